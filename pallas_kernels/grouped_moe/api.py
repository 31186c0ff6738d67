"""The routed experts' product; chooses an implementation."""

from __future__ import annotations

import jax

from pallas_kernels.activation import SwiGLU
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.grouped_moe.reference import grouped_moe_reference
from pallas_kernels.grouped_moe.xla import grouped_moe_xla
from pallas_kernels.quant import Weight


def grouped_moe(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    *,
    activation: SwiGLU,
    implementation: Implementation = None,
) -> jax.Array:
    """Sum over k of expert_weights[n, k] * w2[e] @ activation(w13[e, 0] @ x[n], w13[e, 1] @ x[n]).

    Here e = expert_ids[n, k].

    Args:
      x: [N, D] float32 or bfloat16.
      w13: [E, 2, F, D] plain or packed: gate (w1) at [:, 0], up (w3) at [:, 1].
      w2: [E, D, F] plain or packed.
      expert_ids: [N, k] int32; an id outside 0..E-1 adds nothing (a pad, or an expert of another device).
      expert_weights: [N, k] float32.
      activation: applied in float32, rounded once to x's dtype.
      implementation: "xla", "reference", or None for the best available.

    Returns:
      [N, D] float32.
    """
    fn = choose("grouped_moe", implementation, {"xla": grouped_moe_xla, "reference": grouped_moe_reference})
    out: jax.Array = fn(x, w13, w2, expert_ids, expert_weights, activation)
    return out
