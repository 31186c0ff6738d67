"""Packed weights decode to the formats' own values, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pallas_kernels.linear import linear
from pallas_kernels.quant import Format, QuantTensor, dequantize, dequantize_blocks, global_multiplier, unpack

E4M3, E8M0, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
MXFP4, MXFP8, NVFP4 = Format("mxfp4", (1, 32)), Format("mxfp8", (1, 32)), Format("nvfp4", (1, 16))
NVFP4_DIVIDED = Format("nvfp4", (1, 16), global_divides=True)
CODES = np.arange(256, dtype=np.uint8)


def fp8(block: tuple[int, int]) -> Format:
    return Format("fp8", block)


def decode(
    format: Format, payload: np.ndarray, scale: np.ndarray, whole: Any = None, dtype: Any = jnp.float32
) -> np.ndarray:
    """Compiled, as models do it, and operation by operation; FP4 from bytes and from words of four."""
    factor = None if whole is None else jnp.asarray(whole, jnp.float32)
    payloads = [payload] if payload.dtype != np.uint8 else [payload.view("<u4"), payload]
    found = []
    for each in payloads:
        weight = QuantTensor(jnp.asarray(each), jnp.asarray(scale), format, factor)
        found.append(np.asarray(jax.jit(dequantize, static_argnums=1)(weight, dtype)))
        found.append(np.asarray(dequantize(weight, dtype)))
        assert found[-1].shape == weight.shape
    for other in found[1:]:
        np.testing.assert_array_equal(bits(found[0]), bits(other))
    return found[0]


def bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns, NaN of any pattern as one."""
    found = np.where(np.isnan(values), np.nan, values).astype(values.dtype)
    return found.view({4: np.uint32, 2: np.uint16}[found.itemsize])


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(got), bits(np.asarray(want, got.dtype)))


# ---- every code


def test_every_e4m3_code() -> None:
    payload = CODES.view(E4M3)
    want = payload.astype(np.float32)
    assert list(np.flatnonzero(np.isnan(want))) == [0x7F, 0xFF]
    check(decode(fp8((16, 16)), payload.reshape(16, 16), np.ones((1, 1), np.float32)).ravel(), want)
    check(decode(MXFP8, payload.reshape(8, 32), np.full((8, 1), 127, np.uint8)).ravel(), want)


