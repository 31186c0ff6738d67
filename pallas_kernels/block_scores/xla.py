"""Block scores in plain XLA: one page at a time, as many pages as the longest row needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.barrier import when_needed
from pallas_kernels.paged_attention.lanes import widen


def block_scores_xla(
    index_q: jax.Array, index_cache: jax.Array, page_table: jax.Array, positions: jax.Array, block_size: int
) -> jax.Array:
    """Shapes as in `api.block_scores`."""
    B, T, G, _ = index_q.shape
    S, pages = index_cache.shape[1], page_table.shape[1]

    def page(j: jax.Array, out: jax.Array) -> jax.Array:
        numbers = lax.dynamic_index_in_dim(page_table, j, axis=1, keepdims=False)
        keys = widen(index_cache[numbers], index_q.dtype)  # [B, S, h]
        scores = jnp.einsum(
            "btgh,bsh->btgs", index_q, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        seen = j * S + jnp.arange(S, dtype=jnp.int32) <= positions[..., None]  # [B, T, S]
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        best = jnp.max(scores.reshape(B, T, G, -1, block_size), axis=-1)
        return lax.dynamic_update_slice_in_dim(out, best, j * (S // block_size), axis=3)

    start = when_needed(jnp.full((B, T, G, pages * S // block_size), -jnp.inf, jnp.float32), index_q)
    return lax.fori_loop(0, jnp.max(positions) // S + 1, page, start)
