"""`quantization_config` in each tool's spelling -> `QuantizationConfig`; what cannot be loaded is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from minimax_jax.config_keys import Section, is_int, show
from minimax_jax.quantization.config import QuantizationConfig, Scheme
from minimax_jax.quantization.groups import BLOCK_FORMATS, read_groups
from minimax_jax.quantization.modules import ModuleSet, compile_entry, is_pattern
from minimax_jax.quantization.quark import read_quark_schemes

_E4M3 = ("float8_e4m3fn", "e4m3")
_FP8_FIXED: Mapping[str, tuple[Any, ...]] = {
    "fmt": _E4M3,  # the second is DeepSeek's spelling of the same format
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
    "kv_cache_scheme": (None, {}),
    "activation_scheme": ("dynamic", "static"),
}
_MXFP8_FIXED: Mapping[str, tuple[Any, ...]] = {
    "fmt": (*_E4M3, "mxfp8"),
    "scale_fmt": ("ue8m0", "e8m0"),
    "activation_scheme": ("dynamic",),
    "kv_cache_scheme": (None, {}),
    "modules_to_convert": ([],),
    "weight_block_size": ([1, 32],),
}
_VENDOR_READ = frozenset({"quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers"})
_VENDOR_HARMLESS = frozenset({"dequantize"})

_QUARK_FIXED: Mapping[str, tuple[Any, ...]] = {
    "algo_config": (None, [], {}),  # some algorithms turn activations when the model runs
    "layer_type_quant_config": (None, {}),
    "softmax_quant_spec": (None, {}),
}
_QUARK_READ = frozenset({"quant_method", "global_quant_config", "layer_quant_config", "exclude", "export"})
_QUARK_HARMLESS = frozenset({"quant_mode", "version", "kv_cache_quant_config", "kv_cache_post_rope"})

_GROUPS_FIXED: Mapping[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed", "frozen"),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
    "transform_config": (None, {}),  # rotations of activations when the model runs
}
_GROUPS_READ = frozenset({"quant_method", "config_groups", "format", "ignore"})
_GROUPS_HARMLESS = frozenset({"kv_cache_scheme", "global_compression_ratio", "version", "producer"})

_MODELOPT_READ = frozenset(
    {"quant_method", "quant_algo", "config_groups", "group_size", "ignore", "exclude_modules", "quantized_layers"}
)
_MODELOPT_HARMLESS = frozenset({"kv_cache_scheme", "kv_cache_quant_algo", "producer"})
_MIXED = "MIXED_PRECISION"
_ALGORITHMS: Mapping[str, Scheme] = {
    "NVFP4": Scheme("nvfp4", "nvfp4"),
    "W4A16_NVFP4": Scheme("nvfp4"),
    "MXFP8": Scheme("mxfp8", "mxfp8"),
    "W4A8_MXFP4_FP8": Scheme("mxfp4", not_emulated="MXFP4 weights with FP8 activations"),
    "FP8": Scheme("fp8", not_emulated="FP8 activations with one scale for the tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", not_emulated="FP8 activations with one scale for a token"),
    "FP8_PB_WO": Scheme("fp8"),
}


def read_quantization(section: Section) -> QuantizationConfig:
    """A `quantization_config`.

    Raises:
      ConfigError: a method or format that cannot be loaded, or a value out of its range; one line that names the key.
    """
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise section.error(
            f"{section.name('quant_method')} {show(method)} is not supported; supported are "
            f"{', '.join(map(repr, METHODS))} and no quantization_config at all (bfloat16, float32)"
        )
    return METHODS[method](section)


def _read_fp8(section: Section) -> QuantizationConfig:
    section.check_fixed(_FP8_FIXED)
    section.check_unknown(_VENDOR_READ, _FP8_FIXED, _VENDOR_HARMLESS)
    static = section.get("activation_scheme") == "static"
    return QuantizationConfig(
        quant_method="fp8",
        exclude=_vendor_list(section),
        default=_ALGORITHMS["FP8"] if static else Scheme("fp8", "fp8"),
        weight_block_size=_block(section, section.get("weight_block_size"), section.name("weight_block_size")),
        published=_text(section),
    )


def _read_mxfp8(section: Section) -> QuantizationConfig:
    section.check_fixed(_MXFP8_FIXED)
    section.check_unknown(_VENDOR_READ, _MXFP8_FIXED, _VENDOR_HARMLESS)
    return QuantizationConfig(
        quant_method="mxfp8",
        exclude=_vendor_list(section),
        default=Scheme("mxfp8", "mxfp8"),
        published=_text(section),
    )


def _read_quark(section: Section) -> QuantizationConfig:
    section.check_fixed(_QUARK_FIXED)
    section.check_unknown(_QUARK_READ, _QUARK_FIXED, _QUARK_HARMLESS)
    export = section.section("export")
    if export is not None:
        export.check_fixed({"weight_format": ("real_quantized",)})
    default, layers = read_quark_schemes(section)
    return QuantizationConfig(
        quant_method="quark",
        exclude=_modules(section, "exclude"),
        modules=tuple((_checked(section, "layer_quant_config", (name,)), scheme) for name, scheme in layers),
        default=default,
        published=_text(section),
    )


def _read_compressed_tensors(section: Section) -> QuantizationConfig:
    section.check_fixed(_GROUPS_FIXED)
    section.check_unknown(_GROUPS_READ, _GROUPS_FIXED, _GROUPS_HARMLESS)
    named, default, block = read_groups(section)
    return QuantizationConfig(
        quant_method="compressed-tensors",
        exclude=_modules(section, "ignore"),
        modules=tuple((_checked(section, "config_groups", targets), scheme) for targets, scheme in named),
        default=default,
        weight_block_size=_block(section, block, "config_groups' block_structure"),
        published=_text(section),
    )


def _read_modelopt(section: Section) -> QuantizationConfig:
    section.check_unknown(_MODELOPT_READ, _MODELOPT_HARMLESS)
    algorithm = section.get("quant_algo")
    modules: tuple[tuple[ModuleSet, Scheme], ...] = ()
    default: Scheme | None
    if algorithm == _MIXED:
        default, modules = None, _quantized_layers(section)
    elif algorithm is None and section.get("config_groups") is not None:
        named, default, _ = read_groups(section)
        modules = tuple((_checked(section, "config_groups", targets), scheme) for targets, scheme in named)
    else:
        default = _algorithm(section, algorithm, section.name("quant_algo"))
        if default.activation and _weights_alone(section):
            default = Scheme(default.format)
    excluded = (*section.strings("ignore"), *section.strings("exclude_modules"))
    return QuantizationConfig(
        quant_method="modelopt",
        exclude=_checked(section, "ignore or exclude_modules", tuple(dict.fromkeys(excluded))),
        modules=modules,
        default=default,
        published=_text(section),
    )


METHODS: Mapping[str, Callable[[Section], QuantizationConfig]] = {
    "fp8": _read_fp8,
    "mxfp8": _read_mxfp8,
    "quark": _read_quark,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
}


def _quantized_layers(section: Section) -> tuple[tuple[ModuleSet, Scheme], ...]:
    """ModelOpt's list of every quantised module with its algorithm, gathered by scheme."""
    layers = section.section("quantized_layers")
    if layers is None:
        raise section.error(f"{section.name('quantized_layers')} missing, which quant_algo {_MIXED!r} needs")
    names: dict[Scheme, list[str]] = {}
    for name, value in layers.data.items():
        algorithm = value.get("quant_algo") if isinstance(value, dict) else value
        names.setdefault(_algorithm(section, algorithm, layers.name(name)), []).append(name)
    return tuple((_checked(section, "quantized_layers", tuple(each)), scheme) for scheme, each in names.items())


