"""Dense causal attention over the paged cache: prefill and decode in one portable kernel.

The query heads that share a kv head are rows of one tile: token t and head g of T x G are row t * G + g. A program owns
a tile of rows of one sequence, and walks over its keys up to the tile's last position. For decoding, where there are
few rows, programs share a sequence's keys, cut at absolute positions.
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
    MAX_PARTS,
    MIN_DOT,
    Softmax,
    columns,
    elements,
    merge,
    power_of_two,
    read,
    read_queries,
    why_not,
)
from pallas_kernels.paged_attention.lanes import head_scales
from pallas_kernels.tuning import FEW_ROWS, AttentionTuning, choose_attention

__all__ = ["paged_attention_pallas", "why_not"]


def paged_attention_pallas(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    *,
    scale: float,
    interpret: bool = False,
    tuning: AttentionTuning | Mapping[str, Any] | None = None,
) -> jax.Array:
    """Shapes as in `api.paged_attention`."""
    B, T, H, h = q.shape
    S, K = k_cache.shape[1:3]
    G, pages = H // K, page_table.shape[1]
    R = T * G
    chosen = choose_attention("paged_attention", R <= FEW_ROWS, q.dtype, tuning)
    M = min(chosen.rows, max(MIN_DOT, power_of_two(R)))
    N = chosen.keys
    span = part_of(pages * S, N, chosen.span)
    parts = -(-pages * S // span)
    scales = [part for part in (head_scales(k_scale, K), head_scales(v_scale, K)) if part is not None]

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, positions_ref: Any, *rest: Any) -> None:
        scale_refs, out_refs = list(rest[: len(scales)]), rest[len(scales) :]
        head, part = lax.div(pl.program_id(1), parts), lax.rem(pl.program_id(1), parts)
        b = pl.program_id(2)
        row = pl.program_id(0) * M + jnp.arange(M, dtype=jnp.int32)
        valid = row < R
        token = b * T + lax.div(row, jnp.int32(G))
        q_row = (token * K + head) * G + lax.rem(row, jnp.int32(G))
        position = load(positions_ref.at[token], mask=valid, other=-1)
        queries = read_queries(q_ref, q_row, valid, h)
        last, first = jnp.minimum(jnp.max(position), pages * S - 1), part * span
        factor = scale * LOG2E * (load(scale_refs.pop(0).at[head]) if k_scale is not None else 1.0)

        def step(i: jax.Array, state: Softmax) -> Softmax:
            start = first + i * N
            key = start + jnp.arange(N, dtype=jnp.int32)
            at = jnp.minimum(key, last)
            # Where the keys of a step share a page its number is read once.
            page_index = lax.div(start if S % N == 0 else at, jnp.int32(S))
            page = load(table_ref.at[b * pages + page_index])
            slot = (page * S + at - page_index * S) * K + head
            k, v = (read(ref, slot, h, q.dtype) for ref in (k_ref, v_ref))
            return state.step(queries, k, v, key[None, :] <= position[:, None], factor)

        end = jnp.minimum(last + 1, first + span)
        state = lax.fori_loop(0, lax.div(end - first + (N - 1), jnp.int32(N)), step, Softmax.start(M, h))
        column, mask = columns(h), elements(valid, h)
        if parts == 1:
            out = state.result() * (load(scale_refs.pop(0).at[head]) if v_scale is not None else 1.0)
            store(out_refs[0].at[q_row[:, None], column], out, mask=mask)
        else:
            place = part * (B * T * H) + q_row
            store(out_refs[0].at[place], state.largest, mask=valid)
            store(out_refs[1].at[place], state.total, mask=valid)
            store(out_refs[2].at[place[:, None], column], state.acc, mask=mask)

    run = pallas_call(
        kernel,
        outputs(parts, B * T * H, h),
        grid=(-(-R // M), K * parts, B),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        name="paged_attention_" + ("prefill" if chosen.span is None else "decode"),
        interpret=interpret,
    )
    lanes = [cache.reshape(-1, h) for cache in (k_cache, v_cache)]
    result = run(q.reshape(-1, h), *lanes, page_table.reshape(-1), positions.reshape(-1), *scales)
    return finish(result, parts, (B, T, K, G, h), v_scale).reshape(B, T, H, h)


def part_of(context: int, N: int, span: int | None) -> int:
    """Keys of one part of a row: all, or at least `span`, in whole steps of N and so that MAX_PARTS are enough."""
    if span is None:
        return context
    return -(-max(span, -(-context // MAX_PARTS)) // N) * N


def outputs(parts: int, rows: int, h: int) -> Any:
    """What the kernel writes: the result, or each part's softmax."""
    if parts == 1:
        return [jax.ShapeDtypeStruct((rows, h), jnp.float32)]
    scalars = jax.ShapeDtypeStruct((parts * rows,), jnp.float32)
    return [scalars, scalars, jax.ShapeDtypeStruct((parts * rows, h), jnp.float32)]


def finish(
    written: list[jax.Array], parts: int, shape: tuple[int, ...], v_scale: jax.Array | float | None
) -> jax.Array:
    """What the kernel wrote -> [B, T, K, G, h]."""
    if parts == 1:
        return written[0].reshape(shape)
    h = shape[-1]
    largest, total = (a.reshape(parts, -1) for a in written[:2])
    whole = merge(Softmax(largest, total, written[2].reshape(parts, -1, h)))
    scales = head_scales(v_scale, shape[2])
    out = whole.reshape(shape)
    return out if scales is None else out * scales[:, None, None]
