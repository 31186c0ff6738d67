"""How one module's weight is stored. Its tensors decide; `quantization_config` is held against them.

weight_packed, weight_scale, weight_global_scale         NVFP4 of compressed-tensors; the global scale divides
weight_packed, weight_scale (U8)                         MXFP4 of compressed-tensors
weight (U8), weight_scale, weight_scale_2                NVFP4 of Quark and ModelOpt; the global scale multiplies
weight (U8), weight_scale (U8)                           MXFP4 of Quark
weight (F8_E4M3), weight_scale or weight_scale_inv (U8)  MXFP8
weight (F8_E4M3), the same in a float type               FP8 by blocks, rows or as a whole
weight in a float type                                   plain
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from minimax_jax.checkpoint.lazy import LazyArray, LazyQuant, Tensor, astype, grid_shape
from minimax_jax.checkpoint.safetensors_index import DTYPES, Checkpoint, TensorInfo
from minimax_jax.checkpoint.scales import Scale, ScaleKind
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.quantization import QuantizationConfig
from pallas_kernels.quant import Format, FormatName

PLAIN = ("BF16", "F16", "F32")
FP8, FP4 = "F8_E4M3", "U8"

WEIGHTS = ("weight", "weight_packed")
SCALES = ("weight_scale", "weight_scale_inv")  # both multipliers, whatever the second one's name says
GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")
INPUT_SCALES = ("input_scale", "input_scale_2", "input_global_scale")
PARTS = (*WEIGHTS, *SCALES, *GLOBAL_SCALES, *INPUT_SCALES)  # what a module's weight may be made of

BLOCK_COLS: Mapping[FormatName, int] = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}

_FLOAT32, _BYTE, _WORD = DTYPES["F32"], "U8", "U32"
_KINDS: Mapping[str, ScaleKind] = {
    "U8": "e8m0",
    "F8_E8M0": "e8m0",
    "F8_E4M3": "e4m3",
    **dict.fromkeys(PLAIN, "float"),
}
_FORMATS: Mapping[tuple[str, ScaleKind], FormatName] = {
    (FP4, "e8m0"): "mxfp4",
    (FP4, "e4m3"): "nvfp4",
    (FP8, "e8m0"): "mxfp8",
    (FP8, "float"): "fp8",
}
_SCALE_TEXT = {FP4: "U8 (MXFP4) or F8_E4M3 (NVFP4)", FP8: f"U8 (MXFP8), or {', '.join(PLAIN)} (FP8)"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as it lies in the checkpoint.

    Attributes:
      infos: its tensors, the weight first.
      value: what reads it, with the block scales of a packed one as a grid [rows / block, cols / block].
      label: the format's name for people, such as "FP8 128x128".
      scales: those of its tensors that are scales and will be read.
    """

    infos: tuple[TensorInfo, ...]
    value: LazyArray | LazyQuant
    label: str
    scales: tuple[Scale, ...] = ()


def find_weight(checkpoint: Checkpoint, name: str) -> TensorInfo | None:
    """The tensor that holds the weight `name`, under the spelling that it has here.

    Raises:
      CheckpointError: two spellings of it, or a dtype that no weight has.
    """
    packed = checkpoint.tensors.get(f"{name}_packed") if name.endswith(".weight") else None
    info = checkpoint.tensors.get(name)
    if info is not None and packed is not None:
        raise _two_spellings(info, packed)
    info = info or packed
    if info is None:
        return None
    allowed = (FP4,) if info is packed else (*PLAIN, FP8, FP4)
    if info.dtype not in allowed:
        raise CheckpointError(
            f"{info} has dtype {info.dtype}, expected {', '.join(allowed)} (with a scale beside {FP8} and {FP4}); "
            "other formats cannot be loaded"
        )
    return info


def cols_per_element(info: TensorInfo) -> int:
    """Columns of the decoded weight in one element of its tensor."""
    return 2 if info.dtype == FP4 else 1


def find_stored(
    checkpoint: Checkpoint,
    name: str,
    quantization: QuantizationConfig | None,
    linear: bool,
    emulate_activation_quant: bool = False,
) -> Stored:
    """Decides how the weight `name`, which is there, is stored.

    Args:
      linear: the weight of a linear layer, which a quantised checkpoint is expected to hold packed unless
        `quantization` excludes it.
      emulate_activation_quant: keep what the config declares of the input's quantisation, and its static scale.

    Raises:
      CheckpointError: dtypes, scales and `quantization` do not go together.
      ConfigError: the declared quantisation of the input cannot be emulated.
    """
    weight = find_weight(checkpoint, name)
    assert weight is not None, "callers prove first that it is there"
    module = name.removesuffix(".weight")
    parts = _parts_beside(checkpoint, module) if name.endswith(".weight") else {}
    if weight.dtype in PLAIN:
        if parts:
            raise CheckpointError(
                f"{next(iter(parts.values()))} scales {weight}, expected {FP8} or {FP4} there; one of the two was "
                "replaced"
            )
        _check_plain_allowed(weight, module, quantization, linear)
        return Stored((weight,), Tensor(checkpoint, weight), weight.dtype)
    _check_not_excluded(weight, module, quantization)
    if len(weight.shape) != 2:
        raise CheckpointError(f"{weight} is packed, expected a matrix")
    return _packed(checkpoint, module, weight, parts, quantization, emulate_activation_quant)


