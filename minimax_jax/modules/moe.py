"""Router, routed experts, and the expert that all tokens share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from minimax_jax.config import MiniMaxM3Config, ModelConfig, Parallelism
from minimax_jax.modules.mlp import MLP
from minimax_jax.modules.parameter import array, declare
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import model_index, model_psum
from pallas_kernels.activation import SwiGLU
from pallas_kernels.dispatch import Implementation
from pallas_kernels.dot import dot_t
from pallas_kernels.grouped_moe import grouped_moe


class Experts(nnx.Module):
    """All experts of a layer as two stacks: w13 = [w1 (gate), w3 (up)] and w2 (down)."""

    def __init__(self, config: ModelConfig) -> None:
        E, F, D = config.num_local_experts, config.intermediate_size, config.hidden_size
        self.w13 = declare(ParameterSpec((E, 2, F, D), ("experts", None, "expert_width", "hidden")))
        self.w2 = declare(ParameterSpec((E, D, F), ("experts", "hidden", "expert_width")))


class SparseMoeBlock(nnx.Module):
    """Top-k of E experts a token, and M3's shared expert.

    Sources: transformers `MiniMaxM2SparseMoeBlock` and `MiniMaxM3VLSparseMoeBlock`.
    """

    def __init__(self, config: ModelConfig, parallelism: Parallelism, implementation: Implementation = None) -> None:
        E, D = config.num_local_experts, config.hidden_size
        self.gate = Gate(ParameterSpec((E, D), (None, "hidden"), "float32"))
        self.e_score_correction_bias = declare(ParameterSpec((E,), (None,), "float32"))
        self.experts = Experts(config)
        self.k = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.activation = activation_of(config)
        if isinstance(config, MiniMaxM3Config):
            self.shared_experts = MLP(D, config.shared_intermediate_size, self.activation, implementation)
        self.has_shared = isinstance(config, MiniMaxM3Config)
        self.implementation = implementation
        self.spread_experts = parallelism.experts == "expert"

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """x [B, T, D], real [B, T] bool (False for a pad, which no expert sees) -> [B, T, D]; one all-reduce."""
        B, T, D = x.shape
        tokens = x.reshape(B * T, D)
        ids, weights = route(self.gate(tokens), array(self.e_score_correction_bias), self.k, self.scaling)
        w13, w2 = self.experts.w13.get_value(), self.experts.w2.get_value()
        if self.spread_experts:
            ids = ids - model_index() * w2.shape[0]  # another device's experts fall outside 0..local E - 1
        ids = jnp.where(real.reshape(-1, 1), ids, -1)
        out = grouped_moe(tokens, w13, w2, ids, weights, activation=self.activation, implementation=self.implementation)
        if self.has_shared:
            out = out + self.shared_experts(tokens)
        return model_psum(out).astype(x.dtype).reshape(B, T, D)


class Gate(nnx.Module):
    """The router's matrix: float32 operands at highest precision, so that near ties stay apart."""

    def __init__(self, spec: ParameterSpec) -> None:
        self.weight = declare(spec)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, D] -> logits [N, E] float32."""
        return dot_t(x.astype(jnp.float32), array(self.weight))


def activation_of(config: ModelConfig) -> SwiGLU:
    """Of every MLP and expert of the model: SiLU for M2, the clamped SwiGLU-OAI for M3."""
    if isinstance(config, MiniMaxM3Config):
        return SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)
    return SwiGLU()


def route(logits: jax.Array, bias: jax.Array, k: int, scaling: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Which experts, and with what weight: the biased score selects, the unbiased sigmoid weighs.

    Args:
      logits: [N, E] float32.
      bias: [E] float32, e_score_correction_bias.
      scaling: routed_scaling_factor, of the weights' sum.

    Returns:
      ids [N, k] int32 and weights [N, k] float32 that sum to `scaling`; of equal scores the lower id comes first.
    """
    scores = jax.nn.sigmoid(logits)
    _, ids = lax.top_k(scores + bias, k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    return ids.astype(jnp.int32), weights / jnp.sum(weights, axis=-1, keepdims=True) * scaling
