"""Rotary position embedding on the first `rotary_dim` channels of each head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def rope_tables(positions: jax.Array, rotary_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., rotary_dim / 2] float32 of position * theta^(-2j / rotary_dim).

    Source: RoFormer, with the pairs (j, j + rotary_dim / 2) of GPT-NeoX, as transformers `apply_rotary_pos_emb`.
    """
    # On the host: a device's float32 power is a little off, and the error grows with the position.
    frequencies = (theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, heads, h] with tables [B, T, rotary_dim / 2]; channels past rotary_dim pass through.

    Computed in float32, rounded once to x's dtype.
    """
    cos, sin = (t[..., None, :] for t in tables)
    half = cos.shape[-1]
    rotated = x[..., : 2 * half].astype(jnp.float32)
    first, second = rotated[..., :half], rotated[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
