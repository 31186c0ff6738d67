"""The steps of generation on one device's shards: prefill a chunk, sample the first token, decode a group of tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from minimax_jax.cache import Cache
from minimax_jax.config import ModelConfig, Parallelism
from minimax_jax.generation.limits import NOT_FINITE
from minimax_jax.generation.sampling import Logprobs, Sampling, log_probabilities, no_logprobs, sample
from minimax_jax.model import CausalLM, Weights, build
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the compiled programs are made for; hashable, never a value that changes between calls."""

    config: ModelConfig
    parallelism: Parallelism
    dtype: jnp.dtype
    steps: int  # decode steps a call
    implementation: Implementation = None  # of the kernels, None for the best there is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Where each row stands.

    Attributes:
      token: [B] int32, the newest token, not yet in the cache.
      position: [B] int32, its index in the row's sequence.
      generated: [B] int32, tokens produced so far.
      active: [B] bool, whether the row goes on.
    """

    token: jax.Array
    position: jax.Array
    generated: jax.Array
    active: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """Tokens of one call.

    Attributes:
      tokens: [B, steps] int32, -1 after a row's end, NOT_FINITE where the logits were no numbers.
      logprobs: arrays of [B, steps, ...].
    """

    tokens: jax.Array
    logprobs: Logprobs


def prefill(
    settings: Settings,
    weights: Weights,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    last: jax.Array,
    logits: jax.Array,
) -> tuple[Cache, jax.Array]:
    """One chunk of every row's prompt.

    Args:
      tokens, positions: [B, chunk] int32; position -1 is a pad.
      last: [B] int32, index in this chunk of a prompt's last token, -1 when it lies in another chunk.
      logits: [B, V] float32 of the prompts that ended in earlier chunks.

    Returns:
      the cache, and logits with the rows whose prompt ends here.
    """
    model = _model(settings, weights)
    hidden, cache = model(tokens, positions, cache)
    ending = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where((last >= 0)[:, None], model.logits(ending), logits)


def all_logits(
    settings: Settings, weights: Weights, cache: Cache, tokens: jax.Array, positions: jax.Array
) -> tuple[Cache, jax.Array]:
    """One chunk, with the logits of every position: [B, chunk, V] float32."""
    model = _model(settings, weights)
    hidden, cache = model(tokens, positions, cache)
    return cache, model.logits(hidden)


def first_token(logits: jax.Array, sampling: Sampling, prompt_length: jax.Array) -> tuple[Rows, Emitted]:
    """Sample each prompt's first token; prompt_length [B] int32 is 0 for an empty slot."""
    zeros = jnp.zeros_like(prompt_length)
    rows = Rows(zeros, prompt_length - 1, zeros, prompt_length > 0)
    rows, token, logprobs = _advance(rows, logits, sampling)
    return rows, Emitted(token[:, None], jax.tree.map(lambda a: a[:, None], logprobs))


def decode(
    settings: Settings, weights: Weights, cache: Cache, rows: Rows, sampling: Sampling
) -> tuple[Cache, Rows, Emitted]:
    """Up to `settings.steps` tokens for every active row; stops early when none is left on this data shard."""
    B, steps = rows.token.shape[0], settings.steps
    Carry = tuple[jax.Array, Cache, Rows, Emitted]

    def unfinished(carry: Carry) -> jax.Array:
        i, _, rows, _ = carry
        return (i < steps) & jnp.any(rows.active)

    def step(carry: Carry) -> Carry:
        i, cache, rows, emitted = carry
        # Tied to the counter, so that no compiler decodes packed weights once outside the loop and keeps them.
        tied, i = lax.optimization_barrier((weights, i))
        model = _model(settings, tied)
        positions = jnp.where(rows.active, rows.position, -1)[:, None]
        hidden, cache = model(rows.token[:, None], positions, cache)
        rows, token, logprobs = _advance(rows, model.logits(hidden[:, 0]), sampling)
        emitted = jax.tree.map(
            lambda buffer, new: lax.dynamic_update_index_in_dim(buffer, new, i, axis=1),
            emitted,
            Emitted(token, logprobs),
        )
        return i + 1, cache, rows, emitted

    none = no_logprobs(B, settings.config.vocab_size)
    empty = jax.tree.map(lambda a: jnp.repeat(a[:, None], steps, axis=1), Emitted(jnp.full((B,), -1, jnp.int32), none))
    _, cache, rows, emitted = lax.while_loop(unfinished, step, (jnp.int32(0), cache, rows, empty))
    return cache, rows, emitted


def _advance(rows: Rows, logits: jax.Array, sampling: Sampling) -> tuple[Rows, jax.Array, Logprobs]:
    """Sample from logits [B, V] and move active rows on; the token is -1 where a row has ended.

    A row whose logits are not all finite ends with NOT_FINITE: a damaged weight must not turn into an answer.
    """
    token = sample(logits, sampling, rows.generated)
    logprobs = log_probabilities(logits, token, sampling.logprobs)
    generated = rows.generated + rows.active
    stopped = jnp.any(token[:, None] == sampling.stop_ids, axis=-1) | (generated >= sampling.max_tokens)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    moved = Rows(token, rows.position + rows.active, generated, rows.active & ~stopped & finite)
    return moved, jnp.where(rows.active, jnp.where(finite, token, NOT_FINITE), -1), logprobs


def _model(settings: Settings, weights: Weights) -> CausalLM:
    return build(settings.config, settings.parallelism, settings.dtype, weights, settings.implementation)
