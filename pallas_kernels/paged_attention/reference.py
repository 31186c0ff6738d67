"""What `paged_attention` means: all pages gathered, one softmax, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.lanes import head_scales, widen


def paged_attention_reference(
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
    K = k_cache.shape[2]
    k, v = (widen(cache, jnp.float32)[page_table].reshape(B, -1, K, h) for cache in (k_cache, v_cache))
    k_scales, v_scales = head_scales(k_scale, K), head_scales(v_scale, K)
    k = k if k_scales is None else k * k_scales[:, None]
    v = v if v_scales is None else v * v_scales[:, None]
    grouped = q.reshape(B, T, K, H // K, h).astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, k, precision="highest") * scale
    seen = jnp.arange(k.shape[1]) <= positions[..., None]  # [B, T, keys]; a pad sees none
    scores = jnp.where(seen[:, :, None, None, :], scores, -jnp.inf)
    v = jnp.where((jnp.arange(v.shape[1]) <= positions.max(axis=1, keepdims=True))[..., None, None], v, 0)  # not stale
    probs = jnp.where(positions[..., None, None, None] >= 0, jax.nn.softmax(scores, axis=-1), 0.0)
    return jnp.einsum("btkgs,bskh->btkgh", probs, v, precision="highest").reshape(B, T, H, h)
