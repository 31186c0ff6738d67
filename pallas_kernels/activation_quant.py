"""What a quantised product does to its other operand: groups along the last axis are quantised and decoded again.

    mxfp4   groups of 32   2^n from the group's largest magnitude, "even"     e2m1
    nvfp4   groups of 16   e4m3, under a float32 scale stored with the weight  e2m1
    mxfp8   groups of 32   2^n, the smallest that keeps the group within 448   e4m3
    fp8     groups of 128  float32, the group's largest magnitude / 448        e4m3

Values are rounded to nearest even and saturate. The arithmetic is float32, whatever the operand's dtype, and the result
is rounded once to that dtype: of bfloat16 operands it is bfloat16 (the MX results are exact there), of float32 ones it
stays float32. A last group that the axis does not fill has fewer members. A NaN makes its group NaN.

Sources. "even" adds a quarter of a binade to the largest magnitude and keeps the exponent: Quark, compressed-tensors
and vLLM. MXFP8 has several scale rules in use, all of which decode alike; this one is 2^ceil(log2(largest / 448)), that
of vLLM's and ModelOpt's activations, where "even" would saturate the largest. FP8 is vLLM's for the groups of a token,
which takes 1e-10 as the least magnitude. NVFP4 is vLLM's emulation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quant import FormatName, QuantTensor, Weight, times_power_of_two

GROUP = {"mxfp4": 32, "nvfp4": 16, "mxfp8": 32, "fp8": 128}
_ABOVE_NAN = np.uint32(0x7F800000)  # bits of a float32 magnitude above these are a NaN


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The finite values of a small float: `mantissa` bits, subnormals below 2^`least`, up to `largest`."""

    mantissa: int
    least: int
    largest: float


_E2M1, _E4M3 = _Grid(1, 0, 6.0), _Grid(3, -6, 448.0)


def emulate_activation(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., cols] as the product with `weight` sees it: x itself unless `weight.format.activation` names a scheme.

    A static scale has the axes of the weight's leading dims and broadcasts against x's leading dims.
    """
    if not isinstance(weight, QuantTensor) or weight.format.activation is None:
        return x
    if not scales_each_matrix(weight):
        return quantize_dequantize(x, weight.format.activation)
    scale = weight.input_scale
    if scale is None:
        raise ValueError("activation 'nvfp4' needs the static scale of the weight's input; input_scale is None")
    return quantize_dequantize(x, "nvfp4", scale if weight.format.global_divides else 1 / scale)


def scales_each_matrix(weight: Weight) -> bool:
    """Whether each matrix of a stack quantises its input by a scale of its own."""
    return isinstance(weight, QuantTensor) and weight.format.activation == "nvfp4"


def quantize_dequantize(x: jax.Array, scheme: FormatName, multiplier: jax.Array | None = None) -> jax.Array:
    """x [..., cols] -> the same, each value replaced by the one that its code stands for.

    Args:
      x: float32 or bfloat16.
      scheme: one of the table above.
      multiplier: [...] float32 that broadcasts against x's leading dims, for "nvfp4" only: 2688 / the calibrated
        largest magnitude, which is 1 / input_scale where the checkpoint's scales multiply.
    """
    if scheme not in GROUP:
        raise ValueError(f"activation {scheme!r} is not known; choose from {sorted(GROUP)}")
    if (scheme == "nvfp4") != (multiplier is not None):
        raise ValueError(f"activation {scheme!r} with multiplier {multiplier}; 'nvfp4' has one, the others None")
    cols, group = x.shape[-1], GROUP[scheme]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -cols % group)]
    groups = jnp.pad(_keep(x.astype(jnp.float32), x.dtype), pad).reshape(*x.shape[:-1], -1, group)
    if multiplier is not None:
        out = _nvfp4(groups, multiplier.astype(jnp.float32)[..., None, None])
    elif scheme == "fp8":
        out = _fp8(groups)
    else:
        out = _mxfp4(groups) if scheme == "mxfp4" else _mxfp8(groups)
    out = out.reshape(*out.shape[:-2], -1)[..., :cols]
    return _keep(out, x.dtype).astype(x.dtype)


# Each of these: groups [..., groups of the axis, members] float32 -> the same shape, or with a multiplier what the two
# broadcast to. The order of the operations is part of the result.


def _mxfp4(x: jax.Array) -> jax.Array:
    return _mx(x, round_up=0x200000, exponent=2, grid=_E2M1)  # up from 1.75 x 2^n


def _mxfp8(x: jax.Array) -> jax.Array:
    return _mx(x, round_up=0x1FFFFF, exponent=8, grid=_E4M3)  # up above 1.75 x 2^n: 448 is 1.75 x 2^8


def _mx(x: jax.Array, round_up: int, exponent: int, grid: _Grid) -> jax.Array:
    """Power of two scale by the bits of the largest magnitude: logarithms are inexact, and bits are never flushed."""
    magnitude = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)
    largest = jnp.max(magnitude, axis=-1, keepdims=True)
    byte = jnp.maximum(((largest + np.uint32(round_up)) >> 23).astype(jnp.int32) - exponent, 0)  # and at most 253
    values = _round(x * _power_of_two(127 - byte), grid)
    return times_power_of_two(values, jnp.where(largest > _ABOVE_NAN, 255, byte))


def _nvfp4(x: jax.Array, a: jax.Array) -> jax.Array:
    largest = _largest(x)
    a = _as_written(jnp.broadcast_to(a, jnp.broadcast_shapes(a.shape, largest.shape)))
    s = _as_written(_round(a * _as_written(largest * np.float32(1 / 6)), _E4M3))
    values = _round(x * _as_written(a / s), _E2M1)
    return jnp.where(s == 0, 0, values * _as_written(s / a))


def _fp8(x: jax.Array) -> jax.Array:
    largest = jnp.maximum(_largest(x), np.float32(1e-10))
    scale = largest / _as_written(jnp.full_like(largest, _E4M3.largest))
    return _round(x / _as_written(jnp.broadcast_to(scale, x.shape)), _E4M3) * _as_written(scale)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True)


def _round(x: jax.Array, grid: _Grid) -> jax.Array:
    """The nearest value of the grid, ties to even. By arithmetic: a compiler may drop a conversion there and back."""
    x = jnp.clip(x, -grid.largest, grid.largest)
    exponent = ((lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127
    step = jnp.maximum(exponent, grid.least) - grid.mantissa
    return lax.round(x * _power_of_two(-step), lax.RoundingMethod.TO_NEAREST_EVEN) * _power_of_two(step)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent float32 for int32 exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _keep(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 values rounded to `dtype`; a compiler may drop the rounding of a conversion, but not this one."""
    return x if dtype == jnp.float32 else lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def _as_written(x: jax.Array) -> jax.Array:
    """Keeps XLA from rewriting a quotient: x / (y / z) as x * z / y, x / broadcast(y) as x * broadcast(1 / y)."""
    out: jax.Array = lax.optimization_barrier(x)
    return out
