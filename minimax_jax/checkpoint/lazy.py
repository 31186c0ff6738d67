"""Arrays that are described now and read later, part by part: a device's part reads only the bytes it is made of."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from minimax_jax.checkpoint.safetensors_index import Checkpoint, TensorInfo
from minimax_jax.sharding import Axes
from pallas_kernels.quant import E2M1, SCALE_DTYPES, Format, codes_per_element

Index = tuple[slice, ...]  # one slice a dimension, with start and stop filled in and a step of one
Job = Callable[[], None]  # copies one piece; jobs of one read touch disjoint memory

_ALIGNMENT = 64  # bytes; the CPU back end takes such a buffer over without a copy


class LazyArray(abc.ABC):
    """An array on disk, perhaps made of parts of several tensors.

    Attributes:
      shape: of the whole array.
      dtype: of what `read` returns.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...] = (), pool: Executor | None = None) -> np.ndarray:
        """The part at `index` as a fresh array; `pool` spreads the copying over threads."""
        whole = normalize(index, self.shape)
        out = _empty(tuple(part.stop - part.start for part in whole), self.dtype)
        jobs = list(self.jobs(whole, out))
        if pool is None or len(jobs) == 1:
            for job in jobs:
                job()
        else:
            list(pool.map(_run, jobs))
        return out

    @abc.abstractmethod
    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        """What to run so that `out` holds the part at `index`, cast to the dtype of `out`."""


