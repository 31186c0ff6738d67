"""The command: bad input is one line and exit code 2; good input is text on stdout and the log on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import minimax_jax
from minimax_jax.cli import main
from minimax_jax.text.tokenizer import load_tokenizer
from minimax_jax.tiny import TinyShape, make_tiny

PROMPT = "Question: Tom has 12 apples."
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(num_hidden_layers=1, vocab_size=512, max_position_embeddings=256)
    return make_tiny(tmp_path_factory.mktemp("cli") / "model", shape=shape)


@pytest.fixture(scope="module")
def model_without_tokenizer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ids")
    for file in model.iterdir():
        if "token" not in file.name and file.suffix != ".jinja":
            (directory / file.name).symlink_to(file)
    return directory


def refusal(capsys: Captured, *arguments: str) -> str:
    """The one line of a command that must fail."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("minimax-jax: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.removeprefix("minimax-jax: error: ").rstrip("\n")


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def never_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input has to be refused before the model is loaded."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    from minimax_jax import llm

    monkeypatch.setattr(llm, "load_parameters", load)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["generate", "hi"], "arguments are required: --model"),
        (["generate", "--model", "./x", "hi", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["generate", "--model", "./x", "hi", "--temperature", "warm"], "--temperature: invalid float value"),
        (["generate", "--model", "./x", "hi", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["generate", "--model", "./x", "hi", "--tensor-parallel-size", "0"], "'0' is not a whole number from 1"),
        (["generate", "--model", "./x", "hi", "--max-tok", "3"], "unrecognized arguments: --max-tok"),
        (["inspect"], "arguments are required: DIR"),
        (["inspect", "x", "--max-model-len", "-5"], "'-5' is not a whole number from 1"),
        (["make-tiny", "x", "--format", "int4"], "--format: invalid choice: 'int4'"),
        (["make-tiny", "x", "--seed", "-1"], "seed is -1"),
        (["make-tiny", "x", "--layers", "0"], "num_hidden_layers is 0"),
    ],
)
def test_bad_arguments(capsys: Captured, arguments: list[str], message: str) -> None:
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "-3"], "max_tokens is -3"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "inf"], "temperature is inf"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--top-k", "-2"], "top_k is -2"),
        (["--logprobs", "-1"], "logprobs is -1"),
        (["--logprobs", "1000"], "logprobs is 1000"),
        (["--seed", str(2**64)], "seed is"),
        (["--max-model-len", "1000000"], "max_model_len 1000000 is over"),
        (["--max-model-len", "4"], "the prompt has "),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size 3"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (
            ["--max-num-seqs", "3", "--data-parallel-size", "2"],
            "max_num_seqs 3 is not divisible by data_parallel_size 2",
        ),
    ],
)
@pytest.mark.usefixtures("never_loads")
def test_values_that_cannot_be_served(capsys: Captured, model: Path, arguments: list[str], message: str) -> None:
    assert message in refusal(capsys, "generate", "--model", str(model), PROMPT, *arguments)


@pytest.mark.usefixtures("never_loads")
def test_prompts_that_cannot_be_served(
    capsys: Captured, model: Path, model_without_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: str, model: Path = model) -> str:
        return refusal(capsys, "generate", "--model", str(model), *arguments)

    (tmp_path / "prompt").write_text(PROMPT)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    assert refuse("") == "the prompt is empty; it needs at least one token"
    assert refuse("hi", "") == "prompt 2 of 2 is empty; it needs at least one token"
    assert refuse("--prompt-file", str(tmp_path / "empty")) == "the prompt is empty; it needs at least one token"
    assert refuse("--prompt-ids", "") == "the prompt is empty; it needs at least one token"
    give_stdin(monkeypatch, b"")
    assert refuse() == "the prompt is empty; it needs at least one token"
    give_stdin(monkeypatch, b"\xf0\x28")
    assert "stdin is not UTF-8 text: byte 0xf0 at 0" in refuse("-")
    assert "is not UTF-8 text: byte 0xff at 2" in refuse("--prompt-file", str(tmp_path / "binary"))
    assert "cannot be read: No such file" in refuse("--prompt-file", str(tmp_path / "none"))
    assert "cannot be read: Is a directory" in refuse("--prompt-file", str(tmp_path))
    assert "by prompt arguments and by --prompt-file" in refuse("hi", "--prompt-file", str(tmp_path / "prompt"))
    assert "by prompt arguments and by --prompt-ids" in refuse("hi", "--prompt-ids", "1")
    assert "by --prompt-file and by --prompt-ids" in refuse("--prompt-file", "x", "--prompt-ids", "1")
    assert "has 'x'; expected token ids" in refuse("--prompt-ids", "1,x")
    assert "has '-1'; expected token ids" in refuse("--prompt-ids=-1")
    assert "prompt token id 512 is not in the vocabulary" in refuse("--prompt-ids", "1,512")
    assert "not valid Unicode" in refuse("a\udcff")
    assert "has no tokenizer" in refuse("hi", model=model_without_tokenizer)
    assert "256" in refuse("word " * 400)


