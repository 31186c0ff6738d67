"""One thing said in several spellings: rope, dtype, quantisation, end-of-sequence ids."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM2Config
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import ModuleSet, Scheme

Parse = Callable[..., MiniMaxM2Config]
Refuse = Callable[..., str]
Change = Callable[..., dict[str, Any]]
PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())


# ---- rope: one key, the other, both, neither, in either place

BARE: dict[str, Any] = {"rotary_dim": ..., "rope_theta": ...}


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [
        ({"rotary_dim": 64}, 64),
        ({"rotary_dim": ..., "partial_rotary_factor": 0.5}, 64),
        ({"rotary_dim": 64, "partial_rotary_factor": 0.5}, 64),
        ({"rotary_dim": None, "partial_rotary_factor": 0.5}, 64),
        ({"rotary_dim": ...}, 128),  # transformers: the whole head turns
        ({"rotary_dim": ..., "partial_rotary_factor": 1}, 128),
        ({"rotary_dim": ..., "partial_rotary_factor": 0.3}, 38),  # int(38.4), as in transformers
        ({"rotary_dim": ..., "partial_rotary_factor": 0.301}, 38),  # int(38.528)
        ({"rotary_dim": 38, "partial_rotary_factor": 0.3}, 38),
        ({"rotary_dim": ..., "head_dim": 100, "partial_rotary_factor": 0.58}, 58),  # 57.99999999999999
        ({**BARE, "rope_parameters": {"rope_theta": 5000000}}, 128),
        ({**BARE, "rope_parameters": {"rope_theta": 5000000.0, "partial_rotary_factor": 0.5}}, 64),
        ({**BARE, "rope_parameters": {"rope_theta": 5000000, "rotary_dim": 64}}, 64),
        ({"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}}, 64),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.5, "rotary_dim": 64}}, 64),
        ({"rope_parameters": {}}, 64),
        ({"rope_parameters": None, "rope_scaling": None}, 64),
        ({"rope_scaling": {"type": "default"}}, 64),
        ({"rope_scaling": {"rope_type": "default", "factor": 1.0}}, 64),
        ({**BARE, "rope_scaling": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}}, 64),
    ],
)
def test_rotary_size_in_any_spelling(parse: Parse, changes: dict[str, Any], rotary_dim: int) -> None:
    config = parse(**changes)
    assert config.rotary_dim == rotary_dim
    assert config.rope_theta == 5e6


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"partial_rotary_factor": 0.25}, ["rotary_dim 64", "partial_rotary_factor 0.25", "is 32", "contradict"]),
        (
            {"rope_parameters": {"partial_rotary_factor": 1.0}},
            ["rotary_dim 64", "rope_parameters.partial_rotary_factor 1.0", "is 128", "contradict"],
        ),
        (
            {"rotary_dim": ..., "partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            ["partial_rotary_factor 0.5", "rope_parameters.partial_rotary_factor 0.25", "contradict"],
        ),
        ({"rope_parameters": {"rotary_dim": 32}}, ["rotary_dim 64", "rope_parameters.rotary_dim 32", "contradict"]),
        ({"rope_parameters": {"rope_theta": 1e4}}, ["rope_theta 5000000.0", "rope_parameters.rope_theta 10000.0"]),
        ({"rope_scaling": {"rope_theta": 1e4}}, ["rope_theta 5000000.0", "rope_scaling.rope_theta 10000.0"]),
        ({**BARE, "rope_parameters": {"rope_type": "default"}}, ["rope_theta missing", "no default"]),
        ({"rotary_dim": 63}, ["rotary_dim 63", "even number", "head_dim 128"]),
        ({"rotary_dim": 130}, ["rotary_dim 130", "head_dim 128"]),
        ({"rotary_dim": ..., "partial_rotary_factor": 0.001}, ["partial_rotary_factor 0.001", "is 0"]),
        ({"rotary_dim": ..., "partial_rotary_factor": 0.37}, ["partial_rotary_factor 0.37", "is 47", "even"]),
        ({"rotary_dim": ..., "head_dim": 33}, ["rotary_dim 33", "even"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor 1.5", "at most 1.0"]),
        ({"partial_rotary_factor": 0}, ["partial_rotary_factor 0"]),
        ({"partial_rotary_factor": True}, ["partial_rotary_factor True"]),
        ({"partial_rotary_factor": math.nan}, ["partial_rotary_factor nan"]),
        ({"partial_rotary_factor": "0.5"}, ["partial_rotary_factor '0.5'"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling.type 'yarn'", "'default'"]),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, ["rope_scaling.type 'linear'"]),
        ({"rope_parameters": {"rope_type": "llama3"}}, ["rope_parameters.rope_type 'llama3'"]),
        ({"rope_parameters": {"factor": 2.0}}, ["rope_parameters.factor 2.0"]),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, ["unknown key rope_parameters.mrope_section"]),
        ({"rope_parameters": {"full_attention": {}}}, ["unknown key rope_parameters.full_attention"]),
        ({"rope_parameters": [1]}, ["rope_parameters [1] is not an object"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling 'yarn' is not an object"]),
    ],
)
def test_rope_refused(refuse: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse(*fragments, **changes)


def test_one_value_may_stand_twice_only_if_equal(m2: MiniMaxM2Config, changed: Change) -> None:
    """Every pair of places and spellings of the rotary size: equal is accepted, different is refused."""
    spellings = [
        ("rotary_dim", {64: 64, 32: 32}),
        ("partial_rotary_factor", {64: 0.5, 32: 0.25}),
    ]
    places = ["", "rope_parameters", "rope_scaling"]
    entries = [(place, key, values) for place in places for key, values in spellings]
    for i, first in enumerate(entries):
        for second in entries[i + 1 :]:
            for other in (64, 32):
                data = changed(rotary_dim=...)
                for (place, key, values), size in ((first, 64), (second, other)):
                    (data.setdefault(place, {}) if place else data)[key] = values[size]
                if other == 64:
                    assert MiniMaxM2Config.from_dict(data) == m2
                else:
                    with pytest.raises(ConfigError, match="contradict"):
                        MiniMaxM2Config.from_dict(data)


# ---- dtype


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bfloat16"),
        ({"dtype": None, "torch_dtype": None}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "torch.float32"}, "float32"),
    ],
)
def test_dtype(parse: Parse, changes: dict[str, Any], dtype: str) -> None:
    assert parse(**changes).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"dtype": "float16"}, ["dtype 'float16'", "bfloat16 or float32"]),
        ({"torch_dtype": "torch.float16"}, ["torch_dtype 'torch.float16'"]),
        ({"dtype": "auto"}, ["dtype 'auto'"]),
        ({"dtype": 16}, ["dtype 16"]),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, ["dtype bfloat16", "torch_dtype float32", "contradict"]),
    ],
)
def test_dtype_refused(refuse: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse(*fragments, **changes)


# ---- quantisation


def fp8(**changes: Any) -> dict[str, Any]:
    """The published quantization_config with changes."""
    merged = {**PUBLISHED["quantization_config"], **changes}
    return {key: value for key, value in merged.items() if value is not ...}


STATIC = Scheme("fp8", not_emulated="FP8 activations with one scale for the tensor")


def vendor(*entries: str) -> ModuleSet:
    """A list of exclusions as the vendor means it."""
    return ModuleSet(entries, components=True)


@pytest.mark.parametrize("absent", [..., None])
def test_no_quantization(m2: MiniMaxM2Config, parse: Parse, absent: Any) -> None:
    assert parse(quantization_config=absent) == dataclasses.replace(m2, quantization=None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"fmt": ...}, {}),
        ({"fmt": "e4m3"}, {}),
        ({"activation_scheme": "static"}, {"default": STATIC}),
        ({"activation_scheme": ...}, {}),
        ({"weight_block_size": ...}, {}),
        ({"weight_block_size": None}, {}),
        ({"weight_block_size": [64, 32]}, {"weight_block_size": (64, 32)}),
        ({"modules_to_not_convert": None}, {"exclude": vendor()}),
        ({"modules_to_not_convert": ..., "ignored_layers": ["lm_head"]}, {"exclude": vendor("lm_head")}),
        (
            {"modules_to_not_convert": ["gate", "lm_head"], "ignored_layers": ["lm_head", "x"]},
            {"exclude": vendor("gate", "lm_head", "x")},
        ),
        # As transformers 5 writes its own FP8 config.
        ({"fmt": ..., "scale_fmt": "float", "expert_dtype": "fp8", "dequantize": False}, {}),
        ({"modules_to_convert": None, "kv_cache_scheme": None}, {}),
    ],
)
def test_fp8(m2: MiniMaxM2Config, parse: Parse, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert m2.quantization is not None
    assert parse(quantization_config=fp8(**changes)).quantization == dataclasses.replace(m2.quantization, **expected)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8 ", "FP8", "mxfp4", "bitsandbytes", None, 8, ["fp8"], ...])
def test_other_quantisation_methods(refuse: Refuse, method: Any) -> None:
    fragment = f"quantization_config.quant_method {None if method is ... else method!r}"
    refuse(fragment, "is not supported", "'fp8'", "'quark'", quantization_config=fp8(quant_method=method))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"fmt": "float8_e5m2"}, ["quantization_config.fmt 'float8_e5m2'", "'float8_e4m3fn'"]),
        ({"activation_scheme": "none"}, ["quantization_config.activation_scheme 'none'"]),
        ({"scale_fmt": "ue8m0"}, ["quantization_config.scale_fmt 'ue8m0'"]),
        ({"expert_dtype": "fp4"}, ["quantization_config.expert_dtype 'fp4'"]),
        ({"modules_to_convert": ["embed_tokens"]}, ["quantization_config.modules_to_convert"]),
        ({"weight_block_size": [128]}, ["quantization_config.weight_block_size [128]"]),
        ({"weight_block_size": [128, 0]}, ["quantization_config.weight_block_size [128, 0]"]),
        ({"weight_block_size": [128, True]}, ["quantization_config.weight_block_size"]),
        ({"weight_block_size": [128, 128.0]}, ["quantization_config.weight_block_size"]),
        ({"weight_block_size": 128}, ["quantization_config.weight_block_size 128"]),
        ({"modules_to_not_convert": "lm_head"}, ["quantization_config.modules_to_not_convert 'lm_head'"]),
        ({"ignored_layers": [1]}, ["quantization_config.ignored_layers [1]"]),
        ({"hadamard": True}, ["unknown key quantization_config.hadamard"]),
    ],
)
def test_fp8_refused(refuse: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse(*fragments, quantization_config=fp8(**changes))


def test_quantization_config_must_be_an_object(refuse: Refuse) -> None:
    refuse("quantization_config 'fp8' is not an object", quantization_config="fp8")
    refuse("quantization_config.quant_method None", quantization_config={})


# ---- eos in config.json


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (..., ()),
        (None, ()),
        (200020, (200020,)),
        ([200020, 5, 200020], (200020, 5)),
        ([], ()),
        (200064, ()),  # outside the vocabulary
        ([7, 999999], (7,)),
    ],
)
def test_eos(parse: Parse, value: Any, expected: tuple[int, ...]) -> None:
    assert parse(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize("value", [True, -1, 1.0, "2", [1, None], [[1]], {}])
def test_eos_refused(refuse: Refuse, value: Any) -> None:
    refuse("eos_token_id", "token id", eos_token_id=value)
