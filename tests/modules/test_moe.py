"""The router against numbers a person can check."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.modules.moe import Gate, route
from minimax_jax.parameters import ParameterSpec


def test_bias_selects_and_the_unbiased_sigmoid_weighs() -> None:
    ids, weights = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), jnp.array([0.0, 0.0, 0.0, 10.0]), 2)
    assert ids.tolist() == [[3, 0]]
    # Biased weights would be 0.921 and 0.079; a softmax gives others again.
    np.testing.assert_allclose(np.asarray(weights), [[0.233915, 0.766085]], atol=1e-6)


def test_of_equal_scores_the_lower_id_comes_first() -> None:
    ids, weights = route(jnp.zeros((1, 5)), jnp.zeros(5), 3)
    assert ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(np.asarray(weights), np.full((1, 3), 1 / 3), rtol=1e-6)


def gate(weight: np.ndarray) -> Gate:
    module = Gate(ParameterSpec(weight.shape, (None, "hidden"), "float32"))
    module.weight.set_value(jnp.asarray(weight))
    return module


def test_near_ties_stay_apart() -> None:
    # Logits 4.001 and 4.002: bfloat16 values there are 0.03 apart and would tie, and the first would win.
    weight = np.array([[4.001], [4.002]], np.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        ids, _ = route(gate(weight)(jnp.ones((1, 1), dtype)), jnp.zeros(2), 1)
        assert ids.tolist() == [[1]]


def test_gate_is_a_true_float32_product(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(7, 512)).astype(np.float32), rng.normal(size=(16, 512)).astype(np.float32)
    got = np.asarray(jax.jit(gate(weight))(jnp.asarray(x)))
    np.testing.assert_allclose(got, x.astype(np.float64) @ weight.astype(np.float64).T, atol=2e-4)
