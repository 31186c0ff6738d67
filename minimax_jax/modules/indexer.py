"""M3's block selection: which blocks of keys each query token may read, for each key/value head."""

from __future__ import annotations

import jax
from flax import nnx
from jax import lax

from minimax_jax.cache import LayerCache
from minimax_jax.config import MiniMaxM3Config, Parallelism
from minimax_jax.modules.linear import Linear
from minimax_jax.modules.norms import GemmaRMSNorm
from minimax_jax.modules.rope import apply_rope
from minimax_jax.modules.step import Step
from minimax_jax.parameters import ParameterSpec
from pallas_kernels.block_scores import block_scores, select_blocks
from pallas_kernels.dispatch import Implementation


class Indexer(nnx.Module):
    """Small queries, one for each key/value head, against one small key a token, which all of them share.

    A block's score is the largest product with a key in it that the token may see. The token's own block is always
    chosen, and counts among the `index_topk_blocks`. Blocks are `position // index_block_size` of a row's own sequence.
    Source: transformers `MiniMaxM3VLIndexer`.

    Index heads lie where their key/value heads do; the key's projection, norm and cache are on every device.
    """

    def __init__(
        self, config: MiniMaxM3Config, parallelism: Parallelism, implementation: Implementation = None
    ) -> None:
        D, h, eps = config.hidden_size, config.index_head_dim, config.rms_norm_eps
        heads = config.num_kv_heads_on(parallelism)
        self.q_proj = Linear(ParameterSpec((heads * h, D), ("kv_heads", "hidden")), implementation)
        self.k_proj = Linear(ParameterSpec((h, D), (None, "hidden")), implementation)
        self.q_norm = GemmaRMSNorm(h, eps)
        self.k_norm = GemmaRMSNorm(h, eps)
        self.head_dim = h
        self.block_size = config.index_block_size
        self.topk = config.index_topk_blocks
        self.implementation = implementation

    def __call__(self, x: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> (blocks [B, T, local K, index_topk_blocks] int32, the cache with the new tokens' keys)."""
        B, T, _ = x.shape
        # XLA joins products that share an input by joining their weights, and of five together with attention's it
        # makes a copy in each step. Behind the barrier this is another input.
        x = lax.optimization_barrier(x)
        q = self.q_norm(self.q_proj(x).astype(x.dtype).reshape(B, T, -1, self.head_dim))
        k = self.k_norm(self.k_proj(x).astype(x.dtype).reshape(B, T, 1, self.head_dim))
        q, k = apply_rope(q, step.rope), apply_rope(k, step.rope)
        cache = cache.write_index(k[:, :, 0], step.places)
        assert cache.index_k is not None
        scores = block_scores(
            q,
            cache.index_k,
            step.page_table,
            step.positions,
            block_size=self.block_size,
            implementation=self.implementation,
        )
        return select_blocks(scores, step.positions, block_size=self.block_size, topk=self.topk), cache