def _parts_beside(checkpoint: Checkpoint, module: str) -> dict[str, TensorInfo]:
    """The scales of a module by their last name; no two of them spell the same thing."""
    parts: dict[str, TensorInfo] = {}
    for spellings in (SCALES, GLOBAL_SCALES, INPUT_SCALES):
        found = [suffix for suffix in spellings if f"{module}.{suffix}" in checkpoint.tensors]
        if len(found) > 1:
            raise _two_spellings(*(checkpoint.tensors[f"{module}.{suffix}"] for suffix in found[:2]))
        parts |= {suffix: checkpoint.tensors[f"{module}.{suffix}"] for suffix in found}
    return parts


def _two_spellings(first: TensorInfo, second: TensorInfo) -> CheckpointError:
    return CheckpointError(f"{first} and {second} are two spellings of one thing, expected one; remove the other")


def _one_of(parts: Mapping[str, TensorInfo], spellings: Sequence[str]) -> TensorInfo | None:
    return next((parts[suffix] for suffix in spellings if suffix in parts), None)


def _check_plain_allowed(
    weight: TensorInfo, module: str, quantization: QuantizationConfig | None, linear: bool
) -> None:
    scheme = quantization.declared(module) if quantization is not None and linear else None
    if scheme is not None:
        raise CheckpointError(
            f"{weight} has no scale, but quantization_config says {scheme.format} and does not exclude it; if the "
            f"weight is meant to be plain, name its module '{module}' in the config's list of exclusions"
        )


def _check_not_excluded(weight: TensorInfo, module: str, quantization: QuantizationConfig | None) -> None:
    entry = None if quantization is None else quantization.excluded_by(module)
    if entry is not None:
        raise CheckpointError(
            f"{weight} is packed, but quantization_config excludes its module '{module}' by the entry '{entry}', "
            f"expected {', '.join(PLAIN)} and no scale; if it is meant to be packed, take it out of the list"
        )


def _packed(
    checkpoint: Checkpoint,
    module: str,
    weight: TensorInfo,
    parts: Mapping[str, TensorInfo],
    quantization: QuantizationConfig | None,
    emulate: bool,
) -> Stored:
    scale = _one_of(parts, SCALES)
    if scale is None:
        raise CheckpointError(
            f"{weight} has no '{module}.{SCALES[0]}' (or '{SCALES[1]}') beside it; a scale is never assumed"
        )
    kind = _KINDS.get(scale.dtype)
    name = None if kind is None else _FORMATS.get((weight.dtype, kind))
    if kind is None or name is None:
        raise CheckpointError(f"{scale} has dtype {scale.dtype}, expected {_SCALE_TEXT[weight.dtype]} beside {weight}")
    packed_name = weight.name.endswith(WEIGHTS[1])
    global_scale = _global_scale(module, weight, parts, name, packed_name)
    _check_input_spelling(weight, parts, name, packed_name)
    _check_declared(weight, module, name, quantization)
    format, label = _layout(weight, scale, name, quantization)
    format = dataclasses.replace(format, global_divides=name == "nvfp4" and packed_name)
    input_scale = None
    if emulate and quantization is not None and (scheme := quantization.declared(module)) is not None:
        if scheme.not_emulated is not None:
            raise ConfigError(
                f"emulate_activation_quant: module '{module}' declares {scheme.not_emulated}, which is not emulated; "
                "leave the option off"
            )
        format = dataclasses.replace(format, activation=scheme.activation)
        if scheme.activation == "nvfp4":
            input_scale = _static_scale(module, weight, parts, packed_name)
    shape = (weight.shape[0], weight.shape[1] * cols_per_element(weight))
    grid = grid_shape(shape, format.block)
    value = LazyQuant(
        payload=_payload(checkpoint, weight),
        scale=Tensor(checkpoint, dataclasses.replace(scale, dtype=_BYTE), grid)
        if kind == "e8m0"
        else Tensor(checkpoint, scale, grid)
        if kind == "e4m3"
        else astype(Tensor(checkpoint, scale, grid), _FLOAT32),
        format=format,
        global_scale=_scalar(checkpoint, global_scale),
        input_scale=_scalar(checkpoint, input_scale),
    )
    factors = [info for info in (global_scale, input_scale) if info is not None]
    scales = (Scale(scale, kind), *(Scale(info, "positive") for info in factors))
    return Stored((weight, *parts.values()), value, label, scales)


