"""The portable kernel of the dense product, interpreted, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear.kernel import linear_pallas
from tests.kernels.random_weights import FORMATS, random_weight, with_nan

TILES = {"block_n": 32, "block_k": 128}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("lead", "rows", "cols", "dtype"),
    [((2, 3), 40, 192, jnp.float32), ((70,), 16, 160, jnp.float32), ((1,), 96, 384, jnp.bfloat16)],
    ids=["few", "many", "one"],
)
def test_against_float64(name: str, lead: tuple[int, ...], rows: int, cols: int, dtype: jnp.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, wide = random_weight(rng, name, (rows, cols), dtype=dtype)
    x = jnp.asarray(rng.normal(size=(*lead, cols)), dtype)
    got = jax.jit(lambda x, w: linear_pallas(x, w, interpret=True, tuning=TILES))(x, weight)
    assert got.dtype == jnp.float32
    want = np.asarray(x, np.float64) @ wide.T
    # Products of bfloat16 are exact and are summed in float32, but FP8 scales only the sums.
    assert np.abs(np.asarray(got) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("block", [(1, 256), (128, 128), (7, 16)], ids=["row", "128x128", "7x16"])
def test_fp8_blocks(block: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, wide = random_weight(rng, "fp8", (48, 256), block=block)
    x = jnp.asarray(rng.normal(size=(4, 256)), jnp.float32)
    want = np.asarray(x, np.float64) @ wide.T
    got = np.asarray(linear_pallas(x, weight, interpret=True))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_bad_row_stays_alone(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, _ = random_weight(rng, name, (40, 96))
    x = jnp.asarray(rng.normal(size=(20, 96)), jnp.float32).at[19].set(jnp.nan)
    got = np.asarray(linear_pallas(x, with_nan(weight, (17,)), interpret=True, tuning=TILES))
    bad = np.zeros((20, 40), bool)
    bad[19], bad[:, 17] = True, True
    np.testing.assert_array_equal(np.isnan(got), bad)
