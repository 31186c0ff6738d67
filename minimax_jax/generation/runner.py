"""The host's side of generation: a fixed number of rows, filled with requests, prefilled by chunk, decoded by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from minimax_jax.cache import PAGE_TABLE_AXES, Cache, abstract_cache, cache_axes, static_page_table
from minimax_jax.errors import CheckpointError, RequestError
from minimax_jax.generation.limits import MAX_STOP_IDS, NOT_FINITE
from minimax_jax.generation.loop import Emitted, Rows, Settings
from minimax_jax.generation.patience import FirstRuns
from minimax_jax.generation.programs import Programs, is_axes
from minimax_jax.generation.sampling import Sampling
from minimax_jax.model import Weights
from minimax_jax.sharding import Axes, partition_spec


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, checked and with every default resolved.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: at least one, and within the context.
      stop_ids: ids that end it, eos included unless ignored.
      seed: low and high word.
    """

    prompt: Sequence[int]
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: tuple[int, int]
    logprobs: bool


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one row; logprob arrays are None when nobody asked.

    Attributes:
      tokens: [n] int32.
      chosen, rank: [n]; top_ids, top: [n, MAX_LOGPROBS].
    """

    tokens: np.ndarray
    chosen: np.ndarray | None = None
    rank: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top: np.ndarray | None = None


class Runner:
    """Owns the weights, the cache and the compiled programs."""

    def __init__(
        self,
        settings: Settings,
        mesh: Mesh,
        weights: Weights,
        *,
        max_num_seqs: int,
        max_model_len: int,
        cache_dtype: jnp.dtype,
        chunk: int,
        startup_timeout: float = 600.0,
    ) -> None:
        self.programs = Programs(settings, mesh, weights)
        self.weights, self.mesh, self.settings = weights, mesh, settings
        self.max_num_seqs, self.max_model_len, self.chunk = max_num_seqs, max_model_len, chunk
        self._first_runs = FirstRuns(startup_timeout)
        self._cache_dtype = cache_dtype
        self._cache = self._new_cache()
        self._calls = 0

    def run(self, requests: Sequence[Request]) -> Iterator[list[Piece]]:
        """Generate for at most `max_num_seqs` requests; yields each request's new tokens after every group of steps.

        Raises:
          RequestError: another call has taken the rows since the last piece.
          CheckpointError: a row's logits are NaN or infinite.
        """
        self._calls += 1
        call = self._calls
        slots = self._slots(len(requests))
        sampling = self._sampling(requests, slots)
        rows, emitted = self._prefill([request.prompt for request in requests], slots, sampling)
        with_logprobs = any(request.logprobs for request in requests)
        while True:
            yield _pieces(emitted, slots, with_logprobs)
            if not np.asarray(rows.active).any():
                return
            if call != self._calls:
                raise RequestError(
                    "another call used this LLM while a stream was open, and took its place in the cache; "
                    "read a stream to its end, or leave it, before the next call"
                )
            self._cache, rows, emitted = self.programs.decode(self.weights, self._live_cache(), rows, sampling)
            self._first_runs.wait("decode", rows)

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """Logits of every position of one prompt, [T, V] float32."""
        self._calls += 1
        data = self.settings.parallelism.data
        cache, parts = self._live_cache(), []
        table = cache.page_table
        # Every data shard computes the same row, in the pages of its own first row.
        first_rows = static_page_table(self.settings.parallelism, data, table.shape[1])
        cache = dataclasses.replace(cache, page_table=self._rows(first_rows, PAGE_TABLE_AXES))
        for start in range(0, len(prompt), self.chunk):
            tokens, positions, _ = self._chunk([prompt] * data, range(data), data, start)
            cache, logits = self.programs.all_logits(self.weights, cache, tokens, positions)
            self._first_runs.wait("logits", logits)
            parts.append(np.asarray(logits[0, : len(prompt) - start]))
        self._cache = dataclasses.replace(cache, page_table=table)
        return np.concatenate(parts)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], sampling: Sampling
    ) -> tuple[Rows, Emitted]:
        """All prompts, chunk by chunk at absolute multiples of the chunk, and their first tokens."""
        B = self.max_num_seqs
        logits = self._rows(np.zeros((B, self.settings.config.vocab_size), np.float32))
        for start in range(0, max(map(len, prompts)), self.chunk):
            tokens, positions, last = self._chunk(prompts, slots, B, start)
            self._cache, logits = self.programs.prefill(
                self.weights, self._live_cache(), tokens, positions, last, logits
            )
            self._first_runs.wait("prefill", logits)
        lengths = np.zeros((B,), np.int32)
        lengths[list(slots)] = [len(prompt) for prompt in prompts]
        rows, emitted = self.programs.first_token(logits, sampling, self._rows(lengths))
        return rows, emitted

    def _chunk(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], B: int, start: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens and positions [B, chunk] of each prompts[i][start : start + chunk] in row slots[i], and its end."""
        tokens = np.zeros((B, self.chunk), np.int32)
        positions = np.full((B, self.chunk), -1, np.int32)
        last = np.full((B,), -1, np.int32)
        for slot, prompt in zip(slots, prompts, strict=True):
            part = prompt[start : start + self.chunk]
            tokens[slot, : len(part)] = part
            positions[slot, : len(part)] = np.arange(start, start + len(part))
            if start < len(prompt) <= start + self.chunk:
                last[slot] = len(part) - 1
        return self._rows(tokens), self._rows(positions), self._rows(last)

    def _slots(self, count: int) -> list[int]:
        """A row for each request, spread evenly over the data shards."""
        data = self.settings.parallelism.data
        return [(i % data) * (self.max_num_seqs // data) + i // data for i in range(count)]

    def _sampling(self, requests: Sequence[Request], slots: Sequence[int]) -> Sampling:
        def column(default: object, dtype: type, values: list[Any], *shape: int) -> jax.Array:
            rows: np.ndarray = np.full((self.max_num_seqs, *shape), default, dtype)
            for slot, value in zip(slots, values, strict=True):
                rows[slot] = value
            return self._rows(rows)

        stop_ids = [(*r.stop_ids, *[-1] * (MAX_STOP_IDS - len(r.stop_ids))) for r in requests]
        return Sampling(
            temperature=column(0.0, np.float32, [r.temperature for r in requests]),
            top_k=column(0, np.int32, [r.top_k for r in requests]),
            top_p=column(1.0, np.float32, [r.top_p for r in requests]),
            seed=column(0, np.uint32, [r.seed for r in requests], 2),
            stop_ids=column(-1, np.int32, stop_ids, MAX_STOP_IDS),
            max_tokens=column(1, np.int32, [r.max_tokens for r in requests]),
            logprobs=column(False, np.bool_, [r.logprobs for r in requests]),
        )

    def _rows(self, values: np.ndarray, axes: Axes = ("batch",)) -> jax.Array:
        """[B, ...] on the mesh, rows over the data axis; `axes` spelled as the programs do, or they compile anew."""
        spec = partition_spec(axes, self.settings.parallelism)
        return jax.device_put(values, NamedSharding(self.mesh, spec))

    def _live_cache(self) -> Cache:
        """The cache; a new one when an interrupted call took the old one with it."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache)):
            self._cache = self._new_cache()
        return self._cache

    def _new_cache(self) -> Cache:
        config, parallelism = self.settings.config, self.settings.parallelism
        shapes = abstract_cache(
            config,
            parallelism,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            dtype=self._cache_dtype,
        )
        shardings = jax.tree.map(
            lambda axes: NamedSharding(self.mesh, partition_spec(axes, parallelism)),
            cache_axes(config),
            is_leaf=is_axes,
        )
        zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings)
        cache: Cache = zeros()
        table = static_page_table(parallelism, self.max_num_seqs, shapes.page_table.shape[1])
        return dataclasses.replace(cache, page_table=self._rows(table, PAGE_TABLE_AXES))


def _pieces(emitted: Emitted, slots: Sequence[int], with_logprobs: bool) -> list[Piece]:
    tokens = np.asarray(emitted.tokens)
    if (tokens[list(slots)] == NOT_FINITE).any():
        raise CheckpointError(
            "the model's logits are NaN or infinite: a weight is damaged, or values overflow; "
            "compare with dtype='float32', and fetch the checkpoint again"
        )
    counts = [int((tokens[slot] >= 0).sum()) for slot in slots]
    if not with_logprobs:
        return [Piece(tokens[slot, :n]) for slot, n in zip(slots, counts, strict=True)]
    lp = jax.tree.map(np.asarray, emitted.logprobs)
    return [
        Piece(tokens[slot, :n], lp.chosen[slot, :n], lp.rank[slot, :n], lp.top_ids[slot, :n], lp.top[slot, :n])
        for slot, n in zip(slots, counts, strict=True)
    ]
