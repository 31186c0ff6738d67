"""The attention kernels at the shapes of M2 and M3, and how float8 lanes are written and read, for _rocm_cases.py."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

OPS = ("paged_attention", "sparse_attention", "block_scores")
LANE = "fp8_lane"  # plain XLA: float32 and bfloat16 to a float8 lane and back
FORMATS = ("bfloat16", "float32", "fp8")  # of the cache; queries are bfloat16 beside the last
STEPS = {"few": (8, 1), "many": (1, 512)}  # rows and tokens of a decode step and of a prefill chunk
PAGE, PAGES = 128, 512  # tokens of a page, pages of a row: a context of 65,536


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one device computes.

    Attributes:
      B, T: rows and new tokens of a row.
      H, K, h: query heads, kv heads (and index heads), size of a head.
      block, topk: of sparse attention; 0 where there is none.
    """

    B: int
    T: int
    H: int
    K: int
    h: int
    block: int
    topk: int


def sizes(model: Any, tp: int, rows: str) -> Sizes:
    """`model` is a `_rocm_cases.Model`."""
    return Sizes(*STEPS[rows], model.heads // tp, max(1, model.kv_heads // tp), model.head, *model.sparse)


def program(op: str, of: Sizes, format: str, array: Callable[..., Any]) -> tuple[Any, tuple[Any, ...]]:
    """A jitted call of the kernel and its abstract arguments, which array(shape, dtype) makes."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.block_scores.kernel import block_scores_pallas
    from pallas_kernels.paged_attention.kernel import paged_attention_pallas
    from pallas_kernels.paged_attention.lanes import narrow, widen
    from pallas_kernels.sparse_attention.kernel import sparse_attention_pallas

    dtype = jnp.float32 if format == "float32" else jnp.bfloat16
    cache = jnp.float8_e4m3fn if format == "fp8" else dtype
    row: Sequence[Any] = (array((of.B, PAGES), jnp.int32), array((of.B, of.T), jnp.int32))
    P = of.B * PAGES
    if op == LANE:

        def to_and_fro(a: jax.Array, b: jax.Array) -> list[jax.Array]:
            written = [narrow(x, jnp.float8_e4m3fn) for x in (a, b)]
            return [*written, *(widen(lane, x.dtype) for lane, x in zip(written, (a, b), strict=True))]

        return jax.jit(to_and_fro), tuple(array((P, PAGE, of.K, of.h), t) for t in (jnp.float32, jnp.bfloat16))
    if op == "block_scores":
        run = functools.partial(block_scores_pallas, block_size=of.block)
        return jax.jit(run), (array((of.B, of.T, of.K, of.h), dtype), array((P, PAGE, of.h), cache), *row)
    lane = array((P, PAGE, of.K, of.h), cache)
    scales = [array((), jnp.float32)] * 2 if format == "fp8" else [None, None]
    q = array((of.B, of.T, of.H, of.h), dtype)
    if op == "paged_attention":
        return jax.jit(functools.partial(paged_attention_pallas, scale=of.h**-0.5)), (q, lane, lane, *row, *scales)
    blocks = array((of.B, of.T, of.K, of.topk), jnp.int32)
    run = functools.partial(sparse_attention_pallas, block_size=of.block, scale=of.h**-0.5)
    return jax.jit(run), (q, lane, lane, *row, blocks, *scales)


def float8_conversions(hlo: str) -> list[str]:
    """What is wrong with a compiled program that holds float8: conversions that the back end makes itself."""
    types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", hlo))
    found = [
        name
        for name, operand in re.findall(r"%([\w.-]+) = \S+ convert\((?:\S+ )?%([\w.-]+)\)", hlo)
        if "f8" in types[name] + types[operand]
    ]
    return [f"the back end converts float8 itself: {', '.join(found)}"] if found else []
