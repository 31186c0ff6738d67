"""`block_scores` and `select_blocks` against float64 loops over plain sequences. Slots of no token hold NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_scores import block_scores, select_blocks
from pallas_kernels.block_scores.kernel import block_scores_pallas
from tests.kernels.paged import Paged, lay, oracle_scores, oracle_selection, positions_of

G, h = 4, 16
IMPLEMENTATIONS = ["xla", "reference", "pallas"]
SIZES = [(16, 16), (16, 64), (32, 32), (128, 128), (128, 256)]  # block, page


def case(
    rng: np.random.Generator, lengths: list[int], T: int, page_size: int, whole_numbers: bool = False
) -> tuple[np.ndarray, np.ndarray, Paged]:
    """index_q [B, T, G, h], positions and the index lane; `whole_numbers` makes equal scores frequent and exact."""

    def draw(*shape: int) -> np.ndarray:
        return (rng.integers(-1, 2, shape) if whole_numbers else rng.normal(size=shape)).astype(np.float32)

    positions = positions_of(rng, lengths, T)
    pages = -(-max(lengths) // page_size) + 1
    return draw(len(lengths), T, G, h), positions, lay(rng, [[draw(n, h)] for n in lengths], page_size, pages)


def run(implementation: str, q: np.ndarray, paged: Paged, positions: np.ndarray, block_size: int) -> np.ndarray:
    fn = jax.jit(lambda *args: block_scores(*args, block_size=block_size, implementation=implementation))
    return np.asarray(fn(*map(jnp.asarray, (q, paged.lanes[0], paged.table, positions))))


def select(scores: np.ndarray, positions: np.ndarray, block_size: int, topk: int) -> np.ndarray:
    return np.asarray(select_blocks(jnp.asarray(scores), jnp.asarray(positions), block_size=block_size, topk=topk))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestAgainstFloat64:
    @pytest.mark.parametrize(("block_size", "page_size"), SIZES)
    @pytest.mark.parametrize("T", [1, 6], ids=["decode", "prefill"])
    def test_scores_and_selection(self, T: int, block_size: int, page_size: int, implementation: str, seed: int):
        rng = np.random.default_rng(seed)
        lengths = [5 * block_size + 3, 1, block_size, 0, 2 * block_size + 1]
        q, positions, paged = case(rng, lengths, T, page_size)
        scores = run(implementation, q, paged, positions, block_size)
        assert scores.dtype == np.float32
        assert scores.shape == (5, T, G, paged.table.shape[1] * page_size // block_size)
        chosen = select(scores, positions, block_size, topk=3)
        for b, t, g in np.ndindex(*scores.shape[:3]):
            p = positions[b, t]
            if p < 0:
                assert np.isneginf(scores[b, t, g]).all()
                assert (chosen[b, t, g] == -1).all()
                continue
            want = oracle_scores(q[b, t, g], paged.rows[b][0], p, block_size)
            np.testing.assert_allclose(scores[b, t, g, : len(want)], want, atol=1e-5)
            assert np.isneginf(scores[b, t, g, len(want) :]).all()
            selection = oracle_selection(want, 3)
            assert chosen[b, t, g].tolist() == selection + [-1] * (3 - len(selection))

    def test_equal_scores_take_the_lower_block(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, positions, paged = case(rng, [640, 300], 5, 64, whole_numbers=True)
        scores = run(implementation, q, paged, positions, 16)
        chosen = select(scores, positions, 16, topk=8)
        ties = 0
        for b, t, g in np.ndindex(*scores.shape[:3]):
            if positions[b, t] < 0:
                continue
            want = oracle_scores(q[b, t, g], paged.rows[b][0], positions[b, t], 16)
            np.testing.assert_array_equal(scores[b, t, g, : len(want)], want)
            selection = oracle_selection(want, 8)
            assert chosen[b, t, g].tolist() == selection
            left_out = sorted(set(range(len(want))) - set(selection))
            ties += want[selection[:-1]].min() == want[left_out].max()
        assert ties > 20  # the rule decided

    def test_a_neighbour_changes_no_bit(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, positions, paged = case(rng, [40, 500], 3, 64)
        together = run(implementation, q, paged, positions, 16)
        positions[1], q[1] = -1, np.nan
        alone = run(implementation, q, paged, positions, 16)
        assert together[0].tobytes() == alone[0].tobytes()
        assert np.isneginf(alone[1]).all()

    def test_each_head_by_itself(self, implementation: str, seed: int) -> None:
        """The heads choose differently, and a head's scores are those it has alone."""
        rng = np.random.default_rng(seed)
        q, _, paged = case(rng, [600], 2, 64)
        positions = np.array([[598, 599]], np.int32)
        scores = run(implementation, q, paged, positions, 16)
        chosen = select(scores, positions, 16, topk=4)
        assert len({tuple(c) for c in chosen[0, -1].tolist()}) == G
        for g in range(G):
            alone = run(implementation, q[:, :, g : g + 1], paged, positions, 16)
            np.testing.assert_allclose(alone[:, :, 0], scores[:, :, g], atol=1e-5)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_narrow_lanes(self, dtype: str, implementation: str, seed: int) -> None:
        """What the lane holds is read exactly."""
        rng = np.random.default_rng(seed)
        q, positions, paged = case(rng, [70, 33], 3, 32)
        lane = jnp.asarray(paged.lanes[0]).astype(dtype)
        wide = Paged(paged.table, [np.asarray(lane.astype(jnp.float32))], paged.rows)
        args = (jnp.asarray(q), lane, jnp.asarray(paged.table), jnp.asarray(positions))
        got = np.asarray(block_scores(*args, block_size=32, implementation=implementation))
        np.testing.assert_allclose(got, run("reference", q, wide, positions, 32), atol=1e-5)


