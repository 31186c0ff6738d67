"""Attention over the cache; chooses an implementation."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, choose
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
    implementation: Implementation = None,
) -> jax.Array:
    """softmax(scale * q k^T) v over the keys at positions 0..positions[b, t] of the row's own sequence.

    Args:
      q: [B, T, H, h] float32 or bfloat16; query head i reads key/value head i // (H // K).
      k_cache, v_cache: [P, S, K, h]; the new tokens' keys and values are already written.
      page_table: [B, pages] int32; key position p of row b lies in page page_table[b, p // S], slot p % S.
      positions: [B, T] int32, -1 for a pad, whose output is zero.
      scale: factor on the scores.
      implementation: "xla", "reference", or None for the best available.

    Returns:
      [B, T, H, h] float32.
    """
    available = {"xla": paged_attention_xla, "reference": paged_attention_reference}
    out: jax.Array = choose("paged_attention", implementation, available)(
        q, k_cache, v_cache, page_table, positions, scale
    )
    return out