def _payload(checkpoint: Checkpoint, weight: TensorInfo) -> LazyArray:
    """The packed bytes; those of FP4 four at a time, as words of eight codes."""
    if weight.dtype != FP4:
        return Tensor(checkpoint, weight)
    rows, width = weight.shape
    if width % 4:
        raise CheckpointError(f"{weight} has rows of {2 * width} values, expected a multiple of 8 in FP4")
    return Tensor(checkpoint, dataclasses.replace(weight, dtype=_WORD, shape=(rows, width // 4)))


def _global_scale(
    module: str, weight: TensorInfo, parts: Mapping[str, TensorInfo], name: FormatName, packed_name: bool
) -> TensorInfo | None:
    expected = GLOBAL_SCALES[1] if packed_name else GLOBAL_SCALES[0]
    found = _one_of(parts, GLOBAL_SCALES)
    if name != "nvfp4":
        if found is not None:
            raise CheckpointError(
                f"{found} is a global scale, but {weight} and its block scales are {name.upper()}, which has none; "
                "NVFP4 has block scales in F8_E4M3"
            )
        return None
    if found is None or expected not in parts:
        raise CheckpointError(
            f"{weight} has no '{module}.{expected}' beside it, the global scale of NVFP4"
            + ("" if found is None else f", but {found}")
            + "; a scale is never assumed"
        )
    return found


def _check_input_spelling(
    weight: TensorInfo, parts: Mapping[str, TensorInfo], name: FormatName, packed_name: bool
) -> None:
    found = _one_of(parts, INPUT_SCALES)
    if found is None:
        return
    allowed = INPUT_SCALES[2:] if packed_name else INPUT_SCALES[:2] if name == "nvfp4" else INPUT_SCALES[:1]
    if found.name.rpartition(".")[2] not in allowed:
        raise CheckpointError(f"{found} does not belong to {weight}, expected {' or '.join(allowed)} for it")


def _static_scale(module: str, weight: TensorInfo, parts: Mapping[str, TensorInfo], packed_name: bool) -> TensorInfo:
    found = _one_of(parts, INPUT_SCALES)
    if found is None:
        expected = INPUT_SCALES[2] if packed_name else f"{INPUT_SCALES[0]} or {INPUT_SCALES[1]}"
        raise CheckpointError(
            f"emulate_activation_quant: quantization_config declares a static activation scale for module '{module}', "
            f"but {weight} has no {expected} beside it; a scale is never assumed, so leave the option off"
        )
    return found


def _check_declared(weight: TensorInfo, module: str, name: FormatName, quantization: QuantizationConfig | None) -> None:
    scheme = None if quantization is None else quantization.declared(module)
    if scheme is not None and scheme.format != name:
        raise CheckpointError(
            f"{weight} and its scales are {name.upper()}, but quantization_config declares {scheme.format} for module "
            f"'{module}'; one of the two is of another checkpoint"
        )


def _scalar(checkpoint: Checkpoint, info: TensorInfo | None) -> LazyArray | None:
    """One float32 value, of whatever float type and rank."""
    if info is None:
        return None
    if info.dtype not in PLAIN or info.shape not in ((), (1,), (1, 1)):
        raise CheckpointError(f"{info} is a factor for a whole matrix, expected one value in {', '.join(PLAIN)}")
    return astype(Tensor(checkpoint, info, ()), _FLOAT32)


def _layout(
    weight: TensorInfo, scale: TensorInfo, name: FormatName, quantization: QuantizationConfig | None
) -> tuple[Format, str]:
    """Which (rows, cols) of the weight share one of the scales; an axis of a single block has its own size."""
    rows, cols = weight.shape[0], weight.shape[1] * cols_per_element(weight)
    if name != "fp8":
        block = (1, BLOCK_COLS[name])
        grid = grid_shape((rows, cols), block)
        if scale.shape != grid:
            raise CheckpointError(
                f"{scale} does not fit {weight}: expected {list(grid)}, one scale for {block[1]} columns of "
                f"{[rows, cols]} in {name.upper()}"
            )
        return Format(name, block), name.upper()
    if scale.shape in ((), (1,), (1, 1)):
        return Format(name, (rows, cols)), "FP8 per tensor"
    if scale.shape in ((rows,), (rows, 1)):
        return Format(name, (1, cols)), "FP8 per row"
    declared = (128, 128) if quantization is None else quantization.weight_block_size
    grid = grid_shape((rows, cols), declared)
    if scale.shape != grid:
        raise CheckpointError(
            f"{scale} does not fit {weight}: expected [], [1], [{rows}, 1] or {list(grid)}, which is one scale for "
            f"each block of weight_block_size {list(declared)}"
        )
    return Format(name, (min(declared[0], rows), min(declared[1], cols))), f"FP8 {declared[0]}x{declared[1]}"
