"""Writing a safetensors file a part at a time: the header first, then any part of any tensor in its place."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from minimax_jax.checkpoint.safetensors_index import DTYPES

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor name -> the format's spelling of its dtype, shape

_ALIGNMENT = 8


class ShardWriter:
    """A new file; threads may write different parts at the same time. On the disk when closed without an error.

    Args:
      path: must not exist.
      tensors: every tensor of the file. They are laid out by size of the dtype, so that each is aligned.
    """

    def __init__(self, path: Path, tensors: Layout) -> None:
        self._rows: dict[str, tuple[int, int]] = {}  # offset of the first byte, bytes of a row
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name)):
            dtype, shape = tensors[name]
            row = math.prod(shape[1:]) * DTYPES[dtype].itemsize
            begin, end = end, end + row * (shape[0] if shape else 1)
            self._rows[name] = begin, row
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._pwrite(len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._fd, self._start + end)

    def write(self, name: str, part: np.ndarray, first_row: int = 0) -> None:
        """`part` is the rows of a tensor from `first_row` on."""
        begin, row = self._rows[name]
        self._pwrite(np.ascontiguousarray(part).reshape(-1).view(np.uint8), self._start + begin + first_row * row)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._fd)  # a full disk may show only here
        finally:
            os.close(self._fd)

    def _pwrite(self, data: Any, offset: int) -> None:
        left = memoryview(data)
        while left:
            done = os.pwrite(self._fd, left, offset)
            left, offset = left[done:], offset + done


def layout_bytes(tensors: Layout) -> int:
    """Bytes of the tensors, header aside."""
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors.values())
