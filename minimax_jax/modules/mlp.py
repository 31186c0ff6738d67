"""The dense MLP: M3's first layers, and the expert that all tokens share."""

from __future__ import annotations

import jax
from flax import nnx

from minimax_jax.modules.linear import Linear
from minimax_jax.parameters import ParameterSpec
from pallas_kernels.activation import SwiGLU
from pallas_kernels.dispatch import Implementation


class MLP(nnx.Module):
    """down_proj(activation(gate_proj x, up_proj x)), its width spread over the model axis.

    Source: transformers `MiniMaxM3VLMLP`. Two matrices for gate and up: a slice of one would be a copy of it.
    """

    def __init__(self, hidden_size: int, width: int, activation: SwiGLU, implementation: Implementation = None) -> None:
        rows = ParameterSpec((width, hidden_size), ("mlp_width", "hidden"))
        self.gate_proj = Linear(rows, implementation)
        self.up_proj = Linear(rows, implementation)
        self.down_proj = Linear(ParameterSpec((hidden_size, width), ("hidden", "mlp_width")), implementation)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D] float32, this device's part of the sum."""
        hidden = self.activation(self.gate_proj(x), self.up_proj(x)).astype(x.dtype)
        return self.down_proj(hidden)
