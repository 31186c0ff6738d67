"""What `sparse_attention` means: all pages gathered, a dense mask, one softmax, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.lanes import head_scales, widen


def sparse_attention_reference(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    blocks: jax.Array,
    block_size: int,
    scale: float,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
) -> jax.Array:
    """Shapes as in `api.sparse_attention`."""
    B, T, H, h = q.shape
    K = k_cache.shape[2]

    def keys_of(cache: jax.Array, lane_scale: jax.Array | float | None) -> jax.Array:
        lane = widen(cache, jnp.float32)[page_table].reshape(B, -1, K, h)
        scales = head_scales(lane_scale, K)
        return lane if scales is None else lane * scales[:, None]

    k, v = keys_of(k_cache, k_scale), keys_of(v_cache, v_scale)
    key = jnp.arange(k.shape[1])
    chosen = jnp.any(blocks[..., None] == key // block_size, axis=3)  # [B, T, K, keys]
    seen = (chosen & (key <= positions[..., None])[:, :, None])[:, :, :, None]
    grouped = q.reshape(B, T, K, H // K, h).astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, k, precision="highest") * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    v = jnp.where((key <= positions.max(axis=1, keepdims=True))[..., None, None], v, 0)  # not stale
    probs = jnp.where(seen.any(axis=-1, keepdims=True), jax.nn.softmax(scores, axis=-1), 0.0)
    return jnp.einsum("btkgs,bskh->btkgh", probs, v, precision="highest").reshape(B, T, H, h)
