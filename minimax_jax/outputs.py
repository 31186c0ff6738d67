"""What goes into and comes out of `LLM.generate`, in vLLM's names and meanings."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

from minimax_jax.errors import RequestError
from minimax_jax.generation.limits import MAX_LOGPROBS, MAX_STOP_IDS

# Fields of vLLM's class that have no effect here yet: only the value that changes nothing is taken.
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "stop": None,
    "bad_words": None,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "logit_bias": None,
    "include_stop_str_in_output": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
      temperature: 0, or less than 1e-5, takes the likeliest token.
      top_p: keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1].
      top_k: keep that many likeliest tokens; 0 or -1 keeps all.
      seed: the same seed gives the same tokens, whatever else is in the batch; None or -1 draws one from the LLM's
        own seed.
      max_tokens: tokens to generate at most; None goes up to the context's end.
      stop_token_ids: ids that end the output besides the model's eos.
      ignore_eos: go on past eos.
      logprobs: report the log probabilities of this many likeliest tokens and of the chosen one; None reports none.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: whether to make text at all.
      n, presence_penalty, frequency_penalty, repetition_penalty, min_p, stop, bad_words, min_tokens, prompt_logprobs,
      logit_bias, include_stop_str_in_output: not supported yet; any value but the neutral one is refused.

    Raises:
      RequestError: a value out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    stop: str | list[str] | None = None
    bad_words: list[str] | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, "a finite number of at least 0", lambda v: v >= 0)
        _number("top_p", self.top_p, "a number above 0 and at most 1", lambda v: 0 < v <= 1)
        _integer("top_k", self.top_k, "an integer of at least 1, or 0 or -1 for all tokens", lambda v: v >= -1)
        if self.seed == -1:  # vLLM's other spelling of None
            object.__setattr__(self, "seed", None)
        if self.seed is not None:
            _integer("seed", self.seed, "a 64-bit integer or None", lambda v: -(2**63) <= v < 2**64)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, "an integer of at least 1, or None", lambda v: v >= 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, f"an integer from 0 to {MAX_LOGPROBS}, or None", _within_logprobs)
        stop_ids = self.stop_token_ids or ()
        listed = isinstance(stop_ids, Iterable) and not isinstance(stop_ids, (str, bytes))
        if not listed or not all(_is_integer(i) and i >= 0 for i in stop_ids):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}; expected a list of token ids")
        if len(set(stop_ids)) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids has {len(set(stop_ids))} ids; at most {MAX_STOP_IDS} are supported")
        object.__setattr__(self, "stop_token_ids", tuple(stop_ids))
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value != neutral and value not in ([], {}):
                raise RequestError(f"{name}={value!r} is not supported yet; leave it at {neutral!r}")


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One token's log probability before temperature and filters, and its rank (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
      index: always 0.
      text: the tokens as text; None without a tokenizer or with detokenize=False.
      token_ids: with the eos or stop id that ended it, if one did.
      cumulative_logprob: sum of the chosen tokens' log probabilities, when they were asked for.
      logprobs: per token, id -> `Logprob`, when asked for.
      finish_reason: "stop", "length", or None while it goes on.
      stop_reason: the stop_token_id that ended it, or None for eos and length.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request with what has been generated for it so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))


def _integer(name: str, value: Any, expected: str, allowed: Any) -> None:
    if not _is_integer(value) or not allowed(value):
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def _number(name: str, value: Any, expected: str, allowed: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    if not is_number or not math.isfinite(value) or not allowed(value):
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def _within_logprobs(value: int) -> bool:
    return 0 <= value <= MAX_LOGPROBS
