"""Attention over chosen blocks in plain XLA: one place of the choice at a time with a running softmax.

The cost does not depend on the context. A place that a query leaves empty changes nothing for it, to the bit (its
probabilities are zero and its rescaling is one), so that a token's result does not depend on its neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.barrier import when_needed
from pallas_kernels.paged_attention.lanes import head_scales, widen


def sparse_attention_xla(
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
    P, S, K, _ = k_cache.shape
    topk, per_page = blocks.shape[3], S // block_size
    grouped = q.reshape(B, T, K, H // K, h)
    lanes = [cache.reshape(P * per_page, block_size, K, h) for cache in (k_cache, v_cache)]
    k_scales, v_scales = head_scales(k_scale, K), head_scales(v_scale, K)
    factor = scale if k_scales is None else scale * k_scales[:, None, None]
    head = jnp.arange(K, dtype=jnp.int32)

    def place(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, acc = carry  # [B, T, K, G], the same, [B, T, K, G, h]
        block = lax.dynamic_index_in_dim(blocks, j, axis=3, keepdims=False)  # [B, T, K]
        key_position = block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
        seen = (block >= 0)[..., None] & (key_position <= positions[:, :, None, None])  # [B, T, K, block_size]
        block = jnp.maximum(block, 0)
        page = jnp.take_along_axis(page_table, (block // per_page).reshape(B, -1), axis=1).reshape(block.shape)
        k, v = (widen(lane[page * per_page + block % per_page, :, head], q.dtype) for lane in lanes)
        v = jnp.where(seen[..., None], v, 0)  # a zero probability would not silence a NaN
        scores = jnp.where(seen[:, :, :, None], factor * _einsum("btkgh,btksh->btkgs", grouped, k), -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        # A token that has seen no key yet keeps -inf; the finite stand-in avoids inf - inf.
        base = jnp.where(jnp.isneginf(new_largest), 0.0, new_largest)
        rescale = jnp.exp(largest - base)
        probs = jnp.exp(scores - base[..., None])
        total = total * rescale + jnp.sum(probs, axis=-1)
        acc = acc * rescale[..., None] + _einsum("btkgs,btksh->btkgh", probs.astype(q.dtype), v)
        return new_largest, total, acc

    shape = (B, T, K, H // K)
    start = when_needed((jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, h))), q)
    places = jnp.max(jnp.where(blocks >= 0, jnp.arange(1, topk + 1), 0))  # the tail that no token uses is left out
    _, total, acc = lax.fori_loop(0, places, place, start)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out if v_scales is None else out * v_scales[:, None, None]
    return out.reshape(B, T, H, h)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
