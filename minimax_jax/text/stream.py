"""Text as it grows: token ids in, whole characters out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are no character, or not yet one
_TAIL = 8  # tokens; more than the bytes of any character


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""


class StreamDecoder:
    """Decodes one sequence piece by piece.

    A character may be spread over several tokens: its beginning is held back until the rest has come. All that `push`
    and `finish` return, joined, is the decoded whole. Each call decodes the tokens since the last whole character
    (with those before them as context), so the work grows with the length, not with its square.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._context: list[int] = []  # the last tokens whose text is out
        self._context_text = ""
        self._pending: list[int] = []  # tokens since then
        self._given = 0  # characters of the pending tokens that are out

    def push(self, ids: Iterable[int]) -> str:
        """Take in new ids, return the new text that no later token can change."""
        self._pending.extend(ids)
        if self._ends_in_noise():
            return ""
        text = self._pending_text()
        whole = text.rstrip(_REPLACEMENT)
        delta = whole[self._given :]
        self._given = max(self._given, len(whole))
        if len(whole) < len(text):
            self._cut_before_last_character(whole)
        elif text or len(self._pending) > _TAIL:
            self._cut(len(self._pending), text)
        return delta

    def finish(self) -> str:
        """The rest: what was held back and did not become a character."""
        text = self._pending_text()
        delta = text[self._given :]
        self._cut(len(self._pending), text)
        return delta

    def _pending_text(self, count: int | None = None) -> str:
        """Text of the first `count` pending tokens, or of all."""
        return self._decode_ids(self._context + self._pending[:count])[len(self._context_text) :]

    def _decode_ids(self, ids: list[int]) -> str:
        return self._decode(ids, skip_special_tokens=self._skip)

    def _cut(self, count: int, text: str) -> None:
        """The first `count` pending tokens, whose text is out, become the context."""
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._context_text = self._decode_ids(self._context)
        self._given = max(0, self._given - len(text))

    def _cut_before_last_character(self, whole: str) -> None:
        """Keep a long window from growing while each push happens to end inside a character."""
        if len(self._pending) <= 2 * _TAIL:
            return
        for left in range(1, _TAIL + 1):
            count = len(self._pending) - left
            text = self._pending_text(count)
            if text and not text.endswith(_REPLACEMENT) and whole.startswith(text):
                self._cut(count, text)
                return

    def _ends_in_noise(self) -> bool:
        """A look at the last tokens only, so that a long run of bytes that are no text costs no long decoding."""
        if len(self._pending) <= 2 * _TAIL:
            return False
        tail = self._decode_ids(self._pending[-_TAIL:])
        return bool(tail) and not tail.rstrip(_REPLACEMENT)