@pytest.mark.parametrize("T", [1, 9], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "tuning",
    [{"rows": 16, "keys": 16, "span": None}, {"rows": 16, "keys": 32, "span": 64}, {"rows": 32, "keys": 16, "span": 1}],
    ids=["all blocks", "two blocks", "one block"],
)
def test_kernel_tiles(tuning: dict[str, Any], T: int, seed: int) -> None:
    """Several tiles of rows, programs of several blocks and the last one of fewer; none of them leaves a place out."""
    rng = np.random.default_rng(seed)
    q, positions, paged = case(rng, [290, 0, 33], T, 32)
    args = [jnp.asarray(a) for a in (q, paged.lanes[0], paged.table, positions)]
    got = block_scores_pallas(*args, block_size=32, interpret=True, tuning=tuning)
    want = run("reference", q, Paged(paged.table, [np.nan_to_num(paged.lanes[0])], paged.rows), positions, 32)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)


def test_no_buffer_holds_every_key() -> None:
    T, pages, page_size = 32, 64, 128
    fn = jax.jit(lambda *args: block_scores(*args, block_size=128, implementation="xla"))
    shapes = [(1, T, G, h), (pages, page_size, h), (1, pages), (1, T)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32 if i < 2 else jnp.int32) for i, s in enumerate(shapes)]
    temporaries = fn.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < T * G * pages * page_size * 4 / 8


class TestSelection:
    def test_fewer_blocks_than_topk(self, seed: int) -> None:
        scores = np.random.default_rng(seed).normal(size=(1, 5, 1, 3)).astype(np.float32)
        positions = np.array([[0, 15, 16, 47, -1]], np.int32)
        chosen = select(scores, positions, 16, topk=16)
        assert chosen.shape == (1, 5, 1, 16)
        for t, want in enumerate([[0], [0], [0, 1], [0, 1, 2], []]):
            assert chosen[0, t, 0].tolist() == want + [-1] * (16 - len(want))

    def test_the_own_block_counts(self) -> None:
        """It is chosen with the lowest score and takes one of the places."""
        scores = np.array([5, 1, 4, 3, -9], np.float32)[None, None, None]
        assert select(scores, np.array([[70]], np.int32), 16, topk=3)[0, 0, 0].tolist() == [0, 2, 4]
        assert select(scores, np.array([[70]], np.int32), 16, topk=1)[0, 0, 0].tolist() == [4]

    def test_no_score_makes_a_future_block_eligible_or_hides_an_earlier_one(self) -> None:
        scores = np.array([-np.inf, np.nan, np.inf, 0, 9], np.float32)[None, None, None]
        assert select(scores, np.array([[50]], np.int32), 16, topk=4)[0, 0, 0].tolist() == [0, 1, 2, 3]
        assert select(scores, np.array([[50]], np.int32), 16, topk=2)[0, 0, 0].tolist() == [2, 3]
        assert select(scores, np.array([[50]], np.int32), 16, topk=3)[0, 0, 0].tolist() == [0, 2, 3]


def test_bad_sizes_are_named() -> None:
    q, positions, table = jnp.zeros((1, 1, G, h)), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="page size 24 is no multiple of the block size 16"):
        block_scores(q, jnp.zeros((1, 24, h)), table, positions, block_size=16)
    with pytest.raises(ValueError, match="index queries of 16 for index keys of 8"):
        block_scores(q, jnp.zeros((1, 16, 8)), table, positions, block_size=16)
    with pytest.raises(ValueError, match="implementation 'fast' is not available"):
        block_scores(q, jnp.zeros((1, 16, h)), table, positions, block_size=16, implementation="fast")
    with pytest.raises(ValueError, match="'pallas' is not available: the block size 8 is no power of two from 16 on"):
        block_scores(q, jnp.zeros((1, 16, h)), table, positions, block_size=8, implementation="pallas")
    with pytest.raises(ValueError, match="topk is 0"):
        select_blocks(jnp.zeros((1, 1, 1, 1)), positions, block_size=16, topk=0)
