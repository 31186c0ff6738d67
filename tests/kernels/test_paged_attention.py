"""`paged_attention`, every implementation, against float64."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.block_scores import block_scores
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.kernel import paged_attention_pallas
from pallas_kernels.paged_attention.lanes import narrow, widen
from pallas_kernels.sparse_attention import sparse_attention
from tests.kernels.paged import lay, oracle_attention, positions_of

S, K, H, h = 8, 2, 6, 16
PAGES = 4


def float64_attention(q, sequences, positions, scale):
    """sequences[b] = (keys [n, K, h], values); a plain loop over rows, tokens and heads."""
    out = np.zeros(q.shape)
    for b, t, head in np.ndindex(*q.shape[:3]):
        p = positions[b, t]
        if p < 0:
            continue
        keys, values = (a[: p + 1, head // (H // K)].astype(np.float64) for a in sequences[b])
        scores = scale * keys @ q[b, t, head].astype(np.float64)
        weights = np.exp(scores - scores.max())
        out[b, t, head] = weights @ values / weights.sum()
    return out


def case(rng: np.random.Generator, lengths: list[int], positions: np.ndarray, stale: float = 0.0):
    """Rows of given lengths laid into shuffled pages; every slot that no row owns holds `stale`."""
    B = len(lengths)
    table = rng.permutation(B * PAGES).reshape(B, PAGES).astype(np.int32)
    lanes = np.full((2, B * PAGES, S, K, h), stale, np.float32)
    sequences = []
    for b, n in enumerate(lengths):
        kv = rng.normal(size=(2, n, K, h)).astype(np.float32)
        for p in range(n):
            lanes[:, table[b, p // S], p % S] = kv[:, p]
        sequences.append((kv[0], kv[1]))
    q = rng.normal(size=(*positions.shape, H, h)).astype(np.float32)
    return q, lanes[0], lanes[1], table, sequences


@pytest.mark.parametrize("implementation", ["xla", "reference", "pallas"])
class TestPagedAttention:
    @pytest.mark.parametrize("lengths", [[1, 8, 9], [32, 3, 17], [5, 5, 5]])
    def test_decode(self, implementation: str, lengths: list[int], seed: int) -> None:
        positions = np.array(lengths, np.int32)[:, None] - 1
        self.check(implementation, lengths, positions, seed)

    def test_prefill_chunk_with_earlier_cache_and_pads(self, implementation: str, seed: int) -> None:
        positions = np.array([[8, 9, 10, -1], [-1, -1, -1, -1], [0, 1, -1, 2]], np.int32)
        self.check(implementation, [11, 4, 3], positions, seed)

    def test_stale_slots_are_never_read(self, implementation: str, seed: int) -> None:
        positions = np.array([[4, 5, 6], [-1, -1, -1], [0, 1, 2]], np.int32)
        self.check(implementation, [7, 0, 3], positions, seed, stale=np.nan)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_narrow_lanes_with_scales(self, implementation: str, dtype: str, seed: int) -> None:
        """A scale for all kv heads, and one for each."""
        rng = np.random.default_rng(seed)
        positions = np.array([[8, 9, 10], [-1, 2, 3]], np.int32)
        q, k, v, table, sequences = case(rng, [11, 4], positions, np.nan)
        k, v = (jnp.asarray(lane).astype(dtype) for lane in (k, v))
        factors = (np.full(K, 0.5), np.array([3.0, 0.25]))
        sequences = [
            [
                np.asarray(jnp.asarray(x).astype(dtype), np.float32) * f[:, None]
                for x, f in zip(row, factors, strict=True)
            ]
            for row in sequences
        ]
        args = (jnp.asarray(q), k, v, jnp.asarray(table), jnp.asarray(positions))
        scales = {"k_scale": 0.5, "v_scale": jnp.asarray(factors[1], jnp.float32)}
        got = np.asarray(paged_attention(*args, scale=0.3, implementation=implementation, **scales))
        np.testing.assert_allclose(got, float64_attention(q, sequences, positions, 0.3), atol=1e-5)

    def check(
        self, implementation: str, lengths: list[int], positions: np.ndarray, seed: int, stale: float = 0.0
    ) -> None:
        rng = np.random.default_rng(seed)
        q, k, v, table, sequences = case(rng, lengths, positions, stale)
        args = [jnp.asarray(a) for a in (q, k, v, table, positions)]
        got = jax.jit(lambda *a: paged_attention(*a, scale=0.3, implementation=implementation))(*args)
        np.testing.assert_allclose(np.asarray(got), float64_attention(q, sequences, positions, 0.3), atol=3e-6)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_longer_neighbour_changes_no_bit(implementation: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions = np.array([[2], [30]], np.int32)
    q, k, v, table, _ = case(rng, [3, 31], positions)
    fn = jax.jit(lambda *a: paged_attention(*a, scale=0.3, implementation=implementation))
    together = fn(*map(jnp.asarray, (q, k, v, table, positions)))
    positions[1] = -1
    alone = fn(*map(jnp.asarray, (q, k, v, table, positions)))
    assert np.asarray(together)[0].tobytes() == np.asarray(alone)[0].tobytes()


TILES: dict[str, Any] = {"rows": 16, "keys": 16, "span": None}


class TestKernel:
    """The portable kernel, interpreted: what it does not write is NaN, and so is every slot of no token."""

    def check(
        self,
        rng: np.random.Generator,
        lengths: list[int],
        T: int,
        page_size: int,
        tuning: dict[str, Any],
        q_dtype: Any = np.float32,
        cache_dtype: Any = np.float32,
        scales: tuple[Any, Any] = (None, None),
        tolerance: float = 3e-6,
        G: int = 6,
    ) -> None:
        rows = [[rng.normal(size=(n, K, h)).astype(cache_dtype) for _ in (0, 1)] for n in lengths]
        paged = lay(rng, rows, page_size, -(-max(lengths) // page_size) + 1)
        positions = positions_of(rng, lengths, T)
        q = jnp.asarray(rng.normal(size=(len(lengths), T, K * G, h)), q_dtype)
        q = jnp.where(positions[..., None, None] < 0, jnp.nan, q)
        args = (q, *map(jnp.asarray, (*paged.lanes, paged.table, positions)))
        got = np.asarray(paged_attention_pallas(*args, *scales, scale=0.3, interpret=True, tuning=tuning))
        assert got.dtype == np.float32
        k_scale, v_scale = (np.broadcast_to(1.0 if s is None else s, (K,)) for s in scales)
        want = np.zeros(q.shape)
        for b, t, i in np.ndindex(*q.shape[:3]):
            if (p := positions[b, t]) >= 0:
                keys, values = (lane[:, i // G] for lane in rows[b])
                one = np.asarray(q[b, t, i], np.float64)
                want[b, t, i] = oracle_attention(one, keys, values, p, 0.3 * k_scale[i // G], None, 16)
                want[b, t, i] *= v_scale[i // G]
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
        assert (got[positions < 0] == 0).all()

    @pytest.mark.parametrize("page_size", [8, 16, 24, 64])
    def test_prefill_over_several_tiles(self, page_size: int, seed: int) -> None:
        """Tiles that end within a token, pages of less than a step and of several; a chunk with earlier cache."""
        self.check(np.random.default_rng(seed), [70, 9, 0, 33], 9, page_size, TILES)

    @pytest.mark.parametrize("page_size", [8, 16, 24, 64])
    def test_decode_in_parts(self, page_size: int, seed: int) -> None:
        tuning = TILES | {"span": 32}
        self.check(np.random.default_rng(seed), [150, 1, 0, 32, 33], 1, page_size, tuning)

    @pytest.mark.parametrize("G", [1, 8, 16])
    def test_groups(self, G: int, seed: int) -> None:
        self.check(np.random.default_rng(seed), [40, 17], 3, 16, TILES, G=G)
        self.check(np.random.default_rng(seed), [40, 17], 1, 16, TILES | {"span": 16}, G=G)

    @pytest.mark.parametrize("T", [1, 5], ids=["decode", "prefill"])
    @pytest.mark.parametrize("cache_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
    @pytest.mark.parametrize(("q_dtype", "tolerance"), [("float32", 3e-6), ("bfloat16", 1e-2)])
    def test_dtypes_and_scales(self, q_dtype: str, tolerance: float, cache_dtype: Any, T: int, seed: int) -> None:
        tuning = TILES | {"span": 32 if T == 1 else None}
        for scales in ((0.5, None), (None, np.float32([3, 0.25]))):
            rng = np.random.default_rng(seed)
            self.check(rng, [50, 20], T, 16, tuning, q_dtype, cache_dtype, scales, tolerance)

    @pytest.mark.parametrize("size", [8, 24])
    @pytest.mark.parametrize("cache_dtype", [np.float32, ml_dtypes.float8_e4m3fn])
    def test_head_sizes(self, size: int, cache_dtype: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Less than a tile's least width, and between two powers of two."""
        monkeypatch.setattr(sys.modules[__name__], "h", size)
        for T, span in ((5, None), (1, 32)):
            rng = np.random.default_rng(seed)
            self.check(rng, [50, 20], T, 16, TILES | {"span": span}, cache_dtype=cache_dtype)

    @pytest.mark.parametrize("span", [None, 16])
    def test_tokens_of_one_tile_change_no_bit_of_each_other(self, span: int | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        positions = np.array([[3, 60, 17]], np.int32)
        q = rng.normal(size=(1, 3, 4, h)).astype(np.float32)
        paged = lay(rng, [[rng.normal(size=(61, K, h)).astype(np.float32) for _ in (0, 1)]], 8, 9)

        def run(positions: np.ndarray) -> np.ndarray:
            args = map(jnp.asarray, (q, *paged.lanes, paged.table, positions))
            tuning = TILES | {"span": span}
            return np.asarray(paged_attention_pallas(*args, None, None, scale=0.3, interpret=True, tuning=tuning))

        together = run(positions)
        for t in range(3):
            alone = run(np.where(np.arange(3) == t, positions, -1))
            assert together[0, t].tobytes() == alone[0, t].tobytes()


class TestLanes:
    def test_every_code_survives(self) -> None:
        """To float32 and bfloat16 and back; NaN keeps its sign."""
        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        for dtype in (jnp.float32, jnp.bfloat16):
            wide = jax.jit(lambda x, dtype=dtype: widen(x, dtype))(jnp.asarray(codes))
            np.testing.assert_array_equal(np.asarray(wide, np.float32), codes.astype(np.float32))
            back = np.asarray(jax.jit(lambda x: narrow(x, jnp.float8_e4m3fn))(wide))
            np.testing.assert_array_equal(back.view(np.uint8), codes.view(np.uint8))

    def test_rounding(self, seed: int) -> None:
        """Nearest even as ml_dtypes has it, between all neighbours and at random; beyond 448 it saturates."""
        rng = np.random.default_rng(seed)
        grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        middle = (grid[1:] + grid[:-1]) / 2
        near = [np.nextafter(middle, np.float32(to)) for to in (0, 1000)]
        values = np.concatenate([middle, *near, rng.normal(size=2000).astype(np.float32) * 8, np.float32([1e-30, 0])])
        values = np.concatenate([values, -values])
        got = np.asarray(narrow(jnp.asarray(values), jnp.float8_e4m3fn))
        np.testing.assert_array_equal(got.view(np.uint8), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
        far = np.asarray(narrow(jnp.asarray([460.0, -1e9, np.inf]), jnp.float8_e4m3fn)).astype(np.float32)
        assert far.tolist() == [448, -448, 448]


@contextlib.contextmanager
def gpu(kind: str) -> Iterator[None]:
    """JAX 0.11 and later ask which GPU it is while lowering."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh  # type: ignore[attr-defined]

    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        yield


@pytest.mark.parametrize(("platform", "kind"), [("cuda", "NVIDIA H200"), ("rocm", "gfx942")])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("T", [1, 8], ids=["decode", "prefill"])
def test_programs_for_a_gpu(T: int, cache_dtype: str, platform: str, kind: str) -> None:
    """Without that GPU: asked for by name all three are kernels there, left open none is."""
    q, cache = jnp.zeros((2, T, 8, 64), jnp.bfloat16), jnp.zeros((8, 32, 2, 64), cache_dtype)
    table, positions = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, T), jnp.int32)

    def step(*arrays: jax.Array, implementation: str | None) -> tuple[jax.Array, ...]:
        q, cache, table, positions = arrays
        rest: Any = {"block_size": 16, "implementation": implementation}
        blocks = jnp.zeros((2, T, 2, 3), jnp.int32)
        dense = paged_attention(q, cache, cache, table, positions, scale=1.0, implementation=implementation)
        sparse = sparse_attention(q, cache, cache, table, positions, blocks, scale=1.0, **rest)
        return dense, sparse, block_scores(q[:, :, :2], cache[:, :, 0], table, positions, **rest)

    for implementation in ("pallas", None):
        with gpu(kind):
            fn = jax.jit(lambda *a, i=implementation: step(*a, implementation=i))
            text = fn.trace(q, cache, table, positions).lower(lowering_platforms=(platform,)).as_text()
        names = [
            "block_scores",
            *(f"{op}_{'decode' if T == 1 else 'prefill'}" for op in ("paged_attention", "sparse_attention")),
        ]
        assert [name in text for name in names] == [implementation == "pallas"] * 3


def test_the_kernel_by_name_is_that_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    table, positions = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)

    def attend(q: jax.Array, cache: jax.Array, implementation: str | None = "pallas") -> jax.Array:
        return paged_attention(q, cache, cache, table, positions, scale=1.0, implementation=implementation)

    q, cache = jnp.zeros((1, 1, H, h)), jnp.zeros((1, S, K, h))
    with pytest.raises(ValueError, match="'pallas' is not available: queries are float16, neither float32"):
        attend(q.astype(jnp.float16), cache)
    with pytest.raises(ValueError, match="a cache is float16, none of float32, bfloat16, float8_e4m3fn"):
        attend(q, cache.astype(jnp.float16))
    with pytest.raises(ValueError, match="7 query heads do not divide over 2 kv heads"):
        attend(jnp.zeros((1, 1, 7, h)), cache)
    monkeypatch.setitem(sys.modules, "pallas_kernels.paged_attention.kernel", None)
    with pytest.raises(ValueError, match="'pallas' is not available: this JAX has no Pallas Triton route"):
        attend(q, cache)
    assert bool((attend(q, cache, None) == 0).all())
