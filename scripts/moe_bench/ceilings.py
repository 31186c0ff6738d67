"""The two rates that floors are computed with, through JAX: a device copy, and a bfloat16 matrix product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moe_bench.timing import time_program


def jax_ceilings() -> dict[str, float]:
    """Bytes read and written a second by a "copy" and by a kernel, "add_one"; operations a second of a "matmul"."""
    on_gpu = jax.devices()[0].platform == "gpu"
    words, size = (2**29, 8192) if on_gpu else (2**20, 256)
    # Four buffers of 2 GiB on a GPU: every cache is small beside them.
    buffers = tuple(jax.random.bits(jax.random.key(i), (words,), jnp.uint32) for i in range(4))
    moved = 2 * sum(buffer.nbytes for buffer in buffers)
    result = {
        "copy": moved / _seconds(lambda *each: tuple(jnp.copy(b) for b in each), buffers),
        "add_one": moved / _seconds(lambda *each: tuple(b + 1 for b in each), buffers),
    }
    del buffers
    matrices = tuple(jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(5))
    products = _seconds(lambda b, *each: tuple(jnp.dot(a, b) for a in each), matrices)
    result["matmul"] = 4 * 2 * size**3 / products
    return result


def best(measured: list[dict[str, Any]]) -> tuple[float, float]:
    """(bytes a second, operations a second): the highest of all that was measured, so that floors are lowest."""
    copies = [value for one in measured for name, value in one.items() if name in ("copy", "add_one")]
    return max(copies), max(one["matmul"] for one in measured if "matmul" in one)


def _seconds(fn: Any, arguments: tuple[jax.Array, ...]) -> float:
    return time_program(jax.jit(fn), arguments, 1, 2.0).seconds