def test_e4m3_to_bfloat16_and_back() -> None:
    """Each finite code under jit, by the conversions of whatever compiles it."""
    codes = CODES[CODES & 0x7F != 0x7F].view(E4M3)

    def there_and_back(payload: jax.Array) -> jax.Array:
        weight = QuantTensor(payload, jnp.ones((1, 1)), fp8((1, len(codes))))
        return lax.optimization_barrier(dequantize(weight, jnp.bfloat16)).astype(E4M3)

    back = np.asarray(jax.jit(there_and_back)(jnp.asarray(codes[None])))
    np.testing.assert_array_equal(back.view(np.uint8)[0], codes.view(np.uint8))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_long_product_of_fp8(implementation: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = (rng.normal(size=(16, 4096)) + 0.5).astype(E4M3)
    weight = QuantTensor(jnp.asarray(payload), jnp.ones((1, 32)), fp8((16, 128)))
    x = jnp.asarray(rng.normal(size=(3, 4096)) + 0.5, jnp.bfloat16)
    got = np.asarray(jax.jit(lambda x: linear(x, weight, implementation=implementation))(x))
    want = np.asarray(x).astype(np.float64) @ payload.astype(np.float64).T
    assert np.abs(got - want).max() <= 0.01 * np.abs(want).max()


def test_every_e4m3_block_scale() -> None:
    payload = np.full((256, 8), 0x22, np.uint8)  # ones
    want = CODES.view(E4M3).astype(np.float32)
    check(decode(NVFP4, payload, CODES.view(E4M3)[:, None], 1.0)[:, 3], want)


def test_every_e2m1_code() -> None:
    values = CODES[:16].view(E2M1).astype(np.float32)
    packed = CODES.reshape(8, 32)  # every pair of codes
    want = np.stack([values[packed & 15], values[packed >> 4]], axis=-1).reshape(8, 64)
    check(np.asarray(unpack(jnp.asarray(packed))), want)
    check(decode(MXFP4, packed, np.full((8, 2), 127, np.uint8)), want)
    check(decode(NVFP4, packed, np.ones((8, 4), E4M3), 1.0), want)


@pytest.mark.parametrize("format", [MXFP4, MXFP8], ids=lambda format: format.name)
def test_every_e8m0_scale_on_every_value(format: Format) -> None:
    """Powers of two from 2^-127 to 2^127, and NaN: the products are exact, overflow or are subnormal."""
    scale = CODES.view(E8M0).astype(np.float64)
    assert list(np.flatnonzero(np.isnan(scale))) == [0xFF]
    if format is MXFP4:
        payload = np.broadcast_to(np.arange(16, dtype=np.uint8) * 17, (256, 16))
        values = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64).repeat(2)
        scales = CODES[:, None]
    else:
        payload = np.broadcast_to(CODES, (256, 256)).view(E4M3)
        values = CODES.view(E4M3).astype(np.float64)
        scales = CODES[:, None].repeat(8, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (values * scale[:, None]).astype(np.float32)
    assert (np.abs(want[want != 0]) < 2.0**-126).any()
    check(decode(format, np.ascontiguousarray(payload), np.ascontiguousarray(scales)), want)


# ---- the right scale for each element


@pytest.mark.parametrize("format", [MXFP4, MXFP8], ids=lambda format: format.name)
def test_neighbouring_blocks_have_their_own_scale_bytes(format: Format, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, blocks = 37, 5
    row, block = np.indices((rows, blocks))
    scale = (120 + (3 * row + block) % 11).astype(np.uint8)
    if format is MXFP4:
        payload = rng.integers(256, size=(rows, blocks * 16), dtype=np.uint8)
        values = np.stack([payload & 15, payload >> 4], axis=-1).view(E2M1).astype(np.float32).reshape(rows, -1)
    else:
        payload = rng.normal(size=(rows, blocks * 32)).astype(E4M3)
        values = payload.astype(np.float32)
    want = np.array(
        [[values[i, j] * 2.0 ** (int(scale[i, j // 32]) - 127) for j in range(blocks * 32)] for i in range(rows)]
    )
    check(decode(format, payload, scale), want)


@pytest.mark.parametrize("format", [NVFP4, NVFP4_DIVIDED], ids=["multiplies", "divides"])
def test_each_matrix_of_a_stack_has_its_own_global_scale(format: Format, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, rows, blocks = 3, 5, 4
    payload = rng.integers(256, size=(experts, 2, rows, blocks * 8), dtype=np.uint8)
    scale = (0x30 + rng.integers(64, size=(experts, 2, rows, blocks), dtype=np.uint8)).view(E4M3)
    whole = rng.uniform(0.1, 10, (experts, 2)).astype(np.float32)
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(experts, 2, rows, -1)
    wide = scale.astype(np.float32)
    wide = wide / whole[..., None, None] if format.global_divides else wide * whole[..., None, None]
    check(decode(format, payload, scale, whole), codes.view(E2M1).astype(np.float32) * wide.repeat(16, axis=-1))


def test_without_the_global_scale_nvfp4_is_exact_in_bfloat16(seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = rng.integers(256, size=(127, 128), dtype=np.uint8)
    scale = np.arange(127, dtype=np.uint8)[:, None].repeat(16, axis=1).view(E4M3)
    for format in (NVFP4, NVFP4_DIVIDED):
        weight = QuantTensor(jnp.asarray(payload), jnp.asarray(scale), format, jnp.float32(0.37))
        exact = np.asarray(dequantize_blocks(weight, jnp.float32))
        check(np.asarray(dequantize_blocks(weight, jnp.bfloat16)).astype(np.float32), exact)
        factor = global_multiplier(weight)
        assert factor is not None
        np.testing.assert_allclose(exact * float(factor), decode(format, payload, scale, 0.37), rtol=3e-7)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((6, 4), (6, 4)), ((6, 4), (1, 4)), ((6, 4), (2, 2)), ((5, 7), (2, 4)), ((300, 200), (128, 128))],
    ids=["one", "per row", "grid", "ragged", "ragged 128"],
)
def test_scale_of_each_block(shape: tuple[int, int], block: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = rng.normal(size=shape).astype(E4M3)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scale = rng.uniform(0.5, 2.0, grid).astype(np.float32)
    want = np.zeros(shape, np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            want[i, j] = np.float32(payload[i, j]) * scale[i // block[0], j // block[1]]
    check(decode(fp8(block), payload, scale), want)


def test_decoded_value_takes_the_compute_dtype_not_the_storage_dtype() -> None:
    got = decode(fp8((1, 1)), np.full((1, 1), 1.75, E4M3), np.full((1, 1), 0.01, np.float32), dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert float(got[0, 0]) == pytest.approx(0.0175, rel=2**-8)


# ---- vectors made by other code


@pytest.fixture(scope="module")
def vectors(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "data" / "fp4_vectors.json").read_text())


def hexes(words: list[str], dtype: Any) -> np.ndarray:
    return np.array([int(word, 16) for word in words]).astype(dtype)


def test_tables_of_the_vectors(vectors: dict[str, Any]) -> None:
    table = vectors["e2m1_table"]
    codes = hexes(table["code"], np.uint8)
    payload = np.pad(codes[::2] | codes[1::2] << 4, (0, 8))[None]
    check(decode(MXFP4, payload, np.full((1, 1), 127, np.uint8))[0, :16], table["value"])
    for entry in vectors["e8m0"]:
        byte = hexes([entry["byte"]], np.uint8)[None]
        want = np.full((1, 32), float(entry["value"]), np.float32)
        check(decode(MXFP4, np.full((1, 16), 0x22, np.uint8), byte), want)
    for entry in vectors["e4m3fn"]:
        value = hexes([entry["byte"]], np.uint8)[None].view(E4M3)
        check(decode(fp8((1, 1)), value, np.ones((1, 1), np.float32)), [[float(entry["value"])]])


@pytest.mark.parametrize("scale", ["0x7c", "0x83", "0x01"])
def test_mxfp4_vectors(vectors: dict[str, Any], scale: str) -> None:
    case = vectors[f"mxfp4_block_all_codes_scale_{scale}"]
    payload, byte = hexes(case["weight_u8"], np.uint8)[None], hexes(case["weight_scale_u8"], np.uint8)[None]
    check(decode(MXFP4, payload, byte)[0], hexes(case["values_f32_bits"], np.uint32).view(np.float32))
    got = decode(MXFP4, payload, byte, dtype=jnp.bfloat16)[0]
    np.testing.assert_array_equal(bits(got), hexes(case["values_bf16_bits"], np.uint16))


def test_nvfp4_vector(vectors: dict[str, Any]) -> None:
    case = vectors["nvfp4_row32"]
    payload = hexes(case["weight_u8"], np.uint8)[None]
    scale = hexes(case["weight_scale_e4m3"], np.uint8)[None].view(E4M3)
    whole = hexes([case["weight_scale_2_f32_bits"]], np.uint32).view(np.float32)[0]
    check(decode(NVFP4, payload, scale, whole)[0], hexes(case["values_f32_bits"], np.uint32).view(np.float32))
    got = decode(NVFP4, payload, scale, whole, jnp.bfloat16)[0]
    np.testing.assert_array_equal(bits(got), hexes(case["values_bf16_bits"], np.uint16))
    divisor = hexes([case["ct_weight_global_scale_f32_bits"]], np.uint32).view(np.float32)[0]
    got = decode(NVFP4_DIVIDED, payload, scale, divisor)[0]
    check(got, hexes(case["ct_values_f32_bits"], np.uint32).view(np.float32))
    blocks = QuantTensor(jnp.asarray(payload), jnp.asarray(scale), NVFP4, jnp.asarray(whole))
    alternative = np.asarray(dequantize_blocks(blocks, jnp.bfloat16)).astype(np.float32) * whole
    check(alternative[0], hexes(case["alt_order_f32_bits"], np.uint32).view(np.float32))


def test_hand_made_vectors(vectors: dict[str, Any]) -> None:
    case = vectors["mxfp4_hand"]
    payload, byte = hexes(case["weight_u8"], np.uint8)[None], hexes(case["weight_scale_u8"], np.uint8)[None]
    check(decode(MXFP4, payload, byte)[0], case["values"])
    case = vectors["nvfp4_hand"]
    scale = hexes(case["weight_scale_e4m3"], np.uint8)[None].view(E4M3)
    check(decode(NVFP4, hexes(case["weight_u8"], np.uint8)[None], scale, case["weight_scale_2"])[0], case["values"])


def test_mxfp8_vector(vectors: dict[str, Any]) -> None:
    case = vectors["mxfp8_block"]
    payload = hexes(case["weight_e4m3"], np.uint8)[None].view(E4M3)
    check(decode(MXFP8, payload, hexes(case["weight_scale_inv_u8"], np.uint8)[None])[0], case["values"])


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
def test_what_the_vectors_quantise_decodes_to_what_they_say(vectors: dict[str, Any], mode: str) -> None:
    case = vectors["mxfp4_quantise"][mode]
    payload, byte = hexes(case["weight_u8"], np.uint8)[None], hexes(case["scale_u8"], np.uint8)[None]
    check(decode(MXFP4, payload, byte)[0], case["dequant"])
    case = vectors["nvfp4_quantise"]
    whole = hexes([case["weight_scale_2_f32_bits"]], np.uint32).view(np.float32)[0]
    scale = hexes(case["weight_scale_e4m3"], np.uint8)[None].view(E4M3)
    got = decode(NVFP4, hexes(case["weight_u8"], np.uint8)[None], scale, whole)[0]
    np.testing.assert_allclose(got, case["dequant"], rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "broken",
    [lambda p: (p >> 4) | (p << 4), lambda p: p ^ 0x80, lambda p: np.roll(p, 1)],
    ids=["halves", "sign", "place"],
)
def test_a_wrong_reading_is_seen(vectors: dict[str, Any], broken: Callable[[np.ndarray], np.ndarray]) -> None:
    case = vectors["mxfp4_block_all_codes_scale_0x7c"]
    payload = broken(hexes(case["weight_u8"], np.uint8)).astype(np.uint8)[None]
    got = decode(MXFP4, payload, hexes(case["weight_scale_u8"], np.uint8)[None])[0]
    assert (bits(got) != hexes(case["values_f32_bits"], np.uint32)).any()
