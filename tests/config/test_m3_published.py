"""Every key of M3's published file: what it means, what is refused and how."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax import config_tables
from minimax_jax.config import MiniMaxM2Config, MiniMaxM3Config, ModelConfig, YarnScaling, load_config
from minimax_jax.errors import ConfigError

Parse = Callable[..., MiniMaxM3Config]
Refuse = Callable[..., str]
Change = Callable[..., dict[str, Any]]
PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published_m3.json").read_text())
TEXT_SIZES = [key for key, value in PUBLISHED["text_config"].items() if type(value) is int and key != "rope_theta"]
UNREAD = ("n_shared_experts", "num_mtp_modules", "num_nextn_predict_layers")
SPARSE_SIZES = ["sparse_index_dim", "sparse_num_index_heads", "sparse_topk_blocks", "sparse_block_size"]
VISION_SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size"]


# ---- the published file


def test_published_file(m3: MiniMaxM3Config, published_m3: dict[str, Any], tmp_path: Path) -> None:
    assert MiniMaxM3Config.from_dict(published_m3) == m3
    (tmp_path / "config.json").write_text(json.dumps(published_m3))
    assert load_config(tmp_path) == m3


def test_the_model_type_chooses_the_class(
    m2: MiniMaxM2Config, m3: MiniMaxM3Config, published: dict[str, Any], published_m3: dict[str, Any]
) -> None:
    assert ModelConfig.from_dict(published) == m2
    assert ModelConfig.from_dict(published_m3) == m3
    with pytest.raises(ConfigError, match="'minimax_m2'") as caught:
        MiniMaxM2Config.from_dict(published_m3)
    assert str(caught.value) == "config.json: model_type 'minimax_m3_vl' is not supported; expected 'minimax_m2'"
    with pytest.raises(ConfigError, match="'minimax_m3_vl'"):
        MiniMaxM3Config.from_dict(published)
    for model_type in ("mixtral", None, 3, ["minimax_m2"]):
        with pytest.raises(ConfigError, match="'minimax_m2' or 'minimax_m3_vl' or 'minimax_m3_vl_text'"):
            ModelConfig.from_dict({**published, "model_type": model_type})
    for data in (None, [], "text"):
        with pytest.raises(ConfigError, match=r"^x\.json: expected a JSON object"):
            ModelConfig.from_dict(data, source="x.json")  # type: ignore[arg-type]


def test_both_models_answer_the_same_questions(m2: MiniMaxM2Config, m3: MiniMaxM3Config) -> None:
    assert m2.mlp_layer_types == ("sparse",) * 62
    assert m2.layer_types == ("full_attention",) * 62
    assert m2.routed_scaling_factor == 1.0
    assert (m3.mlp_layer_types[2], m3.mlp_layer_types[3]) == ("dense", "sparse")
    assert (m3.layer_types[2], m3.layer_types[3]) == ("full_attention", "minimax_m3_sparse")
    assert m3.routed_scaling_factor == 2.0
    assert dataclasses.replace(m2, num_hidden_layers=3).mlp_layer_types == ("sparse",) * 3


def test_max_position_embeddings_comes_from_the_file(parse_m3: Parse) -> None:
    """Two revisions of the file are about; the class default of other readers (524288) is never used."""
    for positions in (524288, 1048576, 4096):
        assert parse_m3(max_position_embeddings=positions).max_position_embeddings == positions


@pytest.mark.parametrize(
    ("path", "named"),
    [
        *((size, f"text_config.{size}") for size in TEXT_SIZES if size not in {*UNREAD, "head_dim", "rotary_dim"}),
        *((key, f"text_config.{key}") for key in ("rms_norm_eps", "rope_theta", "routed_scaling_factor")),
        *((key, f"text_config.{key}") for key in ("swiglu_alpha", "swiglu_limit")),
        ("sparse.sparse_index_dim", "text_config.index_head_dim"),
        ("sparse.sparse_num_index_heads", "text_config.index_n_heads"),
        ("sparse.sparse_topk_blocks", "text_config.index_topk_blocks"),
        ("sparse.sparse_block_size", "text_config.index_block_size"),
        ("moe_layer_freq", "text_config.mlp_layer_types and text_config.moe_layer_freq"),
        (
            "sparse.sparse_attention_freq",
            "text_config.layer_types and text_config.sparse_attention_config.sparse_attention_freq",
        ),
        *((f"vision_config.{size}", f"vision_config.{size}") for size in VISION_SIZES),
        (".projector_hidden_size", "projector_hidden_size"),
    ],
)
@pytest.mark.parametrize("absent", [..., None], ids=["absent", "null"])
def test_no_default(refuse_m3: Refuse, path: str, named: str, absent: Any) -> None:
    if path == "rope_theta":
        refuse_m3("rope_theta missing, in text_config and in rope_parameters", **{path: absent})
    else:
        refuse_m3(f"{named} missing", "no default", **{path: absent})


def test_the_rotary_size_has_no_default(refuse_m3: Refuse) -> None:
    refuse_m3("text_config.rotary_dim", "missing", rotary_dim=..., partial_rotary_factor=None)


@pytest.mark.parametrize("absent", [..., None, {}])
def test_no_text_config(refuse_m3: Refuse, absent: Any) -> None:
    refuse_m3("text_config", "missing", **{".text_config": absent})


def test_text_config_must_be_an_object(refuse_m3: Refuse) -> None:
    refuse_m3("text_config [1] is not an object", **{".text_config": [1]})
    refuse_m3("text_config.sparse_attention_config True is not an object", sparse_attention_config=True)
    refuse_m3("vision_config 'clip' is not an object", **{".vision_config": "clip"})


@pytest.mark.parametrize(
    "path",
    [
        *(f".{key}" for key in PUBLISHED if key not in ("model_type", "text_config", "vision_config")),
        *(
            f"text_config.{key}"
            for key, value in PUBLISHED["text_config"].items()
            if type(value) is not int and not isinstance(value, list | dict) and key[:4] not in ("rms_", "rout", "swig")
        ),
        *(f"text_config.{key}" for key in UNREAD),
        "text_config.head_dim",
        "text_config.rotary_dim",
        *(f"sparse.sparse_{key}" for key in ("init_block", "local_block", "score_type", "disable_index_value")),
        "sparse.use_sparse_attention",
        *(f"vision_config.{key}" for key in PUBLISHED["vision_config"] if key not in VISION_SIZES),
    ],
)
def test_keys_that_a_writer_may_leave_out(m3: MiniMaxM3Config, parse_m3: Parse, path: str) -> None:
    if path in (".image_token_index", ".video_token_index"):
        m3 = dataclasses.replace(m3, **{path[1:].replace("index", "id"): None})
    if path == ".projector_hidden_size":
        return  # no default: tested above
    assert parse_m3(**{path: ...}) == m3
    assert parse_m3(**{path: None}) == m3


@pytest.mark.parametrize("absent", [..., None])
def test_text_only(m3: MiniMaxM3Config, parse_m3: Parse, absent: Any) -> None:
    assert parse_m3(**{".vision_config": absent}) == dataclasses.replace(m3, vision=None)
    assert parse_m3(**{".vision_config": absent, ".projector_hidden_size": ...}).vision is None


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("rope_theta", "rope_theta", 2e4),
        ("layer_norm_eps", "layer_norm_eps", 1e-6),
        ("vision_segment_max_frames", "segment_max_frames", 8),
        ("patch_size", "patch_size", 16),
        ("intermediate_size", "intermediate_size", 4096),
    ],
)
def test_vision_sizes_come_from_the_file(
    m3: MiniMaxM3Config, parse_m3: Parse, path: str, field: str, value: Any
) -> None:
    assert m3.vision is not None
    config = parse_m3(**{f"vision_config.{path}": value})
    assert config == dataclasses.replace(m3, vision=dataclasses.replace(m3.vision, **{field: value}))
    assert MiniMaxM3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# ---- the constants of the activation


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1.702, 1.0, 7.0)),
        ({"swiglu_beta": None}, (1.702, 1.0, 7.0)),
        ({"swiglu_beta": 1.0}, (1.702, 1.0, 7.0)),
        ({"swiglu_beta": 0}, (1.702, 0.0, 7.0)),
        ({"swiglu_beta": 0.5, "swiglu_alpha": 1, "swiglu_limit": 10}, (1.0, 0.5, 10.0)),
        ({"hidden_act": ...}, (1.702, 1.0, 7.0)),
        ({"hidden_act": "silu"}, (1.702, 1.0, 7.0)),  # as transformers writes it
    ],
)
def test_activation(parse_m3: Parse, changes: dict[str, Any], expected: tuple[float, ...]) -> None:
    config = parse_m3(**changes)
    assert (config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit) == expected


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"hidden_act": "gelu"}, ["text_config.hidden_act 'gelu'", "'swigluoai'"]),
        ({"hidden_act": "silu", "swiglu_limit": ...}, ["text_config.swiglu_limit missing"]),
        ({"hidden_act": "silu", "swiglu_alpha": ...}, ["text_config.swiglu_alpha missing"]),
        ({"swiglu_limit": 0}, ["text_config.swiglu_limit 0", "above 0"]),
        ({"swiglu_limit": -7.0}, ["text_config.swiglu_limit -7.0", "above 0"]),
        ({"swiglu_alpha": 0}, ["text_config.swiglu_alpha 0", "above 0"]),
        ({"swiglu_limit": math.inf}, ["text_config.swiglu_limit inf"]),
        ({"swiglu_beta": True}, ["text_config.swiglu_beta True"]),
        ({"swiglu_beta": -1}, ["text_config.swiglu_beta -1"]),
        ({"routed_scaling_factor": "2"}, ["text_config.routed_scaling_factor '2'"]),
    ],
)
def test_activation_refused(refuse_m3: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse_m3(*fragments, **changes)


# ---- values that change the computation

TABLES = {
    ".": config_tables.M3_ROOT_FIXED,
    "text_config.": config_tables.M3_TEXT_FIXED,
    "sparse.": config_tables.M3_SPARSE_FIXED,
    "vision_config.": config_tables.M3_VISION_FIXED,
    ".img_token_compression_config.": config_tables.M3_COMPRESSION_FIXED,
    "vision_config.img_token_compression_config.": config_tables.M3_COMPRESSION_FIXED,
}
ENTRIES = [(place + key, values) for place, table in TABLES.items() for key, values in table.items()]


@pytest.mark.parametrize(("path", "values"), ENTRIES, ids=[path for path, _ in ENTRIES])
def test_fixed_keys(m3: MiniMaxM3Config, parse_m3: Parse, refuse_m3: Refuse, path: str, values: tuple) -> None:
    for value in (*values, None):
        assert parse_m3(**{path: value}) == m3
    named = path.replace("sparse.", "text_config.sparse_attention_config.", 1).lstrip(".")
    refuse_m3(f"{named} 'something else' is not supported; expected ", **{path: "something else"})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("use_gemma_norm", False),
        ("qk_norm_type", "per_layer"),
        ("use_qk_norm", False),
        ("n_shared_experts", 2),
        ("n_shared_experts", True),
        ("scoring_func", "softmax"),
        ("tie_word_embeddings", True),
        (".tie_word_embeddings", True),
        ("attention_output_gate", True),
        ("sliding_window", 4096),
        ("index_local_blocks", 2),
        ("index_topk_freq", 4),
        ("model_type", "minimax_m2"),
        ("sparse.use_sparse_attention", False),
        ("sparse.sparse_init_block", 1),
        ("sparse.sparse_local_block", 2),
        ("sparse.sparse_score_type", "mean"),
        ("vision_config.model_type", "siglip_vision_model"),
        ("vision_config.hidden_act", "quick_gelu"),
        ("vision_config.num_channels", 1),
        ("vision_config.rope_mode", "2d"),
        (".vision_feature_layer", -2),
        (".vision_feature_select_strategy", "default"),
        (".projector_hidden_act", "relu"),
        (".multimodal_projector_bias", False),
        (".num_reward_heads", 1),
    ],
)
def test_refused_by_name(refuse_m3: Refuse, path: str, value: Any) -> None:
    refuse_m3(path.rpartition(".")[2], repr(value), "is not supported; expected ", **{path: value})


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (".trick", "trick"),
        ("trick", "text_config.trick"),
        ("sparse.trick", "text_config.sparse_attention_config.trick"),
        ("sparse.index_topk_blocks", "text_config.sparse_attention_config.index_topk_blocks"),
        ("sparse_topk_blocks", "text_config.sparse_topk_blocks"),
        ("index_topk_pattern", "text_config.index_topk_pattern"),
        ("first_k_dense_replace", "text_config.first_k_dense_replace"),
        ("vision_config.trick", "vision_config.trick"),
        (".img_token_compression_config.trick", "img_token_compression_config.trick"),
        ("rope_scaling.trick", "text_config.rope_scaling.trick"),
    ],
)
def test_unknown_keys_are_refused_by_name(
    m3: MiniMaxM3Config, parse_m3: Parse, refuse_m3: Refuse, path: str, named: str
) -> None:
    for value in (1, False, "", []):
        refuse_m3(f"unknown key {named}", "remove it", **{path: value})
    assert parse_m3(**{path: None}) == m3


def test_private_notes_are_ignored(m3: MiniMaxM3Config, parse_m3: Parse) -> None:
    paths = ("._name_or_path", "_name_or_path", "sparse._note", "vision_config._name_or_path", "_commit")
    assert parse_m3(**dict.fromkeys(paths, "somewhere")) == m3


# ---- lists with one value a layer


@pytest.mark.parametrize(
    ("path", "value", "fragments"),
    [
        ("moe_layer_freq", [0] * 59, ["text_config.moe_layer_freq has 59 entries", "num_hidden_layers is 60"]),
        ("moe_layer_freq", [], ["text_config.moe_layer_freq has 0 entries"]),
        ("moe_layer_freq", [0] * 59 + [2], ["text_config.moe_layer_freq holds 2 for layer 59; expected 0 or 1"]),
        ("moe_layer_freq", [True] * 60, ["holds True for layer 0"]),
        ("moe_layer_freq", [1.0] * 60, ["holds 1.0 for layer 0"]),
        ("moe_layer_freq", [[1]] * 60, ["holds [1] for layer 0"]),
        ("moe_layer_freq", "sparse", ["text_config.moe_layer_freq holds 'sparse'"]),
        ("mlp_layer_types", ["dense"] * 61, ["text_config.mlp_layer_types has 61 entries"]),
        ("mlp_layer_types", ["moe"] * 60, ["holds 'moe' for layer 0; expected 'dense' or 'sparse'"]),
        ("mlp_layer_types", [0] * 60, ["holds 0 for layer 0; expected 'dense' or 'sparse'"]),
        ("layer_types", ["linear_attention"] * 60, ["text_config.layer_types", "'linear_attention'", "layer 0"]),
        ("layer_types", "sliding", ["text_config.layer_types holds 'sliding'"]),
        ("sparse.sparse_attention_freq", [1] * 3, ["sparse_attention_config.sparse_attention_freq has 3 entries"]),
        ("sparse.sparse_attention_freq", {"0": 1}, ["sparse_attention_freq holds {'0': 1}"]),
        ("sparse.sparse_disable_index_value", [0] * 60, ["sparse_disable_index_value holds 0 for layer 3", "only 1"]),
        ("sparse.sparse_disable_index_value", [1] * 59 + [0], ["holds 0 for layer 59"]),
        ("sparse.sparse_disable_index_value", [1] * 59, ["sparse_disable_index_value", "list of 1"]),
        ("sparse.sparse_disable_index_value", [True] * 60, ["holds True for layer 3"]),
        ("sparse.sparse_disable_index_value", 0, ["sparse_disable_index_value 0"]),
    ],
)
def test_per_layer_lists_refused(refuse_m3: Refuse, path: str, value: Any, fragments: list[str]) -> None:
    refuse_m3(*fragments, **{path: value})


@pytest.mark.parametrize("value", [1, [1] * 60, [0] * 3 + [1] * 57, [0, 1, 0] + [1] * 57])
def test_index_values_of_dense_layers_do_not_matter(m3: MiniMaxM3Config, parse_m3: Parse, value: Any) -> None:
    assert parse_m3(**{"sparse.sparse_disable_index_value": value}) == m3


def test_the_two_lists_are_independent(parse_m3: Parse) -> None:
    """A dense MLP may follow sparse attention, and one value stands for every layer."""
    config = parse_m3(
        moe_layer_freq=1,
        **{"sparse.sparse_attention_freq": [1, 0] * 30, "sparse.sparse_disable_index_value": [1, 0] * 30},
    )
    assert config.mlp_layer_types == ("sparse",) * 60
    assert config.layer_types == ("minimax_m3_sparse", "full_attention") * 30
    config = parse_m3(moe_layer_freq=[0] * 60, **{"sparse.sparse_attention_freq": 0})
    assert set(config.mlp_layer_types) == {"dense"}
    assert set(config.layer_types) == {"full_attention"}


def test_a_damaged_number_of_layers(refuse_m3: Refuse) -> None:
    refuse_m3("num_hidden_layers 1000000000000 is more than any model has", num_hidden_layers=10**12, moe_layer_freq=1)


# ---- sizes


@pytest.mark.parametrize(
    "path",
    [
        *(size for size in TEXT_SIZES if size not in UNREAD),
        *(f"sparse.{size}" for size in SPARSE_SIZES),
        *(f"vision_config.{size}" for size in (*VISION_SIZES, "vision_segment_max_frames", "spatial_merge_size")),
        ".projector_hidden_size",
        ".img_token_compression_config.temporal_patch_size",
    ],
)
@pytest.mark.parametrize("value", [True, 0, -8, 64.0, "64", [64], math.nan])
def test_whole_numbers(refuse_m3: Refuse, path: str, value: Any) -> None:
    named = path.rpartition(".")[2]
    refuse_m3(f"{named} {value!r} is not a whole number of at least 1", **{path: value})


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok 129", "num_local_experts 128"]),
        ({"num_experts": 64}, ["num_local_experts 128", "num_experts 64", "contradict"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 64", "num_key_value_heads 3"]),
        ({"num_key_value_heads": 8}, ["index_n_heads 4", "num_key_value_heads 8", "one index head for each"]),
        ({"sparse.sparse_num_index_heads": 1}, ["index_n_heads 1", "num_key_value_heads 4", "is supported"]),
        ({"sparse.sparse_index_dim": 32}, ["rotary_dim 64", "index_head_dim 32"]),
        ({"vision_config.num_attention_heads": 17}, ["vision_config", "hidden_size 1280", "17"]),
        ({"vision_config.num_attention_heads": 320}, ["vision_config", "whole heads of at least 6"]),
        ({".merged_hidden_size": 6144}, ["merged_hidden_size 6144", "hidden_size 6144", "spatial_merge_size 2"]),
    ],
)
def test_sizes_that_contradict(refuse_m3: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse_m3(*fragments, **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_n_heads", 8),
        ("index_head_dim", 0),
        ("index_topk_blocks", True),
        ("index_block_size", -1),
        ("dense_intermediate_size", 0),
        ("shared_intermediate_size", 1.0),
        ("mlp_layer_types", ("sparse",)),
        ("mlp_layer_types", ["sparse"] * 60),
        ("layer_types", ("sparse",) * 60),
        ("routed_scaling_factor", 0),
        ("swiglu_limit", math.nan),
        ("swiglu_beta", -1.0),
        ("image_token_id", 200064),
        ("video_token_id", -1),
        ("yarn", YarnScaling(factor=2.0, original_max_position_embeddings=4096, attention_factor=1.0)),
    ],
)
def test_a_config_made_in_code_is_checked_too(m3: MiniMaxM3Config, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="YaRN" if field == "yarn" else field):
        dataclasses.replace(m3, **{field: value})


def test_frozen_and_hashable(m3: MiniMaxM3Config, published_m3: dict[str, Any]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        m3.vocab_size = 1  # type: ignore[misc]
    assert hash(m3) == hash(MiniMaxM3Config.from_dict(published_m3))


# ---- round trip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision": None, "image_token_id": None, "video_token_id": None},
        {"dtype": "float32", "rotary_dim": 128, "rope_theta": 1e4, "swiglu_beta": 0.0},
        {"rotary_dim": 38, "head_dim": 100},
        {"eos_token_ids": (5,)},
        {"eos_token_ids": (5, 6), "swiglu_alpha": 1.0, "routed_scaling_factor": 1.0},
        {"mlp_layer_types": ("dense", "sparse") * 30, "layer_types": ("minimax_m3_sparse",) * 60},
        {
            "yarn": YarnScaling(
                factor=2.0,
                original_max_position_embeddings=524288,
                attention_factor=1.25,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
            )
        },
    ],
)
def test_round_trip(m3: MiniMaxM3Config, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(m3, **changes)
    assert MiniMaxM3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_to_dict_is_the_published_spelling(m3: MiniMaxM3Config, published_m3: dict[str, Any]) -> None:
    written = m3.to_dict()
    left_out = {"auto_map", "image_grid_pinpoints", "image_seq_length", "num_reward_heads", "process_image_mode"}
    assert set(written) == set(published_m3) - left_out - {"transformers_version"}
    text, vision = published_m3["text_config"], published_m3["vision_config"]
    assert set(written["text_config"]) - {"swiglu_beta"} == set(text) - {"num_mtp_modules", "num_nextn_predict_layers"}
    for ours, theirs in ((written, published_m3), (written["text_config"], text), (written["vision_config"], vision)):
        for key in ours.keys() & theirs.keys() - {"text_config", "vision_config"}:
            assert ours[key] == theirs[key], key
