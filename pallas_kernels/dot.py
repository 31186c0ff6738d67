"""The matrix products of the XLA implementations: float32 accumulation, and true float32 for float32 operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quant import QuantTensor, Weight, dequantize_blocks, global_multiplier


def dot_t(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., cols] times weight [rows, cols] transposed -> [..., rows] float32."""
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def dot_weight(x: jax.Array, weight: Weight) -> jax.Array:
    """`dot_t` with a plain or packed weight in x's dtype; a global scale goes on the float32 sums."""
    if not isinstance(weight, QuantTensor):
        return dot_t(x, weight.astype(x.dtype))
    out = dot_t(x, dequantize_blocks(weight, x.dtype))
    multiplier = global_multiplier(weight)
    return out if multiplier is None else out * multiplier
