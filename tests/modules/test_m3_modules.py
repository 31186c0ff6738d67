"""M3's norm, router and activation against numbers a person can check, in every format of weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from minimax_jax.checkpoint.quantizers import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from minimax_jax.modules.mlp import MLP
from minimax_jax.modules.moe import route
from minimax_jax.modules.norms import GemmaRMSNorm
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.quant import Format, QuantTensor, Weight

OAI = SwiGLU(1.702, 1.0, 7.0)
# (gate, up) and what comes out; plain SiLU gives 71.98 and 0.7311 for the first two.
VALUES = [(8.0, 9.0, 55.9996), (1.0, 1.0, 1.69159), (-8.0, 9.0, -0.0000781)]
FORMATS = ["bfloat16", "mxfp8", "mxfp4", "nvfp4"]
D, F = 64, 32


def norm(weight: np.ndarray) -> GemmaRMSNorm:
    module = GemmaRMSNorm(weight.size, 1e-12)
    module.weight.set_value(jnp.asarray(weight))
    return module


def test_a_weight_of_zero_is_no_change_of_scale() -> None:
    x = jnp.array([[3.0, 4.0]])
    np.testing.assert_allclose(np.asarray(norm(np.zeros(2, np.float32))(x)), [[0.848528, 1.131371]], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(norm(np.ones(2, np.float32))(x)), [[1.697056, 2.262742]], rtol=1e-5)


def test_each_head_is_normed_by_itself() -> None:
    """Two heads of four; a norm over both would give 0.6527, 0.8703 and 2.6109."""
    heads = jnp.array([[[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 12.0]]])
    got = np.asarray(norm(np.zeros(4, np.float32))(heads))
    np.testing.assert_allclose(got, [[[1.2, 1.6, 0, 0], [0, 0, 0, 2.0]]], rtol=1e-5)


def test_bfloat16_is_rounded_once_after_the_weight() -> None:
    x = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    weight = np.array([0.7, -0.7, 0.1], np.float32)
    exact = np.array([1.0, 2.0, 3.0]) / np.sqrt(14 / 3) * (1 + weight)
    np.testing.assert_array_equal(np.asarray(norm(weight)(x))[0], exact.astype(ml_dtypes.bfloat16))


def test_routed_weights_are_scaled() -> None:
    ids, weights = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), jnp.array([0.0, 0.0, 0.0, 10.0]), 2, 2.0)
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(np.asarray(weights), [[0.467831, 1.532169]], atol=2e-6)


def pack(matrix: np.ndarray, name: str) -> Weight:
    """[rows, cols] whose values each format holds exactly."""
    if name == "bfloat16":
        return jnp.asarray(matrix, jnp.bfloat16)
    if name == "mxfp8":
        payload, scale = quantize_mxfp8(matrix)
        return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), Format("mxfp8", (1, 32)))
    if name == "mxfp4":
        codes, scale = quantize_mxfp4(matrix)
        return QuantTensor(jnp.asarray(codes.view(np.uint32)), jnp.asarray(scale), Format("mxfp4", (1, 32)))
    codes, scale, whole = quantize_nvfp4(matrix, np.float32(1 / 6))
    packed = jnp.asarray(codes.view(np.uint32)), jnp.asarray(scale)
    return QuantTensor(*packed, Format("nvfp4", (1, 16)), global_scale=jnp.asarray(whole))


def matrices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w1, w3 [F, D] and w2 [D, F]: gate and up of channel 0 are x's first two, and come out as channel 0."""
    w1, w3, w2 = np.zeros((F, D), np.float32), np.zeros((F, D), np.float32), np.zeros((D, F), np.float32)
    w1[0, 0] = w3[0, 1] = w2[0, 0] = 1.0
    return w1, w3, w2


@pytest.mark.parametrize("implementation", ["xla", "pallas", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_activation_reaches_every_path(name: str, implementation: str) -> None:
    """The dense layers' MLP, which is the shared expert's class too, and a routed expert; float32 arithmetic."""
    N = len(VALUES)
    x = np.zeros((N, D), np.float32)
    x[:, :2] = [value[:2] for value in VALUES]
    w1, w3, w2 = (pack(matrix, name) for matrix in matrices())
    mlp = MLP(D, F, OAI, implementation)
    for module, matrix in ((mlp.gate_proj, w1), (mlp.up_proj, w3), (mlp.down_proj, w2)):
        module.weight.set_value(matrix)
    dense = np.asarray(mlp(jnp.asarray(x)))
    ids, weights = jnp.zeros((N, 1), jnp.int32), jnp.ones((N, 1), jnp.float32)
    stacks = stack([stack([w1, w3])]), stack([w2])
    routed = grouped_moe(jnp.asarray(x), *stacks, ids, weights, activation=OAI, implementation=implementation)
    for got in (dense, np.asarray(routed)):
        np.testing.assert_allclose(got[:2, 0], [value[2] for value in VALUES[:2]], rtol=1e-5)
        np.testing.assert_allclose(got[2, 0], VALUES[2][2], rtol=1e-3)
        assert not got[:, 1:].any()


def stack(parts: list[Any]) -> Any:
    """A new first axis."""
    if not isinstance(parts[0], QuantTensor):
        return jnp.stack(parts)
    whole = None if parts[0].global_scale is None else jnp.stack([part.global_scale for part in parts])
    payload, scale = jnp.stack([part.payload for part in parts]), jnp.stack([part.scale for part in parts])
    return QuantTensor(payload, scale, parts[0].format, global_scale=whole)
