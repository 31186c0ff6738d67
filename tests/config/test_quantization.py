"""`quantization_config` of each tool: which modules it means, what it declares for them, what is refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM2Config, load_config
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import ModuleSet, QuantizationConfig, Scheme

Refuse = Callable[..., str]

EXPERT = "model.layers.3.block_sparse_moe.experts.12.w1"
GATE, ATTENTION = "model.layers.3.block_sparse_moe.gate", "model.layers.3.self_attn.q_proj"

# ---- lists of modules


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (GATE, "gate"),
        ("lm_head", "lm_head"),
        ("language_model.lm_head", "lm_head"),
        ("model.layers.0.block_sparse_moe.gate_proj", None),
        ("model.layers.0.block_sparse_moe.aggregate", None),
        ("model.layers.0.self_attn.q_proj", None),
        ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj"),
        ("language_model.model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj"),
        ("model.layers.11.self_attn.q_proj", None),
        ("model.layers.2.self_attn.q_proj", "layers.2"),
        ("model.layers.22.self_attn.q_proj", None),
    ],
)
def test_whole_path_components(module: str, found: str | None) -> None:
    entries = ("gate", "e_score_correction_bias", "lm_head", "model.layers.1.self_attn.q_proj", "layers.2")
    assert ModuleSet(entries, components=True).find(module) == found


@pytest.mark.parametrize(
    ("entry", "module", "holds"),
    [
        (GATE, GATE, True),
        ("gate", GATE, False),  # a name is the whole name
        (f"{GATE}_proj", GATE, False),
        ("model.layers.3.self_attn", ATTENTION, False),
        (f"language_model.{GATE}", GATE, True),
        (GATE, f"language_model.{GATE}", True),
        (GATE, f"model.language_model.{GATE.removeprefix('model.')}", True),
        ("model.language_model.layers.3.self_attn.q_proj", ATTENTION, True),
        ("model.language_model.lm_head", "lm_head", True),
        ("*self_attn*", ATTENTION, True),
        ("*block_sparse_moe.gate*", GATE, True),
        ("*block_sparse_moe.gate", GATE, True),
        ("*block_sparse_moe.gate", EXPERT, False),
        ("*mlp.gate_proj", GATE, False),
        ("*lm_head", "lm_head", True),
        ("model.layers.3.self_attn*", ATTENTION, True),
        ("model.layers.3.self_attn*", "model.layers.33.self_attn.q_proj", False),
        ("model.layers.3.self_attn*", "language_model.model.layers.3.self_attn.q_proj", True),
        ("language_model.model.layers.?.self_attn*", ATTENTION, True),
        ("self_attn*", ATTENTION, False),
        ("re:.*self_attn.*", ATTENTION, True),
        ("re:.*block_sparse_moe.gate$", GATE, True),
        ("re:.*block_sparse_moe.gate$", EXPERT, False),
        ("re:self_attn", ATTENTION, False),  # from the start
        (r"re:model\.layers\.[0-9]\.", ATTENTION, True),
        (r"re:^language_model\.model\.layers\.\d+\.", ATTENTION, True),
        (r"re:(?:model\.)?lm_head", "lm_head", True),
    ],
)
def test_names_globs_and_expressions(entry: str, module: str, holds: bool) -> None:
    assert ModuleSet((entry,)).find(module) == (entry if holds else None)


def test_a_long_list_is_fast() -> None:
    """The names of a whole model against the list that an exporter expands for it."""
    entries = tuple(f"model.layers.{i}.{part}" for i in range(62) for part in ("block_sparse_moe.gate", "self_attn*"))
    modules = ModuleSet((*entries, "lm_head"))
    begin = time.perf_counter()
    for i in range(62):
        for e in range(256):
            assert modules.find(f"model.layers.{i}.block_sparse_moe.experts.{e}.w1") is None
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("re:(unclosed", "is not a regular expression"),
        ("re:*", "is not a regular expression"),
        ("re:(a+)+$", "may take very long"),
        ("re:(a|aa)*b", "may take very long"),
        ("re:(.*a){20}", "may take very long"),
        ("re:.*.*.*.*.*.*x", "may take very long"),
        ("re:" + "a?" * 40 + "a" * 40, "may take very long"),
        ("re:.*.*.*.*.*x", "takes very long"),
    ],
)
def test_expressions_that_are_refused(refuse: Refuse, entry: str, reason: str) -> None:
    config = {**CT, "ignore": ["lm_head", entry]}
    begin = time.perf_counter()
    refuse("quantization_config.ignore", reason, quantization_config=config)
    assert time.perf_counter() - begin < 5


# ---- each tool

FP4_32 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
FP4_16 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "float32"}
E4M3 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None, "is_dynamic": False}
EVEN = {**FP4_32, "scale_calculation_mode": "even", "is_dynamic": True}
QUARK_EXCLUDE = ["lm_head", "*block_sparse_moe.gate*", "*self_attn*"]


def quark(weight: Any, inputs: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": "0.13",
        "algo_config": None,
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None, "output_tensors": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": QUARK_EXCLUDE,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **changes,
    }


def group(bits: int, size: int | None, inputs: Any = None, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "group_size": size, **changes}
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs}


NV_INPUTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}
CT = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*block_sparse_moe.gate$"],
    "kv_cache_scheme": None,
    "config_groups": {"group_0": group(4, 16, NV_INPUTS, strategy="tensor_group")},
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "ignore": ["lm_head", GATE, "model.layers.3.self_attn*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
MXFP8 = {
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "ignored_layers": ["gate", "lm_head"],
}


def ct(first: dict[str, Any], format: str | None = None, **changes: Any) -> dict[str, Any]:
    return {**CT, "format": format, "config_groups": {"group_0": first}, **changes}


def group_inputs(bits: int, size: int | None, dynamic: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "group_size": size, "dynamic": dynamic}


DECLARED: list[tuple[dict[str, Any], Scheme, bool]] = [
    (MXFP8, Scheme("mxfp8", "mxfp8"), False),
    (quark(FP4_32, EVEN), Scheme("mxfp4", "mxfp4"), True),
    (quark(FP4_32), Scheme("mxfp4"), True),
    (quark([FP4_16, E4M3], [{**FP4_16, "is_dynamic": True}, E4M3]), Scheme("nvfp4", "nvfp4"), True),
    (quark([FP4_16, E4M3]), Scheme("nvfp4"), True),
    (quark({**FP4_32, "dtype": "fp8_e4m3"}), Scheme("mxfp8"), True),
    (quark({**E4M3, "qscheme": "per_channel"}), Scheme("fp8"), True),
    (CT, Scheme("nvfp4", "nvfp4"), True),
    (ct(group(4, 16)), Scheme("nvfp4"), True),
    (ct(group(4, 32, group_inputs(4, 32, True)), "mxfp4-pack-quantized"), Scheme("mxfp4", "mxfp4"), True),
    (ct(group(8, 32, group_inputs(8, 32, True)), "mxfp8-quantized"), Scheme("mxfp8", "mxfp8"), True),
    (ct(group(8, None, None, strategy="channel"), "float-quantized"), Scheme("fp8"), True),
    (ct(group(8, None, group_inputs(8, 128, True), strategy="block"), "float-quantized"), Scheme("fp8", "fp8"), True),
    (MODELOPT, Scheme("nvfp4", "nvfp4"), True),
    ({**MODELOPT, "quant_algo": "MXFP8"}, Scheme("mxfp8", "mxfp8"), True),
    ({**MODELOPT, "quant_algo": "W4A16_NVFP4"}, Scheme("nvfp4"), True),
    ({**MODELOPT, "config_groups": {"g": group(4, 16)}}, Scheme("nvfp4"), True),
    ({**MODELOPT, "quant_algo": None, "config_groups": {"g": group(4, 16, NV_INPUTS)}}, Scheme("nvfp4", "nvfp4"), True),
]


def read(config: dict[str, Any], parse: Callable[..., MiniMaxM2Config]) -> QuantizationConfig:
    quantization = parse(quantization_config=config).quantization
    assert quantization is not None
    return quantization


@pytest.mark.parametrize(("config", "scheme", "attention_excluded"), DECLARED)
def test_declared(parse: Any, config: dict[str, Any], scheme: Scheme, attention_excluded: bool) -> None:
    quantization = read(config, parse)
    assert quantization.declared(EXPERT) == scheme
    assert quantization.declared(f"language_model.{EXPERT}") == scheme
    for module in ("lm_head", GATE):
        assert quantization.excluded_by(module) is not None
        assert quantization.declared(module) is None
    assert (quantization.excluded_by(ATTENTION) is not None) == attention_excluded
    assert quantization.to_dict() == config
    assert scheme.format in quantization.describe()
    assert hash(quantization) == hash(read(config, parse))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (quark(FP4_32, {**EVEN, "scale_calculation_mode": "floor"}), "floor"),
        (quark(FP4_32, {**E4M3, "is_dynamic": True}), "MXFP4 weights with activations of 'fp8_e4m3"),
        (ct(group(4, 16, group_inputs(4, 16, True))), "NVFP4 weights with dynamic 4-bit float"),
        (ct(group(8, None, group_inputs(8, None, False), strategy="tensor")), "FP8 weights with static 8-bit"),
        ({**MODELOPT, "quant_algo": "FP8"}, "one scale for the tensor"),
        ({**MODELOPT, "quant_algo": "W4A8_MXFP4_FP8"}, "MXFP4 weights with FP8"),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["gate", "lm_head"]}, "one scale"),
    ],
)
def test_activations_that_are_not_emulated(parse: Any, config: dict[str, Any], reason: str) -> None:
    """The weights load; the reason is kept for a user who asks for the activations."""
    scheme = read(config, parse).declared(EXPERT)
    assert scheme is not None
    assert scheme.activation is None
    assert scheme.not_emulated is not None
    assert reason in scheme.not_emulated


def test_layers_of_their_own(parse: Any) -> None:
    """Quark's layer_quant_config, as of a checkpoint with FP8 attention; a layer with only an output says nothing."""
    layers = {
        "*self_attn*": {"weight": {**E4M3, "qscheme": "per_channel"}, "input_tensors": None},
        "*k_proj": {"weight": None, "output_tensors": E4M3},
    }
    quantization = read(quark(FP4_32, EVEN, layer_quant_config=layers, exclude=["lm_head"]), parse)
    assert quantization.declared(ATTENTION) == Scheme("fp8")
    assert quantization.declared(EXPERT) == Scheme("mxfp4", "mxfp4")


