"""Every key of the published file: what it means, what is refused and how, files that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax import config_tables
from minimax_jax.config import MiniMaxM2Config, QuantizationConfig, load_config
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import ModuleSet

Parse = Callable[..., MiniMaxM2Config]
Refuse = Callable[..., str]
PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
SIZES = [field.name for field in dataclasses.fields(MiniMaxM2Config) if field.type == "int"]


# ---- the published file


def test_published_file(m2: MiniMaxM2Config, published: dict[str, Any]) -> None:
    assert MiniMaxM2Config.from_dict(published) == m2


def test_max_position_embeddings_comes_from_the_file(parse: Parse) -> None:
    assert parse(max_position_embeddings=204800).max_position_embeddings == 204800


@pytest.mark.parametrize(
    "key",
    [*(size for size in SIZES if size not in ("head_dim", "rotary_dim")), "rms_norm_eps", "rope_theta"],
)
@pytest.mark.parametrize("absent", [..., None], ids=["absent", "null"])
def test_sizes_and_rope_theta_have_no_default(refuse: Refuse, key: str, absent: Any) -> None:
    refuse(f"{key} missing", "no default", **{key: absent})


def test_missing_keys_are_named_together(refuse: Refuse) -> None:
    refuse("vocab_size, hidden_size, rms_norm_eps missing", vocab_size=..., hidden_size=None, rms_norm_eps=...)


@pytest.mark.parametrize(
    "key",
    ["head_dim", *sorted({*PUBLISHED} - {*SIZES, "model_type", "quantization_config", "rms_norm_eps", "rope_theta"})],
)
def test_keys_that_a_writer_may_leave_out(m2: MiniMaxM2Config, parse: Parse, key: str) -> None:
    assert parse(**{key: ...}) == m2
    assert parse(**{key: None}) == m2


@pytest.mark.parametrize("model_type", ["minimax_m3_vl", "minimax", "mixtral", None, ..., 2])
def test_other_models_are_refused_first(refuse: Refuse, model_type: Any) -> None:
    refuse("model_type", "'minimax_m2'", model_type=model_type, some_unknown_key=1, vocab_size=...)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_not_an_object(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x\.json: expected a JSON object"):
        MiniMaxM2Config.from_dict(data, source="x.json")


# ---- values that change the computation

REFUSED: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"),
    ("hidden_act", True),
    ("scoring_func", "softmax"),
    ("use_routing_bias", False),
    ("use_routing_bias", 1),
    ("use_qk_norm", False),
    ("qk_norm_type", "per_head"),
    ("shared_intermediate_size", 8192),
    ("shared_intermediate_size", False),
    ("tie_word_embeddings", True),
    ("attention_bias", True),
    ("qkv_bias", True),
    ("mlp_bias", True),
    ("sliding_window", 4096),
    ("use_sliding_window", True),
    ("attn_window_size", 512),
    ("attention_sinks", True),
    ("use_attention_sinks", True),
    ("logit_softcap", 30.0),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30),
    ("attention_output_gate", True),
    ("sparse_attention_config", {"topk": 4}),
    ("norm_topk_prob", False),
    ("routed_scaling_factor", 2.5),
    ("n_group", 8),
    ("num_expert_group", 4),
    ("topk_group", 4),
    ("n_shared_experts", 1),
    ("first_k_dense_replace", 1),
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [0]),
    ("swiglu_limit", 7.0),
    ("use_gemma_norm", True),
    ("postnorm", True),
    ("layernorm_full_attention_alpha", 3.55),
    ("layernorm_mlp_beta", 0.5),
    ("residual_multiplier", 0.5),
    ("per_layer_config", {"0": {"head_dim": 64}}),
    ("pruned_heads", {"0": [1]}),
    ("is_encoder_decoder", True),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_refused_by_name(refuse: Refuse, key: str, value: Any) -> None:
    refuse(key, repr(value), "is not supported; expected ", **{key: value})


ACCEPTED: list[tuple[str, Any]] = [
    *[(key, None) for key in config_tables.M2_FIXED],
    *[(key, value) for key, values in config_tables.M2_FIXED.items() for value in values],
    ("sliding_window", False),
    ("attention_sinks", False),
    ("logit_softcap", 0.0),
    ("routed_scaling_factor", 1.0),
    ("n_group", 1),
    # As in the first release of M2.
    ("mlp_intermediate_size", 8192),
    ("shared_moe_mode", "sigmoid"),
    ("use_grouped_topk", True),
    ("swa_rope_theta", -1.0),
    ("layernorm_full_attention_beta", 1.0),
    ("max_model_len", None),
    ("attention_dropout", 0.0),
    # Private notes of a writer.
    ("_name_or_path", "somewhere"),
    ("_attn_implementation_autoset", True),
]


@pytest.mark.parametrize(("key", "value"), ACCEPTED)
def test_neutral_values_are_accepted(m2: MiniMaxM2Config, parse: Parse, key: str, value: Any) -> None:
    assert parse(**{key: value}) == m2


def test_every_table_entry_refuses_something(refuse: Refuse) -> None:
    for key in config_tables.M2_FIXED:
        refuse(f"{key} 'something else'", **{key: "something else"})


@pytest.mark.parametrize(
    ("key", "value", "fragments"),
    [
        ("attn_type_list", [1] * 61 + [0], ["attn_type_list holds 0 for layer 61", "only 1"]),
        ("attn_type_list", [0] * 62, ["attn_type_list holds 0 for layer 0"]),
        ("attn_type_list", [True] * 62, ["attn_type_list holds True"]),
        ("attn_type_list", [1] * 61, ["attn_type_list has 61 entries", "num_hidden_layers is 62"]),
        ("attn_type_list", [], ["attn_type_list has 0 entries"]),
        ("attn_type_list", "full", ["attn_type_list 'full' is not a list of 1"]),
        ("attn_type_list", 0, ["attn_type_list 0"]),
        ("moe_layer_freq", [0] + [1] * 61, ["moe_layer_freq holds 0 for layer 0"]),
        ("moe_layer_freq", 2, ["moe_layer_freq 2"]),
        ("layer_types", ["full_attention"] * 61 + ["linear_attention"], ["layer_types", "'linear_attention'"]),
        ("mlp_layer_types", ["dense"] + ["sparse"] * 61, ["mlp_layer_types", "'dense'"]),
    ],
)
def test_per_layer_lists_refused(refuse: Refuse, key: str, value: Any, fragments: list[str]) -> None:
    refuse(*fragments, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_layer_freq", 1),
        ("moe_layer_freq", [1] * 62),
        ("layer_types", ["full_attention"] * 62),
        ("mlp_layer_types", ["sparse"] * 62),
    ],
)
def test_per_layer_lists_accepted(m2: MiniMaxM2Config, parse: Parse, key: str, value: Any) -> None:
    assert parse(**{key: value}) == m2


# ---- unknown keys


@pytest.mark.parametrize("value", [1, True, False, 0, "", [], {}])
def test_unknown_key_is_refused_by_name(refuse: Refuse, value: Any) -> None:
    refuse("unknown key new_attention_trick", "remove it", new_attention_trick=value)


def test_unknown_null_is_accepted(m2: MiniMaxM2Config, parse: Parse) -> None:
    assert parse(new_attention_trick=None) == m2


def test_unknown_keys_are_counted_and_kept_on_one_line(refuse: Refuse) -> None:
    message = refuse("k0, k1, k2, k3, k4 and 3 more", **{f"k{i}": 1 for i in range(8)})
    assert "k5" not in message
    refuse(r"'a\nb'", **{"a\nb": 1})


def test_long_values_are_shortened(refuse: Refuse) -> None:
    assert len(refuse("attn_type_list", attn_type_list={str(i): i for i in range(9999)})) < 200


# ---- types of numbers


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [True, 0, -8, 64.0, "64", [64], math.nan, {"__float__": "NaN"}])
def test_whole_numbers(refuse: Refuse, key: str, value: Any) -> None:
    refuse(f"{key} {value!r} is not a whole number of at least 1", **{key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [True, 0, -1.0, "1e-6", [1.0], math.nan, math.inf, -math.inf, 10**400])
def test_positive_numbers(refuse: Refuse, key: str, value: Any) -> None:
    refuse(key, "is not a finite number (above 0)", **{key: value})


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"num_experts_per_tok": 257}, ["num_experts_per_tok 257", "num_local_experts 256"]),
        ({"num_key_value_heads": 7}, ["num_attention_heads 48", "num_key_value_heads 7"]),
        ({"num_key_value_heads": 96}, ["num_attention_heads 48", "num_key_value_heads 96"]),
        ({"num_experts": 128}, ["num_local_experts 256", "num_experts 128", "contradict"]),
        ({"num_experts": True}, ["num_experts True"]),
    ],
)
def test_sizes_that_contradict(refuse: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse(*fragments, **changes)


def test_num_experts_is_num_local_experts(m2: MiniMaxM2Config, parse: Parse, refuse: Refuse) -> None:
    assert parse(num_experts=256) == m2
    assert parse(num_experts=256, num_local_experts=...) == m2
    refuse("num_local_experts missing", num_local_experts=...)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": True},
        {"rope_theta": math.inf},
        {"rotary_dim": 63},
        {"rotary_dim": 130},
        {"num_key_value_heads": 5},
        {"num_experts_per_tok": 300},
        {"dtype": "float16"},
        {"eos_token_ids": (200064,)},
        {"eos_token_ids": (-1,)},
    ],
)
def test_a_config_made_in_code_is_checked_too(m2: MiniMaxM2Config, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes)).removesuffix("s")):
        dataclasses.replace(m2, **changes)


def test_frozen_and_hashable(m2: MiniMaxM2Config, published: dict[str, Any]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        m2.vocab_size = 1  # type: ignore[misc]
    assert hash(m2) == hash(MiniMaxM2Config.from_dict(published))


# ---- round trip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"quantization": None},
        {"dtype": "float32", "rotary_dim": 128, "rope_theta": 1e4},
        {"eos_token_ids": (5,)},
        {"eos_token_ids": (5, 6)},
        {
            "num_hidden_layers": 3,
            "quantization": QuantizationConfig(
                quant_method="fp8", weight_block_size=(64, 32), exclude=ModuleSet(components=True)
            ),
        },
    ],
)
def test_round_trip(m2: MiniMaxM2Config, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(m2, **changes)
    data = json.loads(json.dumps(config.to_dict()))
    assert MiniMaxM2Config.from_dict(data) == config


def test_to_dict_is_the_published_spelling(m2: MiniMaxM2Config, published: dict[str, Any]) -> None:
    unpublished = {"torch_dtype"}
    left_out = {"auto_map", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "transformers_version"}
    written = m2.to_dict()
    assert set(written) - unpublished == set(published) - left_out
    assert {key: written[key] for key in written if key in published} == {
        key: value for key, value in published.items() if key not in left_out
    }


# ---- files


def write(directory: Path, content: str | bytes) -> None:
    (directory / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_load_config(m2: MiniMaxM2Config, published: dict[str, Any], tmp_path: Path, prefix: bytes) -> None:
    write(tmp_path, prefix + json.dumps(published).encode())
    assert load_config(tmp_path) == load_config(str(tmp_path)) == m2


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("", "not valid JSON"),
        ('{"vocab_size": 1,', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[" * 100_000, "JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[1, 2]", "expected a JSON object, found [1, 2]"),
        ("null", "expected a JSON object, found None"),
        ('{"rope_theta": 10000, "rope_theta": 5000000}', "key 'rope_theta' stands twice, as 10000 and 5000000"),
        (json.dumps({**PUBLISHED, "rope_theta": math.nan}), "rope_theta nan"),
        (json.dumps({**PUBLISHED, "rms_norm_eps": math.inf}), "rms_norm_eps inf"),
        (json.dumps({**PUBLISHED, "use_qk_norm": False}), "use_qk_norm False"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | bytes, fragment: str) -> None:
    write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert message.count("config.json: ") == 1
    assert fragment in message
    assert "\n" not in message


def test_equal_duplicates_in_a_file_are_no_contradiction(
    m2: MiniMaxM2Config, published: dict[str, Any], tmp_path: Path
) -> None:
    text = json.dumps(published)
    write(tmp_path, text[:-1] + ', "rope_theta": 5000000}')
    assert load_config(tmp_path) == m2


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"config\.json: not found"):
            load_config(directory)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
