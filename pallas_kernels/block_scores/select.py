"""Which key blocks a query attends to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def select_blocks(scores: jax.Array, positions: jax.Array, *, block_size: int, topk: int) -> jax.Array:
    """The query's own block and the best of the earlier ones, `topk` in all, or all there are.

    Args:
      scores: [B, T, G, blocks] float32, from `block_scores`. Values from the query's own block on are not read. A NaN
        counts as the lowest score.
      positions: [B, T] int32, -1 for a pad, for which nothing is selected.
      block_size: tokens of a block; the own block is positions // block_size.
      topk: most blocks of a query, its own one included.

    Returns:
      [B, T, G, topk] int32, ascending, -1 in the places that are left over. Equal scores take the lower block.

    Raises:
      ValueError: `topk` is not positive.
    """
    if topk < 1:
        raise ValueError(f"select_blocks: topk is {topk}; expected at least 1, the query's own block")
    blocks = scores.shape[-1]
    block = jnp.arange(blocks, dtype=jnp.int32)
    own = (positions // block_size)[:, :, None, None]  # -1 for a pad
    finite = jnp.finfo(jnp.float32)
    # Earlier blocks stay below the own one and above those of the future, whatever their scores are.
    rank = jnp.clip(jnp.where(jnp.isnan(scores), finite.min, scores), finite.min, finite.max)
    rank = jnp.where(block == own, jnp.inf, jnp.where(block < own, rank, -jnp.inf))
    best, chosen = lax.top_k(rank, min(topk, blocks))  # of equal ones the lower index
    chosen = jnp.sort(jnp.where(jnp.isneginf(best), blocks, chosen), axis=-1)
    chosen = jnp.where(chosen == blocks, -1, chosen).astype(jnp.int32)
    return jnp.pad(chosen, [(0, 0)] * 3 + [(0, topk - chosen.shape[-1])], constant_values=-1)
