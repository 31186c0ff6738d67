"""The portable kernels of the experts, interpreted, against float64. What they do not write is NaN there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import decode, product
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe.kernel import down, gate_up, supports, why_not
from pallas_kernels.grouped_moe.routing import plan_blocks
from pallas_kernels.quant import Format, QuantTensor
from tests.kernels.random_weights import FORMATS, random_weight, with_nan

OAI = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
# tokens, experts a token, experts, D, F, rows of a block
FEW, MANY = (7, 2, 5, 96, 48, 8), (50, 2, 2, 160, 96, 64)
TILES = {"block_n": 32, "block_k": 128}  # several tiles of rows, and several steps for one plane


def float64_activation(gate: np.ndarray, up: np.ndarray, activation: SwiGLU) -> np.ndarray:
    if activation.limit is not None:
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-activation.alpha * gate)) * (up + activation.beta)


def check(
    rng: np.random.Generator,
    name: str,
    activation: SwiGLU,
    sizes: tuple[int, ...],
    dtype: jnp.dtype,
    tolerance: float,
    divides: bool = False,
    only_gate_up: bool = False,
    block: tuple[int, int] | None = None,
) -> None:
    """Both kernels, each on equal inputs, row by row."""
    N, k, E, D, F, M = sizes
    small = (1, 16) if name.startswith("mx") and F % 32 else block
    w13, wide13 = random_weight(rng, name, (E, 2, F, D), block=block, global_divides=divides, dtype=dtype)
    w2, wide2 = random_weight(rng, name, (E, D, F), block=small, global_divides=divides, dtype=dtype)
    x = jnp.asarray(rng.normal(size=(N, D)), dtype)
    ids = np.argsort(rng.random((N, E)), axis=1)[:, :k].astype(np.int32)
    ids[2], ids[3, 0] = -1, E + 1
    weights = rng.random((N, k)).astype(np.float32)

    @jax.jit
    def run(x, w13, w2, ids, weights):
        plan = plan_blocks(ids, E, M)
        hidden = gate_up(x, w13, plan, k, activation, interpret=True, tuning=TILES)
        return plan, hidden, None if only_gate_up else down(hidden, w2, plan, weights, interpret=True, tuning=TILES)

    plan, hidden, y = run(x, w13, w2, ids, weights)
    assert hidden.dtype == dtype

    order, experts = np.asarray(plan.order), ids.reshape(-1)
    real = (experts >= 0) & (experts < E)
    used = real.sum()
    hidden64 = np.asarray(hidden, np.float64)
    assert np.isnan(hidden64[used:]).all()
    rows = np.asarray(x, np.float64)[order[:used] // k]
    both = np.einsum("rd,rhfd->rhf", rows, wide13[experts[order[:used]]])
    want = float64_activation(both[:, 0], both[:, 1], activation)
    assert np.abs(hidden64[:used] - want).max() <= tolerance * np.abs(want).max()
    if y is None:
        return
    y64 = np.asarray(y)
    assert y64.dtype == np.float32
    assert np.isnan(y64[~real]).all()
    want = np.einsum("rf,rdf->rd", hidden64[:used], wide2[experts[order[:used]]])
    want = want * weights.reshape(-1)[order[:used], None].astype(np.float64)
    assert np.abs(y64[order[:used]] - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("name", FORMATS)
class TestAgainstFloat64:
    def test_few_rows(self, name: str, seed: int) -> None:
        check(np.random.default_rng(seed), name, OAI, FEW, jnp.float32, 1e-5)

    def test_few_rows_silu(self, name: str, seed: int) -> None:
        check(np.random.default_rng(seed), name, SwiGLU(), FEW, jnp.bfloat16, 1e-2, only_gate_up=True)

    def test_many_rows(self, name: str, seed: int) -> None:
        check(np.random.default_rng(seed), name, OAI, MANY, jnp.bfloat16, 1e-2)

    def test_many_rows_silu(self, name: str, seed: int) -> None:
        check(np.random.default_rng(seed), name, SwiGLU(), MANY, jnp.float32, 1e-5, only_gate_up=True)


def test_global_scales_that_divide(seed: int) -> None:
    check(np.random.default_rng(seed), "nvfp4", OAI, FEW, jnp.float32, 1e-5, divides=True)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_large_stacks_are_read_as_words(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "LARGE", 0)
    block = (16, 64) if name == "fp8" else None
    sizes = (7, 2, 5, 192, 160, 8)
    check(np.random.default_rng(seed), name, OAI, sizes, jnp.float32, 1e-5, block=block)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_row_stays_alone(name: str, seed: int) -> None:
    """NaN in the experts on both sides, in one row of the weight and in one token: nothing of it is read elsewhere."""
    rng = np.random.default_rng(seed)
    block = (1, 32) if name == "fp8" else None
    w13, _ = random_weight(rng, name, (3, 2, 40, 96), block=block)
    for index in ((0,), (2,), (1, 0, 5), (1, 1, 39)):
        w13 = with_nan(w13, index)
    x = jnp.asarray(rng.normal(size=(6, 96)), jnp.float32).at[4].set(jnp.nan)
    plan = plan_blocks(jnp.ones((6, 1), jnp.int32), 3, 4)
    hidden = np.asarray(gate_up(x, w13, plan, 1, SwiGLU(), interpret=True, tuning=TILES))
    bad = np.zeros((6, 40), bool)
    bad[4], bad[:, 5], bad[:, 39] = True, True, True
    np.testing.assert_array_equal(np.isnan(hidden), bad)


@pytest.mark.parametrize("name", FORMATS)
def test_the_activations_numbers_reach_every_format(name: str) -> None:
    """(gate, up) = (8, 9), (1, 1), (-8, 9) as sums of two codes: plain SiLU would give 71.98, 0.7311."""
    codes = np.zeros((1, 2, 16, 32), np.float32)
    codes[0, 0, :3, :2] = [[6, 2], [1, 0], [-6, -2]]
    codes[0, 1, :3, :2] = [[6, 3], [1, 0], [6, 3]]
    grid = (1, 2, 16, 2 if name == "nvfp4" else 1)
    if name == "plain":
        w13 = jnp.asarray(codes)
    elif name in ("fp8", "mxfp8"):
        scale = jnp.ones(grid, jnp.float32) if name == "fp8" else jnp.full(grid, 127, jnp.uint8)
        w13 = QuantTensor(jnp.asarray(codes.astype(ml_dtypes.float8_e4m3fn)), scale, Format(name, (1, 32)))
    else:
        nibbles = codes.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        payload = np.ascontiguousarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view("<u4")
        nv = name == "nvfp4"
        scale = jnp.ones(grid, jnp.float8_e4m3fn) if nv else jnp.full(grid, 127, jnp.uint8)
        whole = jnp.ones((1, 2), jnp.float32) if nv else None
        w13 = QuantTensor(jnp.asarray(payload), scale, Format(name, (1, 16 if nv else 32)), whole)
    x = jnp.zeros((1, 32)).at[0, :2].set(1)
    hidden = gate_up(x, w13, plan_blocks(jnp.zeros((1, 1), jnp.int32), 1, 1), 1, OAI, interpret=True)
    np.testing.assert_allclose(np.asarray(hidden)[0, :3], [55.9996, 1.69159, -0.0000781], rtol=1e-5, atol=5e-8)


class TestDecode:
    codes = np.arange(256, dtype=np.uint8)

    def test_e2m1(self) -> None:
        want = (self.codes & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        got = np.asarray(decode.e2m1(jnp.asarray(self.codes, jnp.int32)))
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))  # the sign of zero too

    def test_e4m3(self) -> None:
        want = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        got = np.asarray(decode.e4m3(jnp.asarray(self.codes, jnp.int32)))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))

    def test_e8m0(self) -> None:
        want = self.codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        got = np.asarray(decode.e8m0(jnp.asarray(self.codes, jnp.int32)))
        np.testing.assert_array_equal(got[1:], want[1:])
        assert got[0] == 0

    @pytest.mark.parametrize("scale", ["e8m0", "e4m3"])
    def test_every_code_with_every_scale_is_exact_in_bfloat16(self, scale: str) -> None:
        codes = np.arange(16, dtype=np.uint8)
        kind = {"e8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}[scale]
        with np.errstate(over="ignore"):
            want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)[:, None] * self.codes.view(kind).astype(
                np.float32
            )
        scales = getattr(decode, scale)(jnp.asarray(self.codes, jnp.int32))
        product = decode.e2m1(jnp.asarray(codes, jnp.int32))[:, None] * scales[None]
        got = np.asarray(decode.narrow(product, jnp.bfloat16)).astype(np.float32)
        normal = (np.abs(want) >= 2.0**-126) | (want == 0) | np.isnan(want)
        normal[:, 0] &= scale == "e4m3"  # the byte of 2^-127 counts as zero
        assert normal.sum() > 16 * 254 - 16
        np.testing.assert_array_equal(got[normal], want[normal])


def test_what_no_kernel_reads_is_told() -> None:
    words, scale = jnp.zeros((4, 32, 12), jnp.uint32), jnp.zeros((4, 32, 3), jnp.uint8)
    assert supports(QuantTensor(words, scale, Format("mxfp4", (1, 32))))
    odd = QuantTensor(jnp.zeros((32, 72), jnp.float8_e4m3fn), jnp.ones((1, 3)), Format("fp8", (32, 24)))
    assert not supports(odd)
    tiled = QuantTensor(words, scale, Format("mxfp4", (1, 32), order="tiles"))
    plan = plan_blocks(jnp.zeros((1, 1), jnp.int32), 1, 1)
    for weight, problem in (
        (odd, "fp8 blocks of 32 x 24 in 72 columns"),
        (tiled, "its payload lies in the order 'tiles'"),
    ):
        with pytest.raises(ValueError, match=f"no kernel for this weight: {problem}"):
            gate_up(jnp.zeros((1, weight.shape[-1])), weight, plan, 1, SwiGLU(), interpret=True)
    big = jax.ShapeDtypeStruct((256, 2, 1536, 3072), jnp.float8_e4m3fn)
    assert supports(QuantTensor(big, scale, Format("fp8", (128, 64))))  # as words
    assert "32 x 32 in 3072 columns" in str(why_not(QuantTensor(big, scale, Format("fp8", (32, 32)))))
