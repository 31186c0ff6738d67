"""Random packed weights, drawn on the device: never zeros, and scaled so that activations keep about their size."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from moe_bench.cases import Layer
from pallas_kernels.quant import E2M1, Format, QuantTensor, Weight
from pallas_kernels.tiles import arrange, can_arrange

BLOCKS = {"mxfp4": (1, 32), "nvfp4": (1, 16), "mxfp8": (1, 32), "fp8": (128, 128)}


def random_experts(layer: Layer, format: str, seed: int) -> tuple[Weight, Weight]:
    """w13 [E, 2, F, D] and w2 [E, D, F]."""
    key13, key2 = jax.random.split(jax.random.key(seed))
    w13 = random_weight(key13, format, (layer.E, 2, layer.F, layer.D))
    w2 = random_weight(key2, format, (layer.E, layer.D, layer.F))
    if "NVIDIA" in jax.devices()[0].device_kind and can_arrange(w13) and can_arrange(w2):  # as a model's are at load
        order = jax.jit(arrange, donate_argnums=0)
        return order(w13), order(w2)
    return w13, w2


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_weight(key: jax.Array, format: str, shape: tuple[int, ...]) -> Weight:
    """A stack of matrices; the product with a vector of unit variance has about unit variance."""
    *lead, rows, cols = shape
    payload_key, scale_key, global_key = jax.random.split(key, 3)
    if format == "bf16":
        return jax.random.normal(payload_key, shape, jnp.bfloat16) * (1 / math.sqrt(cols))
    block = BLOCKS[format]
    scale_shape = (*lead, -(-rows // block[0]), -(-cols // block[1]))
    if format in ("mxfp4", "nvfp4"):
        payload = jax.random.bits(payload_key, (*lead, rows, cols // 8), jnp.uint32)
        code_rms = float(np.sqrt(np.mean(E2M1.astype(np.float64) ** 2)))
    else:
        payload, code_rms = random_e4m3(payload_key, shape)
    target = 1 / (code_rms * math.sqrt(cols))
    global_scale = None
    if format in ("mxfp4", "mxfp8"):  # four neighbouring powers of two
        base = 127 + round(math.log2(target)) - 1
        scale = (base + (random_bytes(scale_key, scale_shape) & 3)).astype(jnp.uint8) - jnp.uint8(1)
    elif format == "nvfp4":  # 0.5 to 1.875 in e4m3, the size in the global scale
        scale = lax.bitcast_convert_type(0x30 + (random_bytes(scale_key, scale_shape) & 0xF), jnp.float8_e4m3fn)
        global_scale = target / 1.2 * jax.random.uniform(global_key, tuple(lead), jnp.float32, 0.9, 1.1)
    else:
        scale = target * jax.random.uniform(scale_key, scale_shape, jnp.float32, 0.5, 1.5)
    return QuantTensor(payload, scale, Format(format, block), global_scale)  # type: ignore[arg-type]


def random_bytes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint8, all 256 values."""
    words = jax.random.bits(key, (-(-math.prod(shape) // 4),), jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: math.prod(shape)].reshape(shape)


def random_e4m3(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, float]:
    """Random e4m3 codes but for the two NaNs, and the root mean square of their values."""
    codes = random_bytes(key, shape)
    codes = jnp.where((codes & 0x7F) == 0x7F, codes & 0x80, codes)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), float(np.sqrt(np.nanmean(values**2)))
