"""One thing of M3's file said in several spellings and places."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM3Config
from minimax_jax.errors import ConfigError

Parse = Callable[..., MiniMaxM3Config]
Refuse = Callable[..., str]
Change = Callable[..., dict[str, Any]]

DENSE = ["dense"] * 3 + ["sparse"] * 57
FULL = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
# One spelling, the other, a value of the other that contradicts the published one.
PAIRS: list[tuple[str, str, Any, Any]] = [
    ("sparse.sparse_num_index_heads", "index_n_heads", 4, 8),
    ("sparse.sparse_index_dim", "index_head_dim", 128, 64),
    ("sparse.sparse_topk_blocks", "index_topk_blocks", 16, 8),
    ("sparse.sparse_block_size", "index_block_size", 128, 64),
    ("moe_layer_freq", "mlp_layer_types", DENSE, ["sparse"] * 60),
    ("sparse.sparse_attention_freq", "layer_types", FULL, ["full_attention"] * 60),
    ("num_local_experts", "num_experts", 128, 64),
    ("rope_theta", "rope_parameters.rope_theta", 5e6, 1e4),
    ("rope_theta", "rope_scaling.rope_theta", 5e6, 1e4),
    ("rotary_dim", "rope_parameters.rotary_dim", 64, 32),
    ("partial_rotary_factor", "rope_parameters.partial_rotary_factor", 0.5, 0.25),
    (".torch_dtype", ".dtype", "bfloat16", "float32"),
    (".torch_dtype", "dtype", "bfloat16", "float32"),
    (".torch_dtype", "torch_dtype", "torch.bfloat16", "float32"),
    (".image_token_index", ".image_token_id", 200025, 200024),
    (".video_token_index", ".video_token_id", 200026, 5),
    ("vision_config.rope_theta", "vision_config.rope_parameters.rope_theta", 1e4, 2e4),
    (".img_token_compression_config", "vision_config.spatial_merge_size", 2, 4),
    (".img_token_compression_config", "vision_config.temporal_patch_size", 2, 1),
    ("vision_config.img_token_compression_config", "vision_config.spatial_merge_size", 2, 3),
]
IDS = [f"{first} {second}" for first, second, _, _ in PAIRS]


@pytest.mark.parametrize(("first", "second", "same", "other"), PAIRS, ids=IDS)
def test_either_spelling_or_both(
    m3: MiniMaxM3Config, parse_m3: Parse, refuse_m3: Refuse, first: str, second: str, same: Any, other: Any
) -> None:
    assert parse_m3(**{second: same}) == m3
    left_out: dict[str, Any] = {first: ...}
    if first == "partial_rotary_factor":
        left_out["rotary_dim"] = ...
    if "compression" not in first:  # which holds two keys, and stands twice
        assert parse_m3(**{**left_out, second: same}) == m3
    message = refuse_m3("contradict", **{second: other})
    for path in (first, second):
        key = path.rpartition(".")[2]
        assert (key if "compression" not in key else second.rpartition(".")[2]) in message


def test_all_of_the_newer_spelling_at_once(m3: MiniMaxM3Config, parse_m3: Parse) -> None:
    newer = {second: same for _, second, same, _ in PAIRS}
    assert parse_m3(**newer) == m3
    older = {first: ... for first, *_ in PAIRS}
    assert parse_m3(**{**newer, **older, "sparse_attention_config": ..., "hidden_act": "silu"}) == m3


def test_every_mixture_of_the_indexers_spellings(m3: MiniMaxM3Config, parse_m3: Parse) -> None:
    six = PAIRS[:6]
    for choice in itertools.product((0, 1, 2), repeat=len(six)):
        changes: dict[str, Any] = {}
        for which, (older, newer, value, _) in zip(choice, six, strict=True):
            changes |= {older: ...} if which == 1 else {}
            changes |= {newer: value} if which else {}
        assert parse_m3(**changes) == m3


def test_lists_that_contradict_name_the_layer(refuse_m3: Refuse) -> None:
    refuse_m3(
        "text_config.mlp_layer_types and text_config.moe_layer_freq contradict each other",
        "layer 4 is 'dense' and 'sparse'",
        mlp_layer_types=[*DENSE[:4], "dense", *DENSE[5:]],
    )
    refuse_m3(
        "text_config.layer_types and text_config.sparse_attention_config.sparse_attention_freq contradict",
        "layer 0 is 'minimax_m3_sparse' and 'full_attention'",
        layer_types=["minimax_m3_sparse"] * 60,
    )


def test_merged_hidden_size_is_derived(m3: MiniMaxM3Config, parse_m3: Parse) -> None:
    assert parse_m3(**{".merged_hidden_size": 24576}) == m3


def test_vision_in_the_newer_spelling(m3: MiniMaxM3Config, parse_m3: Parse, refuse_m3: Refuse) -> None:
    changes: dict[str, Any] = {
        "vision_config.model_type": "minimax_m3_vl_vision",
        "vision_config.rope_theta": ...,
        "vision_config.rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"},
        "vision_config.img_token_compression_config": ...,
        ".img_token_compression_config": ...,
        "vision_config.spatial_merge_size": 4,
        "vision_config.temporal_patch_size": 1,
    }
    assert m3.vision is not None
    vision = dataclasses.replace(m3.vision, spatial_merge_size=4, temporal_patch_size=1)
    assert parse_m3(**changes) == dataclasses.replace(m3, vision=vision)
    for key, value in (("rope_type", "yarn"), ("factor", 2.0), ("partial_rotary_factor", 0.5)):
        refuse_m3(f"vision_config.rope_parameters.{key}", **{f"vision_config.rope_parameters.{key}": value})


# ---- token ids


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"eos_token_id": 200020}, (200020,)),
        ({".eos_token_id": 200020}, (200020,)),
        ({".eos_token_id": [200020, 7], "eos_token_id": [200020, 7]}, (200020, 7)),
        ({".eos_token_id": 7, "eos_token_id": 999999}, (7,)),  # outside the vocabulary
        ({".eos_token_id": None, "eos_token_id": []}, ()),
    ],
)
def test_eos(parse_m3: Parse, changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert parse_m3(**changes).eos_token_ids == expected


def test_eos_refused(refuse_m3: Refuse) -> None:
    refuse_m3("eos_token_id (7,)", "text_config.eos_token_id (8,)", **{".eos_token_id": 7, "eos_token_id": 8})
    refuse_m3("text_config.eos_token_id True", eos_token_id=True)


def test_placeholders_outside_the_vocabulary_are_dropped(m3: MiniMaxM3Config, parse_m3: Parse) -> None:
    """transformers writes its class's ids whatever the vocabulary."""
    expected = dataclasses.replace(m3, vocab_size=200026, video_token_id=None)
    assert parse_m3(vocab_size=200026) == expected
    assert parse_m3(**{".image_token_index": 0}).image_token_id == 0


