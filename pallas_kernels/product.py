"""The inner loop of every portable kernel: a tile of decoded weights times rows of x, summed over K in float32.

A matrix of FP4 words [rows, cols / 8] is read as eight planes: nibble i of word j is column 8j + i. x is handed over in
planes as well, so that nothing is interleaved inside the kernel: eight small products make one of the whole. Stacks of
8-bit codes with 2^31 elements and more are read as words too, in four planes: Pallas's 32-bit offsets would turn
negative in them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import decode
from pallas_kernels._triton import dot, load
from pallas_kernels.quant import PAYLOAD_DTYPES, QuantTensor, Weight, codes_per_element, global_multiplier

MIN_DOT = 16  # least size of any axis of a product on the matrix units
LARGE = 2**31  # elements of a stack of 8-bit codes from which on it is read as words


@dataclasses.dataclass(frozen=True)
class Product:
    """Static facts about one weight stack and the tile that a program computes.

    Attributes:
      name: format name, or "plain".
      rows, cols: of one decoded matrix.
      planes: codes in one element as the kernel loads it.
      block: (rows, cols) that share a scale.
      dtype: of x and of the operands on the matrix units.
      block_n: rows of the weight a program computes.
      step: elements along K in one step of the loop, as the kernel loads them.
    """

    name: str
    planes: int
    rows: int
    cols: int
    block: tuple[int, int]
    dtype: Any
    block_n: int
    step: int

    @property
    def tiles(self) -> int:
        """Programs along the weight's rows."""
        return -(-self.rows // self.block_n)

    def row_indices(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows [block_n] of the weight that a program stores, and the same kept inside the matrix for loads."""
        n = tile * self.block_n + jnp.arange(self.block_n, dtype=jnp.int32)
        return n, jnp.minimum(n, self.rows - 1) if self.rows % self.block_n else n

    def sums(
        self,
        x_ref: Any,
        payload_ref: Any,
        scale_ref: Any,
        tokens: jax.Array,
        n: jax.Array,
        matrices: Sequence[jax.Array | int],
    ) -> list[jax.Array]:
        """For each matrix of the stack float32 [block_n, M]: its rows `n` times the rows `tokens` of x."""
        width = self.cols // self.planes  # of a row of the payload
        scale_rows = -(-self.rows // self.block[0])
        scale_row = n if self.block[0] == 1 else lax.div(n, jnp.int32(self.block[0]))
        ragged = width % self.step != 0

        def tile(ref: Any, row: jax.Array, start: jax.Array, size: int, limit: int) -> jax.Array:
            column = start + jnp.arange(size, dtype=jnp.int32)
            at = ref.at[row[:, None], column[None, :]]
            if not ragged:
                return load(at)
            inside = jnp.broadcast_to((column < limit)[None, :], (row.shape[0], size))
            # A constant of float8 is not to be had in a kernel; its bits are cleared after the load.
            fill = None if ref.dtype == jnp.float8_e4m3fn else jnp.zeros((), ref.dtype)
            values = load(at, mask=inside, other=fill)
            return values if fill is not None else jnp.where(inside, decode.code_bits(values), 0)

        def operands(i: jax.Array, matrix: jax.Array | int) -> Callable[[int], jax.Array]:
            """The decoded tile of one matrix by plane."""
            codes = tile(payload_ref, matrix * self.rows + n, i * self.step, self.step, width)
            if self.name == "plain":
                return lambda plane: codes.astype(self.dtype)
            codes = codes if codes.dtype == jnp.int32 else decode.code_bits(codes)
            decode_code = decode.e2m1 if self.name in ("mxfp4", "nvfp4") else decode.e4m3

            def values(plane: int) -> jax.Array:
                return decode_code(
                    lax.shift_right_logical(codes, jnp.int32(32 // self.planes * plane)) if plane else codes
                )

            if self.name == "fp8":
                return lambda plane: decode.narrow(values(plane), self.dtype)
            each = self.block[1] // self.planes  # payload elements with one scale
            blocks = max(1, self.step // each)
            first = i * blocks if self.step >= each else lax.div(i * self.step, jnp.int32(each))
            scale = tile(scale_ref, matrix * scale_rows + scale_row, first, blocks, -(-width // each))
            scale = scale if scale.dtype == jnp.int32 else decode.code_bits(scale)
            scale = decode.e4m3(scale) if self.name == "nvfp4" else decode.e8m0(scale)
            scale = jnp.broadcast_to(scale[:, :, None], (self.block_n, blocks, self.step // blocks))
            scale = scale.reshape(self.block_n, self.step)
            return lambda plane: decode.narrow(values(plane) * scale, self.dtype)

        def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            decoded = [operands(i, matrix) for matrix in matrices]
            parts: list[Any] = list(sums) if self.name != "fp8" else [0.0] * len(sums)
            for plane in range(self.planes):
                first = i * self.step
                x = tile_x(x_ref, tokens, plane * width, first)
                for m, weight in enumerate(decoded):
                    parts[m] += dot(weight(plane), x, trans_b=True, precision=_precision(self.dtype))
            if self.name != "fp8":
                return parts
            column = lax.div(i * (self.step * self.planes), jnp.int32(self.block[1]))
            scales = [load(scale_ref.at[matrix * scale_rows + scale_row, column]) for matrix in matrices]
            return [total + part * scale[:, None] for total, part, scale in zip(sums, parts, scales, strict=True)]

        def tile_x(ref: Any, row: jax.Array, offset: int, start: jax.Array) -> jax.Array:
            column = start + jnp.arange(self.step, dtype=jnp.int32)
            at = ref.at[row[:, None], (offset + column)[None, :]]
            if not ragged:
                return load(at)
            inside = jnp.broadcast_to((column < width)[None, :], (row.shape[0], self.step))
            return load(at, mask=inside, other=jnp.zeros((), ref.dtype))

        zeros = [jnp.zeros((self.block_n, tokens.shape[0]), jnp.float32) for _ in matrices]
        return lax.fori_loop(0, -(-width // self.step), step, zeros)


def supports(weight: Weight) -> bool:
    """Whether the portable kernels can read this weight; one in tile order as soon as `tiles.restore` has undone it."""
    return why_not(weight) is None


def why_not(weight: Weight) -> str | None:
    """What `supports` stumbles over, None when it does not."""
    if not isinstance(weight, QuantTensor):
        return None
    name, (rows, cols), all_cols = weight.format.name, weight.format.block, weight.shape[-1]
    if weight.payload.dtype != PAYLOAD_DTYPES[name]:
        return f"an {name} payload of {weight.payload.dtype}"
    planes = _planes(weight)
    if name == "fp8":
        fits = (cols >= all_cols or _power_of_two_in(cols) // planes >= MIN_DOT) and all_cols % planes == 0
    else:
        fits = _is_power_of_two(cols) and cols % planes == 0 and all_cols % cols == 0
    return None if fits else f"{name} blocks of {rows} x {cols} in {all_cols} columns"


def make_product(weight: Weight, dtype: Any, block_n: int, block_k: int) -> Product:
    """The loop for a weight (one matrix or a stack), near the tile sizes that are asked for.

    Raises:
      ValueError: the kernels cannot read it as it lies.
    """
    reason = why_not(weight)
    name: str = "plain"
    block = (1, 1)
    if isinstance(weight, QuantTensor):
        name, block = weight.format.name, weight.format.block
        if weight.format.order != "rows":
            reason = f"its payload lies in the order {weight.format.order!r}"
    if reason is not None:
        raise ValueError(f"no kernel for this weight: {reason}")
    rows, cols = weight.shape[-2:]
    planes = _planes(weight)
    step = max(MIN_DOT, block_k // planes)
    if name == "fp8" and block[1] < cols:
        step = min(step, _power_of_two_in(block[1]) // planes)
    step = min(step, max(MIN_DOT, _power_of_two_above(cols // planes)))
    block_n = min(block_n, max(MIN_DOT, _power_of_two_above(rows)))
    return Product(name, planes, rows, cols, block, jnp.dtype(dtype), block_n, step)


def matrices_of(weight: Weight) -> tuple[list[jax.Array], list[jax.Array]]:
    """(payload and scale, global scale): the stack's matrices one below the other, and one multiplier for each."""
    if not isinstance(weight, QuantTensor):
        return [weight.reshape(-1, weight.shape[-1])], []
    flat = [part.reshape(-1, part.shape[-1]) for part in (weight.payload, weight.scale)]
    if weight.payload.dtype != jnp.uint32 and _planes(weight) > 1:  # the same bytes: XLA moves nothing
        words = flat[0].reshape(flat[0].shape[0], -1, _planes(weight))
        flat[0] = lax.bitcast_convert_type(words, jnp.uint32)
    multiplier = global_multiplier(weight)
    return flat, [] if multiplier is None else [multiplier.reshape(-1)]


def _planes(weight: Weight) -> int:
    if not isinstance(weight, QuantTensor):
        return 1
    payload = weight.payload
    large = payload.dtype.itemsize == 1 and payload.size >= LARGE
    return 4 // payload.dtype.itemsize if large else codes_per_element(payload.dtype)


def in_planes(x: jax.Array, product: Product) -> jax.Array:
    """x [rows, cols] with its columns in the order of the product's planes."""
    if product.planes == 1:
        return x
    rows, cols = x.shape
    return x.reshape(rows, cols // product.planes, product.planes).swapaxes(1, 2).reshape(rows, cols)


def block_m(rows: int) -> int:
    """Least tile that holds that many rows of x."""
    return max(MIN_DOT, _power_of_two_above(rows))


def _precision(dtype: Any) -> Any:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _power_of_two_in(size: int) -> int:
    return size & -size


def _power_of_two_above(size: int) -> int:
    return 1 << math.ceil(math.log2(size)) if size > 1 else 1


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0
