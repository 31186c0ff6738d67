"""Quantised activations: other code's vectors bit for bit, numpy bit for bit, and the products that use them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activation import SwiGLU
from pallas_kernels.activation_quant import emulate_activation, quantize_dequantize
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.linear import linear
from pallas_kernels.quant import Format, QuantTensor
from tests.kernels.oracle import BF16, FORMATS, GROUP, Packed, bf16, f32, moe, pack, quantised

IMPLEMENTATIONS = ["xla", "reference"]
SCHEMES = list(GROUP)
OAI = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def qdq(x: np.ndarray, scheme: str, a: Any = None, dtype: Any = jnp.float32) -> np.ndarray:
    """Compiled, as models do, and op by op: both give the same bits."""
    multiplier = None if a is None else jnp.asarray(a, jnp.float32)
    array = jnp.asarray(x, dtype)
    got = np.asarray(jax.jit(quantize_dequantize, static_argnums=1)(array, scheme, multiplier))
    np.testing.assert_array_equal(bits(got), bits(np.asarray(quantize_dequantize(array, scheme, multiplier))))
    assert got.dtype == array.dtype
    return got


def bits(values: np.ndarray) -> np.ndarray:
    return values.view({4: np.uint32, 2: np.uint16}[values.itemsize])


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(got), bits(np.asarray(want, got.dtype)))


# ---- vectors made by other code


@pytest.fixture(scope="module")
def vectors(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "data" / "fp4_vectors.json").read_text())


@pytest.mark.parametrize("case", ["nvfp4_act_qdq_input_scale_1", "nvfp4_act_qdq_input_scale_calibrated"])
@pytest.mark.parametrize("divides", [False, True], ids=["multiplies", "divides"])
def test_nvfp4_vectors(vectors: dict[str, Any], case: str, divides: bool) -> None:
    vector = vectors[case]
    x = np.array([vector["x"]], f32)
    scale = jnp.float32(vector["global_scale" if divides else "input_scale"])
    weight = QuantTensor(
        jnp.zeros((3, 4), jnp.uint32),
        jnp.ones((3, 2), jnp.float8_e4m3fn),
        Format("nvfp4", (1, 16), divides, "nvfp4"),
        jnp.float32(1),
        scale,
    )
    for fn in (emulate_activation, jax.jit(emulate_activation)):
        check(np.asarray(fn(jnp.asarray(x), weight))[0], np.array(vector["y"], f32))
        got = np.asarray(fn(jnp.asarray(x, jnp.bfloat16), weight))[0]
        np.testing.assert_array_equal(bits(got), [int(word, 16) for word in vector["y_bf16_bits"]])
    # A scale that is a constant of the program must not let the compiler fold what the formula keeps apart.
    constant = jax.jit(lambda x: emulate_activation(x, weight))
    check(np.asarray(constant(jnp.asarray(x)))[0], np.array(vector["y"], f32))


def test_mxfp4_vector(vectors: dict[str, Any]) -> None:
    vector = vectors["mxfp4_act_qdq_even"]
    x = np.array([vector["x"]], f32)
    check(qdq(x, "mxfp4")[0], np.array(vector["y"], f32))
    check(qdq(x, "mxfp4", dtype=jnp.bfloat16)[0].astype(f32), np.array(vector["y"], f32))


def test_mxfp4_scales_of_the_vectors(vectors: dict[str, Any]) -> None:
    """The scale shows in what becomes of a quarter of it and the next value: 0, and half of it."""
    for entry in vectors["mx_scale_byte_by_mode_from_amax"]:
        scale = 2.0 ** (entry["even"] - 127)
        row = np.array([[entry["amax"], 0.25 * scale, np.nextafter(f32(0.25 * scale), f32(9))]], f32)
        got = qdq(row, "mxfp4")[0]
        assert got[1] == 0
        assert got[2] == 0.5 * scale


# ---- numpy


def sample(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Magnitudes of 2^-40 to 2^40, ties, zeros, groups of zeros and largest magnitudes where the scale changes."""
    x = rng.normal(size=(rows, cols)) * np.exp2(rng.integers(-40, 41, (rows, 1)))
    x[1::5] *= np.exp2(rng.integers(-12, 13, x[1::5].shape))
    steps = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 448, 896])
    x[2::5] = rng.choice(steps, x[2::5].shape) * rng.choice([-1, 1], x[2::5].shape)
    x[3::5, :130] = 0
    edge = np.array([1.75, np.nextafter(f32(1.75), f32(0)), np.nextafter(f32(1.75), f32(2)), 1.9375, 1, 448, 6, 7])
    x[4::5, ::8] = rng.choice(edge, x[4::5, ::8].shape)
    return x.astype(f32)


