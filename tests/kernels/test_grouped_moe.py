"""`grouped_moe`, every implementation and format, against float64."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.grouped_moe.routing import plan_blocks
from pallas_kernels.grouped_moe.xla import block_rows
from pallas_kernels.quant import SCALE_DTYPES, Format, QuantTensor, Weight
from tests.kernels.oracle import FORMATS, moe, pack, plain

IMPLEMENTATIONS = ["xla", "reference"]
E, F, D = 6, 48, 40
OAI = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
moe_jit = jax.jit(grouped_moe, static_argnames=("activation", "implementation"))


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
        want = moe(x, plain(w13), plain(w2), ids, weights, SwiGLU())
        args = [jnp.asarray(a) for a in (x, w13, w2, ids, weights)]
        got = moe_jit(*args, activation=SwiGLU(), implementation=implementation)
        np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)

    @pytest.mark.parametrize("activation", [SwiGLU(), OAI], ids=["silu", "oai"])
    @pytest.mark.parametrize("kind", FORMATS)
    def test_packed(self, implementation: str, activation: SwiGLU, kind: str, seed: int) -> None:
        """Experts that all differ, each with its own scales, ragged blocks."""
        rng = np.random.default_rng(seed)
        w13, w2 = pack(rng, (E, 2, F, D), kind), pack(rng, (E, D, F), kind, fp8_block=(16, 32))
        x = 3 * rng.normal(size=(20, D)).astype(np.float32)
        ids, weights = routing(rng, 20, 2, "pads"), rng.random((20, 2)).astype(np.float32)
        want = moe(x, w13, w2, ids, weights, activation)
        args = [jnp.asarray(x), w13.weight, w2.weight, jnp.asarray(ids), jnp.asarray(weights)]
        got = moe_jit(*args, activation=activation, implementation=implementation)
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-5 * np.abs(want).max())
        # In bfloat16, near what float32 gives on the same inputs.
        args[0] = args[0].astype(jnp.bfloat16)
        want = moe(np.asarray(args[0], np.float32), w13, w2, ids, weights, activation)
        got = np.asarray(moe_jit(*args, activation=activation, implementation=implementation))
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)

    @pytest.mark.parametrize("kind", FORMATS)
    def test_what_is_not_used_never_enters(self, implementation: str, kind: str, seed: int) -> None:
        """Experts that nobody chose, and tokens that chose none, are NaN throughout."""
        rng = np.random.default_rng(seed)
        w13, w2 = pack(rng, (E, 2, F, D), kind, emulate=True), pack(rng, (E, D, F), kind, emulate=True)
        x = rng.normal(size=(9, D)).astype(np.float32)
        ids = rng.choice([0, 2, 5], (9, 2)).astype(np.int32)
        weights = rng.random((9, 2)).astype(np.float32)
        ids[4], ids[6, 1] = (-1, E), -1
        x[4], weights[4], weights[6, 1] = np.nan, np.nan, np.nan
        poisoned = [poison(w.weight, [1, 3, 4]) for w in (w13, w2)]
        args = [jnp.asarray(x), *poisoned, jnp.asarray(ids), jnp.asarray(weights)]
        got = np.asarray(moe_jit(*args, activation=SwiGLU(), implementation=implementation))
        assert np.isfinite(got).all()
        assert (got[4] == 0).all()
        assert (np.abs(np.delete(got, 4, axis=0)).max(axis=1) > 0).all()
        args[3] = jnp.asarray(np.where(ids == 0, 3, ids))  # the poison is there
        assert np.isnan(np.asarray(moe_jit(*args, activation=SwiGLU(), implementation=implementation))).any()

    @pytest.mark.parametrize("kind", ["bf16", *FORMATS])
    def test_clamped_swiglu_in_every_format(self, implementation: str, kind: str) -> None:
        """One gate and one up a token; plain SiLU would give 71.98 and 0.7311 for the first two."""
        ones = np.zeros((1, 2, 32, 32), np.float32)
        ones[0, 0, 0, 0] = ones[0, 1, 0, 1] = 1  # gate = x[0], up = x[1]
        w13, w2 = exact(ones, kind), exact(ones[:, 0], kind)
        x = np.zeros((3, 32), np.float32)
        x[:, :2] = [[8, 9], [1, 1], [-8, 9]]
        ids, weights = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
        got = moe_jit(jnp.asarray(x), w13, w2, ids, weights, activation=OAI, implementation=implementation)
        np.testing.assert_allclose(np.asarray(got)[:2, 0], [55.9996, 1.69159], rtol=1e-5)
        np.testing.assert_allclose(np.asarray(got)[2, 0], -0.0000781, rtol=2e-3)
        assert (np.asarray(got)[:, 1:] == 0).all()

    def test_bfloat16_is_close(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, w13, w2 = (
            jnp.asarray(rng.normal(size=shape) / 6, jnp.bfloat16) for shape in ((9, D), (E, 2, F, D), (E, D, F))
        )
        ids, weights = routing(rng, 9, 2, "spread"), rng.random((9, 2)).astype(np.float32)
        wide = [np.asarray(a, np.float32) for a in (x, w13, w2)]
        want = moe(wide[0], plain(wide[1]), plain(wide[2]), ids, weights, SwiGLU())
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


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_no_buffer_of_tokens_times_all_experts(kind: str) -> None:
    """Few tokens among 256 experts: nothing in the compiled program is as large as tokens x (experts x width).

    NVFP4 with its inputs quantised by each expert's own scale: not for all experts at once either.
    """
    N, E_, F_, D_, k = 32, 256, 64, 128, 8
    aval = jax.ShapeDtypeStruct

    def stack(*shape: int) -> Weight:
        if kind == "bf16":
            return aval(shape, jnp.bfloat16)
        *lead, rows, cols = shape
        scale = aval((*lead, rows, cols // 16), jnp.float8_e4m3fn)
        each = aval(tuple(lead), jnp.float32)
        format = Format("nvfp4", (1, 16), activation="nvfp4")
        return QuantTensor(aval((*lead, rows, cols // 8), jnp.uint32), scale, format, each, each)

    w13, w2 = stack(E_, 2, F_, D_), stack(E_, D_, F_)
    avals = (aval((N, D_), jnp.bfloat16), w13, w2, aval((N, k), jnp.int32), aval((N, k), jnp.float32))
    lowered = moe_jit.lower(*avals, activation=SwiGLU(), implementation="xla")
    parameters = {int(np.prod(leaf.shape)) for leaf in jax.tree.leaves((w13, w2))}
    sizes = []
    for dims in re.findall(r"= \w+\[([0-9,]+)\]", lowered.compile().as_text()):
        size = int(np.prod([int(dim) for dim in dims.split(",")]))
        if size not in parameters:
            sizes.append(size)
    assert max(sizes) < N * E_ * F_


def test_blocks_hold_every_row_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = rng.integers(-1, E + 1, 77).astype(np.int32)
    plan = plan_blocks(jnp.asarray(experts[:, None]), E, block_rows(77, E))
    order, expert, start, end = (np.asarray(a) for a in (plan.order, plan.expert, plan.start, plan.end))
    seen = []
    for b in range(int(plan.num_blocks)):
        rows = order[start[b] : end[b]]
        assert 0 < len(rows) <= plan.M
        assert (experts[rows] == expert[b]).all()
        seen += rows.tolist()
    assert sorted(seen) == np.flatnonzero((experts >= 0) & (experts < E)).tolist()
    assert (start[int(plan.num_blocks) :] == end[int(plan.num_blocks) :]).all()


def poison(weight: Weight, experts: list[int]) -> Weight:
    """NaN in whatever of these experts can hold one: payload, scales and both scales of the whole."""
    assert isinstance(weight, QuantTensor)

    def fill(array: jax.Array | None) -> jax.Array | None:
        if array is None:
            return None
        if array.dtype == jnp.uint8:
            return array.at[np.array(experts)].set(255)  # a NaN of e8m0
        if array.dtype == jnp.uint32:
            return array
        return array.at[np.array(experts)].set(jnp.nan)

    scales = {name: fill(getattr(weight, name)) for name in ("scale", "global_scale", "input_scale")}
    return dataclasses.replace(weight, payload=fill(weight.payload), **scales)


def exact(values: np.ndarray, kind: str) -> Weight:
    """Zeros and ones packed without loss, as 2 x a half where there are two factors."""
    if kind == "bf16":
        return jnp.asarray(values, jnp.bfloat16)
    name = kind.split()[0]
    *lead, rows, cols = values.shape
    block = {"fp8": (16, 16), "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}[name]
    half = {"uint8": 126, "float32": 0.5, "float8_e4m3fn": 0.5}[SCALE_DTYPES[name]]
    scale = jnp.full((*lead, rows // block[0], cols // block[1]), half, SCALE_DTYPES[name])
    if name in ("fp8", "mxfp8"):
        return QuantTensor(jnp.asarray((2 * values).astype(ml_dtypes.float8_e4m3fn)), scale, Format(name, block))
    codes = np.where(values == 1, 4, 0).astype(np.uint8)  # 4 is the code of 2
    payload = jnp.asarray((codes[..., ::2] | codes[..., 1::2] << 4).view("<u4"))
    if name == "mxfp4":
        return QuantTensor(payload, scale, Format(name, block))
    divides = kind.endswith("divided")
    whole = jnp.full(lead, 4.0 if divides else 0.25, jnp.float32)  # 2 x 2 x 1/4
    return QuantTensor(payload, jnp.full_like(scale, 2), Format(name, block, divides), whole)
