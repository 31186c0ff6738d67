"""`paged_attention`, every implementation, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention

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


@pytest.mark.parametrize("implementation", ["xla", "reference"])
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

    def check(
        self, implementation: str, lengths: list[int], positions: np.ndarray, seed: int, stale: float = 0.0
    ) -> None:
        rng = np.random.default_rng(seed)
        q, k, v, table, sequences = case(rng, lengths, positions, stale)
        args = [jnp.asarray(a) for a in (q, k, v, table, positions)]
        got = jax.jit(lambda *a: paged_attention(*a, scale=0.3, implementation=implementation))(*args)
        np.testing.assert_allclose(np.asarray(got), float64_attention(q, sequences, positions, 0.3), atol=3e-6)


def test_a_longer_neighbour_changes_no_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions = np.array([[2], [30]], np.int32)
    q, k, v, table, _ = case(rng, [3, 31], positions)
    fn = jax.jit(lambda *a: paged_attention(*a, scale=0.3, implementation="xla"))
    together = fn(*map(jnp.asarray, (q, k, v, table, positions)))
    positions[1] = -1
    alone = fn(*map(jnp.asarray, (q, k, v, table, positions)))
    assert np.asarray(together)[0].tobytes() == np.asarray(alone)[0].tobytes()
