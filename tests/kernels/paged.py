"""Random paged caches, and float64 loops over plain sequences that say what attention over them is.

The loops know nothing of pages: a row is a sequence of keys and values, and what they compute is written from the
definition of M3's sparse attention, one query and one head at a time.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Paged:
    """Rows laid into shuffled pages, and the same rows as sequences.

    Attributes:
      table: [B, pages] int32.
      lanes: arrays [P, S, ...], one a lane; slots of no token hold `stale`.
      rows: rows[b][lane] is [n, ...].
    """

    table: np.ndarray
    lanes: list[np.ndarray]
    rows: list[list[np.ndarray]]


def lay(
    rng: np.random.Generator, rows: list[list[np.ndarray]], page_size: int, pages: int, stale: float = np.nan
) -> Paged:
    """Each row owns `pages` pages, scattered among all of them and a few that nobody owns."""
    B = len(rows)
    table = rng.permutation(B * pages + 3)[: B * pages].reshape(B, pages).astype(np.int32)
    lanes = [np.full((B * pages + 3, page_size, *lane.shape[1:]), stale, lane.dtype) for lane in rows[0]]
    for b, row in enumerate(rows):
        for lane, values in zip(lanes, row, strict=True):
            for p, value in enumerate(values):
                lane[table[b, p // page_size], p % page_size] = value
    return Paged(table, lanes, rows)


def positions_of(rng: np.random.Generator, lengths: list[int], T: int) -> np.ndarray:
    """[B, T]: the last tokens of each row in order, with pads anywhere among them; a row of length 0 is all pads."""
    positions = np.full((len(lengths), T), -1, np.int32)
    for b, n in enumerate(lengths):
        real = min(n, T, max(1, T - int(rng.integers(0, 3)))) if n else 0
        places = np.sort(rng.permutation(T)[:real])
        positions[b, places] = np.arange(n - real, n)
    return positions


def oracle_scores(index_q: np.ndarray, keys: np.ndarray, p: int, block_size: int) -> np.ndarray:
    """[blocks up to p's own]: the largest of each block's index scores at positions <= p."""
    scores = keys[: p + 1].astype(np.float64) @ index_q.astype(np.float64)
    return np.array([scores[start : start + block_size].max() for start in range(0, p + 1, block_size)])


def oracle_selection(scores: np.ndarray, topk: int) -> list[int]:
    """The last block and the best others, the lower one of equals; ascending."""
    *others, own = range(len(scores))
    best = sorted(others, key=lambda block: (-scores[block], block))[: topk - 1]
    return sorted([*best, own])


def oracle_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, p: int, scale: float, blocks: list[int] | None, block_size: int
) -> np.ndarray:
    """One query head [h] over keys, values [n, h] at positions <= p, of `blocks` only unless that is None."""
    at = np.array([t for t in range(p + 1) if blocks is None or t // block_size in blocks], int)
    scores = scale * keys[at].astype(np.float64) @ q.astype(np.float64)
    weights = np.exp(scores - scores.max())
    return weights @ values[at].astype(np.float64) / weights.sum()
