"""Grouped experts in plain XLA: a device loop over blocks of rows of one expert.

No buffer holds tokens x all experts, only blocks that hold a row are computed, and the weight of one expert at a time
is decoded. A row's result depends on its own input and its experts alone: a block's other rows never enter its sums.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import SwiGLU
from pallas_kernels.activation_quant import emulate_activation, scales_each_matrix
from pallas_kernels.barrier import when_needed
from pallas_kernels.dot import dot_weight
from pallas_kernels.grouped_moe.routing import plan_blocks, rows_per_expert
from pallas_kernels.quant import Weight

MIN_BLOCK, MAX_BLOCK = 8, 128


def grouped_moe_xla(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: SwiGLU,
) -> jax.Array:
    """Shapes as in `api.grouped_moe`.

    Where the weights' format names a quantisation of activations: x is quantised and decoded along D, gate and up are
    multiplied, the activation's output is rounded to x's dtype, quantised and decoded along F, and multiplied by w2;
    the router's weight comes last, on float32 sums. Dynamic scales depend on the token alone, so x is done once a
    token. NVFP4's static scales stay apart, as its weights' global scales do: x meets w1 by w1's input scale of that
    expert and w3 by w3's. vLLM's emulation takes the largest of both and of all experts of a layer for all of them, and
    the largest of w2's; the two agree where a checkpoint's scales are equal.
    """
    (N, k), E, D = expert_ids.shape, w2.shape[0], x.shape[1]
    R = N * k
    M = block_rows(R, E)
    plan = plan_blocks(expert_ids, E, M)
    each = scales_each_matrix(w13)
    tokens = x if each else emulate_activation(x, w13)

    def block(b: jax.Array, out: jax.Array) -> jax.Array:
        place = plan.start[b] + jnp.arange(M, dtype=jnp.int32)
        valid = place < plan.end[b]
        rows = plan.order[jnp.where(valid, place, 0)]
        inputs = tokens[rows // k]
        gate_up, down = one_expert(w13, plan.expert[b]), one_expert(w2, plan.expert[b])  # [2, F, D] and [D, F]

        def product(index: int) -> jax.Array:
            weight = half(gate_up, index)
            return dot_weight(emulate_activation(inputs, weight) if each else inputs, weight)

        hidden = activation(product(0), product(1)).astype(x.dtype)
        y = dot_weight(emulate_activation(hidden, down), down)
        target = jnp.where(valid, rows, R + jnp.arange(M))  # distinct, also where nothing is to be written
        return out.at[target].set(y, mode="drop", unique_indices=True)

    start = when_needed(jnp.zeros((R, D), jnp.float32), x)
    out = lax.fori_loop(0, plan.num_blocks, block, start)
    weights = jnp.where((expert_ids >= 0) & (expert_ids < E), expert_weights, 0)  # of a pad it may be NaN
    return jnp.sum(out.reshape(N, k, D) * weights[..., None], axis=1)


def block_rows(R: int, E: int) -> int:
    """Rows of a block: the power of two at or above the mean rows of an expert, within the limits."""
    mean = rows_per_expert(R, E)
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (mean - 1).bit_length()))


def one_expert(weight: Weight, expert: jax.Array) -> Weight:
    """The matrices of one expert out of a stack, still packed."""
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, expert, axis=0, keepdims=False), weight)


def half(gate_up: Weight, index: int) -> Weight:
    """One matrix out of [2, F, D], still packed."""
    return jax.tree.map(lambda stack: stack[index], gate_up)
