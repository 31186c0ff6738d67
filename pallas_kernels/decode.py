"""Exact decoders of tiles inside a kernel: integer placement and selects, and no subnormal number on the way.

No back end's own float8 conversion is used: one of AMD's is wrong for one code. A code becomes float32, is multiplied
by its block scale there, and loses only zero bits when it becomes bfloat16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def e2m1(codes: jax.Array) -> jax.Array:
    """int32 with a code in bits 0..3, the others are ignored -> float32."""
    magnitude = codes & 7
    # Exponent and mantissa bits as they stand; below 1 there is only 0.5, whose bits are all ones of a mask.
    bits = jnp.where(magnitude >= 2, (magnitude << 22) + (126 << 23), -magnitude & 0x3F000000)
    return _float(bits | (codes & 8) << 28)


def e4m3(codes: jax.Array) -> jax.Array:
    """int32 with an e4m3fn code in bits 0..7, the others are ignored -> float32, NaN for 0x7F and 0xFF."""
    magnitude = codes & 0x7F
    bits = (magnitude << 20) + (120 << 23)
    small = _float(bits + (1 << 23)) - 2.0**-6  # m / 8 x 2^-6 as (1 + m / 8) x 2^-6 less its 1
    value = jnp.where(magnitude < 8, small, _float(bits))
    sign = (codes & 0x80) << 24
    bits = jnp.where(magnitude == 0x7F, 0x7FC00000, lax.bitcast_convert_type(value, jnp.int32))
    return _float(bits | sign)


def e8m0(codes: jax.Array) -> jax.Array:
    """int32 in 0..255 -> 2^(code - 127) float32, NaN for 255; code 0, a subnormal of float32, counts as zero."""
    return _float(jnp.where(codes == 255, 0x7FC00000, codes << 23))


def narrow(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 values that `dtype` (float32 or bfloat16) holds exactly, in `dtype`."""
    if dtype == jnp.float32:
        return values
    high = lax.shift_right_logical(lax.bitcast_convert_type(values, jnp.int32), 16)
    return lax.bitcast_convert_type(high.astype(jnp.int16), jnp.bfloat16)


def code_bits(codes: jax.Array) -> jax.Array:
    """A loaded tile of codes (float8_e4m3fn, uint8 or uint32) as int32."""
    if codes.dtype == jnp.uint32:
        return lax.bitcast_convert_type(codes, jnp.int32)
    if codes.dtype != jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    return codes.astype(jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
