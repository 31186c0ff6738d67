"""How one module's weight is stored. Its tensors decide; `quantization_config` is held against them."""

from __future__ import annotations

import dataclasses

from minimax_jax.checkpoint.lazy import LazyArray, LazyQuant, Tensor, astype, grid_shape
from minimax_jax.checkpoint.safetensors_index import DTYPES, Checkpoint, TensorInfo
from minimax_jax.config import QuantizationConfig
from minimax_jax.errors import CheckpointError

PLAIN = ("BF16", "F16", "F32")
PACKED = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"  # a multiplier, whatever its name says

_FLOAT32 = DTYPES["F32"]
_DEFAULT_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as it lies in the checkpoint.

    Attributes:
      infos: its tensors, the weight first.
      value: what reads it, with the scales of a packed one as a float32 grid [rows / block, cols / block].
      label: the format's name for people, such as "FP8 128x128".
    """

    infos: tuple[TensorInfo, ...]
    value: LazyArray | LazyQuant
    label: str


def find_stored(
    checkpoint: Checkpoint, info: TensorInfo, quantization: QuantizationConfig | None, linear: bool
) -> Stored:
    """Decides how `info`, a weight, is stored.

    Args:
      linear: the weight of a linear layer, which a quantised checkpoint is expected to hold packed unless
        `quantization` excludes it.

    Raises:
      CheckpointError: dtype, scale and `quantization` do not go together.
    """
    check_dtype(info)
    scale = checkpoint.tensors.get(info.name + SCALE_SUFFIX)
    if info.dtype == PACKED:
        if scale is None:
            raise CheckpointError(f"{info} has no '{info.name}{SCALE_SUFFIX}' beside it; a scale is never assumed")
        return _packed(checkpoint, info, scale, quantization)
    if scale is not None:
        raise CheckpointError(f"{scale} scales {info}, expected {PACKED} there; one of the two was replaced")
    if linear and _should_be_packed(info, quantization):
        raise CheckpointError(
            f"{info} has no scale, but quantization_config says fp8 and does not exclude it; if the weight is meant "
            "to be plain, name its module in modules_to_not_convert"
        )
    return Stored((info,), Tensor(checkpoint, info), info.dtype)


def check_dtype(info: TensorInfo) -> None:
    """Whether a weight may have this dtype at all."""
    if info.dtype not in (*PLAIN, PACKED):
        raise CheckpointError(
            f"{info} has dtype {info.dtype}, expected {', '.join(PLAIN)}, or {PACKED} with a 'weight{SCALE_SUFFIX}'; "
            "other formats cannot be loaded"
        )


def is_excluded(module: str, quantization: QuantizationConfig) -> bool:
    """Whether an entry of `modules_to_not_convert` is `module`, or whole path components of it: never a substring."""
    path = f".{module}."
    return any(f".{entry}." in path for entry in quantization.modules_to_not_convert)


def _should_be_packed(info: TensorInfo, quantization: QuantizationConfig | None) -> bool:
    if quantization is None or quantization.quant_method != "fp8":
        return False
    return not is_excluded(info.name.removesuffix(".weight"), quantization)


def _packed(
    checkpoint: Checkpoint, info: TensorInfo, scale: TensorInfo, quantization: QuantizationConfig | None
) -> Stored:
    if len(info.shape) != 2:
        raise CheckpointError(f"{info} is packed, expected a matrix")
    if scale.dtype not in PLAIN:
        raise CheckpointError(f"{scale} has dtype {scale.dtype}, expected one of {', '.join(PLAIN)} for a scale")
    shape = (info.shape[0], info.shape[1])
    block, label = _source_block(info, scale, quantization)
    grid = astype(Tensor(checkpoint, scale, grid_shape(shape, block)), _FLOAT32)
    return Stored((info, scale), LazyQuant(Tensor(checkpoint, info), grid, block), label)


def _source_block(
    info: TensorInfo, scale: TensorInfo, quantization: QuantizationConfig | None
) -> tuple[tuple[int, int], str]:
    """Which (rows, cols) of the weight share one of the scales; an axis of a single block has its own size."""
    rows, cols = info.shape
    if scale.shape in ((), (1,), (1, 1)):
        return (rows, cols), "FP8 per tensor"
    if scale.shape in ((rows,), (rows, 1)):
        return (1, cols), "FP8 per row"
    declared = _DEFAULT_BLOCK if quantization is None else quantization.weight_block_size
    grid = grid_shape((rows, cols), declared)
    if scale.shape != grid:
        raise CheckpointError(
            f"{scale} does not fit {info}: expected [], [1], [{rows}, 1] or {list(grid)}, which is one scale for each "
            f"block of weight_block_size {list(declared)}"
        )
    return (min(declared[0], rows), min(declared[1], cols)), f"FP8 {declared[0]}x{declared[1]}"
