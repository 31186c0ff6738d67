"""Tile order: where a lane's words and scales lie, and that nothing is lost on the way there and back."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quant import Format, QuantTensor, dequantize
from pallas_kernels.tiles import arrange, as_rows, can_arrange, in_range, restore

ROWS, COLS = 64, 384


def draw(rng: np.random.Generator, name: str, block: int, cols: int = COLS) -> QuantTensor:
    payload = rng.integers(0, 2**32, (3, 2, ROWS, cols // 8), dtype=np.uint32)
    scale = (120 + (3 * np.arange(ROWS)[:, None] + np.arange(cols // block)) % 11).astype(np.uint8)
    scale = np.ascontiguousarray(np.broadcast_to(scale, (3, 2, *scale.shape)))
    if name == "mxfp4":
        return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), Format("mxfp4", (1, block)))
    e4m3 = (scale - 90).view(ml_dtypes.float8_e4m3fn)
    shape = (1, block)
    return QuantTensor(jnp.asarray(payload), jnp.asarray(e4m3), Format("nvfp4", shape), jnp.full((3, 2), 0.01))


@pytest.mark.parametrize(("name", "block"), [("mxfp4", 32), ("mxfp4", 16), ("nvfp4", 16)])
class TestOrder:
    def test_there_and_back(self, name: str, block: int, seed: int) -> None:
        weight = draw(np.random.default_rng(seed), name, block)
        arranged = arrange(weight)
        assert arranged.format == dataclasses.replace(weight.format, order="tiles")
        assert arranged.shape == weight.shape
        assert not bool((arranged.payload == weight.payload).all())
        back = restore(arranged)
        np.testing.assert_array_equal(back.payload, weight.payload)
        np.testing.assert_array_equal(np.asarray(back.scale).view(np.uint8), np.asarray(weight.scale).view(np.uint8))
        assert back.format == weight.format

    def test_decoding_knows_the_order(self, name: str, block: int, seed: int) -> None:
        weight = draw(np.random.default_rng(seed), name, block)
        want = np.asarray(dequantize(weight, jnp.dtype(jnp.float32)))
        np.testing.assert_array_equal(dequantize(arrange(weight), jnp.dtype(jnp.float32)), want)

    def test_a_lane_finds_its_words_and_scales(self, name: str, block: int, seed: int) -> None:
        """Lane (g, t) of tile (i, j): words of rows 16i + g and 16i + g + 8 from column 64j + 16t, and its scales."""
        weight = draw(np.random.default_rng(seed), name, block)
        arranged = arrange(weight)
        words = np.asarray(arranged.payload)[1, 1].reshape(ROWS // 16, COLS // 64, 8, 4, 4)
        blocks = 64 // block
        scales = np.asarray(arranged.scale).view(np.uint8)[1, 1].reshape(ROWS // 16, COLS // 128, 8, blocks, 4)
        payload, scale = np.asarray(weight.payload)[1, 1], np.asarray(weight.scale).view(np.uint8)[1, 1]
        for i, j, g, t in [(0, 0, 0, 0), (2, 3, 5, 1), (3, 5, 7, 3), (1, 4, 2, 2)]:
            rows = [16 * i + g, 16 * i + g + 8]
            first = (64 * j + 16 * t) // 8
            assert words[i, j, g, t].tolist() == [payload[row, first + n] for row in rows for n in (0, 1)]
            own = [scale[row, (64 * j + 16 * t) // block] for row in rows]
            assert scales[i, j // 2, g, t * blocks // 4, 2 * (j % 2) :][:2].tolist() == own


def test_the_scale_of_a_zero_block_is_of_no_consequence(seed: int) -> None:
    """Exporters write scale byte 1 for a block of zeros; the kernel covers bytes from 64."""
    weight = draw(np.random.default_rng(seed), "mxfp4", 32)
    zeros = weight.payload.at[0, 0, 3, 4:8].set(jnp.uint32(0x80000008))  # zero and minus zero
    scale = weight.scale.at[0, 0, 3, 1].set(1)
    weight = dataclasses.replace(weight, payload=zeros, scale=scale)
    arranged = arrange(weight)
    assert bool(in_range(arranged.scale))
    np.testing.assert_array_equal(
        dequantize(arranged, jnp.dtype(jnp.float32)), dequantize(weight, jnp.dtype(jnp.float32))
    )


@pytest.mark.parametrize("byte", [63, 192, 255])
def test_scales_that_the_kernel_does_not_cover(byte: int, seed: int) -> None:
    weight = draw(np.random.default_rng(seed), "mxfp4", 32)
    assert bool(in_range(arrange(weight).scale))
    far = dataclasses.replace(weight, scale=weight.scale.at[2, 1, 9, 7].set(byte))
    assert not bool(in_range(arrange(far).scale))


def test_what_cannot_be_arranged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert can_arrange(draw(rng, "mxfp4", 32))
    assert not can_arrange(draw(rng, "mxfp4", 32, cols=192))  # half a pair of tiles
    assert not can_arrange(arrange(draw(rng, "mxfp4", 32)))
    plain = jnp.ones((32, 128))
    assert not can_arrange(plain)
    assert as_rows(plain) is plain
