"""SwiGLU as both model families use it; its numbers belong to the layer and travel with it whatever the format."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """gate * sigmoid(alpha * gate) * (up + beta), after clamping gate from above and up on both sides by `limit`.

    The defaults are plain SiLU(gate) * up. Source: transformers `MiniMaxM2Experts`, and gpt-oss for the clamped form.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """gate, up [..., F] -> [..., F] float32."""
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.beta)
