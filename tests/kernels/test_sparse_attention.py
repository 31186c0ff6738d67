"""`sparse_attention` against float64 loops over plain sequences. Slots of no token hold NaN."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_scores import block_scores, select_blocks
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.sparse_attention.kernel import sparse_attention_pallas
from tests.kernels.paged import Paged, lay, oracle_attention, oracle_scores, oracle_selection, positions_of

H, K, h = 8, 2, 16
SCALE = 0.3
IMPLEMENTATIONS = ["xla", "reference", "pallas"]
SIZES = [(16, 16), (16, 64), (32, 32), (128, 128), (128, 256)]  # block, page


def case(
    rng: np.random.Generator, lengths: list[int], T: int, page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Paged]:
    """q [B, T, H, h], index_q [B, T, K, h], positions, and the lanes k, v, index keys."""

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    B, pages = len(lengths), -(-max(lengths) // page_size) + 1
    paged = lay(rng, [[draw(n, K, h), draw(n, K, h), draw(n, h)] for n in lengths], page_size, pages)
    return draw(B, T, H, h), draw(B, T, K, h), positions_of(rng, lengths, T), paged


def choice(
    index_q: np.ndarray, paged: Paged, positions: np.ndarray, block_size: int, topk: int
) -> tuple[np.ndarray, dict[Any, list[int]]]:
    """The oracle's blocks [B, T, K, topk], and by (b, t, kv head)."""
    blocks = np.full((*index_q.shape[:3], topk), -1, np.int32)
    selections = {}
    for b, t, k in np.ndindex(*index_q.shape[:3]):
        if (p := positions[b, t]) >= 0:
            scores = oracle_scores(index_q[b, t, k], paged.rows[b][2], p, block_size)
            selections[b, t, k] = oracle_selection(scores, topk)
            blocks[b, t, k, : len(selections[b, t, k])] = selections[b, t, k]
    return blocks, selections


def run(
    implementation: str,
    q: Any,
    paged: Paged,
    positions: np.ndarray,
    blocks: np.ndarray,
    block_size: int,
    **options: Any,
) -> np.ndarray:
    def attend(*args: Any) -> jax.Array:
        return sparse_attention(*args, block_size=block_size, scale=SCALE, implementation=implementation, **options)

    args = (q, *paged.lanes[:2], paged.table, positions, blocks)
    return np.asarray(jax.jit(attend)(*map(jnp.asarray, args)))


