"""Random packed weights with their values in float64, decoded by ml_dtypes and numpy alone."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quant import Format, QuantTensor, Weight

FORMATS = ("plain", "fp8", "mxfp8", "mxfp4", "nvfp4")
BLOCKS = {"fp8": (32, 32), "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}


def random_weight(
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    *,
    block: tuple[int, int] | None = None,
    global_divides: bool = False,
    dtype: jnp.dtype = jnp.float32,
) -> tuple[Weight, np.ndarray]:
    """(weight, float64 values). Neighbouring scales differ, matrices of a stack have their own global scales."""
    *lead, rows, cols = shape
    if name == "plain":
        plain = jnp.asarray(rng.normal(size=shape) / 4, dtype)
        return plain, np.asarray(plain, np.float64)
    block = block or BLOCKS[name]
    grid = (*lead, -(-rows // block[0]), -(-cols // block[1]))
    pattern = (3 * np.arange(grid[-2])[:, None] + np.arange(grid[-1])[None]) % 11
    pattern = (pattern + np.arange(int(np.prod(lead))).reshape(*lead, 1, 1)) % 11
    if name == "fp8":
        scale = (rng.uniform(0.1, 0.2, grid) * (1 + pattern)).astype(np.float32)
        wide = scale.astype(np.float64)
    elif name == "nvfp4":
        scale = (0x30 + pattern).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        wide = scale.astype(np.float64)
    else:
        scale = (120 + pattern).astype(np.uint8)
        wide = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    wide = wide.repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :cols]
    if name in ("fp8", "mxfp8"):
        payload = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        values = payload.astype(np.float64)
    else:
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        payload = np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4).view("<u4")
    values = values * wide
    global_scale = None
    if name == "nvfp4":
        whole = rng.uniform(0.25, 4, lead).astype(np.float32)
        values = values / whole[..., None, None] if global_divides else values * whole[..., None, None]
        global_scale = jnp.asarray(whole)
    format = Format(name, block, global_divides)
    return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), format, global_scale), values


def with_nan(weight: Weight, index: tuple[int, ...]) -> Weight:
    """The weight with NaN in the given matrices, or rows of a matrix: in the scales where the codes have none."""
    if not isinstance(weight, QuantTensor):
        return weight.at[index].set(jnp.nan)
    if weight.format.name in ("fp8", "mxfp8"):
        return QuantTensor(weight.payload.at[index].set(jnp.nan), weight.scale, weight.format)
    bad = jnp.nan if weight.format.name == "nvfp4" else 255
    return QuantTensor(weight.payload, weight.scale.at[index].set(bad), weight.format, weight.global_scale)
