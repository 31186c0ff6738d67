"""Packed weights: the payload as it lies in the checkpoint, beside its scales. Decoding happens where it is used.

    fp8     e4m3 x block scale                        a float32 scale for a block of any size
    mxfp8   e4m3 x 2^(block scale - 127)              1 x 32
    mxfp4   e2m1 x 2^(block scale - 127)              1 x 32
    nvfp4   e2m1 x (block scale x global scale)       1 x 16, e4m3 block scales, one float32 for each matrix

Eight e2m1 codes make a uint32 word, column 8j + i in bits 4i..4i+3 of word j: on a little-endian machine these are the
checkpoint's bytes, two codes each with the even column in the low half. Source of the MX formats: OCP Microscaling
Formats 1.0; of NVFP4: the checkpoints of Quark, ModelOpt and compressed-tensors, whose global scale divides.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

FormatName = Literal["fp8", "mxfp8", "mxfp4", "nvfp4"]
PAYLOAD_DTYPES = {"fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "mxfp4": "uint32", "nvfp4": "uint32"}
SCALE_DTYPES = {"fp8": "float32", "mxfp8": "uint8", "mxfp4": "uint8", "nvfp4": "float8_e4m3fn"}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # value of each code


@dataclasses.dataclass(frozen=True)
class Format:
    """How a matrix is packed.

    Attributes:
      name: see the table above.
      block: (rows, cols) of the decoded matrix that share one block scale; the last block of an axis may be ragged.
      global_divides: the global scale is a divisor, as compressed-tensors writes it, and so is the input's.
      activation: how the product's other operand is quantised and dequantised first, in the spelling of `name`; None
        leaves it as it is.
      order: "rows" as in the checkpoint, or "tiles", see `pallas_kernels.tiles`.
    """

    name: FormatName
    block: tuple[int, int]
    global_divides: bool = False
    activation: FormatName | None = None
    order: Literal["rows", "tiles"] = "rows"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """A block-scaled matrix (or a stack of them) that stays packed in memory.

    Attributes:
      payload: [..., rows, cols], of FP4 [..., rows, cols / 8], the checkpoint's bytes as PAYLOAD_DTYPES.
      scale: [..., ceil(rows / block[0]), ceil(cols / block[1])] of SCALE_DTYPES.
      format: how to read them.
      global_scale: [...] float32, one for each matrix of the stack; NVFP4 has one, the others None.
      input_scale: [...] float32, the static scale of the other operand where `format.activation` needs one.
    """

    payload: jax.Array
    scale: jax.Array
    format: Format = dataclasses.field(metadata={"static": True})
    global_scale: jax.Array | None = None
    input_scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded matrix."""
        *lead, rows, cols = self.payload.shape
        return (*lead, rows, cols * codes_per_element(self.payload.dtype))


Weight = jax.Array | QuantTensor


def dequantize(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The decoded weight in `dtype`: the product of the table above in float32, rounded once.

    NVFP4's two scales are multiplied (or divided) first, as the exporters' own decoders do.
    """
    if not isinstance(weight, QuantTensor):
        return weight.astype(dtype)
    return _decode(weight, weight.global_scale).astype(dtype)


def dequantize_blocks(weight: QuantTensor, dtype: jnp.dtype) -> jax.Array:
    """The decoded weight without its global scale: NVFP4 is exact in bfloat16 then (at most five significant bits)."""
    return _decode(weight, None).astype(dtype)


def global_multiplier(weight: Weight) -> jax.Array | None:
    """[...] float32 that the product with `dequantize_blocks` is multiplied by, None for a factor of one."""
    if not isinstance(weight, QuantTensor) or weight.global_scale is None:
        return None
    return 1 / weight.global_scale if weight.format.global_divides else weight.global_scale


def codes_per_element(dtype: jnp.dtype) -> int:
    """Columns in one element of a payload."""
    return {"float8_e4m3fn": 1, "uint8": 2, "uint32": 8}[jnp.dtype(dtype).name]


def unpack(payload: jax.Array) -> jax.Array:
    """Payload [..., rows, cols / codes_per_element] -> values [..., rows, cols] float32, no scale applied."""
    each = codes_per_element(payload.dtype)
    if each == 1:
        return payload.astype(jnp.float32)
    shifts = (4 * np.arange(each)).astype(payload.dtype)
    codes = (payload[..., None] >> shifts) & np.array(0xF, payload.dtype)
    return jnp.asarray(E2M1)[codes.reshape(*payload.shape[:-1], -1)]


def expand_scale(scale: jax.Array, block: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """One scale per element: [..., rows/block, cols/block] -> [..., rows, cols]."""
    rows, cols = shape[-2:]
    scale = jnp.repeat(scale, block[0], axis=-2)[..., :rows, :]
    return jnp.repeat(scale, block[1], axis=-1)[..., :cols]


def times_power_of_two(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """values x 2^(exponent - 127), exact: float32 values of at most 8 significant bits, uint8 exponents (255 is NaN).

    On the bits, because a back end may flush subnormals, and 2^-127 is one.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    sign, magnitude = bits & jnp.int32(-(2**31)), bits & 0x7FFFFFFF
    power = (magnitude >> 23) + exponent.astype(jnp.int32) - 127
    normal = (magnitude & 0x7FFFFF) | (power << 23)
    subnormal = ((magnitude & 0x7FFFFF) | 0x800000) >> jnp.clip(1 - power, 0, 31)
    scaled = jnp.where(power >= 255, 0x7F800000, jnp.where(power > 0, normal, subnormal))
    scaled = jnp.where(magnitude == 0, 0, scaled)
    scaled = jnp.where((magnitude > 0x7F800000) | (exponent == 255), 0x7FC00000, scaled)
    return lax.bitcast_convert_type(sign | scaled, jnp.float32)


def _decode(weight: QuantTensor, global_scale: jax.Array | None) -> jax.Array:
    if weight.format.order == "tiles":
        from pallas_kernels.tiles import restore  # which imports this module

        weight = restore(weight)
    format = weight.format
    values = unpack(weight.payload)
    scale = weight.scale
    if SCALE_DTYPES[format.name] == "uint8":
        return times_power_of_two(values, expand_scale(scale, format.block, weight.shape))
    scale = scale.astype(jnp.float32)
    if global_scale is not None:
        whole = jnp.broadcast_to(global_scale[..., None, None], scale.shape)
        # Behind the barrier, or XLA multiplies by the reciprocal of a broadcast divisor: one ulp off.
        scale = scale / lax.optimization_barrier(whole) if format.global_divides else scale * whole
    return values * expand_scale(scale, format.block, weight.shape)
