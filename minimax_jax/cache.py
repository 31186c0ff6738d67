"""The paged key/value cache: every lane of every layer as one object, and the page table that places a row's tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.config import MiniMaxM2Config, Parallelism
from minimax_jax.errors import ConfigError
from minimax_jax.sharding import Axes

PAGE_SIZE = 128

LANE_AXES: Axes = ("pages", None, "kv_heads", None)
PAGE_TABLE_AXES: Axes = ("batch", None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's lanes.

    Attributes:
      k, v: [P, S, K, h]; token p of a row lies in slot p % S of the row's page p // S.
    """

    k: jax.Array
    v: jax.Array

    def write(self, k: jax.Array, v: jax.Array, places: tuple[jax.Array, jax.Array]) -> LayerCache:
        """Store k, v [B, T, K, h] at `places` (see `Cache.places`)."""
        return LayerCache(
            self.k.at[places].set(k.astype(self.k.dtype), mode="drop", unique_indices=True),
            self.v.at[places].set(v.astype(self.v.dtype), mode="drop", unique_indices=True),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """All layers.

    Attributes:
      layers: one `LayerCache` a layer, arrays of their own, so that a step updates them in place.
      page_table: [B, pages of a row] int32, page numbers on this row's data shard.
    """

    layers: tuple[LayerCache, ...]
    page_table: jax.Array

    def places(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """positions [B, T] -> (page, slot) [B, T]; a pad (-1) gets a page past the end, where a write is dropped."""
        P, S = self.layers[0].k.shape[:2]
        logical = jnp.maximum(positions, 0) // S
        page = jnp.take_along_axis(self.page_table, logical, axis=1)
        # Distinct places for pads keep the promise of unique indices.
        B, T = positions.shape
        beyond = P + jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
        return jnp.where(positions >= 0, page, beyond), jnp.maximum(positions, 0) % S


def cache_axes(num_layers: int) -> Cache:
    """The cache's tree with logical axes in place of arrays."""
    lane: Any = LANE_AXES
    table: Any = PAGE_TABLE_AXES
    return Cache(tuple(LayerCache(lane, lane) for _ in range(num_layers)), table)


def abstract_cache(
    config: MiniMaxM2Config,
    parallelism: Parallelism,
    *,
    max_num_seqs: int,
    max_model_len: int,
    dtype: jnp.dtype,
    page_size: int = PAGE_SIZE,
) -> Cache:
    """Shapes of a cache with a full set of pages for each of `max_num_seqs` rows.

    Raises:
      ConfigError: the rows do not divide over the data axis.
    """
    if max_num_seqs % parallelism.data:
        raise ConfigError(
            f"max_num_seqs {max_num_seqs} is not divisible by data_parallel_size {parallelism.data}; "
            f"take a multiple of {parallelism.data}"
        )
    pages = -(-max_model_len // page_size)
    K = config.num_kv_heads_on(parallelism)
    lane: Any = jax.ShapeDtypeStruct((max_num_seqs * pages, page_size, K, config.head_dim), dtype)
    table: Any = jax.ShapeDtypeStruct((max_num_seqs, pages), jnp.int32)
    return Cache(tuple(LayerCache(lane, lane) for _ in range(config.num_hidden_layers)), table)


def static_page_table(parallelism: Parallelism, max_num_seqs: int, pages: int) -> np.ndarray:
    """Each row owns `pages` consecutive pages of its data shard. [B, pages] int32."""
    rows = max_num_seqs // parallelism.data
    local = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    return np.tile(local, (parallelism.data, 1))
