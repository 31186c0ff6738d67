"""`linear`, every implementation, against float64."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.linear import linear
from pallas_kernels.quant import QuantTensor


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "fp8"])
def test_against_float64(implementation: str, packed: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, 96)).astype(np.float32)
    payload = rng.normal(size=(40, 96)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    decoded = payload.astype(np.float64)
    weight = jnp.asarray(payload.astype(np.float32))
    if packed:
        decoded = decoded * np.repeat(np.repeat(scale, 32, 0)[:40], 32, 1)
        weight = QuantTensor(jnp.asarray(payload), jnp.asarray(scale), (32, 32))
    got = linear(jnp.asarray(x), weight, implementation=implementation)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), x.astype(np.float64) @ decoded.T, rtol=1e-5, atol=1e-4)


def test_bfloat16_accumulates_in_float32() -> None:
    # 256 + 255 ones: a bfloat16 sum would stick at 256.
    x = jnp.concatenate([jnp.full((1, 1), 256.0), jnp.ones((1, 255))], axis=1).astype(jnp.bfloat16)
    assert float(linear(x, jnp.ones((1, 256), jnp.bfloat16))[0, 0]) == 511.0


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="linear: implementation 'pallas' is not available"):
        linear(jnp.ones((1, 2)), jnp.ones((3, 2)), implementation="pallas")