def _algorithm(section: Section, algorithm: object, label: str) -> Scheme:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        supported = ", ".join(map(repr, (*_ALGORITHMS, _MIXED)))
        raise section.error(f"{label} {show(algorithm)} is not supported; supported are {supported}")
    scheme = _ALGORITHMS[algorithm]
    size = section.get("group_size")
    if algorithm == "NVFP4" and size is not None and size != BLOCK_FORMATS["nvfp4"]:
        raise section.error(f"{section.name('group_size')} {show(size)} is not supported; NVFP4 has 16")
    return scheme


def _weights_alone(section: Section) -> bool:
    """Whether the groups beside `quant_algo` say that inputs are not quantised."""
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    return all(isinstance(group, dict) and group.get("input_activations") is None for group in groups.values())


def _vendor_list(section: Section) -> ModuleSet:
    entries = (*section.strings("modules_to_not_convert"), *section.strings("ignored_layers"))
    checked = _checked(section, "modules_to_not_convert or ignored_layers", tuple(dict.fromkeys(entries)))
    return ModuleSet(checked.entries, components=True)


def _modules(section: Section, key: str) -> ModuleSet:
    return _checked(section, key, section.strings(key))


def _checked(section: Section, key: str, entries: tuple[str, ...]) -> ModuleSet:
    """The entries as a set, each of them usable."""
    for entry in entries:
        if is_pattern(entry):
            try:
                compile_entry(entry)
            except ValueError as error:
                raise section.error(f"{section.prefix}{key}: {show(entry)} {' '.join(str(error).split())}") from None
    return ModuleSet(entries)


def _block(section: Section, block: Any, label: str) -> tuple[int, int]:
    if block is None:
        return 128, 128
    if not (isinstance(block, list) and len(block) == 2 and all(is_int(n) and n > 0 for n in block)):
        raise section.error(f"{label} {show(block)} is not a list of two numbers above 0")
    return block[0], block[1]


def _text(section: Section) -> str:
    return json.dumps(dict(section.data))
