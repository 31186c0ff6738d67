"""Every touch of Pallas's Triton route, which JAX has deprecated, and of what differs between JAX versions in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Pallas Triton.*", category=DeprecationWarning)
    from jax.experimental.pallas import triton as plt

warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated.*", category=DeprecationWarning)

dot = plt.dot
load = plt.load
store = plt.store


def inline_asm(
    text: str, constraints: str, args: Sequence[jax.Array], dtype: Any, pack: int, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """One result of the arguments' shape (or `shape`), `pack` elements of each argument to a call of `text`.

    An unsigned result is refused by Triton: ask for int32.
    """
    result = jax.ShapeDtypeStruct(args[0].shape if shape is None else shape, dtype)
    (out,) = plt.elementwise_inline_asm(
        text, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return out


def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    name: str,
    interpret: bool = False,
) -> Callable[..., Any]:
    """A kernel that sees whole arrays and masks for itself."""
    # Without parameters of its own JAX 0.10.2 would choose the Mosaic route.
    parameters = plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(
        kernel, out_shape=out_shape, grid=grid, compiler_params=parameters, interpret=interpret, name=name
    )
