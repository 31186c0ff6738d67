"""The attention kernels as compiled for the accelerator, against the float32 reference on fresh random caches.

MINIMAX_TEST_PLATFORM=gpu python -m pytest -m gpu tests/gpu/test_attention_gpu.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.block_scores import block_scores, select_blocks
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.lanes import narrow, widen
from pallas_kernels.sparse_attention import sparse_attention
from tests.kernels.paged import oracle_selection, positions_of

pytestmark = pytest.mark.gpu

h, PAGE, PAGES = 128, 128, 24
BLOCK, TOPK = 128, 16
HEADS = {"M2": (48, 8), "M2tp8": (6, 1), "M3": (64, 4), "M3tp8": (8, 1)}  # query and kv heads of one device
CACHES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "fp8": jnp.float8_e4m3fn}
LENGTHS = [2900, 1, 0, 129, 2048]
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}


def operands(rng: np.random.Generator, heads: str, T: int, dtype: str, cache: str) -> dict[str, Any]:
    """Rows of LENGTHS in shuffled pages; slots past a row's end hold NaN."""
    H, K = HEADS[heads]
    B = len(LENGTHS)
    table = rng.permutation(B * PAGES).reshape(B, PAGES).astype(np.int32)

    def lane(*shape: int) -> jax.Array:
        values = rng.normal(size=(B, PAGES * PAGE, *shape)).astype(np.float32)
        for b, n in enumerate(LENGTHS):
            values[b, n:] = np.nan
        pages = np.empty((B * PAGES, PAGE, *shape), np.float32)
        pages[table.reshape(-1)] = values.reshape(B * PAGES, PAGE, *shape)
        return narrow(jnp.asarray(pages), CACHES[cache])

    return {
        "q": jnp.asarray(rng.normal(size=(B, T, H, h)), dtype),
        "k": lane(K, h),
        "v": lane(K, h),
        "index_q": jnp.asarray(rng.normal(size=(B, T, K, h)), dtype),
        "index_k": lane(h),
        "table": jnp.asarray(table),
        "positions": jnp.asarray(positions_of(rng, LENGTHS, T)),
    }


def poison() -> None:
    """Leaves NaN where the next outputs will be allocated: an element that a kernel does not write shows."""
    jnp.full((64, 2**20), jnp.nan).block_until_ready().delete()


def relative(got: jax.Array, want: jax.Array) -> float:
    assert bool(jnp.isfinite(got).all())
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def dense(x: dict[str, Any], implementation: str | None, **scales: Any) -> jax.Array:
    def run(*args: jax.Array) -> jax.Array:
        return paged_attention(*args, scale=h**-0.5, implementation=implementation, **scales)

    return jax.jit(run)(x["q"], x["k"], x["v"], x["table"], x["positions"])


def sparse(x: dict[str, Any], blocks: jax.Array, implementation: str | None, **scales: Any) -> jax.Array:
    def run(*args: jax.Array) -> jax.Array:
        return sparse_attention(*args, block_size=BLOCK, scale=h**-0.5, implementation=implementation, **scales)

    return jax.jit(run)(x["q"], x["k"], x["v"], x["table"], x["positions"], blocks)


def scores_of(x: dict[str, Any], implementation: str | None) -> jax.Array:
    fn = jax.jit(lambda *args: block_scores(*args, block_size=BLOCK, implementation=implementation))
    return fn(x["index_q"], x["index_k"], x["table"], x["positions"])


