"""`config_groups`, as compressed-tensors and ModelOpt write them: what each group of modules is quantised to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minimax_jax.config_keys import Section, show
from minimax_jax.quantization.config import Scheme

if TYPE_CHECKING:
    from pallas_kernels.quant import FormatName

BLOCK_FORMATS: Mapping[str, int] = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}  # columns that share a scale
_EVERY_LINEAR = ("Linear", "LinearBase")
_FORMATS = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)


def read_groups(
    section: Section,
) -> tuple[list[tuple[tuple[str, ...], Scheme]], Scheme | None, Any]:
    """The groups of a `quantization_config`.

    Returns:
      (names, scheme) of the groups that name modules, the scheme of all linear layers where a group has them, and the
      `block_structure` of FP8 weights.

    Raises:
      ConfigError: a group that cannot be loaded.
    """
    _check_format(section, section)
    groups = section.section("config_groups")
    if groups is None or not groups.data:
        raise section.error(f"{section.name('config_groups')} missing; without it no module is quantised")
    named: list[tuple[tuple[str, ...], Scheme]] = []
    default: Scheme | None = None
    block: Any = None
    for key in groups.data:
        group = groups.section(key)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue  # only inputs or outputs, such as the key/value cache's
        _check_format(section, group)
        scheme = Scheme(_format(weights), *_activation(_format(weights), group.section("input_activations")))
        block = weights.get("block_structure") if block is None else block
        targets = group.strings("targets")
        if any(target in _EVERY_LINEAR for target in targets):
            default = scheme if default is None else default
        names = tuple(target for target in targets if target not in _EVERY_LINEAR)
        if names:
            named.append((names, scheme))
    return named, default, block


def _check_format(section: Section, holder: Section) -> None:
    value = holder.get("format")
    if value is not None and value not in _FORMATS:
        raise section.error(
            f"{holder.name('format')} {show(value)} is not supported; supported are {', '.join(map(repr, _FORMATS))}"
        )


def _format(weights: Section) -> FormatName:
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") == "float" and weights.get("symmetric") in (None, True):
        if bits == 4 and size == BLOCK_FORMATS["nvfp4"]:
            return "nvfp4"
        if bits == 4 and size == BLOCK_FORMATS["mxfp4"]:
            return "mxfp4"
        if bits == 8 and size == BLOCK_FORMATS["mxfp8"]:
            return "mxfp8"
        if bits == 8 and weights.get("strategy") in (None, "tensor", "channel", "block"):
            return "fp8"
    kind = {key: weights.get(key) for key in ("num_bits", "type", "group_size", "strategy", "symmetric")}
    raise weights.error(
        f"{weights.prefix.removesuffix('.')} {', '.join(f'{key} {value}' for key, value in kind.items())} is not "
        "supported; supported are NVFP4 (4 bits, float, 16), MXFP4 (4, float, 32), MXFP8 (8, float, 32) and FP8 "
        "(8, float, by tensor, channel or block)"
    )


def _activation(format: FormatName, inputs: Section | None) -> tuple[FormatName | None, str | None]:
    """(activation, not_emulated) of a `Scheme`."""
    if inputs is None:
        return None, None
    bits, size, dynamic = inputs.get("num_bits"), inputs.get("group_size"), inputs.get("dynamic")
    if inputs.get("type") == "float":
        if format == "nvfp4" and (bits, size) == (4, 16) and dynamic in ("local", False):
            return "nvfp4", None
        if format in ("mxfp4", "mxfp8") and (bits, size) == (4 if format == "mxfp4" else 8, 32) and dynamic is True:
            return format, None
        if format == "fp8" and (bits, size) == (8, 128) and dynamic is True:
            return "fp8", None
    size_text = inputs.get("strategy") if size is None else f"groups of {size}"
    how = "dynamic" if dynamic is True else "static" if dynamic is False else str(dynamic)
    return None, f"{format.upper()} weights with {how} {bits}-bit {inputs.get('type')} activations ({size_text})"
