"""How weights are rounded into the packed formats: numpy, float32 [rows, cols] in, a checkpoint's bytes out.

    mxfp4   e2m1, 1 x 32    scale 2^n, rounded up from a mantissa of 1.75: "even", as Quark and compressed-tensors do
    nvfp4   e2m1, 1 x 16    scale e4m3 of what the block's largest is to the matrix's, and that one as float32
    mxfp8   e4m3, 1 x 32    scale the smallest 2^n that holds the block without saturation: the rule of ModelOpt
    fp8     e4m3, 128 x 128 scale float32, the block's largest over 448

Elements are rounded half to even and saturate. All but the global scale of NVFP4 belongs to one block, so a matrix can
be taken by groups of rows. Input must be finite.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1_MAX, E4M3_MAX = np.float32(6), np.float32(448)
MX_BLOCK, NVFP4_BLOCK, FP8_BLOCK = 32, 16, 128

_EPSILON = np.finfo(np.float32).eps
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# Every value of bfloat16, as float32 (NaN as 0: input is finite); see _encode.
_BFLOAT16 = np.nan_to_num((np.arange(2**16, dtype=np.uint32) << 16).view(np.float32))


def quantize_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, cols] -> two codes a byte [rows, cols / 2] and scale bytes [rows, cols / 32].

    Scale bytes stay within 1 to 252: Quark's smallest, and the largest whose decoded values are all finite.
    """
    blocks = _blocks(weight, MX_BLOCK)
    exponent = ((_largest(blocks).view(np.int32) + 0x200000) >> 23) - 2  # of e2m1's largest power of two, 4
    scale = np.clip(exponent, 1, 252).astype(np.uint8)
    return _pack(_encode_e2m1(blocks * _inverse(scale)[..., None])), scale


def nvfp4_global_scale(largest: float) -> np.float32:
    """The float32 multiplier of a matrix whose largest magnitude is `largest`, by which its largest block gets 448."""
    scale = np.float32(largest) / (E2M1_MAX * E4M3_MAX)
    return scale if scale > 0 else _EPSILON


def quantize_nvfp4(
    weight: np.ndarray, global_scale: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """[rows, cols] -> two codes a byte [rows, cols / 2], e4m3 scales [rows, cols / 16], the global scale.

    Where a scale comes out as zero, Quark goes on with an epsilon, and so do we: no code of a block is divided by zero.

    Args:
      weight: some rows of a matrix.
      global_scale: of the whole matrix, where `weight` is not all of it.
    """
    blocks = _blocks(weight, NVFP4_BLOCK)
    largest = _largest(blocks)
    if global_scale is None:
        global_scale = nvfp4_global_scale(largest.max(initial=0))
    ratio = _no_zero(largest / E2M1_MAX) / global_scale
    scale = _encode_e4m3(ratio).view(_E4M3)
    step = _no_zero(decode_e4m3(scale) * global_scale)
    return _pack(_encode_e2m1(blocks / step[..., None])), scale, global_scale


def quantize_mxfp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, cols] -> e4m3 [rows, cols] and scale bytes [rows, cols / 32]; a block of zeros has byte 0."""
    blocks = _blocks(weight, MX_BLOCK)
    # 448 is 1.75 x 2^8: up to that mantissa a block fits its own power of two, above it takes the next.
    exponent = ((_largest(blocks).view(np.int32) + 0x1FFFFF) >> 23) - 8
    scale = np.maximum(exponent, 0).astype(np.uint8)
    payload = _encode_e4m3(blocks * _inverse(scale)[..., None])
    return payload.reshape(weight.shape).view(_E4M3), scale


def quantize_fp8(weight: np.ndarray, block: int = FP8_BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """[rows, cols] -> e4m3 [rows, cols] and a float32 multiplier for each block, the last of an axis ragged.

    A block of zeros has scale one.
    """
    rows, cols = weight.shape
    grid = (-(-rows // block), -(-cols // block))
    padded = np.zeros((grid[0] * block, grid[1] * block), np.float32)
    padded[:rows, :cols] = weight
    blocks = padded.reshape(grid[0], block, grid[1], block)
    largest = np.maximum(blocks.max(axis=(1, 3)), -blocks.min(axis=(1, 3)))
    scale = largest / E4M3_MAX
    scale[scale == 0] = 1
    values = np.clip(blocks / scale[:, None, :, None], -E4M3_MAX, E4M3_MAX)
    payload = np.ascontiguousarray(values.reshape(padded.shape)[:rows, :cols])
    return _encode_e4m3(payload).view(_E4M3), scale


def decode_e4m3(payload: np.ndarray) -> np.ndarray:
    """Values of e4m3fn as float32; several times faster than a cast."""
    return _E4M3_VALUES[payload.view(np.uint8)]


def _blocks(weight: np.ndarray, block: int) -> np.ndarray:
    """[rows, cols] -> [rows, cols / block, block] float32."""
    rows, cols = weight.shape
    if cols % block:
        raise ValueError(f"{cols} columns are no multiple of {block}")
    return np.ascontiguousarray(weight, np.float32).reshape(rows, cols // block, block)


def _largest(blocks: np.ndarray) -> np.ndarray:
    """Largest magnitude of each block."""
    return np.abs(blocks).max(axis=-1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """2^(127 - byte) as float32, exact for the bytes up to 253."""
    return ((254 - scale.astype(np.uint32)) << 23).view(np.float32)


def _no_zero(scale: np.ndarray) -> np.ndarray:
    return np.where(scale > 0, scale, _EPSILON)


def _pack(codes: np.ndarray) -> np.ndarray:
    """Codes [rows, blocks, block] -> bytes [rows, cols / 2], the even column in the low half."""
    pairs = codes.reshape(codes.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _encode_e2m1(values: np.ndarray) -> np.ndarray:
    """float32 -> codes of e2m1; what rounds to zero from below gets +0, as Quark writes it."""
    return _encode(values, _E2M1_CODES)


def _encode_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 -> bytes of e4m3fn; larger than 448 saturates."""
    return _encode(values, _E4M3_CODES)


def _encode(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """float32 -> codes, by a table over the upper 16 bits.

    The lowest of those is set where any lower bit is: no threshold of a format with three bits of mantissa has it, so
    every value stays on its side of each.
    """
    halves = values.view("<u2").reshape(*values.shape, 2)
    return table[halves[..., 1] | (halves[..., 0] != 0)]


def _e2m1_codes() -> np.ndarray:
    magnitude = np.minimum(np.abs(_BFLOAT16), E2M1_MAX).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.signbit(_BFLOAT16) & (magnitude > 0), magnitude | 8, magnitude).astype(np.uint8)


def _e4m3_codes() -> np.ndarray:
    return np.clip(_BFLOAT16, -E4M3_MAX, E4M3_MAX).astype(_E4M3).view(np.uint8)


_E2M1_CODES, _E4M3_CODES = _e2m1_codes(), _e4m3_codes()
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
