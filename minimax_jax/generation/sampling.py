"""From logits to the next token: pure functions of a row's logits, its request's values, and its position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from minimax_jax.generation.limits import MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What the requests of a batch asked for; arrays, so that no value compiles anew.

    Attributes:
      temperature: [B] float32; 0 is greedy.
      top_k: [B] int32; 0 is all.
      top_p: [B] float32 in (0, 1].
      seed: [B, 2] uint32, low and high word.
      stop_ids: [B, n] int32 that end the row, padded with -1.
      max_tokens: [B] int32.
      logprobs: [B] bool, whether the row wants log probabilities.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    stop_ids: jax.Array
    max_tokens: jax.Array
    logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log probabilities of the model itself: before temperature and filters, as vLLM reports them.

    Attributes:
      chosen: [B] float32, of the sampled token.
      rank: [B] int32, 1 for the likeliest token.
      top_ids, top: [B, MAX_LOGPROBS] int32 and float32, the likeliest tokens.
    """

    chosen: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


def sample(logits: jax.Array, sampling: Sampling, generated: jax.Array) -> jax.Array:
    """The next token of each row.

    Args:
      logits: [B, V] float32.
      sampling: the rows' requests.
      generated: [B] int32, how many tokens a row has produced; with the seed it keys the row's randomness.

    Returns:
      [B] int32. A row's token depends on nothing outside the row.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = sampling.temperature > 0

    def draw() -> jax.Array:
        scaled = logits / jnp.where(warm, sampling.temperature, 1.0)[:, None]
        order, kept = keep_top(scaled, sampling.top_k, sampling.top_p)
        noise = gumbel(sampling.seed, generated, logits.shape[-1])
        ranked = jnp.take_along_axis(scaled + noise, order, axis=-1)  # noise belongs to the token, not to its rank
        best = jnp.argmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
        return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)

    # Greedy batches skip the sort; a row's own result is the same in either branch.
    drawn = lax.cond(jnp.any(warm), draw, lambda: greedy)
    return jnp.where(warm, drawn, greedy)


def keep_top(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Top-k, then the smallest set of what is left whose probability reaches top-p.

    Args:
      scaled: [B, V] float32, logits over temperature.
      top_k: [B] int32, 0 for all.
      top_p: [B] float32.

    Returns:
      order [B, V] int32, tokens from likeliest to least (of equals the lower id first), and kept [B, V] bool by rank.
      At least one token is kept.
    """
    V = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.arange(V, dtype=jnp.int32)
    kept = rank < jnp.where(top_k > 0, top_k, V)[:, None]
    ranked = jnp.where(kept, jnp.take_along_axis(scaled, order, axis=-1), -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability of the likelier ones
    within = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)  # rounding may carry the sum past one
    return order, kept & (within | (rank == 0))


def gumbel(seed: jax.Array, generated: jax.Array, V: int) -> jax.Array:
    """[B, V] Gumbel noise from (seed [B, 2], position [B]); argmax of logits + noise is a draw from their softmax."""

    def row(words: jax.Array, n: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(words[0], impl="threefry2x32"), words[1])
        return jax.random.gumbel(jax.random.fold_in(key, n), (V,), jnp.float32)

    return jax.vmap(row)(seed, generated)


def log_probabilities(logits: jax.Array, token: jax.Array, wanted: jax.Array) -> Logprobs:
    """Log probabilities of logits [B, V] for token [B]; zeros when no row wants them (wanted [B] bool)."""
    B, V = logits.shape

    def compute() -> Logprobs:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
        rank = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
        top, ids = lax.top_k(logprobs, min(MAX_LOGPROBS, V))
        return Logprobs(chosen[:, 0], rank, ids.astype(jnp.int32), top)

    return lax.cond(jnp.any(wanted), compute, lambda: no_logprobs(B, V))


def no_logprobs(B: int, V: int) -> Logprobs:
    """Zeros in the shape of `log_probabilities`."""
    count = min(MAX_LOGPROBS, V)
    return Logprobs(
        jnp.zeros((B,), jnp.float32),
        jnp.zeros((B,), jnp.int32),
        jnp.zeros((B, count), jnp.int32),
        jnp.zeros((B, count), jnp.float32),
    )
