"""What is proved from the index and the headers before any tensor is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimax_jax.checkpoint import open_checkpoint
from minimax_jax.errors import CheckpointError
from tests.checkpoint.tiny_checkpoint import (
    BF16,
    FP8,
    Tensors,
    read_index,
    write_checkpoint,
    write_file,
    write_index,
)

FIRST, SECOND = "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"


def four_tensors() -> Tensors:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal((4, 6)).astype(BF16) for name in ("a", "b", "model.norm.weight", "z")}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", four_tensors())


def message(directory: Path) -> str:
    """The one line with which opening fails."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_reads_back(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert list(checkpoint.tensors) == list(four_tensors())
    assert checkpoint.tensors["z"].file == SECOND
    for name, value in four_tensors().items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_single_file_without_index(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", four_tensors())
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("z"), four_tensors()["z"])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16, FP8, np.uint8, np.int32, np.int64])
def test_dtypes_and_scalars(tmp_path: Path, dtype: Any) -> None:
    tensors = {"grid": np.arange(12).astype(dtype).reshape(3, 4), "scalar": np.array(5).astype(dtype)}
    tensors["none"] = np.zeros((0, 4), dtype)
    write_file(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path)
    for name, value in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        np.testing.assert_array_equal(found, value)


def test_same_as_the_safetensors_library(shared: Path) -> None:
    from safetensors import safe_open

    directory = shared / "data" / "checkpoints" / "m2-bf16"
    checkpoint = open_checkpoint(directory)
    seen = 0
    for file in sorted(set(read_index(directory).values())):
        with safe_open(directory / file, "np") as library:
            for name in library.keys():  # noqa: SIM118 (not a mapping)
                np.testing.assert_array_equal(checkpoint.read(name), library.get_tensor(name))
                seen += 1
    assert seen == len(checkpoint.tensors)


@pytest.mark.parametrize("odd", [1, 2, 3, 4])
def test_any_offset(tmp_path: Path, odd: int) -> None:
    """Tensors may begin at any byte, not only at a multiple of their item size."""
    tensors = {"odd": np.arange(odd, dtype=np.uint8), "wide": np.arange(5, dtype=np.float32)}
    write_file(tmp_path / "model.safetensors", tensors)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("wide"), tensors["wide"])


def test_unlisted_files_are_ignored(directory: Path) -> None:
    """A stale file with the same names, full of 7.0, changes nothing; neither does one that is no checkpoint."""
    sevens = {name: np.full_like(value, 7.0) for name, value in four_tensors().items()}
    write_file(directory / "model.safetensors", sevens)
    write_file(directory / "model-00002-of-00003.safetensors", sevens)
    (directory / "broken.safetensors").write_bytes(b"no header")
    checkpoint = open_checkpoint(directory)
    for name, value in four_tensors().items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_missing_shard(directory: Path) -> None:
    (directory / SECOND).unlink()
    text = message(directory)
    assert SECOND in text
    assert FIRST not in text


def test_tensor_that_lies_nowhere(directory: Path) -> None:
    weight_map = read_index(directory)
    tensors = four_tensors()
    del tensors["model.norm.weight"]
    write_checkpoint(directory, tensors)
    write_index(directory, weight_map | {"model.norm.weight": FIRST, "b": SECOND} | read_index(directory))
    text = message(directory)
    assert "model.norm.weight" in text
    assert FIRST in text


def test_tensor_in_another_shard(directory: Path) -> None:
    write_index(directory, read_index(directory) | {"a": SECOND})
    text = message(directory)
    assert "'a'" in text
    assert FIRST in text
    assert SECOND in text


def test_tensor_that_the_index_lacks(directory: Path) -> None:
    weight_map = read_index(directory)
    del weight_map["z"]
    write_index(directory, weight_map)
    text = message(directory)
    assert "z" in text
    assert SECOND in text


def test_tensor_in_two_files(directory: Path) -> None:
    tensors = four_tensors()
    write_file(directory / SECOND, {name: tensors[name] for name in ("model.norm.weight", "z", "a")})
    text = message(directory)
    assert "'a'" in text
    assert FIRST in text
    assert SECOND in text


def test_tensor_twice_in_a_header(tmp_path: Path) -> None:
    entry = json.dumps({"dtype": "U8", "shape": [1], "data_offsets": [0, 1]})
    header = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert "'a' twice" in message(tmp_path)


