"""What a cache lane holds: float32 and bfloat16 as they stand, float8_e4m3fn by integer decoding and encoding.

No back end's own float8 conversion is used in either direction: some of AMD's are wrong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import decode

LANE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)


def widen(lane: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A lane or tile of LANE_DTYPES in `dtype`, float32 or bfloat16; both hold every e4m3fn value exactly."""
    if lane.dtype == jnp.float8_e4m3fn:
        return decode.narrow(decode.e4m3(decode.code_bits(lane)), jnp.dtype(dtype))
    return lane.astype(dtype)


def narrow(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 or bfloat16 values as a lane of LANE_DTYPES; to e4m3fn nearest even, saturating at 448, NaN kept.

    A lane's scale is divided out before.
    """
    if dtype != jnp.float8_e4m3fn:
        return values.astype(dtype)
    values = values.astype(jnp.float32)
    bits = lax.bitcast_convert_type(values, jnp.int32)
    magnitude = jnp.minimum(jnp.abs(values), 448.0)
    exponent = jnp.maximum((lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) - 127, -6)  # subnormals share -6
    eighths = magnitude * lax.bitcast_convert_type((127 + 3 - exponent) << 23, jnp.float32)
    # From 8 to 16 steps of an eighth, fewer in a subnormal; 16 carries into the exponent by itself.
    code = (exponent + 6 << 3) + lax.round(eighths, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    code = jnp.where(jnp.isnan(values), 0x7F, code) | (bits >> 24 & 0x80)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)


def head_scales(scale: jax.Array | float | None, K: int) -> jax.Array | None:
    """A lane's scale, one number or one a kv head, as [K] float32; None stays None."""
    return None if scale is None else jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (K,))


def check_heads(op: str, q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> None:
    """Whether q [B, T, H, h] can read k_cache, v_cache [P, S, K, h].

    Raises:
      ValueError: it cannot.
    """
    H, h = q.shape[2:]
    K = k_cache.shape[2]
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != h:
        raise ValueError(
            f"{op}: caches of shapes {k_cache.shape} and {v_cache.shape} for queries of {h}; "
            f"expected both to be [pages, page size, kv heads, {h}]"
        )
    if H % K:
        raise ValueError(f"{op}: {H} query heads do not divide over {K} kv heads; expected a multiple of {K}")


def check_block_size(op: str, page_size: int, block_size: int) -> None:
    """Whether pages hold whole blocks.

    Raises:
      ValueError: they do not.
    """
    if block_size <= 0 or page_size % block_size:
        raise ValueError(
            f"{op}: the page size {page_size} is no multiple of the block size {block_size}; "
            f"make the cache with pages of a multiple of {block_size} tokens"
        )
