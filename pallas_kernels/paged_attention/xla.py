"""Attention in plain XLA: one page at a time with a running softmax, as many pages as the longest row needs.

A page beyond a row's length changes nothing in that row, to the bit (its probabilities are zero and its rescaling is
one), so a row's result does not depend on how long its neighbours are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.barrier import when_needed
from pallas_kernels.paged_attention.lanes import head_scales, widen


def paged_attention_xla(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    scale: float,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> jax.Array:
    """Shapes as in `api.paged_attention`."""
    B, T, H, h = q.shape
    S, K = k_cache.shape[1:3]
    grouped = q.reshape(B, T, K, H // K, h)
    k_scales, v_scales = head_scales(k_scale, K), head_scales(v_scale, K)
    factor = scale if k_scales is None else scale * k_scales[:, None, None, None]
    row_end = jnp.max(positions, axis=1, keepdims=True)  # [B, 1]

    def page(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, acc = carry  # [B, K, G, T], the same, [B, K, G, T, h]
        pages = lax.dynamic_index_in_dim(page_table, j, axis=1, keepdims=False)
        k, v = (widen(cache[pages], q.dtype) for cache in (k_cache, v_cache))  # [B, S, K, h]
        scores = factor * _einsum("btkgh,bskh->bkgts", grouped, k)
        key_position = j * S + jnp.arange(S, dtype=jnp.int32)
        # Slots past a row's end hold what an earlier sequence left; a zero probability would not silence a NaN there.
        v = jnp.where((key_position <= row_end)[..., None, None], v, 0)
        seen = key_position <= positions[..., None]  # [B, T, S]
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        # A row that has seen no key yet keeps -inf; the finite stand-in avoids inf - inf.
        base = jnp.where(jnp.isneginf(new_largest), 0.0, new_largest)
        rescale = jnp.exp(largest - base)
        probs = jnp.exp(scores - base[..., None])
        total = total * rescale + jnp.sum(probs, axis=-1)
        acc = acc * rescale[..., None] + _einsum("bkgts,bskh->bkgth", probs.astype(q.dtype), v)
        return new_largest, total, acc

    shape = (B, K, H // K, T)
    start = when_needed((jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, h))), q)
    _, total, acc = lax.fori_loop(0, jnp.max(positions) // S + 1, page, start)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out if v_scales is None else out * v_scales[:, None, None, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, h)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
