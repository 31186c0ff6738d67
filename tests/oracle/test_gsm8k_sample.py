"""The first GSM8K questions through `LLM.generate`, on a checkpoint that transformers wrote, against its `generate`."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoTokenizer

from minimax_jax.tiny import make_tiny
from tests.oracle import m2

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SEED, LIMIT, NEW_TOKENS = 8, 64, 16
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "rope_theta": 5e6,
    "rotary_dim": 16,
}
Main = Callable[[Sequence[str]], int]


@pytest.fixture(scope="module")
def main() -> Main:
    script = Path(__file__).resolve().parents[2] / "scripts" / "gsm8k_sample.py"
    run: Main = runpy.run_path(str(script))["main"]
    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, m2.MiniMaxM2ForCausalLM]:
    """Model and tokenizer, both written by `save_pretrained`."""
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("gsm8k")
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(folder / "tiny"))
    shutil.rmtree(folder / "tiny")
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = m2.random_model(SEED, **CONFIG, **ids)
    m2.save(model, folder / "model", max_shard_size="1MB")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model", model


def test_first_questions(
    shared: Path,
    main: Main,
    checkpoint: tuple[Path, m2.MiniMaxM2ForCausalLM],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, model = checkpoint
    questions, file = shared / "data" / "gsm8k_test.jsonl", tmp_path / "out.jsonl"
    arguments = ["--model", str(directory), "--questions", str(questions), "--limit", str(LIMIT)]
    assert main([*arguments, "--dtype", "float32", "--max-model-len", "512", "--output", str(file)]) == 0
    with capsys.disabled():
        print(capsys.readouterr().out)
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    with questions.open(encoding="utf-8") as lines:
        asked = [json.loads(next(lines))["question"] for _ in range(LIMIT)]
    assert [record["prompt"] for record in records] == asked

    eos = model.config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for record in records:
        assert record["prompt_token_ids"] == tokenizer.encode(record["prompt"], add_special_tokens=False)
        assert record["text"] == tokenizer.decode(record["token_ids"], skip_special_tokens=True)
        ended = record["token_ids"][-1] == eos
        assert record["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(record["token_ids"]) == NEW_TOKENS
        assert eos not in record["token_ids"][:-1]
    assert len({tuple(record["token_ids"]) for record in records}) > LIMIT * 3 // 4

    for record in records[:: LIMIT // 4]:
        prompt = torch.tensor([record["prompt_token_ids"]])
        theirs = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=eos, pad_token_id=eos)
        assert record["token_ids"] == theirs[0, prompt.shape[1] :].tolist()
    checked = sum(m2.check_greedy(model, r["prompt_token_ids"], r["token_ids"]) for r in records[1 :: LIMIT // 8])
    assert checked > 8 * NEW_TOKENS * 0.75


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no questions"),
        ('{"question": "How many?"}\n{"answer": "3"}\n', "line 2: expected a JSON object with a 'question'"),
        ("[1]\n", "line 1: expected a JSON object"),
        (None, "No such file"),
    ],
    ids=["empty", "no question", "no object", "no file"],
)
def test_bad_questions(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    questions = tmp_path / "questions.jsonl"
    if content is not None:
        questions.write_text(content, encoding="utf-8")
    assert main(["--model", str(tmp_path), "--questions", str(questions)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_questions_asked_for(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--questions", str(tmp_path / "q.jsonl"), "--limit", "0"]) == 2
    assert capsys.readouterr().err == "gsm8k_sample.py: error: --limit is 0; expected at least 1\n"
