"""The bytes of one file, copied out a part at a time."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from minimax_jax.errors import CheckpointError


class DataFile:
    """A file that is open for reading; threads may read at the same time.

    A part that lies in one piece is read as such. Mapping would serve it too, but a page fault brings in as much as
    the device reads ahead (megabytes on some), which is 200 s in place of 1 s for the scales of MiniMax-M2. A part of
    many short pieces, the columns of a matrix, is copied from the mapped file.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.name = path.name
        self._fd = open_file(path)
        weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd).st_size
        if found != size:
            raise CheckpointError(f"{path.name} had {size} bytes when its header was read, found {found}")
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)

    def copy(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], index: tuple[slice, ...], out: np.ndarray
    ) -> int:
        """Writes the part at `index` of the array of `shape` at `offset` into `out`; returns its bytes on disk."""
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(self._map, dtype, count, offset)
        where: Any = (*index, ...)
        part = flat.reshape(shape)[where]  # a view, also of a scalar: nothing is read yet
        if not part.size or not part.flags.c_contiguous:
            np.copyto(out, part, casting="unsafe")
        elif out.dtype == dtype and out.flags.c_contiguous:
            self._read(offset + _distance(flat, part), out)
        else:
            stored = np.empty(part.shape, dtype)
            self._read(offset + _distance(flat, part), stored)
            np.copyto(out, stored, casting="unsafe")
        return int(part.nbytes)

    def _read(self, offset: int, out: np.ndarray) -> None:
        """Fills `out`, which lies in one piece."""
        left = out.reshape(-1).view(np.uint8).data
        while left:
            try:
                done = os.preadv(self._fd, [left], offset)
            except OSError as error:
                raise CheckpointError(f"{self.name} cannot be read at byte {offset}: {error.strerror}") from None
            if not done:
                raise CheckpointError(f"{self.name} now ends at byte {offset}, before its last tensor")
            left, offset = left[done:], offset + done


def open_file(path: Path) -> int:
    """A file descriptor for reading."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is a directory or a device, expected a file; fetch it again")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _distance(flat: np.ndarray, part: np.ndarray) -> int:
    """Bytes from the start of `flat` to that of `part`, a view of it."""
    return int(part.__array_interface__["data"][0] - flat.__array_interface__["data"][0])
