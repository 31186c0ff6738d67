"""Attention over the cache; chooses an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention.by_name import run_kernel
from pallas_kernels.paged_attention.lanes import check_heads
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """softmax(scale * q k^T) v over the keys at positions 0..positions[b, t] of the row's own sequence.

    Args:
      q: [B, T, H, h] float32 or bfloat16; query head i reads key/value head i // (H // K).
      k_cache, v_cache: [P, S, K, h] float32, bfloat16 or float8_e4m3fn; the new tokens' keys and values are already
        written.
      page_table: [B, pages] int32; key position p of row b lies in page page_table[b, p // S], slot p % S.
      positions: [B, T] int32, -1 for a pad, whose output is zero.
      scale: factor on the scores.
      k_scale, v_scale: float32, one number or [K]: what a lane's values are multiplied by; None is 1.
      implementation: "pallas" (interpreted where there is no GPU), "xla", "reference", or None: "xla" on every platform
        until the kernel has been measured on a GPU.

    Returns:
      [B, T, H, h] float32.

    Raises:
      Unavailable: the named implementation is none of these, or cannot compute this.
      ValueError: the shapes do not fit.
    """

    def kernel(*args: Any) -> jax.Array:
        return run_kernel("paged_attention", [*args[:5], k_scale, v_scale], args[:3], scale=scale)

    check_heads("paged_attention", q, k_cache, v_cache)
    available: dict[str, Callable[..., Any]] = {
        "xla": paged_attention_xla,
        "reference": paged_attention_reference,
        "pallas": kernel,
    }
    out: jax.Array = choose("paged_attention", implementation, available)(
        q, k_cache, v_cache, page_table, positions, scale, k_scale, v_scale
    )
    return out
