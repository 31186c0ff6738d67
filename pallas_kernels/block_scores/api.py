"""Index scores by key block; chooses an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.block_scores.reference import block_scores_reference
from pallas_kernels.block_scores.xla import block_scores_xla
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention.by_name import run_kernel
from pallas_kernels.paged_attention.lanes import check_block_size


def block_scores(
    index_q: jax.Array,
    index_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    implementation: Implementation = None,
) -> jax.Array:
    """max over the keys of a block at positions 0..positions[b, t] of index_q . index_key, unscaled.

    Args:
      index_q: [B, T, G, h] float32 or bfloat16; every head reads the one index key of a token.
      index_cache: [P, S, h] float32, bfloat16 or float8_e4m3fn; the new tokens' keys are already written.
      page_table: [B, pages] int32; key position p of row b lies in page page_table[b, p // S], slot p % S.
      positions: [B, T] int32, -1 for a pad.
      block_size: tokens of a block, by logical position: key position p is in block p // block_size.
      implementation: "pallas" (interpreted where there is no GPU), "xla", "reference", or None: "xla" on every platform
        until the kernel has been measured on a GPU.

    Returns:
      [B, T, G, pages * S // block_size] float32; -inf for a block wholly in the future, and everywhere for a pad.

    Raises:
      Unavailable: the named implementation is none of these, or cannot compute this.
      ValueError: S is no multiple of block_size, or the sizes of the index heads and the index keys differ.
    """
    check_block_size("block_scores", index_cache.shape[1], block_size)
    if index_q.shape[-1] != index_cache.shape[-1]:
        raise ValueError(
            f"block_scores: index queries of {index_q.shape[-1]} for index keys of {index_cache.shape[-1]}; "
            "expected one size"
        )

    def kernel(*args: Any) -> jax.Array:
        return run_kernel("block_scores", args[:4], (index_q, block_size, index_cache), block_size=block_size)

    available: dict[str, Callable[..., Any]] = {
        "xla": block_scores_xla,
        "reference": block_scores_reference,
        "pallas": kernel,
    }
    out: jax.Array = choose("block_scores", implementation, available)(
        index_q, index_cache, page_table, positions, block_size
    )
    return out
