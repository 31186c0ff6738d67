"""One decoder layer: attention, then experts or a dense MLP, each after a norm and around a residual."""

from __future__ import annotations

import jax
from flax import nnx

from minimax_jax.cache import LayerCache
from minimax_jax.config import MiniMaxM3Config, ModelConfig, Parallelism
from minimax_jax.modules.attention import Attention, MiniMaxM2Attention
from minimax_jax.modules.attention_m3 import MiniMaxM3Attention
from minimax_jax.modules.mlp import MLP
from minimax_jax.modules.moe import SparseMoeBlock, activation_of
from minimax_jax.modules.norms import layer_norm
from minimax_jax.modules.step import Step
from minimax_jax.sharding import model_psum
from pallas_kernels.dispatch import Implementation


class DecoderLayer(nnx.Module):
    """Pre-norm, residual in the compute dtype.

    Sources: transformers `MiniMaxM2DecoderLayer` and `MiniMaxM3VLDecoderLayer`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        parallelism: Parallelism,
        kv_scales: bool = False,
        implementation: Implementation = None,
    ) -> None:
        self.input_layernorm = layer_norm(config)
        self.self_attn: Attention
        if isinstance(config, MiniMaxM3Config):
            self.self_attn = MiniMaxM3Attention(config, layer, parallelism, kv_scales, implementation)
        else:
            self.self_attn = MiniMaxM2Attention(config, parallelism, kv_scales, implementation)
        self.post_attention_layernorm = layer_norm(config)
        self.is_dense = config.mlp_layer_types[layer] == "dense"
        if isinstance(config, MiniMaxM3Config) and self.is_dense:
            width = config.dense_intermediate_size
            self.mlp = MLP(config.hidden_size, width, activation_of(config), implementation)
        else:
            self.block_sparse_moe = SparseMoeBlock(config, parallelism, implementation)

    def __call__(self, x: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> ([B, T, D], updated cache)."""
        attended, cache = self.self_attn(self.input_layernorm(x), cache, step)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if self.is_dense:
            return x + model_psum(self.mlp(normed)).astype(x.dtype), cache
        return x + self.block_sparse_moe(normed, step.positions >= 0), cache
