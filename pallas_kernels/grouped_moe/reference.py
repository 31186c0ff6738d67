"""What `grouped_moe` means: every expert on every token in float32, then the chosen ones weighted and summed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.activation import SwiGLU
from pallas_kernels.activation_quant import emulate_activation
from pallas_kernels.quant import Weight, dequantize


def grouped_moe_reference(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: SwiGLU,
) -> jax.Array:
    """Shapes as in `api.grouped_moe`. Memory of all tokens times all experts: for small cases only.

    Where the weights' format names a quantisation of activations, x and the activation's output pass through it, each
    by the scale of the matrix that it meets (`grouped_moe_xla` says how vLLM differs).
    """
    N, E = x.shape[0], w2.shape[0]
    inputs = emulate_activation(x.astype(jnp.float32)[:, None, None], w13)  # [N, 1, 1, D] or [N, E, 2, D]
    inputs = jnp.broadcast_to(inputs, (N, E, 2, x.shape[1]))
    gate_up = jnp.einsum("negd,egfd->negf", inputs, dequantize(w13, jnp.float32), precision="highest")
    hidden = emulate_activation(activation(gate_up[:, :, 0], gate_up[:, :, 1]), w2)
    out = jnp.einsum("nef,edf->ned", hidden, dequantize(w2, jnp.float32), precision="highest")
    chosen = (expert_ids >= 0) & (expert_ids < E)
    terms = out[jnp.arange(N)[:, None], jnp.where(chosen, expert_ids, 0)] * expert_weights[..., None]
    return jnp.sum(jnp.where(chosen[..., None], terms, 0), axis=1)
