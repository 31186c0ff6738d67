"""Attention over chosen blocks of the cache; chooses an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention.by_name import run_kernel
from pallas_kernels.paged_attention.lanes import check_block_size, check_heads
from pallas_kernels.sparse_attention.reference import sparse_attention_reference
from pallas_kernels.sparse_attention.xla import sparse_attention_xla


def sparse_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    blocks: jax.Array,
    *,
    block_size: int,
    scale: float,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """softmax(scale * q k^T) v over the keys of the query's blocks at positions 0..positions[b, t] of its own sequence.

    Args:
      q: [B, T, H, h] float32 or bfloat16; query head i reads key/value head i // (H // K) and its blocks.
      k_cache, v_cache: [P, S, K, h] float32, bfloat16 or float8_e4m3fn; the new tokens' keys and values are already
        written.
      page_table: [B, pages] int32; key position p of row b lies in page page_table[b, p // S], slot p % S.
      positions: [B, T] int32, -1 for a pad, whose output is zero.
      blocks: [B, T, K, topk] int32, each block of a query once, -1 for none: what `select_blocks` gives.
      block_size: tokens of a block, by logical position; S is a multiple.
      scale: factor on the scores.
      k_scale, v_scale: float32, one number or [K]: what a lane's values are multiplied by; None is 1.
      implementation: "pallas" (interpreted where there is no GPU), "xla", "reference", or None: "xla" on every platform
        until the kernel has been measured on a GPU.

    Returns:
      [B, T, H, h] float32.

    Raises:
      Unavailable: the named implementation is none of these, or cannot compute this.
      ValueError: S is no multiple of block_size, or the shapes do not fit.
    """
    check_heads("sparse_attention", q, k_cache, v_cache)
    check_block_size("sparse_attention", k_cache.shape[1], block_size)
    expected = (*q.shape[:2], k_cache.shape[2])
    if blocks.ndim != 4 or blocks.shape[:3] != expected:
        raise ValueError(f"sparse_attention: blocks of shape {blocks.shape}; expected {(*expected, 'topk')}")

    def kernel(*args: Any) -> jax.Array:
        arrays = [*args[:6], k_scale, v_scale]
        static = {"block_size": block_size, "scale": scale}
        return run_kernel("sparse_attention", arrays, (q, block_size, k_cache, v_cache), **static)

    available: dict[str, Callable[..., Any]] = {
        "xla": sparse_attention_xla,
        "reference": sparse_attention_reference,
        "pallas": kernel,
    }
    out: jax.Array = choose("sparse_attention", implementation, available)(
        q, k_cache, v_cache, page_table, positions, blocks, block_size, scale, k_scale, v_scale
    )
    return out
