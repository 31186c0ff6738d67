"""What every layer of one step shares."""

from __future__ import annotations

import dataclasses

import jax

from minimax_jax.cache import Cache
from minimax_jax.config import MiniMaxM3Config, ModelConfig
from minimax_jax.modules.rope import rope_tables


@dataclasses.dataclass(frozen=True)
class Step:
    """Computed once a step.

    Attributes:
      positions: [B, T] int32, a token's index in its own sequence, -1 for a pad.
      places: (page, slot) [B, T] int32, where the new tokens go in the cache.
      page_table: [B, pages of a row] int32.
      rope: cos and sin [B, T, rotary_dim / 2] float32.
    """

    positions: jax.Array
    places: tuple[jax.Array, jax.Array]
    page_table: jax.Array
    rope: tuple[jax.Array, jax.Array]


def make_step(config: ModelConfig, positions: jax.Array, cache: Cache) -> Step:
    """positions [B, T] int32 -> the step's shared values."""
    yarn = config.yarn if isinstance(config, MiniMaxM3Config) else None
    rope = rope_tables(positions, config.rotary_dim, config.rope_theta, yarn)
    return Step(positions, cache.places(positions), cache.page_table, rope)
