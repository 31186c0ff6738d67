"""What `block_scores` means: all pages gathered, every score, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.lanes import widen


def block_scores_reference(
    index_q: jax.Array, index_cache: jax.Array, page_table: jax.Array, positions: jax.Array, block_size: int
) -> jax.Array:
    """Shapes as in `api.block_scores`."""
    B, T, G, h = index_q.shape
    keys = widen(index_cache, jnp.float32)[page_table].reshape(B, -1, h)
    scores = jnp.einsum("btgh,bsh->btgs", index_q.astype(jnp.float32), keys, precision="highest")
    seen = jnp.arange(keys.shape[1]) <= positions[..., None]  # [B, T, keys]; a pad sees none
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    return jnp.max(scores.reshape(B, T, G, -1, block_size), axis=-1)
