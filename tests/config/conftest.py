"""The published config and two ways to try a change of it: parse it, or see it refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM2Config, QuantizationConfig
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import ModuleSet


@pytest.fixture
def published() -> dict[str, Any]:
    """The published file of M2.5, key for key."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
    return data


@pytest.fixture
def m2() -> MiniMaxM2Config:
    """What the published file means."""
    return MiniMaxM2Config(
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        rope_theta=5e6,
        max_position_embeddings=196608,
        rms_norm_eps=1e-6,
        num_local_experts=256,
        num_experts_per_tok=8,
        quantization=QuantizationConfig(
            quant_method="fp8", exclude=ModuleSet(("gate", "e_score_correction_bias", "lm_head"), components=True)
        ),
    )


@pytest.fixture
def changed(published: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The published keys with some replaced, added, or left out (given as `...`)."""

    def change(**changes: Any) -> dict[str, Any]:
        return {key: value for key, value in {**published, **changes}.items() if value is not ...}

    return change


@pytest.fixture
def parse(changed: Callable[..., dict[str, Any]]) -> Callable[..., MiniMaxM2Config]:
    """The config of the changed file."""
    return lambda **changes: MiniMaxM2Config.from_dict(changed(**changes))


@pytest.fixture
def refuse(parse: Callable[..., MiniMaxM2Config]) -> Callable[..., str]:
    """The one line with which the changed file is refused; it names the file once and holds each fragment."""

    def check(*fragments: str, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(**changes)
        message = str(caught.value)
        assert message.startswith("config.json: ")
        assert message.count("config.json: ") == 1
        assert "\n" not in message
        for fragment in fragments:
            assert fragment in message
        return message

    return check
