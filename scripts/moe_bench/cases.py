"""What is measured: layer sizes, seeded routings, the least bytes and operations that each case needs. numpy only."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import numpy as np

FORMATS = ("mxfp4", "nvfp4", "mxfp8", "fp8", "bf16")
BF16_BYTES, F32_BYTES = 2, 4


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of routed experts: D hidden, F expert width, E experts, k of them for each token."""

    D: int
    F: int
    E: int
    k: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


LAYERS = {
    "M2.1": Layer(D=3072, F=1536, E=256, k=8),
    "M3": Layer(D=6144, F=3072, E=128, k=4, alpha=1.702, beta=1.0, limit=7.0),
    "tiny": Layer(D=128, F=64, E=8, k=2),  # for a look on a CPU
}


@dataclasses.dataclass(frozen=True)
class Routing:
    """expert_ids [N, k] int32, distinct for each token; weights [N, k] float32, each token's sum is one."""

    expert_ids: np.ndarray
    weights: np.ndarray

    @property
    def experts_hit(self) -> int:
        """Distinct experts of all tokens."""
        return len(np.unique(self.expert_ids))


@functools.lru_cache(maxsize=64)
def routings(layer: Layer, tokens: int, repeats: int, seed: int) -> tuple[Routing, ...]:
    """Independent uniform routings, the same for everything that is measured with this seed.

    One token's experts are dealt from a shuffled pack, so that a repetition does not find its predecessors' weights in
    the cache.
    """
    rng = np.random.default_rng([seed, tokens, zlib.crc32(repr(layer).encode())])
    pack: list[int] = []
    made = []
    for _ in range(repeats):
        if tokens == 1:
            if len(pack) < layer.k:
                pack = rng.permutation(layer.E).tolist()
            ids = np.array([[pack.pop() for _ in range(layer.k)]])
        else:
            ids = np.argsort(rng.random((tokens, layer.E)), axis=1)[:, : layer.k]
        weights = rng.uniform(0.5, 1.5, ids.shape)
        weights /= weights.sum(1, keepdims=True)
        made.append(Routing(ids.astype(np.int32), weights.astype(np.float32)))
    return tuple(made)


def default_repeats(tokens: int) -> int:
    """Repetitions in one program: enough that starting it does not count."""
    return next(n for most, n in ((1, 40), (8, 24), (16, 20), (64, 12), (256, 8), (10**9, 4)) if tokens <= most)


def matrix_bytes(format: str, rows: int, cols: int) -> int:
    """Bytes of one packed matrix: payload, block scales and global scale."""
    return {
        "mxfp4": rows * cols // 2 + rows * -(-cols // 32),
        "nvfp4": rows * cols // 2 + rows * -(-cols // 16) + F32_BYTES,
        "mxfp8": rows * cols + rows * -(-cols // 32),
        "fp8": rows * cols + F32_BYTES * -(-rows // 128) * -(-cols // 128),
        "bf16": BF16_BYTES * rows * cols,
    }[format]


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least that must be done, whatever the implementation."""

    bytes: float
    flops: float

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The slower of moving the bytes and doing the operations."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)

    def bound(self, bytes_per_s: float, flops_per_s: float) -> str:
        """Which of the two it is."""
        return "bytes" if self.bytes / bytes_per_s >= self.flops / flops_per_s else "flops"


def floors(layer: Layer, format: str, cases: Sequence[Routing]) -> dict[str, Floor]:
    """Mean floor of each part over `cases`; "experts" is the whole without the routing.

    Weights of the experts that were hit are read once, x read once, hidden written and read, the output written, all
    activations in bfloat16. The rows between down and the weighted sum count for those two parts and not for the whole,
    which need not write them.
    """
    D, F = layer.D, layer.F
    hit = float(np.mean([case.experts_hit for case in cases]))
    N, k = cases[0].expert_ids.shape
    R = N * k
    w13, w2 = hit * 2 * matrix_bytes(format, F, D), hit * matrix_bytes(format, D, F)
    x, hidden, out = N * D * BF16_BYTES, R * F * BF16_BYTES, N * D * BF16_BYTES
    rows = R * D * F32_BYTES
    return {
        "gate_up": Floor(w13 + x + hidden, 2 * R * 2 * D * F),
        "down": Floor(w2 + hidden + rows, 2 * R * D * F),
        "sum": Floor(rows + out, 0),
        "experts": Floor(w13 + w2 + x + 2 * hidden + out, 2 * R * 3 * D * F),
    }