def test_tensor_twice_in_the_index(directory: Path) -> None:
    text = json.dumps({"weight_map": read_index(directory)})
    (directory / "model.safetensors.index.json").write_text(text.replace('"a":', f'"z": "{FIRST}", "a":'))
    assert "'z' twice" in message(directory)


@pytest.mark.parametrize("cut", [1, 40, 10**6])
def test_truncated_file(directory: Path, cut: int) -> None:
    whole = (directory / SECOND).read_bytes()
    (directory / SECOND).write_bytes(whole[: max(len(whole) - cut, 9)])
    text = message(directory)
    assert SECOND in text
    assert "truncated" in text
    assert str(max(len(whole) - cut, 9)) in text
    if cut < 100:
        assert str(len(whole)) in text


@pytest.mark.parametrize("content", [b"", b"\x00\x00", b"\xff" * 64])
def test_no_safetensors_file(directory: Path, content: bytes) -> None:
    (directory / SECOND).write_bytes(content)
    text = message(directory)
    assert SECOND in text
    assert str(len(content)) in text


def test_bytes_behind_the_last_tensor(directory: Path) -> None:
    with (directory / SECOND).open("ab") as stream:
        stream.write(b"more")
    assert "after its last tensor" in message(directory)


def test_git_lfs_pointer(directory: Path) -> None:
    (directory / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    assert "git lfs pull" in message(directory)


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xfe", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"[" * 100_000])
def test_corrupt_header(directory: Path, header: bytes) -> None:
    (directory / FIRST).write_bytes(len(header).to_bytes(8, "little") + header)
    assert FIRST in message(directory)


ENTRY = {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "F3"}, "'F3'"),
        ({"dtype": ["F32"]}, "dtype"),
        ({"dtype": "F32"}, "expected 96"),
        ({"shape": [4, 7]}, "expected 56"),
        ({"shape": [4, -6]}, "whole numbers"),
        ({"shape": [4, True]}, "whole numbers"),
        ({"shape": [4.0, 6]}, "whole numbers"),
        ({"shape": 24}, "shape"),
        ({"data_offsets": [0, 47]}, "47 bytes"),
        ({"data_offsets": [48, 96]}, "overlap or leave a hole"),
        ({"data_offsets": [2, 50]}, "overlap or leave a hole"),
        ({"data_offsets": [0, 24, 48]}, "data_offsets"),
        ({"data_offsets": [48, 0]}, "-48 bytes"),
    ],
)
def test_wrong_entry(directory: Path, change: dict[str, Any], expected: str) -> None:
    tensors = four_tensors()
    part = {name: tensors[name] for name in ("a", "b")}
    write_file(directory / FIRST, part, {"a": ENTRY | change})
    text = message(directory)
    assert expected in text
    assert FIRST in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "weight_map"),
        (b'{"weight_map": {}}', "weight_map"),
        (b'{"weight_map": {"a": 1}}', "'a'"),
        (b'{"weight_map": {"a": "../other.safetensors"}}', "../other.safetensors"),
        (b'{"weight_map": {"a": "/other.safetensors"}}', "/other.safetensors"),
    ],
)
def test_corrupt_index(directory: Path, content: bytes, expected: str) -> None:
    (directory / "model.safetensors.index.json").write_bytes(content)
    text = message(directory)
    assert expected in text
    assert "model.safetensors.index.json" in text


def test_empty_directory(tmp_path: Path) -> None:
    assert "neither" in message(tmp_path)
    assert "not a directory" in message(tmp_path / "absent")
    write_file(tmp_path / "pytorch.safetensors", four_tensors())
    assert "pytorch.safetensors" in message(tmp_path)


def test_file_that_changes_after_opening(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    (directory / FIRST).write_bytes((directory / FIRST).read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=FIRST):
        checkpoint.read("a")


def test_file_that_disappears_after_opening(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    (directory / FIRST).unlink()
    with pytest.raises(CheckpointError, match=FIRST):
        checkpoint.read("a")


def test_file_that_is_cut_while_it_is_read(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    checkpoint.read("a")
    with (directory / FIRST).open("r+b") as stream:
        stream.truncate(checkpoint.tensors["b"].offset + 5)
    with pytest.raises(CheckpointError, match=f"{FIRST} now ends at byte"):
        checkpoint.read("b")


def test_closing_opens_again(directory: Path) -> None:
    with open_checkpoint(directory) as checkpoint:
        checkpoint.read("a")
    np.testing.assert_array_equal(checkpoint.read("a"), four_tensors()["a"])
