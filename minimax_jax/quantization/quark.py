"""The quantisation specs of AMD Quark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minimax_jax.config_keys import Section, show
from minimax_jax.quantization.config import Scheme

if TYPE_CHECKING:
    from pallas_kernels.quant import FormatName

_SUPPORTED = (
    "MXFP4 (fp4, per_group, 32, e8m0), NVFP4 (fp4, per_group, 16, with an fp8_e4m3 per_tensor scale), MXFP8 (fp8_e4m3, "
    "per_group, 32, e8m0) and FP8 (fp8_e4m3, per_tensor or per_channel)"
)


def read_quark_schemes(section: Section) -> tuple[Scheme | None, list[tuple[str, Scheme]]]:
    """The scheme of `global_quant_config`, and (name or glob, scheme) of `layer_quant_config`.

    Raises:
      ConfigError: a spec that cannot be loaded.
    """
    whole = section.section("global_quant_config")
    if whole is None:
        raise section.error(f"{section.name('global_quant_config')} missing; it says what weights are quantised to")
    layers = section.section("layer_quant_config")
    found = []
    for name in () if layers is None else layers.data:
        layer = layers.section(name) if layers is not None else None
        scheme = None if layer is None else _scheme(layer)
        if scheme is not None:
            found.append((name, scheme))
    return _scheme(whole), found


def _scheme(section: Section) -> Scheme | None:
    weight = section.get("weight")
    if weight is None:
        return None  # such as a layer whose output alone is quantised, for the key/value cache
    format = _format(weight)
    if format is None:
        raise section.error(f"{section.name('weight')} {_kind(weight)} is not supported; supported are {_SUPPORTED}")
    return Scheme(format, *_activation(format, section.get("input_tensors")))


def _format(value: Any) -> FormatName | None:
    specs = value if isinstance(value, list) else [value]
    if not all(isinstance(spec, dict) for spec in specs):
        return None
    kinds = [(spec.get("dtype"), spec.get("qscheme"), spec.get("group_size")) for spec in specs]
    if kinds == [("fp4", "per_group", 16), ("fp8_e4m3", "per_tensor", None)]:
        return "nvfp4"
    if len(kinds) != 1:
        return None
    if kinds[0] == ("fp4", "per_group", 32) and specs[0].get("scale_format") == "e8m0":
        return "mxfp4"
    if kinds[0] == ("fp8_e4m3", "per_group", 32) and specs[0].get("scale_format") == "e8m0":
        return "mxfp8"
    if kinds[0][0] == "fp8_e4m3" and kinds[0][1] in ("per_tensor", "per_channel"):
        return "fp8"
    return None


def _activation(format: FormatName, value: Any) -> tuple[FormatName | None, str | None]:
    """(activation, not_emulated) of a `Scheme`."""
    if value is None:
        return None, None
    inputs = _format(value)
    specs = value if isinstance(value, list) else [value]
    if inputs == format and specs[0].get("is_dynamic") is True:
        if format == "nvfp4" and specs[1].get("is_dynamic") is False:
            return "nvfp4", None
        if format in ("mxfp4", "mxfp8") and specs[0].get("scale_calculation_mode") in (None, "even"):
            return format, None
    return None, f"{format.upper()} weights with activations of {_kind(value)}"


def _kind(value: Any) -> str:
    """A spec for people."""
    specs = value if isinstance(value, list) else [value]
    if not all(isinstance(spec, dict) for spec in specs):
        return show(value)
    keys = ("dtype", "qscheme", "group_size", "scale_format", "scale_calculation_mode", "is_dynamic")
    return show(" + ".join(" ".join(str(spec[key]) for key in keys if spec.get(key) is not None) for spec in specs))
