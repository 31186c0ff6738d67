"""Norms against numbers a person can check."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from minimax_jax.config import Parallelism
from minimax_jax.modules import norms
from minimax_jax.modules.norms import HeadsNorm, RMSNorm, norm_q_and_k
from minimax_jax.sharding import make_mesh, shard_map


def rms_norm(weight: np.ndarray, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(weight.size, eps)
    norm.weight.set_value(jnp.asarray(weight))
    return norm


def test_weight_is_the_factor_itself() -> None:
    x = jnp.array([[3.0, 4.0]])  # root mean square 3.5355
    np.testing.assert_allclose(np.asarray(rms_norm(np.ones(2, np.float32))(x)), [[0.848528, 1.131371]], rtol=1e-5)
    # A Gemma norm would add one to the weight and give x / rms(x) here.
    assert np.asarray(rms_norm(np.zeros(2, np.float32))(x)).tolist() == [[0.0, 0.0]]


def test_bfloat16_rounds_before_the_weight_as_transformers_does() -> None:
    x = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    weight = np.array([1.7, 0.3, 1.1], np.float32)
    exact = np.array([1.0, 2.0, 3.0]) / np.sqrt(14 / 3 + 1e-6)
    want = jnp.asarray(exact, jnp.bfloat16) * jnp.asarray(weight, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rms_norm(weight)(x))[0], np.asarray(want))


def normed(devices: int, q: list[float], k: list[float], q_weight: list[float] | None = None) -> np.ndarray:
    mesh = make_mesh(Parallelism(model=devices))

    def local(q: jax.Array, k: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_norm, k_norm = HeadsNorm(len(q_values), "heads", 1e-12), HeadsNorm(len(k_values), "kv_heads", 1e-12)
        q_norm.weight.set_value(weight)
        k_norm.weight.set_value(jnp.ones(k.shape[-1:]))
        return norm_q_and_k(q, k, q_norm, k_norm)

    q_values, k_values = np.array(q, np.float32), np.array(k, np.float32)
    weight = np.ones_like(q_values) if q_weight is None else np.array(q_weight, np.float32)
    spec = P(None, "model")
    fn = shard_map(local, mesh, (spec, spec, P("model")), (spec, spec))
    return np.asarray(jax.jit(fn)(q_values[None], k_values[None], weight)[0])[0]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_qk_norm_spans_all_heads_of_all_devices(devices: int) -> None:
    # A norm of each device's own part would give 1.2, 1.6, ..., 2.0.
    got = normed(devices, [3, 4, 0, 0, 0, 0, 0, 12], [1] * 8)
    np.testing.assert_allclose(got, [0.6527, 0.8703, 0, 0, 0, 0, 0, 2.6109], atol=5e-5)


def test_qk_norm_weight_is_the_devices_own_part() -> None:
    got = normed(2, [1.0] * 8, [1.0] * 8, [1, 2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_allclose(got, [1, 2, 3, 4, 5, 6, 7, 8], rtol=1e-6)


def test_q_and_k_have_their_own_sums() -> None:
    np.testing.assert_allclose(normed(2, [2.0] * 8, [100.0] * 8), np.ones(8), rtol=1e-6)


def test_the_local_mean_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test above fails, as it must, when each device takes its own mean."""
    monkeypatch.setattr(norms, "model_psum", lambda sums: sums * 2)
    got = normed(2, [3, 4, 0, 0, 0, 0, 0, 12], [1] * 8)
    np.testing.assert_allclose(got, [1.2, 1.6, 0, 0, 0, 0, 0, 2.0], atol=5e-5)
