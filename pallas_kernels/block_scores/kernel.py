"""Index scores as a portable kernel, the maximum of each key block taken where the scores are made.

Token t and index head g of T x G are row t * G + g; all of them read the one index key of a token. A program owns a
tile of rows of one sequence and a few blocks, and writes one number for each row and block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, pallas_call, store
from pallas_kernels.paged_attention.flash import MIN_DOT, power_of_two, product, read, read_queries
from pallas_kernels.sparse_attention.kernel import why_not
from pallas_kernels.tuning import FEW_ROWS, AttentionTuning, choose_attention

__all__ = ["block_scores_pallas", "why_not"]


def block_scores_pallas(
    index_q: jax.Array,
    index_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    interpret: bool = False,
    tuning: AttentionTuning | Mapping[str, Any] | None = None,
) -> jax.Array:
    """Shapes as in `api.block_scores`."""
    B, T, G, h = index_q.shape
    S, pages = index_cache.shape[1], page_table.shape[1]
    R, blocks = T * G, pages * S // block_size
    chosen = choose_attention("block_scores", R <= FEW_ROWS, index_q.dtype, tuning)
    M = min(chosen.rows, max(MIN_DOT, power_of_two(R)))
    N = min(chosen.keys, block_size)
    per_program = blocks if chosen.span is None else min(blocks, max(1, chosen.span // block_size))

    def kernel(q_ref: Any, keys_ref: Any, table_ref: Any, positions_ref: Any, out_ref: Any) -> None:
        b = pl.program_id(2)
        row = pl.program_id(0) * M + jnp.arange(M, dtype=jnp.int32)
        valid = row < R
        position = load(positions_ref.at[b * T + lax.div(row, jnp.int32(G))], mask=valid, other=-1)
        queries = read_queries(q_ref, b * R + row, valid, h)
        last = jnp.max(position)

        def block_best(j: jax.Array, carry: jax.Array) -> jax.Array:
            first = j * block_size
            page_index = lax.div(first, jnp.int32(S))

            def step(i: jax.Array, best: jax.Array) -> jax.Array:
                key = first + i * N + jnp.arange(N, dtype=jnp.int32)
                slot = load(table_ref.at[b * pages + page_index]) * S + jnp.minimum(key, last) - page_index * S
                scores = product(queries, read(keys_ref, slot, h, index_q.dtype), trans_b=True)
                scores = jnp.where(key[None, :] <= position[:, None], scores, -jnp.inf)
                return jnp.maximum(best, jnp.max(scores, axis=1))

            # None in a block of the future.
            steps = lax.div(jnp.minimum(last + 1 - first, block_size) + (N - 1), jnp.int32(N))
            best = lax.fori_loop(0, steps, step, jnp.full((M,), -jnp.inf))
            store(out_ref.at[b * R + row, j], best, mask=valid)
            return carry

        start = pl.program_id(1) * per_program
        lax.fori_loop(start, jnp.minimum(start + per_program, blocks), block_best, jnp.int32(0))

    run = pallas_call(
        kernel,
        jax.ShapeDtypeStruct((B * R, blocks), jnp.float32),
        grid=(-(-R // M), -(-blocks // per_program), B),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        name="block_scores",
        interpret=interpret,
    )
    flat = (index_q.reshape(-1, h), index_cache.reshape(-1, h), page_table.reshape(-1), positions.reshape(-1))
    out: jax.Array = run(*flat)
    return out.reshape(B, T, G, blocks)
