"""The one matrix product of the XLA implementations: float32 accumulation, and true float32 for float32 operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot_t(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., cols] times weight [rows, cols] transposed -> [..., rows] float32."""
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