def chosen(x: dict[str, Any]) -> jax.Array:
    fn = jax.jit(lambda scores, positions: select_blocks(scores, positions, block_size=BLOCK, topk=TOPK))
    return fn(scores_of(x, "reference"), x["positions"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("T", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads", HEADS)
class TestAgainstTheReference:
    def test_dense(self, heads: str, T: int, cache: str, dtype: str, seed: int) -> None:
        x = operands(np.random.default_rng(seed), heads, T, dtype, cache)
        scales = {"k_scale": jnp.float32(0.5), "v_scale": jnp.float32(3)} if cache == "fp8" else {}
        want = dense(x, "reference", **scales)
        poison()
        assert relative(dense(x, "pallas", **scales), want) < TOLERANCE[dtype]

    def test_sparse(self, heads: str, T: int, cache: str, dtype: str, seed: int) -> None:
        x = operands(np.random.default_rng(seed), heads, T, dtype, cache)
        scales = {"k_scale": jnp.float32(0.5), "v_scale": jnp.float32(3)} if cache == "fp8" else {}
        blocks = chosen(x)
        want = sparse(x, blocks, "reference", **scales)
        poison()
        assert relative(sparse(x, blocks, "pallas", **scales), want) < TOLERANCE[dtype]

    def test_scores(self, heads: str, T: int, cache: str, dtype: str, seed: int) -> None:
        x = operands(np.random.default_rng(seed), heads, T, dtype, cache)
        want = scores_of(x, "reference")
        poison()
        got = scores_of(x, "pallas")
        np.testing.assert_array_equal(jnp.isneginf(got), jnp.isneginf(want))
        finite = jnp.isfinite(want)
        assert relative(jnp.where(finite, got, 0), jnp.where(finite, want, 0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_equal_scores_take_the_lower_block(implementation: str, seed: int) -> None:
    """The device's own top-k too: scores of small whole numbers, many of them equal."""
    rng = np.random.default_rng(seed)
    x = operands(rng, "M3", 7, "float32", "float32")
    for name in ("index_q", "index_k"):
        x[name] = jnp.clip(jnp.round(x[name][..., :16]), -1, 1)
    scores = np.asarray(scores_of(x, implementation))
    fn = jax.jit(lambda scores, positions: select_blocks(scores, positions, block_size=BLOCK, topk=TOPK))
    blocks = np.asarray(fn(jnp.asarray(scores), x["positions"]))
    for b, t, g in np.ndindex(*scores.shape[:3]):
        if (p := int(x["positions"][b, t])) >= 0:
            want = oracle_selection(scores[b, t, g, : p // BLOCK + 1], TOPK)
            assert blocks[b, t, g].tolist() == want + [-1] * (TOPK - len(want))


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("T", [1, 40], ids=["decode", "prefill"])
def test_up_to_topk_blocks_sparse_is_dense(T: int, implementation: str, seed: int) -> None:
    x = operands(np.random.default_rng(seed), "M3", T, "float32", "float32")
    x["positions"] = jnp.where(x["positions"] < BLOCK * TOPK, x["positions"], -1)
    want = dense(x, implementation)
    got = sparse(x, chosen(x), implementation)
    assert float(jnp.abs(got - want).max()) <= 1e-6 * float(jnp.abs(want).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("T", [1, 40], ids=["decode", "prefill"])
def test_neighbours_change_no_bit(T: int, dtype: str, seed: int) -> None:
    """Each row with the others gone, and each token of the first row alone."""
    x = operands(np.random.default_rng(seed), "M3", T, dtype, dtype)
    blocks, positions = chosen(x), x["positions"]

    def results(positions: jax.Array, blocks: jax.Array) -> list[np.ndarray]:
        x["positions"] = positions
        return [np.asarray(a) for a in (dense(x, "pallas"), sparse(x, blocks, "pallas"), scores_of(x, "pallas"))]

    together = results(positions, blocks)
    row, token = np.arange(len(LENGTHS))[:, None], np.arange(T)
    keeps = [np.broadcast_to(row == b, positions.shape) for b in range(len(LENGTHS))]
    keeps += [(row == 0) & (token == t) for t in (0, T // 2, T - 1)]
    for keep in keeps:
        alone = results(jnp.where(keep, positions, -1), jnp.where(keep[..., None, None], blocks, -1))
        for some, whole in zip(alone, together, strict=True):
            assert some[keep].tobytes() == whole[keep].tobytes()


class TestFloat8:
    """How lanes are written and read; what a back end's own conversions have been wrong in."""

    codes = np.arange(256, dtype=np.uint8)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_every_code_to_and_fro(self, dtype: str) -> None:
        lane = jnp.asarray(self.codes.view(ml_dtypes.float8_e4m3fn))
        wide = jax.jit(lambda lane: widen(lane, jnp.dtype(dtype)))(lane)
        want = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(wide, np.float32), want)
        back = jax.jit(lambda wide: narrow(wide, jnp.float8_e4m3fn))(wide)
        np.testing.assert_array_equal(np.asarray(back).view(np.uint8), self.codes)

    def test_the_back_ends_own_conversion(self) -> None:
        """Of no use to the kernels; a failure says why they do without it."""
        finite = self.codes[self.codes & 0x7F != 0x7F].view(ml_dtypes.float8_e4m3fn)
        wide = jax.jit(lambda lane: lane.astype(jnp.bfloat16))(jnp.asarray(finite))
        back = jax.jit(lambda wide: wide.astype(jnp.float8_e4m3fn))(wide)
        np.testing.assert_array_equal(np.asarray(back).view(np.uint8), finite.view(np.uint8))

    def test_a_long_product(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        a, b = (narrow(jnp.asarray(rng.normal(size=(16, 4096)) + 0.5, jnp.float32), jnp.float8_e4m3fn) for _ in (0, 1))
        got = jax.jit(lambda a, b: jnp.einsum("ik,jk->ij", a, b, preferred_element_type=jnp.float32))(a, b)
        want = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T
        assert np.abs(np.asarray(got) - want).max() <= 0.01 * np.abs(want).max()