@dataclasses.dataclass(frozen=True)
class LazyQuant:
    """A packed matrix, or a stack of them, before it is read; the fields are those of `QuantTensor`."""

    payload: LazyArray
    scale: LazyArray
    format: Format
    global_scale: LazyArray | None = None
    input_scale: LazyArray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded matrix."""
        *lead, cols = self.payload.shape
        return (*lead, cols * codes_per_element(self.payload.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(array.nbytes for array, _ in self.arrays(()))

    def arrays(self, axes: Axes) -> list[tuple[LazyArray, Axes]]:
        """Payload, scale, global and input scale, where they are there, with the logical axes of each."""
        found = [
            (self.payload, axes),
            (self.scale, axes),
            (self.global_scale, axes[:-2]),
            (self.input_scale, axes[:-2]),
        ]
        return [(array, axes) for array, axes in found if array is not None]


Lazy = LazyArray | LazyQuant


def normalize(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """`index` with a filled-in slice for every dimension; missing ones stand for the whole dimension."""
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(full, shape, strict=True))


class Tensor(LazyArray):
    """One tensor of a checkpoint, seen in `shape` (the same elements) where that is given."""

    def __init__(self, checkpoint: Checkpoint, info: TensorInfo, shape: tuple[int, ...] | None = None) -> None:
        self.checkpoint = checkpoint
        self.info = info
        self.shape = info.shape if shape is None else shape
        self.dtype = info.numpy_dtype

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        yield partial(self.checkpoint.copy, self.info, self.shape, index, out)


class Cast(LazyArray):
    """`source` in another dtype."""

    def __init__(self, source: LazyArray, dtype: np.dtype[Any]) -> None:
        self.source = source
        self.shape = source.shape
        self.dtype = dtype

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        return self.source.jobs(index, out)  # every copy casts to the dtype of `out`


class Stack(LazyArray):
    """Arrays of one shape and dtype along a new first axis."""

    def __init__(self, sources: Sequence[LazyArray]) -> None:
        self.sources = tuple(sources)
        self.shape = (len(self.sources), *self.sources[0].shape)
        self.dtype = self.sources[0].dtype
        for source in self.sources:
            if source.shape != self.shape[1:] or source.dtype != self.dtype:
                raise ValueError(f"cannot stack {source.dtype} {source.shape} on {self.dtype} {self.shape[1:]}")

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        for place, number in enumerate(range(index[0].start, index[0].stop)):
            yield from self.sources[number].jobs(index[1:], out[place, ...])  # of scalars too, a view


class RepeatHeads(LazyArray):
    """Groups of `head` rows, each `times` times in a row: heads 0, 1 -> 0, 0, 1, 1."""

    def __init__(self, source: LazyArray, head: int, times: int) -> None:
        if source.shape[0] % head:
            raise ValueError(f"{source.shape[0]} rows are no multiple of a head's {head}")
        self.source, self.head, self.times = source, head, times
        self.shape = (source.shape[0] * times, *source.shape[1:])
        self.dtype = source.dtype

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        start, stop = index[0].start, index[0].stop
        row = start
        while row < stop:
            copy, inside = divmod(row, self.head)
            rows = min(self.head - inside, stop - row)
            begin = copy // self.times * self.head + inside
            place = slice(row - start, row - start + rows)
            yield from self.source.jobs((slice(begin, begin + rows), *index[1:]), out[place])
            row += rows


class Rows(LazyArray):
    """Rows `start` to `stop` of an array."""

    def __init__(self, source: LazyArray, start: int, stop: int) -> None:
        self.source, self.start = source, start
        self.shape = (stop - start, *source.shape[1:])
        self.dtype = source.dtype

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        rows = slice(self.start + index[0].start, self.start + index[0].stop)
        return self.source.jobs((rows, *index[1:]), out)


class Regrid(LazyArray):
    """A grid of block scales for smaller blocks: each scale repeated for the blocks that its own block is cut into."""

    def __init__(
        self, source: LazyArray, block: tuple[int, int], new_block: tuple[int, int], shape: tuple[int, int]
    ) -> None:
        if block[0] % new_block[0] or block[1] % new_block[1]:
            raise ValueError(f"blocks of {block} cannot be cut into blocks of {new_block}")
        self.source = source
        self.factors = (block[0] // new_block[0], block[1] // new_block[1])
        self.shape = grid_shape(shape, new_block)
        self.dtype = source.dtype

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        yield partial(self._fill, index, out)

    def _fill(self, index: Index, out: np.ndarray) -> None:
        outer = tuple(
            slice(part.start // factor, -(-part.stop // factor))
            for part, factor in zip(index, self.factors, strict=True)
        )
        scales = self.source.read(outer)
        for axis, (part, whole, factor) in enumerate(zip(index, outer, self.factors, strict=True)):
            places = np.arange(part.start, part.stop) // factor - whole.start
            scales = np.take(scales, places, axis=axis)
        out[...] = scales


class Dequantized(LazyArray):
    """A packed matrix decoded while it is read: the product in float32, rounded once to `dtype`."""

    def __init__(self, packed: LazyQuant, dtype: np.dtype[Any]) -> None:
        self.packed = packed
        self.shape = packed.shape
        self.dtype = dtype

    def jobs(self, index: Index, out: np.ndarray) -> Iterator[Job]:
        yield partial(self._fill, index, out)

    def _fill(self, index: Index, out: np.ndarray) -> None:
        packed, format = self.packed, self.packed.format
        scale = Regrid(packed.scale, format.block, (1, 1), (self.shape[0], self.shape[1])).read(index)
        if SCALE_DTYPES[format.name] == "uint8":
            scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)  # 255, which is NaN, was refused before
        scale = scale.astype(np.float32)
        if packed.global_scale is not None:
            whole = packed.global_scale.read()
            scale = scale / whole if format.global_divides else scale * whole
        out[...] = (self._values(index) * scale).astype(out.dtype)

    def _values(self, index: Index) -> np.ndarray:
        """The payload's part, unpacked to float32."""
        each = codes_per_element(self.packed.payload.dtype)
        rows, cols = index
        outer = slice(cols.start // each, -(-cols.stop // each))
        payload = self.packed.payload.read((rows, outer))
        if each == 1:
            return payload.astype(np.float32)
        pairs = payload.view(np.uint8)
        codes = np.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(payload.shape[0], -1)
        begin = cols.start - outer.start * each
        return E2M1[codes[:, begin : begin + cols.stop - cols.start]]


def astype(source: LazyArray, dtype: np.dtype[Any]) -> LazyArray:
    """`source` in `dtype`; itself where it has that already."""
    return source if source.dtype == dtype else Cast(source, dtype)


def regrid(source: LazyArray, block: tuple[int, int], new_block: tuple[int, int], shape: tuple[int, int]) -> LazyArray:
    """The scales of a matrix of `shape` for blocks of `new_block`, which divide `block`; exact."""
    return source if block == new_block else Regrid(source, block, new_block, shape)


def take_part(value: Lazy, part: tuple[int, int]) -> Lazy:
    """The i-th of n equal parts of a matrix's rows, for `part` (i, n); its global scales are the whole matrix's."""
    i, n = part
    if n == 1:
        return value
    rows = value.shape[0] // n
    if isinstance(value, LazyArray):
        return Rows(value, i * rows, (i + 1) * rows)
    block = value.format.block
    each = (math.gcd(block[0], rows), block[1])  # no block lies in two parts
    scale = regrid(value.scale, block, each, (value.shape[0], value.shape[1]))
    grid = rows // each[0]
    return dataclasses.replace(
        value,
        payload=Rows(value.payload, i * rows, (i + 1) * rows),
        scale=Rows(scale, i * grid, (i + 1) * grid),
        format=dataclasses.replace(value.format, block=each),
    )


def repeat_heads(source: LazyArray, head: int, times: int) -> LazyArray:
    """Each group of `head` rows `times` times in a row."""
    return source if times == 1 else RepeatHeads(source, head, times)


def grid_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks cover a matrix; the last of an axis may be ragged."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _run(job: Job) -> None:
    job()


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)
