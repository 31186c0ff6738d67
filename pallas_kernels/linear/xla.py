"""Decode the weight, then one XLA matmul."""

from __future__ import annotations

import jax

from pallas_kernels.dot import dot_t
from pallas_kernels.quant import Weight, dequantize


def linear_xla(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., cols], weight [rows, cols] -> [..., rows] float32; the decoded weight takes x's dtype."""
    return dot_t(x, dequantize(weight, x.dtype))
