"""Packed weights decode to the formats' own values."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quant import QuantTensor, dequantize


def test_every_fp8_code_decodes_as_ml_dtypes_says() -> None:
    payload = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(16, 16)
    weight = QuantTensor(jnp.asarray(payload), jnp.ones((1, 1)), (16, 16))
    np.testing.assert_array_equal(np.asarray(dequantize(weight, jnp.float32)), payload.astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "block"),
    [((6, 4), (6, 4)), ((6, 4), (1, 4)), ((6, 4), (2, 2)), ((5, 7), (2, 4)), ((300, 200), (128, 128))],
    ids=["one", "per row", "grid", "ragged", "ragged 128"],
)
def test_scale_of_each_block(shape: tuple[int, int], block: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scale = rng.uniform(0.5, 2.0, grid).astype(np.float32)
    want = np.zeros(shape, np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            want[i, j] = np.float32(payload[i, j]) * scale[i // block[0], j // block[1]]
    got = dequantize(QuantTensor(jnp.asarray(payload), jnp.asarray(scale), block), jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_decoded_value_takes_the_compute_dtype_not_the_storage_dtype() -> None:
    weight = QuantTensor(jnp.full((1, 1), 1.75, jnp.float8_e4m3fn), jnp.full((1, 1), 0.01), (1, 1))
    decoded = dequantize(weight, jnp.bfloat16)
    assert decoded.dtype == jnp.bfloat16
    assert float(decoded[0, 0]) == pytest.approx(0.0175, rel=2**-8)
