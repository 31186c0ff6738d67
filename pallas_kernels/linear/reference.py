"""What `linear` means: every operand in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quant import Weight, dequantize


def linear_reference(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., cols], weight [rows, cols] -> [..., rows] float32."""
    return jnp.einsum("...c,rc->...r", x.astype(jnp.float32), dequantize(weight, jnp.float32), precision="highest")
