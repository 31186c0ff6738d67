"""Bytes a device will hold, counted before a weight is read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from minimax_jax.cache import abstract_cache
from minimax_jax.config import MiniMaxM3Config, ModelConfig, Parallelism
from minimax_jax.errors import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device; `limit` is what its allocator may use, None when it is not known."""

    weights: int
    cache: int
    workspace: int
    limit: int | None

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.cache + self.workspace

    def line(self) -> str:
        """The plan on one line."""
        limit = "unknown" if self.limit is None else f"{self.limit / GIB:.2f} GiB"
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in ("weights", "cache", "workspace"))
        return f"memory per device: {parts}, total {self.total / GIB:.2f} GiB of {limit}"

    def check(self) -> None:
        """Raises ConfigError when the plan is over the limit."""
        if self.limit is not None and self.total > self.limit:
            raise ConfigError(
                f"{self.line()}: too much; lower max_model_len or max_num_seqs, raise tensor_parallel_size, or on a "
                "GPU raise XLA_PYTHON_CLIENT_MEM_FRACTION (0.75 of the card by default)"
            )


def plan_memory(
    weight_bytes: int,
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    max_num_seqs: int,
    max_model_len: int,
    chunk: int,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    devices: Sequence[Any] | None = None,
) -> MemoryPlan:
    """Plan for one device.

    Args:
      weight_bytes: bytes of the weights on one device, packed as they stay.
      chunk: tokens of a row in one prefill step.
      devices: to ask for their limit; None plans without one.
    """
    cache = abstract_cache(
        config, parallelism, max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=cache_dtype
    )
    model = parallelism.model
    lanes = sum(_bytes(layer.k) + _bytes(layer.v) for layer in cache.layers) // model
    lanes += sum(_bytes(layer.index_k) for layer in cache.layers if layer.index_k is not None)
    rows = max_num_seqs // parallelism.data
    tokens = rows * chunk
    # A prefill step keeps a few activations a token, the experts' outputs, and its routed rows; the head's logits and
    # their sort keep a few rows of the vocabulary; one expert and one attention matrix are decoded at a time.
    activation = tokens * (8 * config.hidden_size + 4 * config.num_attention_heads * config.head_dim // model) * 4
    routed = tokens * config.num_experts_per_tok * config.hidden_size * 4
    logits = 6 * rows * config.vocab_size * 4
    widths = [2 * config.intermediate_size, config.num_attention_heads * config.head_dim]
    if isinstance(config, MiniMaxM3Config):
        widths.append(config.dense_intermediate_size)
    matrix = config.hidden_size * max(widths)
    workspace = activation + routed + logits + 2 * matrix * dtype.itemsize
    return MemoryPlan(weight_bytes, lanes // parallelism.data, workspace, _limit(devices))


def _bytes(lane: jax.Array) -> int:
    return int(lane.size) * lane.dtype.itemsize


def _limit(devices: Sequence[Any] | None) -> int | None:
    """What the allocator of the first device may use; simulated CPU devices share the machine's memory."""
    if not devices:
        return None
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return None