@pytest.mark.parametrize("value", [-1, True, 1.0, "5", [5]])
def test_placeholders_refused(refuse_m3: Refuse, value: Any) -> None:
    refuse_m3(f"image_token_index {value!r}", **{".image_token_index": value})


# ---- the text part alone


def test_text_part_alone(m3: MiniMaxM3Config, changed_m3: Change) -> None:
    data = {**changed_m3()["text_config"], "model_type": "minimax_m3_vl_text", "torch_dtype": "float32"}
    alone = dataclasses.replace(m3, vision=None, image_token_id=None, video_token_id=None, dtype="float32")
    assert MiniMaxM3Config.from_dict(data) == alone
    data["rope_scaling"] = {"type": "yarn", "factor": 2.0}  # here the top level is the text part
    assert MiniMaxM3Config.from_dict(data).max_position_embeddings == 2 * 1048576
    with pytest.raises(ConfigError, match="unknown key vision_config"):
        MiniMaxM3Config.from_dict({**data, "vision_config": {"patch_size": 14}})


# ---- quantisation

MXFP8: dict[str, Any] = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [1, 32],
    "ignored_layers": ["lm_head", "model.embed_tokens", "language_model.model.layers.3.block_sparse_moe.gate"],
}


def test_quantization_in_either_place(m3: MiniMaxM3Config, parse_m3: Parse, refuse_m3: Refuse) -> None:
    outside = parse_m3(**{".quantization_config": MXFP8})
    assert outside.quantization is not None
    assert outside.quantization.quant_method == "mxfp8"
    assert outside.quantization.excluded_by("model.layers.3.block_sparse_moe.gate") is not None
    assert outside.quantization.excluded_by("model.layers.4.block_sparse_moe.gate") is None
    assert dataclasses.replace(outside, quantization=None) == m3
    assert parse_m3(quantization_config=MXFP8) == outside
    assert parse_m3(**{".quantization_config": MXFP8, "quantization_config": copy.deepcopy(MXFP8)}) == outside
    assert MiniMaxM3Config.from_dict(outside.to_dict()) == outside
    refuse_m3(
        "quantization_config and text_config.quantization_config contradict",
        **{".quantization_config": MXFP8, "quantization_config": {**MXFP8, "ignored_layers": []}},
    )
    refuse_m3("text_config.quantization_config.quant_method 'awq'", quantization_config={"quant_method": "awq"})
