"""The routed experts through kernels: sort, gate-up, down, weighted sum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activation import SwiGLU
from pallas_kernels.dispatch import on_gpu
from pallas_kernels.grouped_moe import kernel, mma
from pallas_kernels.grouped_moe.routing import BlockPlan, plan_blocks, rows_per_expert
from pallas_kernels.quant import QuantTensor, Weight
from pallas_kernels.tiles import as_rows


def unsupported(w13: Weight, w2: Weight) -> str | None:
    """Why the kernels cannot compute this, None when they can."""
    for name, weight in (("w13", w13), ("w2", w2)):
        if isinstance(weight, QuantTensor) and weight.format.activation is not None:
            return f"{name} asks for its inputs to be quantised, which 'xla' and 'reference' emulate"
        why = kernel.why_not(weight)
        if why is not None:
            return f"{name} has {why}"
    return None


def grouped_moe_pallas(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: SwiGLU,
    interpret: Callable[..., Any] | None = None,
) -> jax.Array:
    """Shapes as in `api.grouped_moe`. `interpret` stands in where there is no GPU; None interprets the kernels."""
    args = (x, w13, w2, expert_ids, expert_weights)
    run = functools.partial(_grouped_moe, activation=activation)
    out: jax.Array = on_gpu(run, interpret or functools.partial(run, interpret=True), args)
    return out


def parts(
    x: jax.Array, w13: Weight, w2: Weight, k: int, activation: SwiGLU, interpret: bool = False
) -> tuple[int, Callable[[jax.Array, BlockPlan], jax.Array], Callable[[jax.Array, BlockPlan, jax.Array], jax.Array]]:
    """What `grouped_moe_pallas` is made of: rows of a block, gate-up (x, plan) and down (hidden, plan, weights)."""
    E, N = w2.shape[0], x.shape[0]
    if isinstance(w13, QuantTensor) and isinstance(w2, QuantTensor) and mma.fits(x, w13, w2) and not interpret:
        tuning = mma.choose(rows_per_expert(N * k, E), N * k)
        return (
            tuning.rows,
            lambda x, plan: mma.gate_up_mma(x, w13, plan, k, activation, tuning.gate_up),
            lambda hidden, plan, weights: mma.down_mma(hidden, w2, plan, weights, tuning.down),
        )
    rows13, rows2 = as_rows(w13), as_rows(w2)
    return (
        kernel.block_rows(N * k, E),
        lambda x, plan: kernel.gate_up(x, rows13, plan, k, activation, interpret=interpret),
        lambda hidden, plan, weights: kernel.down(hidden, rows2, plan, weights, interpret=interpret),
    )


def _grouped_moe(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: SwiGLU,
    interpret: bool = False,
) -> jax.Array:
    k, E = expert_ids.shape[1], w2.shape[0]
    rows, gate_up, down = parts(x, w13, w2, k, activation, interpret)
    plan = plan_blocks(expert_ids, E, rows)
    y = down(gate_up(x, plan), plan, expert_weights)
    return weighted_sum(y, expert_ids, E)


def weighted_sum(y: jax.Array, expert_ids: jax.Array, E: int) -> jax.Array:
    """y [N * k, D] float32, weighted already -> [N, D]; a row of no expert was never written and counts as zero."""
    held = (expert_ids >= 0) & (expert_ids < E)
    return jnp.sum(jnp.where(held[..., None], y.reshape(*expert_ids.shape, -1), 0), axis=1)