@pytest.mark.parametrize("cols", [32, 300, 5], ids=["one group or two", "a ragged last group", "less than a group"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_against_numpy_bit_for_bit(scheme: str, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = sample(rng, 500, cols)
    a = f32(rng.uniform(0.01, 300)) if scheme == "nvfp4" else None
    check(qdq(x, scheme, a), quantised(x, scheme, a))
    check(qdq(x, scheme, a, jnp.bfloat16), quantised(bf16(x), scheme, a).astype(BF16))


def test_nvfp4_with_many_scales_against_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = sample(rng, 40, 48)
    a = np.exp2(rng.uniform(-12, 12, 200)).astype(f32)
    got = qdq(x[:, None], "nvfp4", a)
    assert got.shape == (40, 200, 48)
    check(got, np.stack([quantised(x, "nvfp4", value) for value in a], axis=1))


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
def test_powers_of_two_at_the_ends_of_float32(scheme: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for exponent in (-126, -125, -124, -120, 120, 126):
        x = (rng.uniform(1, 2, (64, 32)) * rng.choice([-1, 1], (64, 32)) * 2.0**exponent).astype(f32)
        want = quantised(x, scheme)
        assert (want != 0).any()
        check(qdq(x, scheme), want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_nan_makes_its_group_nan_and_no_other(scheme: str) -> None:
    group = GROUP[scheme]
    x = np.ones((1, 3 * group), f32)
    x[0, group + 3] = np.nan
    got = qdq(x, scheme, 1.0 if scheme == "nvfp4" else None)[0]
    assert np.isnan(got[group : 2 * group]).all()
    assert np.isfinite(got[:group]).all()
    assert np.isfinite(got[2 * group :]).all()


def test_roundings_to_bfloat16_are_kept(seed: int) -> None:
    """A compiled chain of products and roundings gives the codes of rounded values, not of what they were before."""
    rng = np.random.default_rng(seed)
    x, y = bf16(rng.normal(size=(2, 256, 64)))
    chain = jax.jit(lambda x, y: quantize_dequantize((x * y).astype(jnp.bfloat16), "fp8").astype(jnp.float32))
    got = np.asarray(chain(jnp.asarray(x), jnp.asarray(y)))
    check(got, bf16(quantised(bf16(x * y), "fp8")))
    assert (got != bf16(quantised(x * y, "fp8"))).any()


def test_bad_arguments_are_refused() -> None:
    x = jnp.ones((2, 32))
    with pytest.raises(ValueError, match="activation 'int8' is not known"):
        quantize_dequantize(x, "int8")
    with pytest.raises(ValueError, match="activation 'nvfp4' with multiplier None"):
        quantize_dequantize(x, "nvfp4")
    with pytest.raises(ValueError, match="activation 'fp8' with multiplier"):
        quantize_dequantize(x, "fp8", jnp.float32(1))
    weight = pack(np.random.default_rng(0), (8, 32), "nvfp4", emulate=True).weight
    with pytest.raises(ValueError, match="input_scale is None"):
        emulate_activation(x, dataclasses.replace(weight, input_scale=None))


# ---- the products


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", FORMATS)
def test_linear(implementation: str, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (3 * rng.normal(size=(7, 168))).astype(f32)
    case = pack(rng, (40, 168), kind, emulate=True)
    run = jax.jit(lambda x, weight: linear(x, weight, implementation=implementation))
    want = quantised(x, kind.split()[0], case.a).astype(np.float64) @ case.decoded.T
    got = np.asarray(run(jnp.asarray(x), case.weight))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    without = np.asarray(run(jnp.asarray(x), switched_off(case.weight)))
    assert np.abs(without - want).max() > 1e-3 * np.abs(want).max()


E, F, D, N, K = 6, 48, 160, 20, 2
moe_jit = jax.jit(grouped_moe, static_argnames=("activation", "implementation"))


@dataclasses.dataclass
class Layer:
    x: np.ndarray
    w13: Packed
    w2: Packed
    ids: np.ndarray
    weights: np.ndarray

    def run(self, activation: SwiGLU, implementation: str, dtype: Any = jnp.float32, **weights: Any) -> np.ndarray:
        args = [jnp.asarray(self.x, dtype), weights.get("w13", self.w13.weight), weights.get("w2", self.w2.weight)]
        args += [jnp.asarray(self.ids), jnp.asarray(self.weights)]
        return np.asarray(moe_jit(*args, activation=activation, implementation=implementation))


def layer(rng: np.random.Generator, kind: str, activation: SwiGLU) -> tuple[Layer, np.ndarray]:
    """A layer none of whose codes hangs on the last bits of a float32 sum, and what it gives in float32."""
    for _ in range(20):
        w13 = pack(rng, (E, 2, F, D), kind, emulate=True)
        w2 = pack(rng, (E, D, F), kind, emulate=True, largest_input=40.0)
        x = (3 * rng.normal(size=(N, D))).astype(f32)
        ids = np.argsort(rng.random((N, E)), axis=1)[:, :K].astype(np.int32)
        ids[rng.random(N) < 0.1] = -1
        made = Layer(x, w13, w2, ids, rng.random((N, K)).astype(f32))
        want, *nudged = (
            moe(x, w13, w2, ids, made.weights, activation, scheme=kind.split()[0], nudge=nudge)
            for nudge in (1.0, 1 - 3e-6, 1 + 3e-6)
        )
        if all(np.abs(other - want).max() < 2e-5 * np.abs(want).max() for other in nudged):
            return made, want
    raise AssertionError("twenty layers with a code at a boundary each")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", [SwiGLU(), OAI], ids=["silu", "oai"])
@pytest.mark.parametrize("kind", FORMATS)
def test_moe_layer(implementation: str, activation: SwiGLU, kind: str, seed: int) -> None:
    made, want = layer(np.random.default_rng(seed), kind, activation)
    got = made.run(activation, implementation)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_layer_shows_what_is_left_out_or_out_of_place(implementation: str, kind: str, seed: int) -> None:
    made, want = layer(np.random.default_rng(seed), kind, SwiGLU())
    w13, w2 = made.w13.weight, made.w2.weight
    wrong: list[dict[str, QuantTensor]] = [{"w13": switched_off(w13)}, {"w2": switched_off(w2)}]
    if kind.startswith("nvfp4"):
        wrong += [
            {"w13": dataclasses.replace(w13, input_scale=w13.input_scale[:, ::-1])},
            {"w13": dataclasses.replace(w13, input_scale=jnp.roll(w13.input_scale, 1, axis=0))},
            {"w2": dataclasses.replace(w2, input_scale=jnp.roll(w2.input_scale, 1))},
        ]
    for weights in wrong:
        assert np.abs(made.run(SwiGLU(), implementation, **weights) - want).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("activation", [SwiGLU(), OAI], ids=["silu", "oai"])
@pytest.mark.parametrize("kind", FORMATS)
def test_moe_layer_in_bfloat16(activation: SwiGLU, kind: str, seed: int) -> None:
    """Rounded where numpy rounds: equal but where a last bit of a sum moved a rounding."""
    rng = np.random.default_rng(seed)
    made, _ = layer(rng, kind, activation)
    args = (made.x, made.w13, made.w2, made.ids, made.weights, activation)
    want = moe(*args, scheme=kind.split()[0], bfloat16=True)
    error = np.abs(made.run(activation, "xla", jnp.bfloat16) - want).max(axis=1) / np.abs(want).max()
    assert error.max() < 1e-2
    assert np.median(error) < 1e-6
    unrounded = np.abs(moe(*args, scheme=kind.split()[0]) - want).max(axis=1) / np.abs(want).max()
    assert np.median(unrounded) > 1e-4


def switched_off(weight: QuantTensor) -> QuantTensor:
    return dataclasses.replace(weight, format=dataclasses.replace(weight.format, activation=None), input_scale=None)
