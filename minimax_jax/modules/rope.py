"""Rotary position embedding on the first `rotary_dim` channels of each head."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.config_rope import YarnScaling


def rope_tables(
    positions: jax.Array, rotary_dim: int, theta: float, yarn: YarnScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., rotary_dim / 2] float32 of position * theta^(-2j / rotary_dim), stretched by `yarn`.

    Source: RoFormer, with the pairs (j, j + rotary_dim / 2) of GPT-NeoX, as transformers `apply_rotary_pos_emb`.
    """
    # On the host: a device's float32 power is a little off, and the error grows with the position.
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if yarn is not None:
        frequencies = stretch(frequencies, theta, yarn)
    angles = positions[..., None].astype(jnp.float32) * frequencies.astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if yarn is None else (cos * yarn.attention_factor, sin * yarn.attention_factor)


def stretch(frequencies: np.ndarray, theta: float, yarn: YarnScaling) -> np.ndarray:
    """[pairs] frequencies for YaRN's longer context: quick pairs as they are, slow ones divided by its factor.

    Source: transformers `_compute_yarn_parameters`, after arXiv 2309.00071.
    """
    pairs = len(frequencies)

    def pair(turns: float) -> float:
        """Which pair turns so often over the original context."""
        return pairs * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / (high - low if high != low else 0.001), 0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


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
