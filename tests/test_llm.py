"""`LLM` refuses what it cannot run, in one line, before it reads a weight; the command line then exits with 2."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import minimax_jax.llm as llm_module
from minimax_jax import LLM, SamplingParams
from minimax_jax.cli import main
from minimax_jax.config import Parallelism, load_config
from minimax_jax.errors import CheckpointError, ConfigError, RequestError
from minimax_jax.memory import MemoryPlan, plan_memory
from tests.checkpoints import FIXTURES

FP8 = FIXTURES / "tiny-m2-fp8-block"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'; expected one of"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; expected one of"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; expected an integer of at least 1"),
        ({"tensor_parallel_size": 3}, "num_attention_heads 8 is not a multiple of 3"),
        ({"tensor_parallel_size": 16}, "num_attention_heads 8 is not a multiple of 16"),
        ({"tensor_parallel_size": 8, "data_parallel_size": 4}, "needs 32 devices, found 16"),
        ({"max_num_seqs": 3, "data_parallel_size": 2}, "max_num_seqs 3 is not divisible by data_parallel_size 2"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_model_len": 5000}, "max_model_len 5000 is over the model's max_position_embeddings 4096"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size is -1"),
        ({"seed": -1}, "seed is -1; expected an integer of at least 0"),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_options(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "open_checkpoint", lambda path: pytest.fail("opened a file first"))
    with pytest.raises(ConfigError) as caught:
        LLM(FP8, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def rewrite_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def remove_a_shard(directory: Path) -> str:
    (directory / "model-00001-of-00003.safetensors").unlink()
    return "model-00001-of-00003.safetensors"


def cut_a_shard(directory: Path) -> str:
    file = directory / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file.name


def name_a_tensor_that_is_nowhere(directory: Path) -> str:
    rewrite_index(directory, lambda names: names.update({"model.norm.weight": "model-00000-of-00003.safetensors"}))
    return "model.norm.weight"


def forget_a_tensor(directory: Path) -> str:
    rewrite_index(directory, lambda names: names.pop("model.layers.1.self_attn.q_norm.weight"))
    return "model.layers.1.self_attn.q_norm.weight"


def make_the_index_a_directory(directory: Path) -> str:
    (directory / INDEX).unlink()
    (directory / INDEX).mkdir()
    return INDEX


def edit_config(key: str, value: Any) -> Callable[[Path], str]:
    def edit(directory: Path) -> str:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {key: value}))
        return key

    edit.__name__ = f"config_{key}"
    return edit


def overwrite(directory: Path, name: str, value: bytes) -> None:
    """Replace the first bytes of a tensor."""
    shard = directory / json.loads((directory / INDEX).read_text())["weight_map"][name]
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + start : 8 + length + start + len(value)] = value
    shard.write_bytes(data)


def a_scale_that_is_nan(directory: Path) -> str:
    name = "model.layers.0.self_attn.k_proj.weight_scale_inv"
    overwrite(directory, name, np.float32(np.nan).tobytes())
    return name


@pytest.mark.parametrize(
    "damage",
    [
        remove_a_shard,
        cut_a_shard,
        name_a_tensor_that_is_nowhere,
        forget_a_tensor,
        a_scale_that_is_nan,
        edit_config("num_hidden_layers", 3),
        edit_config("num_local_experts", 4),
        edit_config("num_local_experts", 10**9),
        make_the_index_a_directory,
        edit_config("hidden_size", 32),
        edit_config("num_key_value_heads", 4),
        edit_config("vocab_size", 512),
        edit_config("scoring_func", "softmax"),
    ],
)
def test_damaged_checkpoints(damage: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "model"
    shutil.copytree(FP8, directory)
    named = damage(directory)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        LLM(directory, dtype="float32")
    assert named in str(caught.value)
    assert main(["generate", "--model", str(directory), "--prompt-ids", "1,2"]) == 2
    shown = capsys.readouterr()
    errors = [line for line in shown.err.splitlines() if line.startswith("minimax-jax: error:")]
    assert shown.out == ""
    assert len(errors) == 1
    assert named in errors[0]
    assert "Traceback" not in shown.err


def test_a_string_without_a_tokenizer_is_refused_and_ids_are_not() -> None:
    llm = LLM(FP8, dtype="float32", max_num_seqs=1, max_model_len=64)
    with pytest.raises(RequestError, match="has no tokenizer; pass a list of token ids"):
        llm.generate("hello")
    (output,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].text is None
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate([1, 2, 3], {"temperature": 0})  # type: ignore[arg-type]


def test_nan_in_a_weight_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "model"
    shutil.copytree(FP8, directory)
    overwrite(directory, "model.norm.weight", np.full(16, 0x7FC0, np.uint16).tobytes())  # bfloat16 NaN
    with pytest.raises(CheckpointError, match="logits are NaN or infinite"):
        LLM(directory, dtype="float32", max_num_seqs=1, max_model_len=64).generate([1, 2])
    assert main(["generate", "--model", str(directory), "--prompt-ids", "1,2", "--max-model-len", "64"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "minimax-jax: error: the model's logits are NaN or infinite" in shown.err


def plan(**changes: Any) -> MemoryPlan:
    sizes = {"max_num_seqs": 8, "max_model_len": 1000, "chunk": 128} | changes
    config, parallelism = load_config(FP8), Parallelism(data=2, model=4)
    return plan_memory(
        10**6, config, parallelism, **sizes, dtype=jnp.dtype("float32"), cache_dtype=jnp.dtype("bfloat16")
    )


def test_memory_of_the_cache_is_its_bytes() -> None:
    # 2 layers x (K, V) x 4 rows of this shard x 8 pages of 128 x 1 of 4 heads (2, each repeated) x 32 x 2 bytes
    assert plan().cache == 2 * 2 * 4 * 8 * 128 * 1 * 32 * 2
    assert plan(max_model_len=1025).cache == plan().cache // 8 * 9
    assert plan().total == plan().weights + plan().cache + plan().workspace


def test_a_plan_over_the_limit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryPlan(weights=2**30, cache=2**30, workspace=0, limit=2**31).check()
    with pytest.raises(ConfigError, match=r"total 2\.00 GiB of 1\.50 GiB.*XLA_PYTHON_CLIENT_MEM_FRACTION"):
        MemoryPlan(weights=2**30, cache=2**30, workspace=0, limit=3 * 2**29).check()
    monkeypatch.setattr("minimax_jax.memory._limit", lambda devices: 10**6)
    monkeypatch.setattr(llm_module, "load_parameters", lambda *args: pytest.fail("read a weight first"))
    with pytest.raises(ConfigError, match="too much; lower max_model_len"):
        LLM(FP8, dtype="float32")
