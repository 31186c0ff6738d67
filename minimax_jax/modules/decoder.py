"""One decoder layer: attention and experts, each after a norm and around a residual."""

from __future__ import annotations

import jax
from flax import nnx

from minimax_jax.cache import LayerCache
from minimax_jax.config import MiniMaxM2Config, Parallelism
from minimax_jax.modules.attention import Attention
from minimax_jax.modules.moe import SparseMoeBlock
from minimax_jax.modules.norms import RMSNorm
from minimax_jax.modules.step import Step
from pallas_kernels.dispatch import Implementation


class DecoderLayer(nnx.Module):
    """Pre-norm, residual in the compute dtype. Source: transformers `MiniMaxM2DecoderLayer`."""

    def __init__(
        self,
        config: MiniMaxM2Config,
        parallelism: Parallelism,
        kv_scales: bool = False,
        implementation: Implementation = None,
    ) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, parallelism, kv_scales, implementation)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = SparseMoeBlock(config, parallelism, implementation)

    def __call__(self, x: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> ([B, T, D], updated cache)."""
        attended, cache = self.self_attn(self.input_layernorm(x), cache, step)
        x = x + attended
        return x + self.block_sparse_moe(self.post_attention_layernorm(x), step.positions >= 0), cache