def test_kernels_that_this_jax_does_not_have(capsys: Captured, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pallas_kernels.paged_attention.kernel", None)
    assert main(["generate", "--model", str(model), "--implementation", "pallas", "a"]) == 2
    *_, message = capsys.readouterr().err.splitlines()  # after the lines about loading
    assert message.startswith("minimax-jax: error: ")
    assert "paged_attention: implementation 'pallas' is not available: this JAX has no Pallas Triton route" in message
    assert "leave it out, or take 'xla'" in message


def test_models_that_are_not_there(capsys: Captured, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    assert refusal(capsys, "generate", "--model", missing, "hi") == f"model '{missing}': no such directory"
    assert "config.json" in refusal(capsys, "generate", "--model", str(tmp_path), "hi")
    assert missing in refusal(capsys, "inspect", missing)
    assert "safetensors" in refusal(capsys, "inspect", str(tmp_path))


def test_a_repository_that_cannot_be_fetched_is_refused(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "cannot be reached" in refusal(capsys, "generate", "--model", "owner/model", "hi")


def test_a_broken_tokenizer_is_refused(capsys: Captured, model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "tokenizer files" in refusal(capsys, "generate", "--model", str(tmp_path), "hi")


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path) -> None:
    from minimax_jax import tiny

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "make_tiny", interrupt)
    assert main(["make-tiny", str(tmp_path / "a")]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "minimax_jax.cli", "inspect", str(model)]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


# --- help


def test_help_needs_no_jax(capsys: Captured) -> None:
    code = (
        "import sys\n"
        "from minimax_jax.cli import main\n"
        "commands = ([], ['generate'], ['inspect'], ['quantize'], ['make-tiny'])\n"
        "codes = [main([*command, '--help']) for command in commands]\n"
        "print(codes, [name for name in ('jax', 'transformers', 'numpy', 'torch') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []"
    assert done.stderr == ""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"minimax-jax {minimax_jax.__version__}\n"


# --- make-tiny and inspect


def test_make_tiny_writes_and_says_so(capsys: Captured, tmp_path: Path) -> None:
    arguments = ["make-tiny", str(tmp_path / "a"), "--format", "fp8", "--seed", "7", "--layers", "1"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert str(tmp_path / "a") in err
    assert json.loads((tmp_path / "a" / "config.json").read_text())["num_hidden_layers"] == 1
    assert "is not empty" in refusal(capsys, *arguments)


def test_inspect_shows_what_is_there(capsys: Captured, model: Path) -> None:
    assert main(["inspect", str(model)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    sections = re.findall(r"^(\w[\w ]*?)  +", out, flags=re.M)
    assert sections == [
        "checkpoint", "files", "stored as", "model", "generation", "tokenizer", "formats", "coverage", "memory",
    ]  # fmt: skip
    tensors = len(json.loads((model / "model.safetensors.index.json").read_text())["weight_map"])
    assert f"{tensors} of {tensors} tensors used, each once; 15 of 15 parameters filled" in out
    assert "8 query heads and 2 key/value heads of 32 channels, 16 of them rotated" in out
    assert "with a chat template" in out
    assert "model-00002-of-00003.safetensors" in out


def test_inspect_plans_a_mesh_without_having_it(capsys: Captured, model: Path) -> None:
    def planned(*arguments: str) -> dict[str, int]:
        assert main(["inspect", str(model), *arguments]) == 0
        out = capsys.readouterr().out
        return {name: int(n) for name, n in re.findall(r"(weights|kv cache|workspace|total) +.*?\((\d+) bytes\)", out)}

    one = planned("--max-model-len", "256", "--max-num-seqs", "2")
    # 2 rows x 256 tokens x 1 layer x (k, v) x 2 heads x 32 channels x 2 bytes
    assert one["kv cache"] == 2 * 256 * 2 * 2 * 32 * 2
    assert one["total"] == one["weights"] + one["kv cache"] + one["workspace"]
    two = planned("--max-model-len", "256", "--max-num-seqs", "2", "--tensor-parallel-size", "2")
    assert two["kv cache"] == one["kv cache"] // 2
    assert one["weights"] // 2 < two["weights"] < one["weights"]
    wide = planned("--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-dtype", "float32")
    assert wide["kv cache"] == 2 * one["kv cache"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size", "3"], "tensor_parallel_size 3"),
        (["--max-model-len", "257"], "max_model_len 257 is over"),
        (["--data-parallel-size", "3"], "max_num_seqs 8 is not divisible by data_parallel_size 3"),
    ],
)
def test_inspect_refuses_an_impossible_plan(capsys: Captured, model: Path, arguments: list[str], message: str) -> None:
    assert message in refusal(capsys, "inspect", str(model), *arguments)


def test_inspect_names_what_does_not_fit(capsys: Captured, model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 16, "rotary_dim": 8}))
    assert main(["inspect", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("checkpoint")  # what is known is shown
    assert "expected" in err
    assert err.count("\n") == 1


def test_inspect_shows_the_files_of_a_model_that_cannot_run(capsys: Captured, shared: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(shared / "data" / "checkpoints" / "m3-mxfp4-quark", tmp_path / "other")
    (directory / "config.json").chmod(0o644)
    (directory / "config.json").write_text('{"model_type": "minimax_text_01"}')
    assert main(["inspect", str(directory)]) == 2
    out, err = capsys.readouterr()
    assert re.search(r"U8 +\d+ tensors", out)
    assert err.count("\n") == 1
    assert "model_type 'minimax_text_01' is not supported" in err


def test_inspect_of_m3_counts_what_sees(capsys: Captured, shared: Path) -> None:
    assert main(["inspect", str(shared / "data" / "checkpoints" / "m3-mxfp4-quark")]) == 0
    out, err = capsys.readouterr()
    assert "MiniMax-M3 (model_type minimax_m3_vl)" in out
    assert "3 layers attend to 3 blocks of 16 tokens" in out
    assert "43 of the vision tower and its projector left out" in out
    assert not err


# --- generate, with a real model


OPTIONS = ["--max-tokens", "20", "--max-model-len", "128", "--dtype", "float32", "--temperature", "0", "--ignore-eos"]


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """The Python API's own output for the same options."""
    llm = minimax_jax.LLM(str(model), dtype="float32", max_model_len=128, max_num_seqs=1)
    params = minimax_jax.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    return llm.generate([PROMPT], params)[0].outputs[0]


def test_one_prompt_streams_the_text_of_the_python_api(capsys: Captured, model: Path, expected: Any) -> None:
    assert main(["generate", "--model", str(model), PROMPT, *OPTIONS]) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + ("" if expected.text.endswith("\n") else "\n")
    assert "20 new tokens, finish_reason length" in err


@pytest.mark.parametrize("source", ["stdin", "dash", "file", "ids", "no stream"])
def test_every_way_to_give_a_prompt_means_the_same(
    capsys: Captured, model: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "prompt").write_text(f"{PROMPT}\n")
    give_stdin(monkeypatch, f"{PROMPT}\n".encode())
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    arguments = {
        "stdin": [],
        "dash": ["-"],
        "file": ["--prompt-file", str(tmp_path / "prompt")],
        "ids": ["--prompt-ids", ",".join(map(str, tokenizer.encode(PROMPT)))],
        "no stream": [PROMPT, "--no-stream"],
    }[source]
    assert main(["generate", "--model", str(model), *arguments, *OPTIONS]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected.text.rstrip("\n")


def test_log_probabilities_are_a_table(capsys: Captured, model: Path, expected: Any) -> None:
    assert main(["generate", "--model", str(model), PROMPT, "--logprobs", "1", *OPTIONS]) == 0
    out = capsys.readouterr().out
    rows = [line.split("\t") for line in out[out.index("step\tid\tlogprob") :].splitlines()]
    chosen = [int(row[1]) for row in rows[1:] if row[3] == "1"]
    assert chosen == list(expected.token_ids)
    for row, entries in zip(rows[1:], expected.logprobs, strict=True):
        (entry,) = entries.values()
        assert float(row[2]) == pytest.approx(entry.logprob, abs=1e-3)


def test_several_prompts_come_in_order(capsys: Captured, model: Path, expected: Any) -> None:
    assert main(["generate", "--model", str(model), "Other", PROMPT, "--max-num-seqs", "1", *OPTIONS]) == 0
    out = capsys.readouterr().out
    first, second = re.split(r"^==> prompt \d of 2 <==\n", out, flags=re.M)[1:]
    assert second.rstrip("\n") == expected.text.rstrip("\n") != first.rstrip("\n")


def test_without_a_tokenizer_ids_come_out(
    capsys: Captured, model: Path, model_without_tokenizer: Path, expected: Any
) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ids = ",".join(map(str, tokenizer.encode(PROMPT)))
    assert main(["generate", "--model", str(model_without_tokenizer), "--prompt-ids", ids, *OPTIONS]) == 0
    assert capsys.readouterr().out == ",".join(map(str, expected.token_ids)) + "\n"


def test_a_seed_repeats_and_another_one_differs(capsys: Captured, model: Path) -> None:
    def sampled(seed: int) -> str:
        options = [
            "--temperature",
            "1.5",
            "--top-k",
            "0",
            "--max-tokens",
            "12",
            "--max-model-len",
            "128",
            "--dtype",
            "float32",
        ]
        assert main(["generate", "--model", str(model), PROMPT, "--seed", str(seed), *options]) == 0
        return capsys.readouterr().out

    assert sampled(1) == sampled(1) != sampled(2)
