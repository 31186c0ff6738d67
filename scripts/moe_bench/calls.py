"""The functions that are timed, each in one place: the kernels' parts, the public op, and the JAX peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_bench.cases import Layer
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe, kernel, mma
from pallas_kernels.grouped_moe.routing import plan_blocks, rows_per_expert
from pallas_kernels.quant import QuantTensor, Weight

KERNEL_PARTS = ("routing", "gate_up", "down", "sum", "experts")
Tuning = dict[str, Any] | None


def has_kernels(implementation: str | None) -> bool:
    """Whether the parts can be timed apart; without them only the public op is timed."""
    return implementation in (None, "pallas")


def activation_of(layer: Layer) -> SwiGLU:
    """The layer's activation."""
    return SwiGLU(layer.alpha, layer.beta, layer.limit)


def kernel_parts(layer: Layer, w13: Weight, tuning: Tuning) -> dict[str, Callable[..., Any]]:
    """The kernels' own entry points by part: the tensor-core ones for weights in tile order, else the portable ones.

    routing(ids) -> plan; gate_up(w13, x, plan) -> hidden; down(w2, hidden, plan, weights) -> rows; sum(rows) -> out;
    experts(w13, w2, x, plan, weights) -> out.
    """
    activation = activation_of(layer)
    interpret = jax.default_backend() == "cpu"
    tiled = isinstance(w13, QuantTensor) and w13.format.order == "tiles"

    def tuned(R: int) -> mma.LayerTuning:
        if tuning is None:
            return mma.choose(rows_per_expert(R, layer.E), R)
        given = {name: mma.MmaTuning(*tuning[name]) for name in ("gate_up", "down")}
        return mma.LayerTuning(tuning["rows"], **given)

    def plan(ids: jax.Array) -> Any:
        rows = tuned(ids.size).rows if tiled else kernel.block_rows(ids.size, layer.E)
        return plan_blocks(ids, layer.E, (tuning or {}).get("rows", rows))

    def gate_up(w13: Weight, x: jax.Array, plan: Any) -> jax.Array:
        if tiled:
            return mma.gate_up_mma(x, w13, plan, layer.k, activation, tuned(plan.order.size).gate_up)
        return kernel.gate_up(x, w13, plan, layer.k, activation, interpret=interpret, tuning=tuning)

    def down(w2: Weight, hidden: jax.Array, plan: Any, weights: jax.Array) -> jax.Array:
        if tiled:
            return mma.down_mma(hidden, w2, plan, weights, tuned(plan.order.size).down)
        return kernel.down(hidden, w2, plan, weights, interpret=interpret, tuning=tuning)

    def weighted_sum(rows: jax.Array) -> jax.Array:
        return jnp.sum(rows.reshape(-1, layer.k, layer.D), axis=1)

    def experts(w13: Weight, w2: Weight, x: jax.Array, plan: Any, weights: jax.Array) -> jax.Array:
        return weighted_sum(down(w2, gate_up(w13, x, plan), plan, weights))

    return {"routing": plan, "gate_up": gate_up, "down": down, "sum": weighted_sum, "experts": experts}


def layer_op(layer: Layer, implementation: str | None) -> Callable[..., jax.Array]:
    """The public op, routing included: (w13, w2, x, ids, weights) -> [N, D]."""
    activation = activation_of(layer)

    def op(w13: Weight, w2: Weight, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_moe(x, w13, w2, ids, weights, activation=activation, implementation=implementation)

    return op


def ragged_op(layer: Layer) -> Callable[..., jax.Array]:
    """`lax.ragged_dot` on bfloat16 weights: (w13 [E, D, 2F], w2 [E, F, D], x, ids, weights) -> [N, D]."""
    activation = activation_of(layer)

    def op(w13: jax.Array, w2: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        rows = ids.reshape(-1)
        order = jnp.argsort(rows)
        sizes = jnp.bincount(rows, length=layer.E).astype(jnp.int32)
        gate_up = lax.ragged_dot(x[order // layer.k], w13, sizes)
        hidden = activation(gate_up[:, : layer.F], gate_up[:, layer.F :]).astype(x.dtype)
        y = lax.ragged_dot(hidden, w2, sizes).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        return jnp.sum(y[jnp.argsort(order)].reshape(-1, layer.k, layer.D), axis=1)

    return op


def relative_error(layer: Layer, out: jax.Array, w13: Weight, w2: Weight, x: Any, ids: Any, weights: Any) -> float:
    """||out - reference|| / ||reference|| of the first token, in float32 with only its own experts decoded."""
    from pallas_kernels.grouped_moe.reference import grouped_moe_reference

    own = jax.tree.map(lambda stack: stack[ids[0]], (w13, w2))
    local = jnp.arange(layer.k, dtype=jnp.int32)[None]
    want = grouped_moe_reference(x[:1], *own, local, weights[:1], activation_of(layer))
    error = jnp.linalg.norm(out[0] - want[0]) / jnp.linalg.norm(want[0])
    return float(error)
