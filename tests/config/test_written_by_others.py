"""Configs that other programs wrote: checkpoints beside the checkout, transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import (
    GenerationDefaults,
    MiniMaxM2Config,
    QuantizationConfig,
    load_config,
    load_generation_defaults,
)
from minimax_jax.quantization import ModuleSet
from tests.checkpoints import NAMES

# ---- checkpoints beside the checkout


@pytest.mark.parametrize("name", NAMES)
def test_shared_checkpoints(shared: Path, name: str) -> None:
    directory = shared / "data" / "checkpoints" / name
    config = load_config(directory)
    assert (config.hidden_size, config.rotary_dim, config.rope_theta, config.dtype) == (128, 16, 5e6, "bfloat16")
    assert (config.quantization is None) == (name == "m2-bf16")
    plain = dataclasses.replace(config, quantization=None)
    assert plain == load_config(shared / "data" / "checkpoints" / "m2-bf16")
    defaults = load_generation_defaults(directory, config)
    assert defaults == GenerationDefaults(temperature=1.0, top_p=0.95, top_k=40, eos_token_ids=(500,), do_sample=True)


def test_shared_config_in_the_newer_spelling(shared: Path) -> None:
    checkpoints = shared / "data" / "checkpoints"
    data = json.loads((checkpoints / "m2-nvfp4-modelopt" / "config.transformers5.json").read_text())
    assert MiniMaxM2Config.from_dict(data) == load_config(checkpoints / "m2-nvfp4-modelopt")
    del data["quantization_config"]
    assert MiniMaxM2Config.from_dict(data) == load_config(checkpoints / "m2-bf16")


# ---- files that transformers itself writes

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({}, {"rotary_dim": 16}),  # no partial factor anywhere: the whole head turns
        ({"rotary_dim": 8}, {"rotary_dim": 8}),
        ({"partial_rotary_factor": 0.5}, {"rotary_dim": 8}),
        ({"rotary_dim": 8, "rope_theta": 1e4}, {"rotary_dim": 8, "rope_theta": 1e4}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            {"rotary_dim": 4, "rope_theta": 1e4},
        ),
        ({"rotary_dim": 8, "dtype": "float32"}, {"rotary_dim": 8, "dtype": "float32"}),
        ({"rotary_dim": 8, "eos_token_id": [3, 4]}, {"rotary_dim": 8, "eos_token_ids": (3, 4)}),
    ],
)
def test_save_pretrained(tmp_path: Path, spelling: dict[str, Any], expected: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MiniMaxM2Config(**TINY, **spelling)
    theirs.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config == MiniMaxM2Config(**{**TINY, "rope_theta": 5e6, **expected})
    factor = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert config.rotary_dim == int(theirs.head_dim * factor)  # what its rotary embedding computes
    # The whole dictionary, and ours read by transformers, say the same.
    assert MiniMaxM2Config.from_dict(theirs.to_dict()) == config
    back = transformers.MiniMaxM2Config.from_dict(config.to_dict())
    assert back.rope_parameters["rope_theta"] == config.rope_theta
    assert int(back.head_dim * back.rope_parameters["partial_rotary_factor"]) == config.rotary_dim


def test_defaults_of_the_transformers_class(m2: MiniMaxM2Config, published: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.MiniMaxM2Config(rotary_dim=64).save_pretrained(tmp_path)
    assert load_config(tmp_path) == dataclasses.replace(m2, quantization=None, eos_token_ids=(200020,))
    fields = {field.name: field.default for field in dataclasses.fields(transformers.MiniMaxM2Config)}
    del published["head_dim"]
    assert fields["head_dim"] == MiniMaxM2Config.from_dict(published).head_dim
    # A file of the newer library with the published file's spellings added.
    mixed = {**json.loads((tmp_path / "config.json").read_text()), **published}
    assert MiniMaxM2Config.from_dict(mixed) == dataclasses.replace(m2, eos_token_ids=(200020,))


def test_transformers_generics_are_no_unknown_keys(m2: MiniMaxM2Config, published: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    generics = {
        **dict.fromkeys(transformers.GenerationConfig._get_default_generation_params(), 1),
        **transformers.PretrainedConfig().to_dict(),
        **transformers.MiniMaxM2Config(rotary_dim=64).to_dict(),
    }
    merged = {**generics, **published}
    assert MiniMaxM2Config.from_dict(merged) == dataclasses.replace(m2, eos_token_ids=(200020,))


def test_saved_model_brings_class_defaults_for_eos(tmp_path: Path) -> None:
    """`save_pretrained` of a small model writes eos 200020 twice; neither is in its vocabulary, neither is an error."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MiniMaxM2Config(**TINY, rotary_dim=8)
    theirs.save_pretrained(tmp_path)
    transformers.GenerationConfig.from_model_config(theirs).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written["eos_token_id"] == 200020
    assert written["_from_model_config"] is True
    config = load_config(tmp_path)
    assert config.eos_token_ids == ()
    assert load_generation_defaults(tmp_path, config) == GenerationDefaults()


def test_quantised_config_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fp8_config = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    theirs = transformers.MiniMaxM2Config(**TINY, rotary_dim=8, quantization_config=fp8_config)
    theirs.save_pretrained(tmp_path)
    assert load_config(tmp_path).quantization == QuantizationConfig(
        quant_method="fp8", exclude=ModuleSet(("lm_head",), components=True)
    )
