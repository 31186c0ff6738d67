"""Linear layers and the vocabulary-parallel embedding and head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from minimax_jax.modules.parameter import array, declare
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import model_all_gather, model_index, model_psum
from pallas_kernels.dispatch import Implementation
from pallas_kernels.linear import linear
from pallas_kernels.quant import QuantTensor


class Linear(nnx.Module):
    """y = x W^T without a bias; W [rows, cols], plain or packed.

    `implementation` is for packed weights: a plain matrix product is XLA's.
    """

    def __init__(self, spec: ParameterSpec, implementation: Implementation = None) -> None:
        self.weight = declare(spec)
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., local cols] -> [..., local rows] float32, a partial sum where the columns are spread."""
        weight = self.weight.get_value()
        return linear(x, weight, implementation=self.implementation if isinstance(weight, QuantTensor) else "xla")


class Embedding(nnx.Module):
    """Token embedding, rows spread over the model axis; one all-reduce a step."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self.weight = declare(ParameterSpec((vocab_size, hidden_size), ("vocab", "hidden")))

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """tokens [B, T] int32 -> [B, T, D] in `dtype`; every device adds zeros for tokens that it does not hold."""
        table = array(self.weight)
        row = tokens - model_index() * table.shape[0]
        held = (row >= 0) & (row < table.shape[0])
        rows = table[jnp.where(held, row, 0)].astype(dtype)
        return model_psum(jnp.where(held[..., None], rows, 0))


class LMHead(Linear):
    """Logits, vocabulary spread over the model axis; one all-gather a step."""

    def __init__(self, vocab_size: int, hidden_size: int, implementation: Implementation = None) -> None:
        super().__init__(ParameterSpec((vocab_size, hidden_size), ("vocab", "hidden")), implementation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., V] float32 on every device."""
        return model_all_gather(super().__call__(x), axis=x.ndim - 1)
