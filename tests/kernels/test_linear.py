"""`linear`, every implementation and format, against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import linear
from tests.kernels.oracle import BF16, FORMATS, bf16, f32, pack, plain


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("kind", ["plain", *FORMATS])
def test_against_float64(implementation: str, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, 104)).astype(f32)
    case = plain(rng.normal(size=(40, 104)).astype(f32)) if kind == "plain" else pack(rng, (40, 104), kind)
    got = linear(jnp.asarray(x), case.weight, implementation=implementation)
    assert got.dtype == jnp.float32
    want = x.astype(np.float64) @ case.decoded.T
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", FORMATS)
def test_bfloat16_decodes_blocks_and_scales_the_sums(kind: str, seed: int) -> None:
    """One rounding of a weight at most: none for FP4 and MXFP8, whose codes times block scales bfloat16 holds."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, 104)).astype(BF16)
    case = pack(rng, (40, 104), kind)
    blocks = bf16(case.blocks)
    assert (blocks == case.blocks).all() == (kind != "fp8")
    want = x.astype(np.float64) @ blocks.astype(np.float64).T * case.factor
    got = np.asarray(linear(jnp.asarray(x), case.weight, implementation="xla"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_bfloat16_accumulates_in_float32() -> None:
    # 256 + 255 ones: a bfloat16 sum would stick at 256.
    x = jnp.concatenate([jnp.full((1, 1), 256.0), jnp.ones((1, 255))], axis=1).astype(jnp.bfloat16)
    assert float(linear(x, jnp.ones((1, 256), jnp.bfloat16))[0, 0]) == 511.0


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="linear: implementation 'cutlass' is not available"):
        linear(jnp.ones((1, 2)), jnp.ones((3, 2)), implementation="cutlass")
