"""Grouped experts in plain XLA: rows sorted by expert, cut into blocks of one expert each, a device loop over blocks.

No buffer holds tokens x all experts, only blocks that hold a row are computed, and the weight of one expert at a time
is decoded. A row's result depends on its own input and its experts alone: a block's other rows never enter its sums.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import SwiGLU
from pallas_kernels.dot import dot_t
from pallas_kernels.quant import Weight, dequantize

MIN_BLOCK, MAX_BLOCK = 8, 128


def grouped_moe_xla(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: SwiGLU,
) -> jax.Array:
    """Shapes as in `api.grouped_moe`."""
    (N, k), E, D = expert_ids.shape, w2.shape[0], x.shape[1]
    R = N * k
    M = block_rows(R, E)
    plan = plan_blocks(expert_ids.reshape(R), E, M)

    def block(b: jax.Array, out: jax.Array) -> jax.Array:
        expert, rows, valid = plan.block(b)
        gate_up = one_expert(w13, expert)  # [2, F, D]
        hidden = dot_t(x[rows // k], dequantize(gate_up, x.dtype))  # [M, 2, F]
        hidden = activation(hidden[:, 0], hidden[:, 1]).astype(x.dtype)
        y = dot_t(hidden, dequantize(one_expert(w2, expert), x.dtype))
        place = jnp.where(valid, rows, R + jnp.arange(M))  # distinct, also where nothing is to be written
        return out.at[place].set(y, mode="drop", unique_indices=True)

    out = lax.fori_loop(0, plan.num_blocks, block, jnp.zeros((R, D), jnp.float32))
    return jnp.sum(out.reshape(N, k, D) * expert_weights[..., None], axis=1)


def block_rows(R: int, E: int) -> int:
    """Rows of a block: the power of two at or above the mean rows of an expert, within the limits."""
    mean = max(1, -(-R // E))
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (mean - 1).bit_length()))


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Which rows each block holds.

    Attributes:
      order: [R] int32, rows sorted by expert; rows of no expert come last.
      row_end: [E] int32, where in `order` an expert's rows end.
      block_end: [E] int32, number of blocks of this and all earlier experts.
      M: rows of a block.
    """

    order: jax.Array
    row_end: jax.Array
    block_end: jax.Array
    M: int

    @property
    def num_blocks(self) -> jax.Array:
        """Blocks that hold at least one row, a scalar on the device."""
        return self.block_end[-1]

    def block(self, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Block b -> (its expert, [M] rows, [M] which of them are its own)."""
        expert = jnp.searchsorted(self.block_end, b, side="right").astype(jnp.int32)
        before = jnp.where(expert > 0, expert - 1, 0)
        first_row = jnp.where(expert > 0, self.row_end[before], 0)
        first_block = jnp.where(expert > 0, self.block_end[before], 0)
        place = first_row + (b - first_block) * self.M + jnp.arange(self.M, dtype=jnp.int32)
        valid = place < self.row_end[expert]
        return expert, self.order[jnp.where(valid, place, 0)], valid


def plan_blocks(expert_of_row: jax.Array, E: int, M: int) -> BlockPlan:
    """expert_of_row [R] int32, ids outside 0..E-1 belong to no expert."""
    expert = jnp.where((expert_of_row >= 0) & (expert_of_row < E), expert_of_row, E)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row_end = jnp.searchsorted(expert[order], jnp.arange(E, dtype=expert.dtype), side="right").astype(jnp.int32)
    rows = jnp.diff(row_end, prepend=0)
    return BlockPlan(order, row_end, jnp.cumsum(-(-rows // M)), M)


def one_expert(weight: Weight, expert: jax.Array) -> Weight:
    """The matrices of one expert out of a stack, still packed."""
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, expert, axis=0, keepdims=False), weight)
