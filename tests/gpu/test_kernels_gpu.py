"""The kernels as compiled for the accelerator, against the float32 reference on fresh random data.

MINIMAX_TEST_PLATFORM=gpu python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.grouped_moe.mma import LayerTuning, MmaTuning, down_mma, gate_up_mma
from pallas_kernels.grouped_moe.pallas import weighted_sum
from pallas_kernels.grouped_moe.routing import plan_blocks
from pallas_kernels.linear import linear
from pallas_kernels.quant import Format, QuantTensor, Weight
from pallas_kernels.tiles import arrange

pytestmark = pytest.mark.gpu

ACTIVATIONS = {"silu": SwiGLU(), "oai": SwiGLU(alpha=1.702, beta=1.0, limit=7.0)}
BLOCKS = {"fp8": (64, 64), "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}
E, F, D, K = 12, 192, 384, 3


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Weight:
    """A weight of normal codes; scale bytes differ between neighbours, global scales between matrices."""
    *lead, rows, cols = shape
    if name == "bf16":
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16)
    block = BLOCKS[name]
    grid = (*lead, -(-rows // block[0]), -(-cols // block[1]))
    bytes_ = (120 + (3 * np.arange(grid[-2])[:, None] + np.arange(grid[-1])) % 11).astype(np.uint8)
    bytes_ = np.broadcast_to(bytes_ - 7, grid)
    global_scale = None
    if name in ("mxfp4", "nvfp4"):
        payload = rng.integers(0, 2**32, (*lead, rows, cols // 8), dtype=np.uint32)
    else:
        payload = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    if name == "nvfp4":
        scale = rng.uniform(0.5, 8, grid).astype(ml_dtypes.float8_e4m3fn)
        global_scale = jnp.asarray(rng.uniform(0.005, 0.02, lead), jnp.float32)
    else:
        scale = rng.uniform(0.02, 0.2, grid).astype(np.float32) if name == "fp8" else bytes_
    return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), Format(name, block), global_scale)


def operands(rng: np.random.Generator, name: str, N: int) -> tuple[Weight, Weight, jax.Array, jax.Array, jax.Array]:
    ids = np.argsort(rng.random((N, E)), axis=1)[:, :K].astype(np.int32)
    ids[rng.random((N, K)) < 0.1] = -1
    x = jnp.asarray(rng.normal(size=(N, D)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((N, K)), jnp.float32)
    return draw(rng, name, (E, 2, F, D)), draw(rng, name, (E, D, F)), x, jnp.asarray(ids), weights


def poison() -> None:
    """Leaves NaN where the next outputs will be allocated: an element that a kernel does not write shows."""
    jnp.full((64, 2**20), jnp.nan).block_until_ready().delete()


def relative(got: jax.Array, want: jax.Array) -> float:
    assert bool(jnp.isfinite(got).all())
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("N", [9, 700], ids=["few", "many"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["bf16", *BLOCKS])
def test_portable_experts(name: str, activation: str, N: int, dtype: str, seed: int) -> None:
    w13, w2, x, ids, weights = operands(np.random.default_rng(seed), name, N)
    x, swiglu = x.astype(dtype), ACTIVATIONS[activation]
    want = grouped_moe(x, w13, w2, ids, weights, activation=swiglu, implementation="reference")
    run = jax.jit(lambda *args: grouped_moe(*args, activation=swiglu, implementation="pallas"))
    poison()
    assert relative(run(x, w13, w2, ids, weights), want) < (1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    "tuning",
    [
        LayerTuning(8, MmaTuning(2, 2, True), MmaTuning(2, 2, True)),
        LayerTuning(8, MmaTuning(4, 1, True), MmaTuning(2, 1, False)),
        LayerTuning(16, MmaTuning(4, 1, False), MmaTuning(1, 4, True)),
        LayerTuning(48, MmaTuning(4, 1, False, 2, 2), MmaTuning(4, 1, False, 2, 2)),
    ],
    ids=["split", "narrow", "wide", "prefill"],
)
def test_tensor_core_experts(name: str, activation: str, tuning: LayerTuning, seed: int) -> None:
    """Columns that fill half a step, rows that no warp has, blocks that no row fills."""
    rng = np.random.default_rng(seed)
    N = 300 if tuning.rows > 16 else 20
    ids = np.argsort(rng.random((N, E)), axis=1)[:, :K].astype(np.int32)
    ids[rng.random((N, K)) < 0.1] = -1
    w13, w2 = draw(rng, name, (E, 2, 128, 384)), draw(rng, name, (E, 352, 128))
    x = jnp.asarray(rng.normal(size=(N, 384)), jnp.bfloat16)
    weights, swiglu, ids = jnp.asarray(rng.random((N, K)), jnp.float32), ACTIVATIONS[activation], jnp.asarray(ids)
    want = grouped_moe(x, w13, w2, ids, weights, activation=swiglu, implementation="reference")
    assert isinstance(w13, QuantTensor)
    assert isinstance(w2, QuantTensor)
    assert want.shape == (N, 352)

    def run(x, w13, w2, ids, weights):
        plan = plan_blocks(ids, E, tuning.rows)
        hidden = gate_up_mma(x, w13, plan, K, swiglu, tuning.gate_up)
        return weighted_sum(down_mma(hidden, w2, plan, weights, tuning.down), ids, E)

    poison()
    got = jax.jit(run)(x, arrange(w13), arrange(w2), ids, weights)
    assert relative(got, want) < 1e-2


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("N", [1, 40, 400])
def test_weights_in_tile_order_take_the_tensor_core_kernel(name: str, N: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = jnp.asarray(np.argsort(rng.random((N, E)), axis=1)[:, :K].astype(np.int32))
    w13, w2 = draw(rng, name, (E, 2, 256, 384)), draw(rng, name, (E, 384, 256))
    assert isinstance(w13, QuantTensor)
    assert isinstance(w2, QuantTensor)
    x, weights = jnp.asarray(rng.normal(size=(N, 384)), jnp.bfloat16), jnp.asarray(rng.random((N, K)), jnp.float32)
    want = grouped_moe(x, w13, w2, ids, weights, activation=SwiGLU(), implementation="reference")
    run = jax.jit(lambda *args: grouped_moe(*args, activation=SwiGLU()))
    args = (x, arrange(w13), arrange(w2), ids, weights)
    assert "moe_gate_up_mma" in run.lower(*args).as_text()
    poison()
    assert relative(run(*args), want) < 1e-2


def test_a_scale_beyond_the_kernel_range_is_told(seed: int) -> None:
    from pallas_kernels.tiles import in_range

    weight = draw(np.random.default_rng(seed), "mxfp4", (2, 32, 128))
    assert isinstance(weight, QuantTensor)
    assert bool(in_range(arrange(weight).scale))
    far = dataclasses.replace(weight, scale=weight.scale.at[1, 3, 2].set(200))
    assert not bool(in_range(arrange(far).scale))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("R", [3, 200], ids=["few", "many"])
@pytest.mark.parametrize("name", list(BLOCKS))
def test_linear(name: str, R: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = draw(rng, name, (160, 384))
    x = jnp.asarray(rng.normal(size=(R, 384)), dtype)
    want = linear(x, weight, implementation="reference")
    poison()
    got = jax.jit(lambda x, w: linear(x, w, implementation="pallas"))(x, weight)
    assert relative(got, want) < (1e-2 if dtype == "bfloat16" else 1e-5)
