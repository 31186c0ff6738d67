"""What the attention kernels share: the running softmax over tiles of keys, and the merging of a row's parts.

A program owns a tile of query rows, which share one kv head, and takes its keys in a fixed order. Scores are in powers
of two. Keys that a row must not see change nothing in it, to the bit: their probabilities are zero and the rescaling is
one. No slot beyond the tile's last position is read, so that what an earlier sequence left there cannot matter.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import dot, load
from pallas_kernels.paged_attention.lanes import LANE_DTYPES, widen

LOG2E = math.log2(math.e)
MIN_DOT = 16  # least size of any axis of a product on the matrix units
MAX_PARTS = 32  # of a row's keys
OFFSETS = 2**31  # Pallas's 32-bit offsets turn negative from there on


class Softmax(NamedTuple):
    """The running softmax of M query rows: largest score [M], sum [M] and weighted values [M, W], all float32."""

    largest: jax.Array
    total: jax.Array
    acc: jax.Array

    @staticmethod
    def start(M: int, h: int) -> Softmax:
        """Before any key, for heads of size h."""
        return Softmax(jnp.full((M,), -jnp.inf), jnp.zeros((M,)), jnp.zeros((M, columns(h).shape[1])))

    def step(self, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, factor: jax.Array | float) -> Softmax:
        """With N keys more: q [M, W], k and v [N, W] of one dtype, seen [M, N]; `factor` is the scale times log2 e."""
        scores = jnp.where(seen, product(q, k, trans_b=True) * factor, -jnp.inf)
        largest = jnp.maximum(self.largest, jnp.max(scores, axis=1))
        # A row that has seen no key yet keeps -inf; the finite stand-in avoids inf - inf.
        base = jnp.where(largest == -jnp.inf, 0.0, largest)
        rescale, probs = jnp.exp2(self.largest - base), jnp.exp2(scores - base[:, None])
        total = self.total * rescale + jnp.sum(probs, axis=1)
        return Softmax(largest, total, self.acc * rescale[:, None] + product(probs.astype(v.dtype), v))

    def result(self) -> jax.Array:
        """[M, W]; zero for a row that has seen no key."""
        return self.acc / jnp.where(self.total == 0.0, 1.0, self.total)[:, None]


def merge(parts: Softmax) -> jax.Array:
    """Parts of the same rows, [parts, R] and [parts, R, h] -> the whole rows' result [R, h]; summed in order."""
    count = parts.largest.shape[0]
    largest = functools.reduce(jnp.maximum, [parts.largest[i] for i in range(count)])
    base = jnp.where(largest == -jnp.inf, 0.0, largest)
    weights = [jnp.exp2(parts.largest[i] - base) for i in range(count)]
    total = functools.reduce(operator.add, [parts.total[i] * w for i, w in enumerate(weights)])
    acc = functools.reduce(operator.add, [parts.acc[i] * w[:, None] for i, w in enumerate(weights)])
    return Softmax(largest, total, acc).result()


def product(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    """a b, or a b^T -> float32; true float32 for float32."""
    return dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def read(ref: Any, row: jax.Array, h: int, dtype: Any) -> jax.Array:
    """Rows [N] of a lane [rows, h] in `dtype`, as wide as `columns`.

    Beyond h it is the last value again: of k it meets zeros of q, of v it is not stored.
    """
    column = columns(h)
    return widen(load(ref.at[row[:, None], column if column.shape[1] == h else jnp.minimum(column, h - 1)]), dtype)


def read_queries(ref: Any, row: jax.Array, valid: jax.Array, h: int) -> jax.Array:
    """Rows [M] of q [rows, h], as wide as `columns`; zero where they are not valid and beyond h."""
    at = ref.at[row[:, None], columns(h)]
    return load(at, mask=elements(valid, h), other=jnp.zeros((), ref.dtype))


def columns(h: int) -> jax.Array:
    """[1, W]: the columns of a tile of heads of size h, a power of two of them."""
    return jnp.arange(max(MIN_DOT, power_of_two(h)), dtype=jnp.int32)[None, :]


def elements(valid: jax.Array, h: int) -> jax.Array:
    """[M, W]: the elements of valid rows [M] that there are."""
    column = columns(h)
    mask = jnp.broadcast_to(valid[:, None], (valid.shape[0], column.shape[1]))
    return mask if column.shape[1] == h else mask & (column < h)


def why_not(q: jax.Array, *lanes: jax.Array) -> str | None:
    """What keeps the kernels from reading these; None when nothing does."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries are {q.dtype}, neither float32 nor bfloat16"
    for lane in lanes:
        if lane.dtype not in LANE_DTYPES:
            return f"a cache is {lane.dtype}, none of {', '.join(jnp.dtype(d).name for d in LANE_DTYPES)}"
        if lane.size >= OFFSETS:
            return f"a cache has {lane.size:,} elements, and offsets are of 32 bits"
    return f"the queries have {q.size:,} elements, and offsets are of 32 bits" if q.size >= OFFSETS else None


def power_of_two(size: int) -> int:
    """The least one that holds `size`."""
    return 1 << (size - 1).bit_length()