def oracle(
    q: np.ndarray, rows: list[list[np.ndarray]], positions: np.ndarray, selections: Any, block_size: int
) -> np.ndarray:
    out = np.zeros(q.shape)
    for b, t, i in np.ndindex(*q.shape[:3]):
        if (p := positions[b, t]) >= 0:
            k = i // (H // K)
            keys, values = rows[b][0][:, k], rows[b][1][:, k]
            out[b, t, i] = oracle_attention(q[b, t, i], keys, values, p, SCALE, selections[b, t, k], block_size)
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestAgainstFloat64:
    @pytest.mark.parametrize(("block_size", "page_size"), SIZES)
    @pytest.mark.parametrize("T", [1, 6], ids=["decode", "prefill"])
    def test_ragged_rows_with_pads(self, T: int, block_size: int, page_size: int, implementation: str, seed: int):
        """Rows with more blocks than places, exactly as many, and fewer."""
        rng = np.random.default_rng(seed)
        lengths = [5 * block_size + 3, 3 * block_size, 1, 0, block_size + 1]
        q, index_q, positions, paged = case(rng, lengths, T, page_size)
        blocks, selections = choice(index_q, paged, positions, block_size, topk=3)
        got = run(implementation, q, paged, positions, blocks, block_size)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, oracle(q, paged.rows, positions, selections, block_size), atol=3e-6)
        assert (got[positions < 0] == 0).all()

    def test_a_neighbour_changes_no_bit(self, implementation: str, seed: int) -> None:
        """Neither another row nor another token of the row."""
        rng = np.random.default_rng(seed)
        q, index_q, positions, paged = case(rng, [90, 500], 3, 64)
        positions[0] = [87, 88, 89]
        blocks, _ = choice(index_q, paged, positions, 16, topk=4)
        together = run(implementation, q, paged, positions, blocks, 16)
        positions[1], blocks[1], q[1] = -1, -1, np.nan
        positions[0, 0], blocks[0, 0] = -1, -1
        alone = run(implementation, q, paged, positions, blocks, 16)
        assert together[0, 1:].tobytes() == alone[0, 1:].tobytes()
        assert (alone[1] == 0).all()
        assert (alone[0, 0] == 0).all()

    def test_each_head_has_its_own_blocks(self, implementation: str, seed: int) -> None:
        """Group k of the blocks is kv head k: exchanging the two groups exchanges what the heads see."""
        rng = np.random.default_rng(seed)
        q, index_q, positions, paged = case(rng, [200], 1, 32)
        blocks, selections = choice(index_q, paged, positions, 16, topk=3)
        assert selections[0, 0, 0] != selections[0, 0, 1]
        swapped = {(0, 0, k): selections[0, 0, 1 - k] for k in range(K)}
        got = run(implementation, q, paged, positions, blocks[:, :, ::-1], 16)
        np.testing.assert_allclose(got, oracle(q, paged.rows, positions, swapped, 16), atol=3e-6)

    def test_order_and_gaps_of_the_blocks_do_not_matter(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, index_q, positions, paged = case(rng, [200, 20], 3, 32)
        blocks, selections = choice(index_q, paged, positions, 16, topk=5)
        got = run(implementation, q, paged, positions, rng.permuted(blocks, axis=3), 16)
        np.testing.assert_allclose(got, oracle(q, paged.rows, positions, selections, 16), atol=3e-6)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    @pytest.mark.parametrize("scales", [(None, None), (0.5, 3.0), ([0.5, 2.0], [3.0, 0.25])])
    def test_narrow_lanes_with_scales(self, scales: Any, dtype: str, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, index_q, positions, paged = case(rng, [70, 33], 3, 32)
        blocks, selections = choice(index_q, paged, positions, 16, topk=3)
        factors = [np.broadcast_to(1.0 if s is None else s, (K,))[:, None] for s in scales]
        rows = [
            [
                np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32)) * f
                for x, f in zip(row, factors, strict=False)
            ]
            for row in paged.rows
        ]
        narrow = Paged(paged.table, [jnp.asarray(lane).astype(dtype) for lane in paged.lanes], paged.rows)
        k_scale, v_scale = (jnp.asarray(s, jnp.float32) if isinstance(s, list) else s for s in scales)
        got = run(implementation, q, narrow, positions, blocks, 16, k_scale=k_scale, v_scale=v_scale)
        np.testing.assert_allclose(got, oracle(q, rows, positions, selections, 16), atol=1e-5)

    def test_bfloat16_queries(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, index_q, positions, paged = case(rng, [70, 33], 3, 32)
        blocks, selections = choice(index_q, paged, positions, 16, topk=3)
        got = run(implementation, jnp.asarray(q, jnp.bfloat16), paged, positions, blocks, 16)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, oracle(q, paged.rows, positions, selections, 16), atol=5e-2)


