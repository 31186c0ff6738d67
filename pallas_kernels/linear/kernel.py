"""The dense product as a portable kernel, on the same loop as the experts': out^T = W x^T, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, pallas_call, store
from pallas_kernels.product import block_m, in_planes, make_product, matrices_of, supports, why_not
from pallas_kernels.quant import Weight
from pallas_kernels.tuning import Tuning, choose

__all__ = ["linear_pallas", "supports", "why_not"]


def linear_pallas(
    x: jax.Array,
    weight: Weight,
    *,
    interpret: bool = False,
    tuning: Tuning | Mapping[str, Any] | None = None,
) -> jax.Array:
    """x [..., cols] float32 or bfloat16, weight [rows, cols] plain or packed -> [..., rows] float32."""
    *lead, cols = x.shape
    flat = x.reshape(-1, cols)
    R = flat.shape[0]
    M = block_m(R)
    chosen = choose("linear", weight, M, tuning)
    M = min(M, chosen.block_m)
    product = make_product(weight, x.dtype, chosen.block_n, chosen.block_k)
    packed, multipliers = matrices_of(weight)

    def kernel(x_ref: Any, payload_ref: Any, *rest: Any) -> None:
        refs, out_ref = list(rest[:-1]), rest[-1]
        scale_ref = refs.pop(0) if len(packed) == 2 else None
        n, inside = product.row_indices(pl.program_id(0))
        row = pl.program_id(1) * M + jnp.arange(M, dtype=jnp.int32)
        safe = jnp.minimum(row, R - 1) if R % M else row
        (out,) = product.sums(x_ref, payload_ref, scale_ref, safe, inside, [jnp.int32(0)])
        if refs:
            out = out * load(refs[0].at[jnp.int32(0)])
        store(out_ref.at[row[None, :], n[:, None]], out, mask=(n < product.rows)[:, None] & (row < R)[None, :])

    run = pallas_call(
        kernel,
        jax.ShapeDtypeStruct((R, product.rows), jnp.float32),
        grid=(product.tiles, -(-R // M)),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        name="linear_" + product.name,
        interpret=interpret,
    )
    return run(in_planes(flat, product), *packed, *multipliers).reshape(*lead, product.rows)