def test_groups_with_their_own_targets(parse: Any) -> None:
    """A group that names modules goes before the one of all linear layers, whatever their order."""
    groups = {
        "all": group(4, 32, format="mxfp4-pack-quantized"),
        "attention": {**group(8, 32), "targets": ["re:.*self_attn.*"], "format": "mxfp8-quantized"},
    }
    config = {**CT, "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    quantization = read(config, parse)
    assert quantization.declared(ATTENTION) == Scheme("mxfp8")
    assert quantization.declared(EXPERT) == Scheme("mxfp4")


def test_mixed_precision(parse: Any) -> None:
    """A list of the quantised modules: of others nothing is declared, and none is excluded but those listed."""
    layers = {
        ATTENTION: {"quant_algo": "MXFP8"},
        f"language_model.{EXPERT}": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
        "quantized_layers": layers,
    }
    quantization = read(config, parse)
    assert quantization.declared(ATTENTION) == Scheme("mxfp8", "mxfp8")
    assert quantization.declared(EXPERT) == Scheme("nvfp4", "nvfp4")
    other = EXPERT.replace("w1", "w3")
    assert quantization.declared(other) is None
    assert quantization.excluded_by(other) is None
    assert quantization.excluded_by("lm_head") == "lm_head"


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (MXFP8 | {"weight_block_size": [1, 16]}, ["weight_block_size [1, 16]", "[1, 32]"]),
        (MXFP8 | {"activation_scheme": "static"}, ["activation_scheme 'static'"]),
        (MXFP8 | {"moe_quant_algo": "NVFP4"}, ["unknown key quantization_config.moe_quant_algo"]),
        (quark({"dtype": "int4", "qscheme": "per_group", "group_size": 128}), ["int4", "MXFP4 (fp4"]),
        (quark(FP4_16), ["global_quant_config.weight", "fp4 per_group 16", "NVFP4"]),
        (quark(FP4_32 | {"group_size": 64}), ["fp4 per_group 64"]),
        (quark(FP4_32, export={"weight_format": "fake_quantized"}), ["export.weight_format 'fake_quantized'"]),
        (quark(FP4_32, algo_config=[{"name": "rotation"}]), ["algo_config"]),
        (quark(FP4_32, rotation=True), ["unknown key quantization_config.rotation"]),
        ({"quant_method": "quark"}, ["global_quant_config missing"]),
        (CT | {"format": "pack-quantized"}, ["format 'pack-quantized'", "'nvfp4-pack-quantized'"]),
        (ct(group(4, 128)), ["config_groups.group_0.weights", "group_size 128", "NVFP4 (4 bits"]),
        (ct(group(4, 32, type="int")), ["type int"]),
        (ct(group(4, 16) | {"format": "marlin"}), ["config_groups.group_0.format 'marlin'"]),
        (CT | {"transform_config": {"config_groups": {"u": 1}}}, ["transform_config"]),
        (CT | {"quantization_status": "initialized"}, ["quantization_status 'initialized'"]),
        (CT | {"config_groups": None}, ["config_groups missing"]),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, ["quant_algo 'NVFP4_AWQ'", "'MIXED_PRECISION'"]),
        (MODELOPT | {"quant_algo": None}, ["quant_algo None"]),
        (MODELOPT | {"group_size": 32}, ["group_size 32", "16"]),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, ["quantized_layers missing"]),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "INT4"}}},
            ["quantized_layers.lm_head 'INT4'"],
        ),
        (MODELOPT | {"ignore": "lm_head"}, ["ignore 'lm_head' is not a list"]),
    ],
)
def test_refused(refuse: Refuse, config: dict[str, Any], fragments: list[str]) -> None:
    refuse(*fragments, quantization_config=config)


