"""Sampling values and end-of-sequence ids of generation_config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import GenerationDefaults, MiniMaxM2Config, load_generation_defaults
from minimax_jax.errors import ConfigError


@pytest.fixture
def config(m2: MiniMaxM2Config) -> MiniMaxM2Config:
    """With an end-of-sequence id from config.json, the one to fall back to."""
    return dataclasses.replace(m2, eos_token_ids=(7,))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, GenerationDefaults(eos_token_ids=(7,))),
        ({}, GenerationDefaults(temperature=1.0, top_p=1.0, top_k=0, eos_token_ids=(7,), do_sample=False)),
        (
            {
                "bos_token_id": 200019,
                "do_sample": True,
                "eos_token_id": 200020,
                "temperature": 0.9,
                "top_p": 0.95,
                "top_k": 40,
                "transformers_version": "4.46.1",
            },
            GenerationDefaults(temperature=0.9, top_p=0.95, top_k=40, eos_token_ids=(200020,), do_sample=True),
        ),
        ({"eos_token_id": [200020, 3, 3]}, GenerationDefaults(eos_token_ids=(200020, 3))),
        ({"eos_token_id": None}, GenerationDefaults(eos_token_ids=(7,))),
        ({"eos_token_id": []}, GenerationDefaults(eos_token_ids=(7,))),
        ({"temperature": 0}, GenerationDefaults(temperature=0.0, eos_token_ids=(7,))),
        ({"top_k": -1, "top_p": 1}, GenerationDefaults(eos_token_ids=(7,))),
        ({"temperature": None, "top_p": None, "top_k": None}, GenerationDefaults(eos_token_ids=(7,))),
        ({"repetition_penalty": 1.0, "min_p": 0.0, "num_beams": 4}, GenerationDefaults(eos_token_ids=(7,))),
        # Derived by transformers from its class defaults: ids outside the vocabulary are no one's choice.
        ({"_from_model_config": True, "eos_token_id": 999999}, GenerationDefaults(eos_token_ids=(7,))),
        ({"_from_model_config": True, "eos_token_id": [9, 200064]}, GenerationDefaults(eos_token_ids=(9,))),
    ],
)
def test_generation_defaults(
    config: MiniMaxM2Config, tmp_path: Path, data: dict[str, Any] | None, expected: GenerationDefaults
) -> None:
    if data is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(data))
    assert load_generation_defaults(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        ({"eos_token_id": 200064}, ["eos_token_id 200064", "vocabulary of 200064"]),
        ({"eos_token_id": [5, 999999]}, ["eos_token_id 999999"]),
        ({"eos_token_id": 999999, "_from_model_config": False}, ["eos_token_id 999999"]),
        ({"eos_token_id": True}, ["eos_token_id True"]),
        ({"eos_token_id": -1}, ["eos_token_id -1"]),
        ({"temperature": -0.1}, ["temperature -0.1", "at least 0"]),
        ({"temperature": math.nan}, ["temperature nan"]),
        ({"temperature": math.inf}, ["temperature inf"]),
        ({"temperature": True}, ["temperature True"]),
        ({"temperature": "1"}, ["temperature '1'"]),
        ({"top_p": 0}, ["top_p 0", "above 0"]),
        ({"top_p": 1.1}, ["top_p 1.1", "at most 1.0"]),
        ({"top_k": -2}, ["top_k -2", "at least -1"]),
        ({"top_k": 40.0}, ["top_k 40.0"]),
        ({"do_sample": 1}, ["do_sample 1"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty 1.1"]),
        ({"min_p": 0.05}, ["min_p 0.05"]),
        ([], ["expected a JSON object"]),
    ],
)
def test_generation_defaults_refused(config: MiniMaxM2Config, tmp_path: Path, data: Any, fragments: list[str]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        load_generation_defaults(tmp_path, config)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'generation_config.json'}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
