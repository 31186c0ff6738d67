"""The routed experts in two portable kernels over blocks of rows of one expert; see `routing.plan_blocks`.

Both compute out^T = W x^T, the decoded weight on the left. A program owns some rows of one matrix and one block of rows
of x; programs of unused blocks return at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, pallas_call, store
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe.routing import BlockPlan, rows_per_expert
from pallas_kernels.product import block_m, in_planes, make_product, matrices_of, supports, why_not
from pallas_kernels.quant import Weight
from pallas_kernels.tuning import Tuning, choose

__all__ = ["block_rows", "down", "gate_up", "supports", "why_not"]

MAX_ROWS = 64  # of a block


def gate_up(
    x: jax.Array,
    w13: Weight,
    plan: BlockPlan,
    k: int,
    activation: SwiGLU,
    *,
    interpret: bool = False,
    tuning: Tuning | Mapping[str, Any] | None = None,
) -> jax.Array:
    """activation(w1 x, w3 x) of every row, in sorted order.

    Args:
      x: [N, D] float32 or bfloat16.
      w13: [E, 2, F, D] plain or packed.
      plan: blocks of the N * k rows; `k` experts a token.

    Returns:
      [N * k, F] in x's dtype; rows of no expert are not written.
    """
    M = block_m(plan.M)
    chosen = choose("gate_up", w13, M, tuning)
    product = make_product(w13, x.dtype, chosen.block_n, chosen.block_k)
    packed, multipliers = matrices_of(w13)

    def kernel(*refs: Any) -> None:
        *plan_refs, x_ref, payload_ref = refs[:6]
        scale_ref, multiplier_ref, out_ref = _optional(refs[6:], len(packed) == 2, bool(multipliers))
        n, inside = product.row_indices(pl.program_id(0))

        def block(expert: jax.Array, rows: _Rows) -> None:
            halves = [2 * expert, 2 * expert + 1]
            token = lax.div(rows.row, jnp.int32(k))
            gate, up = product.sums(x_ref, payload_ref, scale_ref, token, inside, halves)
            if multiplier_ref is not None:
                gate, up = (half * load(multiplier_ref.at[i]) for half, i in zip((gate, up), halves, strict=True))
            hidden = activation(gate, up).astype(out_ref.dtype)
            mask = (n < product.rows)[:, None] & rows.valid[None, :]
            store(out_ref.at[rows.place[None, :], n[:, None]], hidden, mask=mask)

        _with_block(plan_refs, M, block)

    return _call(
        kernel,
        jax.ShapeDtypeStruct((plan.order.shape[0], product.rows), x.dtype),
        (product.tiles, plan.expert.shape[0]),
        chosen,
        "moe_gate_up_" + product.name,
        interpret,
        [*_plan_arrays(plan), in_planes(x, product), *packed, *multipliers],
    )


def down(
    hidden: jax.Array,
    w2: Weight,
    plan: BlockPlan,
    expert_weights: jax.Array,
    *,
    interpret: bool = False,
    tuning: Tuning | Mapping[str, Any] | None = None,
) -> jax.Array:
    """w2 hidden of every row, times its router weight, in the rows' own order.

    Args:
      hidden: [R, F] in sorted order, R = N * k.
      w2: [E, D, F] plain or packed.
      expert_weights: [N, k] float32.

    Returns:
      [R, D] float32; rows of no expert are not written.
    """
    M = block_m(plan.M)
    chosen = choose("down", w2, M, tuning)
    product = make_product(w2, hidden.dtype, chosen.block_n, chosen.block_k)
    packed, multipliers = matrices_of(w2)

    def kernel(*refs: Any) -> None:
        *plan_refs, weights_ref, hidden_ref, payload_ref = refs[:7]
        scale_ref, multiplier_ref, out_ref = _optional(refs[7:], len(packed) == 2, bool(multipliers))
        n, inside = product.row_indices(pl.program_id(0))

        def block(expert: jax.Array, rows: _Rows) -> None:
            (out,) = product.sums(hidden_ref, payload_ref, scale_ref, rows.inside, inside, [expert])
            factor = load(weights_ref.at[rows.row])
            if multiplier_ref is not None:
                out = out * load(multiplier_ref.at[expert])
            mask = (n < product.rows)[:, None] & rows.valid[None, :]
            store(out_ref.at[rows.target[None, :], n[:, None]], out * factor[None, :], mask=mask)

        _with_block(plan_refs, M, block)

    return _call(
        kernel,
        jax.ShapeDtypeStruct((hidden.shape[0], product.rows), jnp.float32),
        (product.tiles, plan.expert.shape[0]),
        chosen,
        "moe_down_" + product.name,
        interpret,
        [*_plan_arrays(plan), expert_weights.reshape(-1), in_planes(hidden, product), *packed, *multipliers],
    )


class _Rows(NamedTuple):
    """The places of a block, [M] each, of which the last ones may hold no row."""

    place: jax.Array  # in sorted order
    inside: jax.Array  # the same, the first one where there is no row
    row: jax.Array  # what lies at `inside`
    target: jax.Array  # the same, beyond all rows where there is none
    valid: jax.Array  # whether there is a row


def block_rows(R: int, E: int) -> int:
    """Rows of a plan's blocks: the power of two at or above the mean rows of an expert, within what the tiles hold."""
    return min(MAX_ROWS, block_m(rows_per_expert(R, E)))


def _plan_arrays(plan: BlockPlan) -> list[jax.Array]:
    return [plan.order, plan.expert, plan.start, plan.end]


def _with_block(plan_refs: list[Any], M: int, body: Any) -> None:
    """body(expert, rows) of a used block."""
    order_ref, expert_ref, start_ref, end_ref = plan_refs
    b = pl.program_id(1)
    start, end = load(start_ref.at[b]), load(end_ref.at[b])

    @pl.when(start < end)
    def _() -> None:
        place = start + jnp.arange(M, dtype=jnp.int32)
        valid = place < end
        inside = jnp.where(valid, place, start)
        row = load(order_ref.at[inside])
        # Distinct places where nothing is to be written: the interpreter writes the old value back there.
        target = jnp.where(valid, row, order_ref.shape[0] + place)
        body(load(expert_ref.at[b]), _Rows(place, inside, row, target, valid))


def _optional(refs: tuple[Any, ...], scale: bool, multiplier: bool) -> tuple[Any, Any, Any]:
    """(scale, multiplier, output) of the last refs; None for what the format lacks."""
    rest = list(refs)
    scale_ref = rest.pop(0) if scale else None
    multiplier_ref = rest.pop(0) if multiplier else None
    (out_ref,) = rest
    return scale_ref, multiplier_ref, out_ref


def _call(
    kernel: Any, out: Any, grid: tuple[int, ...], tuning: Tuning, name: str, interpret: bool, arrays: list[jax.Array]
) -> jax.Array:
    run = pallas_call(
        kernel,
        out,
        grid=grid,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        name=name,
        interpret=interpret,
    )
    result: jax.Array = run(*arrays)
    return result