def test_fp8_is_no_mxfp8(parse: Any) -> None:
    assert read(MXFP8, parse).default == Scheme("mxfp8", "mxfp8")
    fp8 = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    assert read(fp8, parse).default == Scheme("fp8", "fp8")


# ---- hf_quant_config.json


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
def test_file_of_its_own(tmp_path: Path, published: dict[str, Any], algorithm: str | None) -> None:
    """Read where config.json has no quantization_config; there it has none itself."""
    beside = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": beside}))
    (tmp_path / "config.json").write_text(json.dumps(published))
    quantization = load_config(tmp_path).quantization
    assert quantization is not None
    assert quantization.quant_method == "fp8"
    del published["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    quantization = load_config(tmp_path).quantization
    if algorithm is None:
        assert quantization is None
        return
    assert quantization is not None
    assert quantization.declared(EXPERT) == Scheme("nvfp4", "nvfp4")
    assert quantization.excluded_by("lm_head") == "lm_head"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "INT8_SQ"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization\.quant_algo 'INT8_SQ'"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("m2-mxfp4-quark", Scheme("mxfp4", "mxfp4")),
        ("m2-nvfp4-quark", Scheme("nvfp4", "nvfp4")),
        ("m2-nvfp4-ct", Scheme("nvfp4", "nvfp4")),
        ("m2-nvfp4-modelopt", Scheme("nvfp4", "nvfp4")),
    ],
)
def test_written_by_the_tools(shared: Path, name: str, scheme: Scheme) -> None:
    quantization = load_config(shared / "data" / "checkpoints" / name).quantization
    assert quantization is not None
    for i in range(3):
        prefix = f"model.layers.{i}"
        assert quantization.declared(f"{prefix}.block_sparse_moe.experts.7.w2") == scheme
        assert quantization.excluded_by(f"{prefix}.block_sparse_moe.gate")
        assert all(quantization.excluded_by(f"{prefix}.self_attn.{part}_proj") for part in "qkvo")
    assert quantization.excluded_by("lm_head")
