"""The order of bytes that the tensor-core kernel reads: each 16 x 64 tile of a matrix lies where one warp wants it.

A lane (g, t), g < 8 and t < 4, of a 16 x 64 tile owns columns 16t..16t+15 of rows g and g + 8: four words of FP4 codes,
16 bytes of the warp's 512. The four scale bytes it needs for two neighbouring tiles lie together as well. Arrays keep
their shapes; only the order inside each matrix changes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quant import Format, QuantTensor, Weight

ROWS, COLS = 16, 64  # of a tile

# What the kernel's scale arithmetic covers: 2^(64 - 127) to 2^(191 - 127).
SMALLEST_E8M0, LARGEST_E8M0 = 64, 191


def can_arrange(weight: Weight) -> bool:
    """Whether tile order is defined for this format and shape (of one device's part)."""
    if not isinstance(weight, QuantTensor) or weight.format.name not in ("mxfp4", "nvfp4"):
        return False
    rows, cols = weight.shape[-2:]
    return (
        weight.format.order == "rows"
        and weight.payload.dtype == jnp.uint32
        and rows % 32 == 0
        and cols % 128 == 0
        and weight.format.block in ((1, 16), (1, 32))
    )


def arrange(weight: QuantTensor) -> QuantTensor:
    """Rows order to tile order. A block of zero codes gets an e8m0 scale of one: any other means the same."""
    payload, scale = weight.payload, weight.scale
    if weight.format.name == "mxfp4":
        words = weight.format.block[1] // 8
        empty = jnp.all((payload & 0x77777777).reshape(*scale.shape, words) == 0, axis=-1)
        scale = jnp.where(empty, jnp.uint8(127), scale)
    order = dataclasses.replace(weight.format, order="tiles")
    return dataclasses.replace(weight, payload=_payload(payload), scale=_scale(scale, weight.format), format=order)


def in_range(scale: jax.Array) -> jax.Array:
    """Whether all scales of an MXFP4 matrix in tile order are ones that the kernel computes exactly; a scalar."""
    return jnp.all((scale >= SMALLEST_E8M0) & (scale <= LARGEST_E8M0))


def restore(weight: QuantTensor) -> QuantTensor:
    """Tile order back to rows order."""
    order = dataclasses.replace(weight.format, order="rows")
    return dataclasses.replace(
        weight,
        payload=_payload(weight.payload, back=True),
        scale=_scale(weight.scale, weight.format, back=True),
        format=order,
    )


def as_rows(weight: Weight) -> Weight:
    """The same weight in rows order, whatever it is: a copy only where it is in tile order."""
    return restore(weight) if isinstance(weight, QuantTensor) and weight.format.order == "tiles" else weight


def _payload(words: jax.Array, back: bool = False) -> jax.Array:
    """[rows, words] as (tile row, half, g; tile column, t, word) to (tile row, tile column, g, t, half, word)."""
    rows, cols = words.shape[-2:]
    return _permute(words, (rows // 16, 2, 8, cols // 8, 4, 2), (0, 3, 2, 4, 1, 5), back)


def _scale(scale: jax.Array, format: Format, back: bool = False) -> jax.Array:
    """[rows, blocks] as (tile row, half, g; pair, tile, block) to (tile row, pair, g, block, tile, half)."""
    rows, cols = scale.shape[-2:]
    blocks = COLS // format.block[1]
    return _permute(scale, (rows // 16, 2, 8, cols // (2 * blocks), 2, blocks), (0, 3, 2, 5, 4, 1), back)


def _permute(array: jax.Array, sizes: tuple[int, ...], axes: tuple[int, ...], back: bool) -> jax.Array:
    """The last two axes seen as `sizes` and transposed by `axes`, or that undone."""
    if back:
        sizes, axes = tuple(sizes[a] for a in axes), tuple(axes.index(i) for i in range(len(axes)))
    lead = array.ndim - 2
    whole = array.reshape(*array.shape[:-2], *sizes)
    return whole.transpose(*range(lead), *(lead + a for a in axes)).reshape(array.shape)
