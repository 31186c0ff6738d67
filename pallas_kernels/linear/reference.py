"""What `linear` means: every operand in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.activation_quant import emulate_activation
from pallas_kernels.quant import Weight, dequantize


def linear_reference(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., cols], weight [rows, cols] -> [..., rows] float32."""
    x = emulate_activation(x.astype(jnp.float32), weight)
    return jnp.einsum("...c,rc->...r", x, dequantize(weight, jnp.float32), precision="highest")
