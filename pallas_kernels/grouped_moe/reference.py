"""What `grouped_moe` means: every expert on every token in float32, then the chosen ones weighted and summed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.activation import SwiGLU
from pallas_kernels.quant import Weight, dequantize


def grouped_moe_reference(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: SwiGLU,
) -> jax.Array:
    """Shapes as in `api.grouped_moe`. Memory of all tokens times all experts: for small cases only."""
    x = x.astype(jnp.float32)
    gate_up = jnp.einsum("nd,egfd->negf", x, dequantize(w13, jnp.float32), precision="highest")
    hidden = activation(gate_up[:, :, 0], gate_up[:, :, 1])
    out = jnp.einsum("nef,edf->ned", hidden, dequantize(w2, jnp.float32), precision="highest")
    chosen = jax.nn.one_hot(expert_ids, w2.shape[0], dtype=jnp.float32)  # an id outside the range is a zero row
    return jnp.einsum("ned,nke,nk->nd", out, chosen, expert_weights, precision="highest")
