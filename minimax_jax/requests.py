"""From what a user passes to a checked request, and from its tokens back to an output."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from minimax_jax.errors import RequestError
from minimax_jax.generation.limits import MAX_STOP_IDS, MIN_TEMPERATURE
from minimax_jax.generation.runner import Piece, Request
from minimax_jax.outputs import CompletionOutput, Logprob, RequestOutput, SamplingParams
from minimax_jax.text.stream import StreamDecoder

Prompt = str | Sequence[int] | Mapping[str, Any]


class TextCodec(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Text to ids."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""


class Transcript:
    """A request and what has been generated for it so far."""

    def __init__(
        self, text: str | None, request: Request, params: SamplingParams, codec: TextCodec | None, eos: frozenset[int]
    ) -> None:
        self.text, self.request, self.params, self.codec, self.eos = text, request, params, codec, eos
        self.request_id = uuid.uuid4().hex
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self._decoder = StreamDecoder(codec, params.skip_special_tokens) if codec and params.detokenize else None
        self._decoded = ""

    @property
    def work(self) -> tuple[int, int]:
        """Prompt length and tokens to come: what rows of one batch should have in common."""
        return len(self.request.prompt), self.request.max_tokens

    def add(self, piece: Piece) -> None:
        """Take in new tokens."""
        tokens = piece.tokens.tolist()
        self.token_ids += tokens
        if self.request.logprobs:
            self.logprobs += [self._logprobs(piece, i, token) for i, token in enumerate(tokens)]
        if self._decoder is not None:
            finish = self._finish()[0] if tokens else None
            # The token that ends a row is no part of its text, as in vLLM.
            self._decoded += self._decoder.push(tokens[:-1] if finish == "stop" else tokens)
            if finish is not None:
                self._decoded += self._decoder.finish()

    def output(self) -> RequestOutput:
        """The state as a user sees it."""
        finish, stop = self._finish()
        text = None if self._decoder is None else self._decoded
        logprobs = tuple(self.logprobs) if self.request.logprobs else None
        total = None
        if logprobs is not None:
            total = sum(entry[token].logprob for entry, token in zip(logprobs, self.token_ids, strict=True))
        completion = CompletionOutput(0, text, tuple(self.token_ids), total, logprobs, finish, stop)
        prompt_ids = tuple(self.request.prompt)
        return RequestOutput(self.request_id, self.text, prompt_ids, (completion,), finish is not None)

    def _finish(self) -> tuple[str | None, int | None]:
        if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
            last = self.token_ids[-1]
            return "stop", None if last in self.eos else last
        return ("length" if len(self.token_ids) >= self.request.max_tokens else None), None

    def _logprobs(self, piece: Piece, i: int, token: int) -> dict[int, Logprob]:
        """The chosen token, then the likeliest ones, as vLLM lists them."""
        if piece.chosen is None or piece.rank is None or piece.top_ids is None or piece.top is None:
            raise AssertionError("a request with logprobs ran without them")
        entry = {token: self._logprob(token, float(piece.chosen[i]), int(piece.rank[i]))}
        for rank in range(self.params.logprobs or 0):
            other = int(piece.top_ids[i, rank]) if rank < piece.top_ids.shape[1] else token
            if other != token:
                entry[other] = self._logprob(other, float(piece.top[i, rank]), rank + 1)
        return entry

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        decoded = None if self.codec is None else self.codec.decode([token], skip_special_tokens=False)
        return Logprob(logprob, rank, decoded)


def make_transcript(
    prompt: Prompt,
    params: SamplingParams,
    *,
    codec: TextCodec | None,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: Sequence[int],
    own_seed: np.random.SeedSequence,
) -> Transcript:
    """Check one prompt with its parameters and resolve every default.

    Args:
      own_seed: gives a request without a seed the next one of its sequence.

    Raises:
      RequestError: the prompt cannot be served.
    """
    text, ids = _prompt_ids(prompt, codec)
    check_prompt(ids, vocab_size, max_model_len, new_tokens=1)
    room = max_model_len - len(ids)
    if foreign := [id_ for id_ in params.stop_token_ids if id_ >= vocab_size]:
        raise RequestError(f"stop_token_ids has {foreign[0]}; the vocabulary is 0 to {vocab_size - 1}")
    eos = () if params.ignore_eos else tuple(eos_token_ids)
    stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"{len(stop_ids)} stop_token_ids and eos ids together; at most {MAX_STOP_IDS} are supported")
    request = Request(
        prompt=ids,
        temperature=float(params.temperature) if params.temperature >= MIN_TEMPERATURE else 0.0,
        top_k=min(max(params.top_k, 0), vocab_size),
        top_p=float(params.top_p),
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_ids=stop_ids,
        seed=_seed_words(params.seed, own_seed),
        logprobs=params.logprobs is not None,
    )
    return Transcript(text, request, params, codec, frozenset(eos))


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> a list; a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not _is_listed(prompts):
        raise RequestError(f"prompts is a {type(prompts).__name__}; expected a prompt or a list of prompts")
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(map(_is_id, listed)) else listed


def check_prompt(ids: Sequence[int], vocab_size: int, max_model_len: int, new_tokens: int) -> None:
    """Raises RequestError unless the ids are tokens of the model and leave room for `new_tokens` more."""
    if not ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    for id_ in ids:
        if not _is_id(id_) or not 0 <= id_ < vocab_size:
            raise RequestError(f"prompt token id {id_!r} is not in the vocabulary; expected 0 to {vocab_size - 1}")
    if len(ids) > max_model_len - new_tokens:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, the context max_model_len {max_model_len}; "
            f"shorten it to {max_model_len - new_tokens} tokens or raise max_model_len, up to the model's "
            "max_position_embeddings"
        )


def _prompt_ids(prompt: Any, codec: TextCodec | None) -> tuple[str | None, list[int]]:
    """A prompt in any form -> its text, if it came as text, and its ids, not yet checked."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return None, token_list(prompt["prompt_token_ids"])
        if "prompt" not in prompt:
            raise RequestError(f"prompt has keys {sorted(map(str, prompt))}; expected 'prompt' or 'prompt_token_ids'")
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return None, token_list(prompt)
    if codec is None:
        raise RequestError("the prompt is a string but the checkpoint has no tokenizer; pass a list of token ids")
    return prompt, codec.encode(prompt)


def token_list(ids: Any) -> list[int]:
    """A sequence or an array of ids as a list, not yet checked."""
    if not _is_listed(ids):
        raise RequestError(f"prompt is a {type(ids).__name__}; expected a string, a list of token ids or a dict")
    return [int(id_) if isinstance(id_, np.integer) else id_ for id_ in ids]


def _seed_words(seed: int | None, own: np.random.SeedSequence) -> tuple[int, int]:
    if seed is None:
        low, high = own.spawn(1)[0].generate_state(2).tolist()
        return int(low), int(high)
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _is_listed(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