@pytest.mark.parametrize("G", [3, 8, 16])
@pytest.mark.parametrize("T", [1, 3], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "tuning",
    [{"keys": 16, "span": None}, {"keys": 16, "span": 32}, {"keys": 64, "span": 64}],
    ids=["half blocks", "a block a part", "two blocks a part"],
)
def test_kernel_tiles_and_parts(tuning: dict[str, Any], T: int, G: int, seed: int) -> None:
    """Groups that fill a tile and that do not, blocks of several steps, and tokens that several programs share."""
    rng = np.random.default_rng(seed)
    _, index_q, positions, paged = case(rng, [260, 96, 0, 33], T, 64)
    q = rng.normal(size=(4, T, K * G, h)).astype(np.float32)
    blocks, selections = choice(index_q, paged, positions, 32, topk=5)
    args = map(jnp.asarray, (q, *paged.lanes[:2], paged.table, positions, blocks))
    got = np.asarray(
        sparse_attention_pallas(*args, 0.5, 2.0, block_size=32, scale=2 * SCALE, interpret=True, tuning=tuning)
    )
    want = np.zeros(q.shape)
    for b, t, i in np.ndindex(*q.shape[:3]):
        if (p := positions[b, t]) >= 0:
            keys, values = paged.rows[b][0][:, i // G], paged.rows[b][1][:, i // G]
            want[b, t, i] = 2 * oracle_attention(q[b, t, i], keys, values, p, SCALE, selections[b, t, i // G], 32)
    np.testing.assert_allclose(got, want, atol=6e-6)


@pytest.mark.parametrize("size", [8, 24])
def test_head_sizes(size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a tile's least width, and between two powers of two; of scores too."""
    monkeypatch.setattr(sys.modules[__name__], "h", size)
    for T in (1, 3):
        rng = np.random.default_rng(seed)
        q, index_q, positions, paged = case(rng, [90, 33], T, 32)
        args = (jnp.asarray(index_q), *map(jnp.asarray, (paged.lanes[2], paged.table, positions)))
        scores = block_scores(*args, block_size=16, implementation="pallas")
        blocks = select_blocks(scores, jnp.asarray(positions), block_size=16, topk=3)
        want, selections = choice(index_q, paged, positions, 16, topk=3)
        np.testing.assert_array_equal(blocks, want)
        got = run("pallas", q, paged, positions, want, 16)
        np.testing.assert_allclose(got, oracle(q, paged.rows, positions, selections, 16), atol=3e-6)


def test_kernel_reads_nothing_else(seed: int) -> None:
    """NaN in each block that is not chosen, and in queries that are pads: no result shows any."""
    rng = np.random.default_rng(seed)
    q, index_q, positions, paged = case(rng, [200, 40], 1, 32)
    positions[1] = -1
    q[1] = np.nan
    blocks, selections = choice(index_q, paged, positions, 16, topk=3)
    lanes = [np.full_like(lane, np.nan) for lane in paged.lanes[:2]]
    for k in range(K):
        for token in (t for block in selections[0, 0, k] for t in range(block * 16, min(block * 16 + 16, 200))):
            at = paged.table[0, token // 32], token % 32, k
            for lane, values in zip(lanes, paged.rows[0], strict=False):
                lane[at] = values[token, k]
    got = run("pallas", q, Paged(paged.table, lanes, paged.rows), positions, blocks, 16)
    np.testing.assert_allclose(got, oracle(q, paged.rows, positions, selections, 16), atol=3e-6)


def test_the_work_does_not_grow_with_the_context() -> None:
    """Temporaries of the XLA version are the same for 8 pages and for 64."""

    def temporaries(pages: int) -> int:
        fn = jax.jit(lambda *args: sparse_attention(*args, block_size=16, scale=1.0, implementation="xla"))
        shapes = [(2, 4, H, h), (2 * pages, 32, K, h), (2 * pages, 32, K, h), (2, pages), (2, 4), (2, 4, K, 4)]
        args = [jax.ShapeDtypeStruct(s, jnp.float32 if i < 3 else jnp.int32) for i, s in enumerate(shapes)]
        return fn.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert 0 < temporaries(64) == temporaries(8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 2047, 2048])
def test_up_to_topk_blocks_sparse_is_dense(length: int, implementation: str, seed: int) -> None:
    """At M3's sizes of block, page and choice, to 1e-6 of the largest output."""
    rng = np.random.default_rng(seed)
    q, index_q, positions, paged = case(rng, [length, 40], 3, 128)
    args = [jnp.asarray(a) for a in (*paged.lanes, paged.table, positions)]
    k, v, index_k, table, at = args
    scores = block_scores(jnp.asarray(index_q), index_k, table, at, block_size=128, implementation=implementation)
    blocks = select_blocks(scores, at, block_size=128, topk=16)
    sparse = run(implementation, q, paged, positions, np.asarray(blocks), 128)
    dense = np.asarray(paged_attention(jnp.asarray(q), k, v, table, at, scale=SCALE, implementation=implementation))
    assert np.abs(sparse - dense).max() <= 1e-6 * np.abs(dense).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_page_size_moves_no_block(implementation: str, seed: int) -> None:
    """The same rows in pages of one, four and sixteen blocks: the same choice and result."""
    rng = np.random.default_rng(seed)
    q, index_q, positions, paged = case(rng, [270, 90], 3, 16)
    results = []
    for page_size in (16, 64, 256):
        laid = lay(rng, paged.rows, page_size, -(-270 // page_size))
        index = map(jnp.asarray, (index_q, laid.lanes[2], laid.table, positions))
        scores = block_scores(*index, block_size=16, implementation=implementation)
        blocks = np.asarray(select_blocks(scores, jnp.asarray(positions), block_size=16, topk=4))
        results.append((blocks.tobytes(), run(implementation, q, laid, positions, blocks, 16)))
    for blocks, out in results[1:]:
        assert blocks == results[0][0]
        np.testing.assert_allclose(out, results[0][1], atol=0 if implementation == "pallas" else 1e-6)


def test_one_token_more_is_sparse(seed: int) -> None:
    """Position 2048 is the first with 17 blocks: one is left out, the oracle's."""
    rng = np.random.default_rng(seed)
    q, index_q, positions, paged = case(rng, [2049], 1, 128)
    args = [jnp.asarray(a) for a in (index_q, paged.lanes[2], paged.table, positions)]
    scores = block_scores(*args, block_size=128)
    blocks = np.asarray(select_blocks(scores, args[3], block_size=128, topk=16))
    want, selections = choice(index_q, paged, positions, 128, topk=16)
    np.testing.assert_array_equal(blocks, want)
    got = run("xla", q, paged, positions, blocks, 128)
    np.testing.assert_allclose(got, oracle(q, paged.rows, positions, selections, 128), atol=3e-6)


def test_bad_sizes_are_named() -> None:
    q, cache = jnp.zeros((1, 1, H, h)), jnp.zeros((1, 24, K, h))
    table, positions = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    blocks = jnp.zeros((1, 1, K, 2), jnp.int32)

    def attend(q: jax.Array, cache: jax.Array, blocks: jax.Array, block_size: int, **options: Any) -> None:
        sparse_attention(q, cache, cache, table, positions, blocks, block_size=block_size, scale=1.0, **options)

    with pytest.raises(ValueError, match="page size 24 is no multiple of the block size 16"):
        attend(q, cache, blocks, 16)
    with pytest.raises(ValueError, match=r"blocks of shape \(1, 1, 4, 2\); expected \(1, 1, 2, 'topk'\)"):
        attend(q, cache, jnp.zeros((1, 1, 4, 2), jnp.int32), 24)
    with pytest.raises(ValueError, match="7 query heads do not divide over 2 kv heads"):
        attend(q[:, :, :7], cache, blocks, 24)
    with pytest.raises(ValueError, match="for queries of 16; expected both"):
        attend(q, cache[..., :8], blocks, 24)
    with pytest.raises(ValueError, match="implementation 'fast' is not available"):
        attend(q, cache, blocks, 24, implementation="fast")
    with pytest.raises(ValueError, match="'pallas' is not available: the block size 24 is no power of two from 16 on"):
        attend(q, cache, blocks, 24, implementation="pallas")
