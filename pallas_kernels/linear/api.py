"""The linear layer's product; chooses an implementation."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.linear.reference import linear_reference
from pallas_kernels.linear.xla import linear_xla
from pallas_kernels.quant import Weight


def linear(x: jax.Array, weight: Weight, *, implementation: Implementation = None) -> jax.Array:
    """x times the transpose of `weight`.

    Args:
      x: [..., cols] float32 or bfloat16.
      weight: [rows, cols], plain or packed.
      implementation: "xla", "reference", or None for the best available.

    Returns:
      [..., rows] float32, not yet rounded to x's dtype.
    """
    return choose("linear", implementation, {"xla": linear_xla, "reference": linear_reference})(x, weight)
