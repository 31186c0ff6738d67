"""The tokenizer wrapper: no token added, specials parsed, every id below the model's vocabulary, clear refusals."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimax_jax.errors import CheckpointError, RequestError
from minimax_jax.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from minimax_jax.text.train import BOS, EOS, SPECIAL_TOKENS, TAGS, train_tokenizer

VOCAB_SIZE = 512
TEXT = Path(__file__).parents[2] / "minimax_jax" / "data" / "gsm8k_excerpt.txt"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(
        path, TEXT.read_text(encoding="utf-8"), vocab_size=VOCAB_SIZE, chat_template="{{ messages[0].content }}"
    )
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    loaded = load_tokenizer(directory)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    "text",
    [
        "Question: how many?",
        " leading  and   inner spaces \n\n\ttabs\r\n",
        "wörld £5 ÷ 2",
        "안녕하세요",
        "漢字かな",
        "👨‍👩‍👧 é",
        "a\x00b",
        "",
    ],
)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_below_the_vocabulary(tokenizer: Tokenizer, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_vocabulary(tokenizer, VOCAB_SIZE)
    for _ in range(50):
        points = rng.integers(0, 0x110000, 40)
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < tokenizer.vocab_size <= VOCAB_SIZE


def test_training_text_becomes_fewer_tokens(tokenizer: Tokenizer) -> None:
    text = TEXT.read_text(encoding="utf-8")[:5000]
    assert len(tokenizer.encode(text)) < 0.6 * len(text)


def test_specials_in_text_are_specials_and_none_is_added(tokenizer: Tokenizer) -> None:
    for token in (*SPECIAL_TOKENS, *TAGS):
        assert tokenizer.encode(token) == [tokenizer.token_id(token)]
    hello = tokenizer.encode("hello")
    assert not set(hello) & {tokenizer.token_id(token) for token in SPECIAL_TOKENS}
    assert tokenizer.encode(f"{BOS}hello{EOS}") == [tokenizer.token_id(BOS), *hello, tokenizer.token_id(EOS)]


def test_a_file_that_would_add_bos_adds_none(directory: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Prompts are spelled out whole: a template begins with its own BOS."""
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [tokenizer.token_id(BOS)], "tokens": [BOS]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    adding = load_tokenizer(tmp_path)
    assert adding is not None
    assert adding.encode("hello") == tokenizer.encode("hello")


def test_decoding_skips_special_tokens_but_keeps_tags(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{BOS}<think>\na\n</think>{EOS}")
    assert tokenizer.decode(ids) == "<think>\na\n</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}<think>\na\n</think>{EOS}"
    assert tokenizer.decode(tuple(ids)) == tokenizer.decode(ids)
    assert tokenizer.decode([]) == ""


def test_spaces_before_punctuation_are_not_cleaned_up(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("Why ? I 'm here , now .")) == "Why ? I 'm here , now ."


def test_ids_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")
    assert tokenizer.vocab_size < VOCAB_SIZE
    assert tokenizer.decode([*a, tokenizer.vocab_size, VOCAB_SIZE - 1, *a]) == "aa"
    assert tokenizer.token(tokenizer.vocab_size) is None


def test_eos_is_the_tokenizers_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (tokenizer.token_id(EOS),)


def test_a_long_text_is_neither_cut_nor_warned_about(tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    text = "abc " * 20000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert capfd.readouterr().err == ""


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 1"):
        tokenizer.encode("a\udc80")


def test_no_files_means_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "", '{"model": 3}'])
def test_damaged_files_are_one_line(directory: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes((directory / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_without_a_vocabulary_are_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes((directory / "tokenizer_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"has tokenizer_config\.json but no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_alone_is_enough(directory: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    alone = load_tokenizer(tmp_path)
    assert alone is not None
    text = f"{BOS}Tom has 12 apples.{EOS}"
    assert alone.encode(text) == tokenizer.encode(text)
    assert alone.eos_token_ids == ()
    with pytest.raises(RequestError, match="has no chat template"):
        alone.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    check_vocabulary(tokenizer, tokenizer.vocab_size)
    with pytest.raises(CheckpointError) as caught:
        check_vocabulary(tokenizer, 300)
    assert f"ids up to {tokenizer.vocab_size - 1} " in str(caught.value)
    assert "vocab_size is 300" in str(caught.value)


class _Stub:
    """Answers `apply_chat_template` in one of the shapes that versions of transformers have had."""

    chat_template = "x"
    eos_token_id = None

    def __init__(self, result: Any) -> None:
        self.result = result

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def apply_chat_template(self, *_: Any, **__: Any) -> Any:
        return self.result


@pytest.mark.parametrize(
    "result",
    [
        [5, 6, 7],
        (5, 6, 7),
        [[5, 6, 7]],
        np.array([5, 6, 7]),
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [[5, 6, 7]]},
        collections.UserDict(input_ids=[5, 6, 7]),  # a mapping that is no dict
    ],
    ids=["list", "tuple", "batch", "array", "dict", "batch in a dict", "mapping"],
)
def test_a_rendered_chat_is_a_list_of_ids_in_any_version(result: Any) -> None:
    ids = Tokenizer(_Stub(result), "stub").apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == [5, 6, 7]
    assert all(type(i) is int for i in ids)


def test_importing_and_loading_say_nothing_and_leave_jax_alone(directory: Path) -> None:
    code = (
        "import sys, json\n"
        "from minimax_jax.text.tokenizer import load_tokenizer\n"
        f"t = load_tokenizer({str(directory)!r})\n"
        "ids = t.apply_chat_template([{'role': 'user', 'content': 'hello'}])\n"
        "print(json.dumps([ids, 'jax' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    ids, has_jax = json.loads(done.stdout)
    assert ids
    assert not has_jax
