"""`grouped_moe`, every implementation, against float64."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.grouped_moe.xla import block_rows, plan_blocks
from pallas_kernels.quant import QuantTensor

IMPLEMENTATIONS = ["xla", "reference"]
E, F, D = 6, 48, 40
OAI = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def float64_moe(x, w13, w2, ids, weights, activation):
    """A plain loop over tokens, float64, with an activation of its own."""
    out = np.zeros((len(x), w2.shape[1]))
    for n in range(len(x)):
        for e, weight in zip(ids[n], weights[n], strict=True):
            if not 0 <= e < len(w2):
                continue
            gate, up = w13[e].astype(np.float64) @ x[n].astype(np.float64)
            if activation.limit is not None:
                gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
            hidden = gate / (1 + np.exp(-activation.alpha * gate)) * (up + activation.beta)
            out[n] += weight * (w2[e].astype(np.float64) @ hidden)
    return out


def packed(rng: np.random.Generator, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[QuantTensor, np.ndarray]:
    payload = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    grid = (-(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scale = rng.uniform(0.02, 0.4, (*shape[:-2], *grid)).astype(np.float32)
    wide = np.repeat(np.repeat(scale, block[0], -2)[..., : shape[-2], :], block[1], -1)[..., : shape[-1]]
    return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), block), payload.astype(np.float64) * wide


def routing(rng: np.random.Generator, N: int, k: int, kind: str) -> np.ndarray:
    if kind == "one expert":
        return np.tile(np.array([3, 1], np.int32)[:k], (N, 1))
    ids = np.argsort(rng.random((N, E)), axis=1)[:, :k].astype(np.int32)
    if kind == "pads":
        ids[rng.random(N) < 0.4] = -1
        ids[rng.random((N, k)) < 0.2] = E + 3
    if kind == "nothing":
        ids[:] = -1
    return ids


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestGroupedMoe:
    @pytest.mark.parametrize("kind", ["spread", "one expert", "pads", "nothing"])
    @pytest.mark.parametrize("N", [1, 5, 64, 300])
    def test_against_float64(self, implementation: str, N: int, kind: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(N, D)).astype(np.float32)
        w13 = rng.normal(size=(E, 2, F, D)).astype(np.float32) / 6
        w2 = rng.normal(size=(E, D, F)).astype(np.float32) / 6
        ids = routing(rng, N, 2, kind)
        weights = rng.random((N, 2)).astype(np.float32)
        want = float64_moe(x, w13, w2, ids, weights, SwiGLU())
        args = [jnp.asarray(a) for a in (x, w13, w2, ids, weights)]
        got = jax.jit(lambda *a: grouped_moe(*a, activation=SwiGLU(), implementation=implementation))(*args)
        np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)

    @pytest.mark.parametrize("activation", [SwiGLU(), OAI], ids=["silu", "oai"])
    def test_fp8_blocks(self, implementation: str, activation: SwiGLU, seed: int) -> None:
        rng = np.random.default_rng(seed)
        w13, wide13 = packed(rng, (E, 2, F, D), (32, 16))
        w2, wide2 = packed(rng, (E, D, F), (16, 32))
        x = 3 * rng.normal(size=(20, D)).astype(np.float32)
        ids, weights = routing(rng, 20, 2, "spread"), rng.random((20, 2)).astype(np.float32)
        want = float64_moe(x, wide13, wide2, ids, weights, activation)
        args = (jnp.asarray(x), w13, w2, jnp.asarray(ids), jnp.asarray(weights))
        got = grouped_moe(*args, activation=activation, implementation=implementation)
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-5 * np.abs(want).max())

    def test_bfloat16_is_close(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, w13, w2 = (
            jnp.asarray(rng.normal(size=shape) / 6, jnp.bfloat16) for shape in ((9, D), (E, 2, F, D), (E, D, F))
        )
        ids, weights = routing(rng, 9, 2, "spread"), rng.random((9, 2)).astype(np.float32)
        want = float64_moe(*(np.asarray(a, np.float64) for a in (x, w13, w2)), ids, weights, SwiGLU())
        got = grouped_moe(
            x, w13, w2, jnp.asarray(ids), jnp.asarray(weights), activation=SwiGLU(), implementation=implementation
        )
        assert np.abs(np.asarray(got) - want).max() < 0.01 * np.abs(want).max()

    def test_gate_is_the_first_half(self, implementation: str) -> None:
        # w1 = I, w3 = 2 I, x = 1: silu(1) * 2; swapped halves would give silu(2) * 1 = 1.76159.
        eye = np.eye(4, dtype=np.float32)
        w13, w2 = jnp.asarray(np.stack([eye, 2 * eye])[None]), jnp.asarray(eye[None])
        got = grouped_moe(
            jnp.ones((1, 4)), w13, w2, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)),
            activation=SwiGLU(), implementation=implementation,
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(got), np.full((1, 4), 1.46212), atol=1e-5)


def test_an_expert_that_is_not_chosen_never_enters() -> None:
    w13 = jnp.ones((2, 2, 8, 4)).at[1].set(jnp.nan)
    w2 = jnp.ones((2, 4, 8)).at[1].set(jnp.nan)
    ids = jnp.array([[0], [-1], [0]], jnp.int32)
    got = grouped_moe(jnp.ones((3, 4)), w13, w2, ids, jnp.ones((3, 1)), activation=SwiGLU(), implementation="xla")
    assert bool(jnp.all(jnp.isfinite(got)))
    assert float(jnp.abs(got[1]).max()) == 0.0


@pytest.mark.parametrize(("gate", "up", "want"), [(8.0, 9.0, 55.9996), (1.0, 1.0, 1.69159), (-8.0, 9.0, -0.0000781)])
def test_clamped_swiglu(gate: float, up: float, want: float) -> None:
    # At (-8, 9): -8 * sigmoid(-13.616) * (7 + 1).
    got = float(OAI(jnp.float32(gate), jnp.float32(up)))
    assert got == pytest.approx(want, rel=2e-3 if gate < 0 else 1e-5)


def test_no_buffer_of_tokens_times_all_experts() -> None:
    """Few tokens among 256 experts: nothing in the compiled program is as large as tokens x (experts x width)."""
    N, E_, F_, D_, k = 32, 256, 64, 128, 8
    shapes = [(N, D_), (E_, 2, F_, D_), (E_, D_, F_)]
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    avals += [jax.ShapeDtypeStruct((N, k), jnp.int32), jax.ShapeDtypeStruct((N, k), jnp.float32)]
    lowered = jax.jit(lambda *a: grouped_moe(*a, activation=SwiGLU())).lower(*avals)
    parameters = {(E_, 2, F_, D_), (E_, D_, F_)}
    sizes = []
    for dims in re.findall(r"= \w+\[([0-9,]+)\]", lowered.compile().as_text()):
        shape = tuple(map(int, dims.split(",")))
        if not any(np.prod(shape) == np.prod(p) for p in parameters):
            sizes.append(int(np.prod(shape)))
    assert max(sizes) < N * E_ * F_


def test_blocks_hold_every_row_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = rng.integers(-1, E + 1, 77).astype(np.int32)
    M = block_rows(77, E)
    plan = plan_blocks(jnp.asarray(experts), E, M)
    seen = []
    for b in range(int(plan.num_blocks)):
        expert, rows, valid = (np.asarray(a) for a in plan.block(jnp.int32(b)))
        assert valid.any()
        assert (experts[rows[valid]] == expert).all()
        seen += rows[valid].tolist()
    assert sorted(seen) == np.flatnonzero((experts >= 0) & (experts < E)).tolist()
