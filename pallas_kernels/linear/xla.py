"""Decode the weight, then one XLA matmul."""

from __future__ import annotations

import jax

from pallas_kernels.activation_quant import emulate_activation
from pallas_kernels.dot import dot_weight
from pallas_kernels.quant import Weight


def linear_xla(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., cols], weight [rows, cols] -> [..., rows] float32; the decoded weight takes x's dtype."""
    return dot_weight(emulate_activation(x, weight), weight)
