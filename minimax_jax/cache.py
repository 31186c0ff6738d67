"""The paged cache: keys, values and M3's index keys of every layer as one object, and the table that places tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.config import MiniMaxM3Config, ModelConfig, Parallelism
from minimax_jax.errors import ConfigError
from minimax_jax.sharding import Axes

PAGE_SIZE = 128

LANE_AXES: Axes = ("pages", None, "kv_heads", None)
INDEX_AXES: Axes = ("pages", None, None)  # one key a token for all heads, so on every device
PAGE_TABLE_AXES: Axes = ("batch", None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's lanes.

    Attributes:
      k, v: [P, S, K, h]; token p of a row lies in slot p % S of the row's page p // S.
      index_k: [P, S, index_head_dim], the indexer's keys of a layer that selects blocks.
    """

    k: jax.Array
    v: jax.Array
    index_k: jax.Array | None = None

    def write(self, k: jax.Array, v: jax.Array, places: tuple[jax.Array, jax.Array]) -> LayerCache:
        """Store k, v [B, T, K, h] at `places` (see `Cache.places`)."""
        return dataclasses.replace(self, k=_put(self.k, k, places), v=_put(self.v, v, places))

    def write_index(self, index_k: jax.Array, places: tuple[jax.Array, jax.Array]) -> LayerCache:
        """Store index_k [B, T, index_head_dim] at `places`."""
        assert self.index_k is not None, "a layer that selects blocks has a lane for their keys"
        return dataclasses.replace(self, index_k=_put(self.index_k, index_k, places))


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


def cache_axes(config: ModelConfig) -> Cache:
    """The cache's tree with logical axes in place of arrays."""
    return _cache(config, LANE_AXES, INDEX_AXES, PAGE_TABLE_AXES)


def abstract_cache(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    max_num_seqs: int,
    max_model_len: int,
    dtype: jnp.dtype,
    page_size: int = PAGE_SIZE,
) -> Cache:
    """Shapes of a cache with a full set of pages for each of `max_num_seqs` rows.

    Raises:
      ConfigError: the rows do not divide over the data axis, or pages do not hold whole blocks.
    """
    if max_num_seqs % parallelism.data:
        raise ConfigError(
            f"max_num_seqs {max_num_seqs} is not divisible by data_parallel_size {parallelism.data}; "
            f"take a multiple of {parallelism.data}"
        )
    if isinstance(config, MiniMaxM3Config) and page_size % config.index_block_size:
        raise ConfigError(
            f"page size {page_size} is not a multiple of the model's index_block_size {config.index_block_size}; pages "
            f"hold whole blocks, so take a multiple of {config.index_block_size}, or a config.json whose blocks fit"
        )
    pages = -(-max_model_len // page_size)
    K = config.num_kv_heads_on(parallelism)
    slots = (max_num_seqs * pages, page_size)
    lane = jax.ShapeDtypeStruct((*slots, K, config.head_dim), dtype)
    index_dim = config.index_head_dim if isinstance(config, MiniMaxM3Config) else 0
    index = jax.ShapeDtypeStruct((*slots, index_dim), dtype)
    return _cache(config, lane, index, jax.ShapeDtypeStruct((max_num_seqs, pages), jnp.int32))


def static_page_table(parallelism: Parallelism, max_num_seqs: int, pages: int) -> np.ndarray:
    """Each row owns `pages` consecutive pages of its data shard. [B, pages] int32."""
    rows = max_num_seqs // parallelism.data
    local = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    return np.tile(local, (parallelism.data, 1))


def _cache(config: ModelConfig, lane: Any, index: Any, table: Any) -> Cache:
    """A cache's tree with one leaf for each kind of array."""
    lanes = (index if kind == "minimax_m3_sparse" else None for kind in config.layer_types)
    return Cache(tuple(LayerCache(lane, lane, index_k) for index_k in lanes), table)


def _put(lane: jax.Array, values: jax.Array, places: tuple[jax.Array, jax.Array]) -> jax.Array:
    return lane.at[places].set(values.astype(lane.dtype), mode="drop", unique_indices=True)
