"""Grouped FP4 experts on NVIDIA tensor cores: packed weights go from memory to matrix registers and nowhere else.

The product is transposed, out^T = W x^T: a warp's 16 x 64 tile of W, in the order of `pallas_kernels.tiles`, is decoded
into the first operand of `mma.m16n8k16`, and tokens are its narrow side, eight at a time. Every array in the kernel is
one value a register: element i belongs to register i % 4 of lane i // 4 % 32 of warp i // 128, which is how Triton
lays out a coalesced load of 16 bytes a thread. The kernel checks that this is so where it runs and gives NaN where it
is not.

A code's bits placed at the top of a bfloat16 mantissa and the bottom of its exponent read as value x 2^-126, and one
packed multiplication by a power of two makes the scaled weight, exactly. What is left of the power is applied to the
float32 sums. A row's sums never depend on the other rows of its block, and their order is fixed by the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe.routing import BlockPlan
from pallas_kernels.quant import QuantTensor, global_multiplier
from pallas_kernels.tiles import COLS, ROWS

TOKENS = 8  # of one instruction
# What the decoder leaves to the float32 sums.
LEFT_OVER = {"mxfp4": 2.0**64, "nvfp4": 2.0**8}


@dataclasses.dataclass(frozen=True)
class MmaTuning:
    """How the work is cut.

    Attributes:
      row_warps, k_warps: warps of a program, along rows of W and along its columns; powers of two.
      prefetch_x: load a step's tokens one step ahead, as its weights are.
      tiles: tiles of one step along a row of W, 2 or 4.
      row_tiles: tiles along W's rows that a warp has of each of its two matrices.
    """

    row_warps: int
    k_warps: int
    prefetch_x: bool
    tiles: int = 4
    row_tiles: int = 1


@dataclasses.dataclass(frozen=True)
class LayerTuning:
    """Of both products: `rows` of a block, a multiple of 8."""

    rows: int
    gate_up: MmaTuning
    down: MmaTuning


# By the mean rows of an expert, and for a token or two by all rows. The best of a few variants timed on one NVIDIA H200
# at MiniMax-M2.1's shapes in MXFP4, 1 December 2026, JAX 0.11.2.
_ONE_TOKEN = LayerTuning(8, MmaTuning(2, 2, True), MmaTuning(2, 2, True))
_DECODE = LayerTuning(8, MmaTuning(2, 1, True), MmaTuning(2, 1, True))
_FULL_DECODE = LayerTuning(16, MmaTuning(4, 1, True), MmaTuning(4, 1, True))
_PREFILL = LayerTuning(48, MmaTuning(4, 1, False, 2, 2), MmaTuning(4, 1, False, 2, 2))


def choose(rows_per_expert: int, R: int) -> LayerTuning:
    """Args: mean rows of an expert, rounded up; rows in all."""
    if R <= 16:
        return _ONE_TOKEN
    if rows_per_expert <= 4:
        return _DECODE
    return _FULL_DECODE if rows_per_expert <= 24 else _PREFILL


def fits(x: jax.Array, w13: QuantTensor, w2: QuantTensor) -> bool:
    """Whether these are operands for the kernel: which GPU it is, whoever arranged the weights has seen to."""
    return x.dtype == jnp.bfloat16 and w13.format.order == "tiles" and w2.format.order == "tiles"


def gate_up_mma(
    x: jax.Array, w13: QuantTensor, plan: BlockPlan, k: int, activation: SwiGLU, tuning: MmaTuning
) -> jax.Array:
    """activation(w1 x, w3 x) for every row of the plan.

    Args:
      x: [N, D] bfloat16.
      w13: [E, 2, F, D] in tile order.
      plan: with blocks of a multiple of 8 rows.
      k: experts a token: row r is token r // k.

    Returns:
      [R, F] bfloat16, rows in the plan's order, columns in `operand_order`.
    """
    R, F = plan.order.size, w13.shape[-2]
    out = jax.ShapeDtypeStruct((R * F,), jnp.bfloat16)
    return _Job(w13, out, plan, tuning, k, activation).run(operand_order(x), [], name="moe_gate_up_mma").reshape(R, F)


def down_mma(
    hidden: jax.Array, w2: QuantTensor, plan: BlockPlan, expert_weights: jax.Array, tuning: MmaTuning
) -> jax.Array:
    """expert_weight x (w2 hidden) for every row.

    Args:
      hidden: as `gate_up_mma` gives it.
      w2: [E, D, F] in tile order.
      expert_weights: [N, k] float32.

    Returns:
      [R, D] float32, row n * k + j for token n's j-th expert; rows of no expert are not written.
    """
    R, D = plan.order.size, w2.shape[-2]
    out = jax.ShapeDtypeStruct((R * D,), jnp.float32)
    return (
        _Job(w2, out, plan, tuning, 1, None)
        .run(hidden, [expert_weights.reshape(-1)], name="moe_down_mma")
        .reshape(R, D)
    )


def operand_order(x: jax.Array) -> jax.Array:
    """[N, cols] with the columns in the order of a lane's registers: see `_place`."""
    N, cols = x.shape
    x = x.reshape(N, cols // COLS, 4, 2, 2, 4)  # tile, t, word; in a word columns i and i + 4 make a pair, as codes do
    return x.transpose(0, 1, 3, 2, 5, 4).reshape(N, cols)


def _place(column: jax.Array) -> jax.Array:
    """Where `operand_order` puts a column."""
    t, word, i = lax.rem(lax.div(column, 16), 4), lax.rem(lax.div(column, 8), 2), lax.rem(column, 8)
    return lax.div(column, COLS) * COLS + word * 32 + t * 8 + lax.rem(i, 4) * 2 + lax.div(i, 4)


class _Job:
    """One of the two products; `activation` tells them apart: with one, W is a pair of matrices."""

    def __init__(
        self,
        weight: QuantTensor,
        out: jax.ShapeDtypeStruct,
        plan: BlockPlan,
        tuning: MmaTuning,
        k: int,
        activation: SwiGLU | None,
    ) -> None:
        self.weight, self.out, self.plan, self.tuning, self.k, self.activation = (
            weight,
            out,
            plan,
            tuning,
            k,
            activation,
        )
        self.rows, self.cols = weight.shape[-2:]
        self.token_tiles = plan.M // TOKENS
        # A warp's tiles come in two halves: the same rows of w1 and w3, or neighbouring rows of w2.
        self.half_rows = ROWS * tuning.row_tiles
        self.rows_per_warp = self.half_rows if activation is not None else 2 * self.half_rows
        self.steps = -(-self.cols // (COLS * tuning.tiles))
        self.steps_per_warp = -(-self.steps // tuning.k_warps)
        self.even = self.cols % (COLS * tuning.tiles) == 0 and self.steps % tuning.k_warps == 0
        self.even_rows = self.rows % (self.rows_per_warp * tuning.row_warps) == 0

    def run(self, x: jax.Array, extra: list[jax.Array], name: str) -> jax.Array:
        """The kernel over (parts of W's rows, blocks of the plan)."""
        warps = self.tuning.row_warps * self.tuning.k_warps
        programs = -(-self.rows // (self.rows_per_warp * self.tuning.row_warps))
        words = lax.bitcast_convert_type(x.reshape(-1, 2), jnp.uint32)
        multiplier = global_multiplier(self.weight)
        if multiplier is not None:
            extra = [multiplier.reshape(-1), *extra]
        call = _triton.pallas_call(
            functools.partial(_kernel, self),
            self.out,
            grid=(programs, self.plan.expert.size),
            num_warps=warps,
            num_stages=1,
            name=name,
        )
        plan, weight = self.plan, self.weight
        arrays = (words, weight.payload.reshape(-1), weight.scale.reshape(-1))
        out: jax.Array = call(plan.expert, plan.start, plan.end, plan.order, *arrays, *extra)
        return out


class _Lanes:
    """Which (register, t, g, warp along rows, warp along columns) each element of an array is."""

    def __init__(self, row_warps: int, k_warps: int) -> None:
        self.size = 128 * row_warps * k_warps
        self.i = lax.iota(jnp.int32, self.size)
        self.reg = lax.rem(self.i, 4)
        self.t = lax.rem(lax.div(self.i, 4), 4)
        self.g = lax.rem(lax.div(self.i, 16), 8)
        self.row_warp = lax.rem(lax.div(self.i, 128), row_warps)
        self.k_warp = lax.div(self.i, 128 * row_warps)

    def misplaced(self) -> jax.Array:
        """True where an element is not in the register and lane that the kernel takes it to be in."""
        lane = _asm("".join(f"mov.u32 ${r}, %laneid;" for r in range(4)), [self.i], jnp.int32)
        register = _asm("".join(f"mov.u32 ${r}, {r};" for r in range(4)), [self.i], jnp.int32)
        return (lane != lax.rem(lax.div(self.i, 4), 32)) | (register != self.reg)


def _kernel(
    job: _Job,
    expert_ref: Any,
    start_ref: Any,
    end_ref: Any,
    order_ref: Any,
    x_ref: Any,
    w_ref: Any,
    s_ref: Any,
    *rest: Any,
) -> None:
    *extra, out_ref = rest
    block = pl.program_id(1)
    start, end = start_ref[block], end_ref[block]

    @pl.when(start < end)
    def _() -> None:
        expert = expert_ref[block]
        lanes = _Lanes(job.tuning.row_warps, job.tuning.k_warps)
        sums = _sums(job, lanes, expert, start, end, order_ref, x_ref, w_ref, s_ref)
        sums = [jnp.where(lanes.misplaced(), jnp.nan, part) for part in sums]
        if job.tuning.k_warps > 1:
            sums = [jnp.sum(part.reshape(job.tuning.k_warps, -1), axis=0) for part in sums]
            lanes = _Lanes(job.tuning.row_warps, 1)
        left = LEFT_OVER[job.weight.format.name]
        if job.activation is not None:
            scales = [left * (extra[0][expert * 2 + half] if len(extra) > 0 else 1.0) for half in (0, 1)]
            _store_hidden(job, lanes, sums, scales, start, end, out_ref)
        else:
            scale = left * (extra[0][expert] if len(extra) > 1 else 1.0)
            _store_rows(job, lanes, sums, scale, start, end, order_ref, extra[-1], out_ref)


def _sums(
    job: _Job, lanes: _Lanes, expert: jax.Array, start: jax.Array, end: jax.Array,
    order_ref: Any, x_ref: Any, w_ref: Any, s_ref: Any,
) -> list[jax.Array]:  # fmt: skip
    """[half, row tile, token tile] float32 accumulators: registers 0, 1 are row g, 2, 3 are row g + 8, each for tokens
    2t and 2t + 1."""
    per_step, per_half = job.tuning.tiles, job.tuning.row_tiles
    tile_rows, tiles = job.rows // ROWS, job.cols // COLS
    first = lax.div(_first_row(job, lanes), ROWS)
    # Of each row tile its place in its matrix, and in the stack.
    if job.activation is not None:
        local = [first + r for _ in (0, 1) for r in range(per_half)]
        row_tiles = [(expert * 2 + i // per_half) * tile_rows + tile for i, tile in enumerate(local)]
    else:
        local = [first + r for r in range(2 * per_half)]
        row_tiles = [expert * tile_rows + tile for tile in local]
    blocks = COLS // job.weight.format.block[1]
    lane_scale = (lanes.g * blocks + lax.div(lanes.t * blocks, 4)) * 4 + lanes.reg
    lane_word = lanes.t * 4 + lanes.reg
    w_at = [tile * (tiles * 128) + lanes.g * 16 + lane_word for tile in row_tiles]
    s_at = [tile * (tiles * 16 * blocks) + lane_scale for tile in row_tiles]

    x_at, x_valid = [], []
    for n in range(job.token_tiles):
        place = start + n * TOKENS + lanes.g
        valid = place < end
        row = (
            place if job.activation is None else lax.div(_triton.load(order_ref.at[place], mask=valid, other=0), job.k)
        )
        x_at.append(row * (job.cols // 2) + lane_word)
        x_valid.append(valid)

    def load(ref: Any, at: jax.Array, mask: jax.Array | None) -> jax.Array:
        if mask is None:
            return _triton.load(ref.at[at])
        zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
        return _triton.load(ref.at[at], mask=mask, other=zero)

    def there(step: jax.Array, tile: int, row_tile: jax.Array) -> jax.Array | None:
        """Mask of weights, None where all are."""
        masks = [] if job.even else [jnp.broadcast_to(step * per_step + tile < tiles, (lanes.size,))]
        masks += [] if job.even_rows else [row_tile < tile_rows]
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def load_weights(step: jax.Array) -> tuple[list[list[jax.Array]], list[list[jax.Array]]]:
        """Of each row tile: the words of each tile of the step, the scales of each pair."""
        words = [
            [load(w_ref, at + (step * per_step + tile) * 128, there(step, tile, row)) for tile in range(per_step)]
            for at, row in zip(w_at, local, strict=True)
        ]
        pairs = per_step // 2
        scales = [
            [load(s_ref, at + (step * pairs + i) * 32 * blocks, there(step, 2 * i, row)) for i in range(pairs)]
            for at, row in zip(s_at, local, strict=True)
        ]
        return words, scales

    def load_x(step: jax.Array) -> list[list[jax.Array]]:
        """Of each (tile, word): the token tiles."""
        masks = [
            [valid if job.even else valid & (step * per_step + tile < tiles) for valid in x_valid]
            for tile in range(per_step)
        ]
        return [
            [
                load(x_ref, at + (step * per_step + tile) * 32 + word * 16, mask)
                for at, mask in zip(x_at, masks[tile], strict=True)
            ]
            for tile in range(per_step)
            for word in (0, 1)
        ]

    def fetch(step: jax.Array) -> tuple[Any, Any]:
        return load_weights(step), load_x(step) if job.tuning.prefetch_x else []

    from_step = lanes.k_warp * job.steps_per_warp if job.tuning.k_warps > 1 else jnp.int32(0)

    def body(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, ((words, scales), x) = carry
        step = from_step + i
        # One step ahead: a warp's loads are under way while it decodes. The last one is not used.
        ahead = fetch(jnp.minimum(step + 1, job.steps - 1) if job.even else step + 1)
        x = x if job.tuning.prefetch_x else load_x(step)
        sums = [list(of_row_tile) for of_row_tile in sums]
        for tile in range(per_step):
            for word in (0, 1):
                for w, s, of_row_tile in zip(words, scales, sums, strict=True):
                    low, high = (
                        _decode(job.weight.format.name, w[tile], s[tile // 2], 2 * row + word, 2 * (tile % 2) + row)
                        for row in (0, 1)
                    )
                    for n, tokens in enumerate(x[2 * tile + word]):
                        of_row_tile[n] = _mma(low, high, tokens, of_row_tile[n])
        return sums, ahead

    zero = jnp.zeros((lanes.size,), jnp.float32)
    zeros = [[zero] * job.token_tiles for _ in row_tiles]
    sums, _ = lax.fori_loop(0, job.steps_per_warp, body, (zeros, fetch(from_step)))
    return [part for of_row_tile in sums for part in of_row_tile]


def _first_row(job: _Job, lanes: _Lanes) -> jax.Array:
    """Of a warp's rows of W."""
    return (pl.program_id(0) * job.tuning.row_warps + lanes.row_warp) * job.rows_per_warp


def _store_hidden(
    job: _Job, lanes: _Lanes, sums: list[jax.Array], scales: list[Any], start: jax.Array, end: jax.Array, out_ref: Any
) -> None:
    assert job.activation is not None
    gates, ups = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    for at, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        tile, n = divmod(at, job.token_tiles)
        column = _first_row(job, lanes) + tile * ROWS + lanes.g + 8 * lax.div(lanes.reg, 2)
        place = start + n * TOKENS + 2 * lanes.t + lax.rem(lanes.reg, 2)
        valid = place < end if job.even_rows else (place < end) & (column < job.rows)
        hidden = job.activation(gate * scales[0], up * scales[1]).astype(job.out.dtype)
        _triton.store(out_ref.at[place * job.rows + _place(column)], hidden, mask=valid)


def _store_rows(
    job: _Job, lanes: _Lanes, sums: list[jax.Array], scale: Any, start: jax.Array, end: jax.Array,
    order_ref: Any, expert_weights_ref: Any, out_ref: Any,
) -> None:  # fmt: skip
    for n in range(job.token_tiles):
        place = start + n * TOKENS + 2 * lanes.t + lax.rem(lanes.reg, 2)
        target = _triton.load(order_ref.at[place], mask=place < end, other=0)
        factor = _triton.load(expert_weights_ref.at[target], mask=place < end, other=0.0) * scale
        for tile, value in enumerate(sums[n :: job.token_tiles]):
            row = _first_row(job, lanes) + tile * ROWS + lanes.g + 8 * lax.div(lanes.reg, 2)
            valid = place < end if job.even_rows else (place < end) & (row < job.rows)
            _triton.store(out_ref.at[target * job.rows + row], value * factor, mask=valid)


# Shifts that bring codes p and p + 4 of a word to the two halves of a register: (magnitude, sign).
_SHIFTS = (("shl", 6, "shl", 12), ("shl", 2, "shl", 8), ("shr", 2, "shl", 4), ("shr", 6, "", 0))


def _decode(format: str, words: jax.Array, scales: jax.Array, word: int, byte: int) -> jax.Array:
    """Word `word` of a lane's four -> four registers of two bfloat16 weights, scaled by byte `byte` of its scales."""
    source = f"${4 + word}"
    lines = ["{ .reg .b32 s, a, b;", f"prmt.b32 s, $8, 0, 0x4{byte}4{byte};"]
    if format == "mxfp4":  # 2^(byte - 127 + 126 - 64): the rest is in LEFT_OVER
        lines += ["shl.b32 s, s, 7;", "add.u32 s, s, 0x1F001F00;"]
    else:  # e4m3 bits read as value x 2^-120; times 2^238 in two steps, so that 448 x 2^118 still fits
        lines += ["shl.b32 s, s, 4;", "mov.b32 a, 0x7B007B00;", "mul.rn.bf16x2 s, s, a;", "mul.rn.bf16x2 s, s, a;"]
    for pair, (magnitude, by, sign, sign_by) in enumerate(_SHIFTS):
        lines += [f"{magnitude}.b32 a, {source}, {by};", "and.b32 a, a, 0x01C001C0;"]
        lines += [f"{sign}.b32 b, {source}, {sign_by};"] if sign else [f"mov.b32 b, {source};"]
        lines += ["lop3.b32 a, b, 0x80008000, a, 0xEA;", f"mul.rn.bf16x2 ${pair}, a, s;"]
    return _asm("\n".join([*lines, "}"]), [words, scales], jnp.int32)


def _mma(low: jax.Array, high: jax.Array, x: jax.Array, sums: jax.Array) -> jax.Array:
    """Two m16n8k16 products: rows g in `low`, rows g + 8 in `high`, added to `sums`."""
    lines = []
    for i in (0, 2):
        a, b = f"{{${4 + i}, ${8 + i}, ${5 + i}, ${9 + i}}}", f"{{${12 + i}, ${13 + i}}}"
        name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        lines.append(f"{name} {{$0, $1, $2, $3}}, {a}, {b}, {{$0, $1, $2, $3}};")
    return _asm("\n".join(lines), [low, high, x, sums], jnp.float32)


def _asm(text: str, args: list[jax.Array], dtype: Any) -> jax.Array:
    """`text` on the four registers that a lane has of each argument: $0..$3 out, then the arguments'.

    Four bytes of an 8-bit argument are one register. A float argument shares its registers with the result.
    """
    kind = "f" if dtype == jnp.float32 else "r"
    constraints = [f"=&{kind}"] * 4
    for arg in args:
        if arg.dtype == jnp.float32:
            constraints += ["0", "1", "2", "3"]
        else:
            constraints += ["r"] * arg.dtype.itemsize
    return _triton.inline_asm(text, ",".join(constraints), args, dtype, pack=4)
