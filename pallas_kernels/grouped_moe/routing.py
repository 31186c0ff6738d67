"""Rows sorted by expert and cut into blocks of one expert each, on the device and in fixed shapes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Which rows each block holds. A row is one (token, chosen expert) pair: row n * k + j is token n's j-th.

    Attributes:
      order: [R] int32, rows sorted by expert; rows of no expert come last.
      expert: [blocks] int32, the expert of each block.
      start, end: [blocks] int32, its places in `order`; an unused block, and only that, has start == end.
      M: most rows of a block.
    """

    order: jax.Array
    expert: jax.Array
    start: jax.Array
    end: jax.Array
    M: int = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> jax.Array:
        """Blocks in use, a scalar on the device; they come first."""
        return jnp.sum(self.end > self.start)


def plan_blocks(expert_ids: jax.Array, E: int, M: int) -> BlockPlan:
    """Args: expert_ids [N, k] int32, where an id outside 0..E-1 belongs to no expert; M rows a block at most."""
    R = expert_ids.size
    row_expert = expert_ids.reshape(R)
    row_expert = jnp.where((row_expert >= 0) & (row_expert < E), row_expert, E)
    order = jnp.argsort(row_expert, stable=True).astype(jnp.int32)
    # Counting by comparison: no scatter, and one fused reduction for a few rows as for many.
    rows = jnp.sum(row_expert[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)
    row_end = jnp.cumsum(rows)
    block_end = jnp.cumsum(-(-rows // M))
    blocks = jnp.arange(max_blocks(R, E, M), dtype=jnp.int32)
    expert = jnp.sum(block_end[None] <= blocks[:, None], axis=1, dtype=jnp.int32)
    used = expert < E
    expert = jnp.where(used, expert, 0)
    first_block = block_end[expert] - -(-rows[expert] // M)
    start = row_end[expert] - rows[expert] + (blocks - first_block) * M
    end = jnp.minimum(start + M, row_end[expert])
    return BlockPlan(order, expert, jnp.where(used, start, 0), jnp.where(used, end, 0), M)


def max_blocks(R: int, E: int, M: int) -> int:
    """Most blocks that R rows over E experts can need: a partly filled one an expert, beside the full ones."""
    return R if R <= E else min(R, E + (R - E) // M)


def rows_per_expert(R: int, E: int) -> int:
    """Mean rows of an expert, rounded up: what block sizes are chosen by."""
    return max(1, -(-R // E))
