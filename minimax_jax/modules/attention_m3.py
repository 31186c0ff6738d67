"""M3's attention: each head normed by itself, and over selected blocks of keys in the layers that have an indexer."""

from __future__ import annotations

import jax

from minimax_jax.cache import LayerCache
from minimax_jax.config import MiniMaxM3Config, Parallelism
from minimax_jax.modules.attention import Attention
from minimax_jax.modules.indexer import Indexer
from minimax_jax.modules.norms import GemmaRMSNorm
from minimax_jax.modules.step import Step
from pallas_kernels.dispatch import Implementation
from pallas_kernels.sparse_attention import sparse_attention


class MiniMaxM3Attention(Attention):
    """One all-reduce. Source: transformers `MiniMaxM3VLAttention`.

    Up to index_topk_blocks x index_block_size tokens all blocks are selected, and both kinds of layers do the same.
    """

    def __init__(
        self,
        config: MiniMaxM3Config,
        layer: int,
        parallelism: Parallelism,
        kv_scales: bool = False,
        implementation: Implementation = None,
    ) -> None:
        super().__init__(config, parallelism, kv_scales, implementation)
        self.q_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.selects_blocks = config.layer_types[layer] == "minimax_m3_sparse"
        if self.selects_blocks:
            self.indexer = Indexer(config, parallelism, implementation)

    def norm(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k = (
            norm(a.reshape(*a.shape[:-1], -1, self.head_dim)).reshape(a.shape)
            for norm, a in ((self.q_norm, q), (self.k_norm, k))
        )
        return q, k

    def attend(self, x: jax.Array, q: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        if not self.selects_blocks:
            return super().attend(x, q, cache, step)
        blocks, cache = self.indexer(x, cache, step)
        out = sparse_attention(
            q,
            cache.k,
            cache.v,
            step.page_table,
            step.positions,
            blocks,
            block_size=self.indexer.block_size,
            scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )
        return out, cache
