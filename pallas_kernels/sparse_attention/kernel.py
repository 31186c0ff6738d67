"""Attention over chosen blocks as a portable kernel: decode and prefill in one.

Every token of every kv head has blocks of its own, so that a program is one token and one kv head, with the query heads
that share it as rows. It walks over the places of its choice; for decoding, where there are few tokens, programs share
them. Nothing has the size of the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, pallas_call, store
from pallas_kernels.paged_attention.flash import (
    LOG2E,
    MIN_DOT,
    Softmax,
    columns,
    elements,
    power_of_two,
    read,
    read_queries,
)
from pallas_kernels.paged_attention.flash import why_not as why_not_read
from pallas_kernels.paged_attention.kernel import finish, outputs
from pallas_kernels.paged_attention.lanes import head_scales
from pallas_kernels.tuning import AttentionTuning, choose_attention


def why_not(q: jax.Array, block_size: int, *lanes: jax.Array) -> str | None:
    """What keeps the kernel from computing this; None when nothing does."""
    if block_size < MIN_DOT or block_size & (block_size - 1):
        return f"the block size {block_size} is no power of two from {MIN_DOT} on"
    return why_not_read(q, *lanes)


def sparse_attention_pallas(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    blocks: jax.Array,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    *,
    block_size: int,
    scale: float,
    interpret: bool = False,
    tuning: AttentionTuning | Mapping[str, Any] | None = None,
) -> jax.Array:
    """Shapes as in `api.sparse_attention`."""
    B, T, H, h = q.shape
    S, K = k_cache.shape[1:3]
    G, pages, topk = H // K, page_table.shape[1], blocks.shape[3]
    chosen = choose_attention("sparse_attention", T == 1, q.dtype, tuning)
    M = max(MIN_DOT, power_of_two(G))
    N = min(chosen.keys, block_size)
    steps = block_size // N  # of one block
    places = topk if chosen.span is None else min(topk, max(1, chosen.span // block_size))  # of one part
    parts = -(-topk // places)
    scales = [part for part in (head_scales(k_scale, K), head_scales(v_scale, K)) if part is not None]

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, positions_ref: Any, blocks_ref: Any, *rest: Any
    ) -> None:
        scale_refs, out_refs = list(rest[: len(scales)]), rest[len(scales) :]
        head, part = lax.div(pl.program_id(1), parts), lax.rem(pl.program_id(1), parts)
        b = pl.program_id(2)
        token = b * T + pl.program_id(0)
        row = jnp.arange(M, dtype=jnp.int32)
        valid = row < G
        q_row = (token * K + head) * G + row
        position = load(positions_ref.at[token])
        queries = read_queries(q_ref, q_row, valid, h)
        factor = scale * LOG2E * (load(scale_refs.pop(0).at[head]) if k_scale is not None else 1.0)

        # The places up to the last one in use; the tail is empty for a token with few blocks.
        choice, first = (token * K + head) * topk, part * places
        place = jnp.arange(power_of_two(topk), dtype=jnp.int32)
        mine = (place >= first) & (place < jnp.minimum(first + places, topk))
        used = load(blocks_ref.at[choice + place], mask=mine, other=-1) >= 0
        count = jnp.maximum(jnp.max(jnp.where(used, place + 1, 0)) - first, 0)
        last = jnp.clip(position, 0, pages * S - 1)

        def step(i: jax.Array, state: Softmax) -> Softmax:
            block = load(blocks_ref.at[choice + first + lax.div(i, jnp.int32(steps))])
            start = jnp.maximum(block, 0) * block_size + lax.rem(i, jnp.int32(steps)) * N
            key = start + jnp.arange(N, dtype=jnp.int32)
            seen = (key <= position) & (block >= 0)
            at = jnp.minimum(key, last)
            page_index = lax.div(jnp.minimum(start, last), jnp.int32(S))
            slot = (load(table_ref.at[b * pages + page_index]) * S + at - page_index * S) * K + head
            k, v = (read(ref, slot, h, q.dtype) for ref in (k_ref, v_ref))
            return state.step(queries, k, v, jnp.broadcast_to(seen[None, :], (M, N)), factor)

        state = lax.fori_loop(0, count * steps, step, Softmax.start(M, h))
        column, mask = columns(h), elements(valid, h)
        if parts == 1:
            out = state.result() * (load(scale_refs.pop(0).at[head]) if v_scale is not None else 1.0)
            store(out_refs[0].at[q_row[:, None], column], out, mask=mask)
        else:
            target = part * (B * T * H) + q_row
            store(out_refs[0].at[target], state.largest, mask=valid)
            store(out_refs[1].at[target], state.total, mask=valid)
            store(out_refs[2].at[target[:, None], column], state.acc, mask=mask)

    run = pallas_call(
        kernel,
        outputs(parts, B * T * H, h),
        grid=(T, K * parts, B),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        name="sparse_attention_" + ("prefill" if chosen.span is None else "decode"),
        interpret=interpret,
    )
    lanes = [cache.reshape(-1, h) for cache in (k_cache, v_cache)]
    flat = [a.reshape(-1) for a in (page_table, positions, blocks)]
    return finish(run(q.reshape(-1, h), *lanes, *flat, *scales), parts, (B, T, K, G, h), v_scale).reshape(B, T, H, h)
