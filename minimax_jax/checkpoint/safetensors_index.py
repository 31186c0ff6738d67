"""What a checkpoint directory holds, proved from its index and headers before any tensor is read.

A safetensors file is: 8 bytes little endian (length of the header), the header (JSON: name -> dtype, shape, offsets
counted from the end of the header), then the tensors' bytes without holes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from minimax_jax.checkpoint.data_file import DataFile, open_file
from minimax_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the checkpoint, not yet read.

    Attributes:
      name: as in the file.
      file: the file's name inside the checkpoint directory.
      dtype: the format's spelling, such as "BF16".
      shape: as in the header.
      offset: of its first byte from the start of the file.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype it is read as."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        return f"tensor '{self.name}' ({self.dtype} {list(self.shape)} in {self.file})"


class Checkpoint:
    """The tensors of one directory; files are opened when first read, and let go by `close`.

    Attributes:
      directory: where the files are.
      tensors: every tensor by name.
      bytes_read: bytes of tensors that were copied out so far.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo], sizes: Mapping[str, int]) -> None:
        self.directory = directory
        self.tensors = tensors
        self.bytes_read = 0
        self._sizes = sizes
        self._files: dict[str, DataFile] = {}
        self._lock = threading.Lock()

    def copy(self, info: TensorInfo, shape: tuple[int, ...], index: tuple[slice, ...], out: np.ndarray) -> None:
        """Writes `info`, seen as `shape` and cut by `index`, into `out`, cast to the dtype of `out`.

        Only the bytes of the part are read; threads may call this at the same time.
        """
        count = self._file(info.file).copy(info.offset, info.numpy_dtype, shape, index, out)
        with self._lock:
            self.bytes_read += count

    def read(self, name: str) -> np.ndarray:
        """A whole tensor as it is stored."""
        info = self.tensors[name]
        out = np.empty(info.shape, info.numpy_dtype)
        self.copy(info, info.shape, (), out)
        return out

    def close(self) -> None:
        """Lets the files go; reading again opens them again."""
        with self._lock:
            self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> DataFile:
        with self._lock:
            found = self._files.get(name)
            if found is None:
                found = self._files[name] = DataFile(self.directory / name, self._sizes[name])
            return found


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Reads the index and every header, and no tensor.

    With `model.safetensors.index.json` the files are those that it lists, whatever else lies beside them; without it
    the one file `model.safetensors`.

    Raises:
      CheckpointError: a file is missing, damaged or truncated, or the index and the headers disagree.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint '{directory}' is not a directory")
    listed = _read_index(directory / INDEX_NAME) if (directory / INDEX_NAME).exists() else None
    files = sorted(set(listed.values())) if listed is not None else [SINGLE_NAME]
    missing = [file for file in files if not (directory / file).is_file()]
    if missing and listed is None:
        found = sorted(path.name for path in directory.glob("*.safetensors"))
        raise CheckpointError(
            f"checkpoint '{directory}' has neither {INDEX_NAME} nor {SINGLE_NAME}"
            + (f"; it has {name_some(found)}, which no index lists" if found else "; only safetensors can be loaded")
        )
    if missing:
        raise CheckpointError(
            f"{INDEX_NAME} lists {len(files)} files, of which {len(missing)} are not in '{directory}': "
            f"{name_some(missing)}; fetch them again"
        )
    tensors: dict[str, TensorInfo] = {}
    sizes: dict[str, int] = {}
    for file in files:
        header, sizes[file] = _read_header(directory / file, file)
        for info in header:
            if info.name in tensors:
                raise CheckpointError(f"tensor '{info.name}' is in both {tensors[info.name].file} and {file}")
            tensors[info.name] = info
    if listed is not None:
        _check_index(listed, tensors)
    return Checkpoint(directory, tensors, sizes)


def name_some(names: Iterable[str], limit: int = 5) -> str:
    """Up to `limit` names, and how many there are where that is more."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    with open(open_file(path), "rb") as stream:
        listed = _parse_json(stream.read(), path.name).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path.name} has no 'weight_map' from tensor names to files")
    for name, file in listed.items():
        if not isinstance(file, str) or len(file) > 255 or Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(f"{path.name} puts tensor '{name}' in {file!r}, expected a file of the directory")
    return listed


def _check_index(listed: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """The index and the headers must tell the same story, in both directions."""
    for name, file in listed.items():
        found = tensors.get(name)
        if found is None:
            raise CheckpointError(f"{INDEX_NAME} puts tensor '{name}' in {file}, but that file does not hold it")
        if found.file != file:
            raise CheckpointError(f"{INDEX_NAME} puts tensor '{name}' in {file}, but it is in {found.file}")
    unlisted = [name for name in tensors if name not in listed]
    if unlisted:
        raise CheckpointError(
            f"{tensors[unlisted[0]].file} holds {len(unlisted)} tensors that {INDEX_NAME} does not list: "
            f"{name_some(unlisted)}; the index is stale"
        )


def _read_header(path: Path, file: str) -> tuple[list[TensorInfo], int]:
    """The tensors of one file in the order of their bytes, and the file's size."""
    with open(open_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if prefix == _LFS_POINTER[:8] and (prefix + stream.read(15)) == _LFS_POINTER:
            raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
        length = int.from_bytes(prefix, "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{file} is truncated or no safetensors file: its header needs {8 + length} bytes, found {size}"
            )
        if length > _HEADER_LIMIT:
            raise CheckpointError(f"{file} has a header of {length} bytes, expected at most {_HEADER_LIMIT}")
        stream.seek(8)
        header = _parse_json(stream.read(length), f"the header of {file}")
    infos = [_parse_entry(name, entry, file, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = 8 + length
    for info in infos:
        if info.offset != end:
            raise CheckpointError(
                f"{info} begins at byte {info.offset}, expected {end}: tensors overlap or leave a hole"
            )
        end += info.nbytes
    if size != end:
        what = "is truncated" if size < end else "has bytes after its last tensor"
        raise CheckpointError(f"{file} {what}: its header describes {end} bytes, found {size}; fetch it again")
    return infos, size


def _parse_entry(name: str, entry: Any, file: str, start: int) -> TensorInfo:
    """One entry of a header, with its shape and offsets checked against each other."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"the header of {file} has no dtype, shape and data_offsets for '{name}'") from None
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointError(
            f"the header of {file} gives '{name}' shape {list(shape)} and data_offsets {[begin, end]}, "
            "expected whole numbers from 0"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"the header of {file} gives '{name}' dtype {dtype!r}, expected one of {', '.join(DTYPES)}"
        )
    info = TensorInfo(name, file, dtype, shape, start + begin)
    if end - begin != info.nbytes:
        raise CheckpointError(f"{info} has {end - begin} bytes in the header, expected {info.nbytes} from its shape")
    return info


def _parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no key comes twice."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise CheckpointError(f"{where} names '{error}' twice") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


class _DuplicateKey(Exception):
    """A key that comes twice in one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKey(next(name for name in names if names.count(name) > 1))
    return value
