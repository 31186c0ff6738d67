"""Packed weights, activation quantisation and the expert layer in numpy: ml_dtypes casts and plain loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.activation import SwiGLU
from pallas_kernels.quant import Format, QuantTensor, Weight

E2M1, E4M3, BF16 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FORMATS = ["fp8", "mxfp8", "mxfp4", "nvfp4", "nvfp4 divided"]
GROUP = {"fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
f32 = np.float32


def bf16(values: Any) -> np.ndarray:
    """float32 values rounded to bfloat16."""
    return np.asarray(values, f32).astype(BF16).astype(f32)


# ---- weights


@dataclasses.dataclass
class Packed:
    """A weight and what it decodes to.

    Attributes:
      weight: what is tested.
      blocks: [..., rows, cols] float32, decoded with the block scales only.
      factor: [...] float64, the effect of the global scale.
      a: [...] float32, by which an input is multiplied before NVFP4 quantises it.
    """

    weight: Weight
    blocks: np.ndarray
    factor: np.ndarray
    a: np.ndarray

    @property
    def decoded(self) -> np.ndarray:
        return self.blocks.astype(np.float64) * self.factor[..., None, None]


def pack(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    kind: str,
    *,
    emulate: bool = False,
    largest_input: float = 10.0,
    fp8_block: tuple[int, int] = (32, 16),
) -> Packed:
    """Random codes whose values are about 0.1 large; neighbouring blocks, matrices and experts differ in scale."""
    name = kind.split()[0]
    divides = kind.endswith("divided")
    *lead, rows, cols = shape
    block = fp8_block if name == "fp8" else (1, GROUP[name])
    if name in ("mxfp4", "nvfp4"):
        codes = rng.integers(16, size=shape, dtype=np.uint8)
        values = codes.view(E2M1).astype(f32)
        payload = (codes[..., ::2] | codes[..., 1::2] << 4).view("<u4")
    else:
        payload = (2 * rng.normal(size=shape)).astype(E4M3)
        values = payload.astype(f32)
    grid = (*lead, -(-rows // block[0]), -(-cols // block[1]))
    if name == "fp8":
        scale = rng.uniform(0.01, 0.1, grid).astype(f32)
        wide = scale
    elif name == "nvfp4":
        scale = rng.uniform(0.5, 8, grid).astype(E4M3)
        wide = scale.astype(f32)
    else:
        *_, row, col = np.indices(grid)
        matrix = np.arange(int(np.prod(lead))).reshape(*lead, 1, 1)
        scale = (119 + (3 * row + col + 2 * matrix) % 7).astype(np.uint8)
        wide = np.exp2(scale.astype(f32) - 127)
    blocks = values * np.repeat(np.repeat(wide, block[0], -2)[..., :rows, :], block[1], -1)[..., :cols]
    whole, input_scale = None, None
    factor = np.ones(lead)
    a = np.ones(lead, f32)
    if name == "nvfp4":
        whole = rng.uniform(0.003, 0.03, lead).astype(f32)
        input_scale = (largest_input / 2688 * rng.uniform(0.3, 3, lead)).astype(f32)
        factor = whole.astype(np.float64)
        a = f32(1) / input_scale
        if divides:
            whole = f32(1) / whole
            factor, input_scale = 1 / whole.astype(np.float64), a
    format = Format(name, block, global_divides=divides, activation=name if emulate else None)
    weight = QuantTensor(
        jnp.asarray(payload),
        jnp.asarray(scale),
        format,
        None if whole is None else jnp.asarray(whole),
        jnp.asarray(input_scale) if emulate and input_scale is not None else None,
    )
    assert weight.shape == shape
    return Packed(weight, blocks, factor, a)


def plain(values: np.ndarray) -> Packed:
    """A weight that is not packed, in its own dtype."""
    lead = values.shape[:-2]
    return Packed(jnp.asarray(values), values.astype(f32), np.ones(lead), np.ones(lead, f32))


# ---- activations


def quantised(x: np.ndarray, scheme: str, a: Any = None) -> np.ndarray:
    """x [..., cols] float32 after quantisation and back, a group at a time, in float32."""
    out = np.empty_like(x)
    for begin in range(0, x.shape[-1], GROUP[scheme]):
        part = x[..., begin : begin + GROUP[scheme]]
        largest = np.abs(part).max(axis=-1, keepdims=True)
        half, exponent = np.frexp(largest)  # largest = (2 half) x 2^(exponent - 1), 1 <= 2 half < 2
        if scheme == "mxfp4":
            scale = np.exp2(np.maximum(exponent - 1 + (2 * half >= 1.75) - 2, -127), dtype=np.float64)
            new = (np.clip(part / scale, -6, 6)).astype(E2M1).astype(np.float64) * scale
        elif scheme == "mxfp8":
            scale = np.exp2(np.maximum(exponent - 1 + (2 * half > 1.75) - 8, -127), dtype=np.float64)
            new = (np.clip(part / scale, -448, 448)).astype(E4M3).astype(np.float64) * scale
        elif scheme == "fp8":
            scale = np.maximum(largest, f32(1e-10)) / f32(448)
            new = np.clip(part / scale, -448, 448).astype(E4M3).astype(f32) * scale
        else:
            a = f32(a)
            scale = np.minimum(a * (largest * f32(1 / 6)), f32(448)).astype(E4M3).astype(f32)
            safe = np.where(scale == 0, f32(1), scale)
            new = np.clip(part * (a / safe), -6, 6).astype(E2M1).astype(f32) * (safe / a)
            new = np.where(scale == 0, f32(0), new)
        out[..., begin : begin + GROUP[scheme]] = new
    return out


def swiglu(gate: np.ndarray, up: np.ndarray, activation: SwiGLU) -> np.ndarray:
    """In float64, by the formula."""
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    if activation.limit is not None:
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return gate / (1 + np.exp(-activation.alpha * gate)) * (up + activation.beta)


def moe(
    x: np.ndarray,
    w13: Packed,
    w2: Packed,
    ids: np.ndarray,
    weights: np.ndarray,
    activation: SwiGLU,
    *,
    scheme: str | None = None,
    bfloat16: bool = False,
    nudge: float = 1.0,
) -> np.ndarray:
    """The layer, a token and an expert at a time, sums in float64.

    Args:
      scheme: how the two products' inputs are quantised, None for not at all.
      bfloat16: inputs, decoded blocks and the activation's output are rounded to it.
      nudge: a factor on the activation's output, to see whether a code hangs on its last bits.
    """
    rounded = bf16 if bfloat16 else f32
    blocks13, blocks2 = (rounded(w.blocks).astype(np.float64) for w in (w13, w2))
    out = np.zeros((len(x), w2.blocks.shape[1]))
    for n in range(len(x)):
        for e, weight in zip(ids[n], weights[n], strict=True):
            if not 0 <= e < len(blocks2):
                continue
            sums = []
            for half in (0, 1):
                row = rounded(x[n])
                if scheme is not None:
                    row = rounded(quantised(row, scheme, w13.a[e, half]))
                sums.append(blocks13[e, half] @ row.astype(np.float64) * w13.factor[e, half])
            hidden = rounded(swiglu(*sums, activation) * nudge)
            if scheme is not None:
                hidden = rounded(quantised(hidden, scheme, w2.a[e]))
            out[n] += weight * (blocks2[e] @ hidden.astype(np.float64) * w2.factor[e])
    return out
