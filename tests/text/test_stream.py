"""Incremental decoding: whole characters only, and nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from minimax_jax.text.stream import StreamDecoder
from minimax_jax.text.tokenizer import Tokenizer, load_tokenizer
from minimax_jax.text.train import EOS, train_tokenizer

VOCAB_SIZE = 512
TEXT = Path(__file__).parents[2] / "minimax_jax" / "data" / "gsm8k_excerpt.txt"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(path, TEXT.read_text(encoding="utf-8"), vocab_size=VOCAB_SIZE, chat_template="x")
    loaded = load_tokenizer(path)
    assert loaded is not None
    return loaded


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.count += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens)


def stream(tokenizer: Tokenizer | Counting, ids: Sequence[int], step: int, skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    return [*(decoder.push(ids[at : at + step]) for at in range(0, len(ids), step)), decoder.finish()]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "😀👨‍👩‍👧🏽🇰🇷",
        "안녕하세요 세계",
        "漢字とかな、仮名。",
        "plain text, 12 apples",
        "é ÷ £5 ñ",
        "a\ufffdb\ufffd",
        "\ufffd",
    ],
    ids=["emoji", "hangul", "cjk", "ascii", "latin", "replacement", "replacement only"],
)
def test_deltas_are_whole_characters_and_join_to_the_text(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text)
    deltas = stream(tokenizer, ids, step)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(deltas)
        assert deltas[-1] == ""  # nothing was held back for the end


def test_a_character_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x한y")
    assert len(ids) == 5
    assert stream(tokenizer, ids, 1) == ["x", "", "", "한", "y", ""]


def test_text_before_an_unfinished_character_is_not_held_back(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("ab한")
    assert decoder.push(ids[:-1]) == "ab"
    assert decoder.push(ids[-1:]) == "한"


def test_an_output_cut_inside_a_character_ends_as_the_whole_decodes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab한")[:-1]
    assert stream(tokenizer, ids, 1)[-1] == "\ufffd"
    assert "".join(stream(tokenizer, ids, 1)) == tokenizer.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("step", [1, 4, 16])
def test_random_ids_join_to_the_decoded_whole(tokenizer: Tokenizer, seed: int, step: int, skip: bool) -> None:
    """As an untrained model emits them: bytes that are no text, special tokens, ids without a token."""
    rng = np.random.default_rng(seed)
    for high in (VOCAB_SIZE, 256):
        ids = rng.integers(0, high, 600).tolist()
        assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{EOS}b")
    assert stream(tokenizer, ids, 1) == ["a", "", "b", ""]
    assert stream(tokenizer, ids, 1, skip=False) == ["a", EOS, "b", ""]


@pytest.mark.parametrize("kind", ["text", "hangul in halves", "noise", "specials", "noise after text"])
def test_work_grows_with_the_length_not_its_square(tokenizer: Tokenizer, kind: str) -> None:
    lone = tokenizer.encode("한")[1]  # a byte that begins no character
    eos = tokenizer.eos_token_ids[0]
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8")[:20000])[:3000]
    hangul = tokenizer.encode("한국어" * 400)
    ids, step = {
        "text": (text, 1),
        "hangul in halves": (hangul[1:], 3),  # every push ends inside a character
        "noise": ([lone] * 3000, 1),
        "specials": ([eos] * 3000, 1),
        "noise after text": ([*text[:5], *([lone, lone, text[0]] * 1000)], 2),
    }[kind]
    counting = Counting(tokenizer)
    assert "".join(stream(counting, ids, step)) == tokenizer.decode(ids)
    assert counting.count < 80 * len(ids), f"{counting.count} ids decoded for {len(ids)}"
