"""Safetensors files and packed weights by the formats' own descriptions: numpy alone, nothing of what is tested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a file: bytes stay bytes, all else becomes float32."""
    raw = file.read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:data]).items():
        if name == "__metadata__":
            continue
        begin, end = (data + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(raw[begin:end], {"F32": "<u4", "BF16": "<u2", "F8_E4M3": "u1", "U8": "u1"}[entry["dtype"]])
        if entry["dtype"] == "F32":
            values = bits.view("<f4").copy()
        elif entry["dtype"] == "BF16":
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F8_E4M3":
            values = e4m3_values()[bits]
        else:
            values = bits
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def read_checkpoint(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= read_safetensors(file)
    return tensors


def decode_all(tensors: dict[str, np.ndarray], block: tuple[int, int] = (128, 128)) -> dict[str, np.ndarray]:
    """The tensors with every packed weight as float32 and named `weight`, scales gone; `block` is that of FP8."""
    decoded = {}
    for name in tensors:
        if "_scale" in name.rpartition(".")[2]:
            continue
        found = decode(tensors, name, block)
        if found.dtype == np.uint8:
            raise ValueError(f"{name} has no scale")
        decoded[name.removesuffix("_packed")] = found
    return decoded


def decode(tensors: dict[str, np.ndarray], name: str, block: tuple[int, int] = (128, 128)) -> np.ndarray:
    """One weight [rows, cols] as float32; of compressed-tensors its name is `weight_packed`."""
    weight, scales = tensors[name], name.removesuffix("_packed")
    scale = tensors.get(f"{scales}_scale", tensors.get(f"{scales}_scale_inv"))
    if scale is None:
        return weight
    if weight.dtype == np.uint8:
        codes = np.empty((weight.shape[0], weight.shape[1], 2), np.uint8)
        codes[..., 0], codes[..., 1] = weight % 16, weight // 16
        weight = E2M1[codes.reshape(len(codes), -1)]
    rows, cols = weight.shape
    if scale.dtype == np.uint8:  # powers of two for blocks of a row
        return np.ldexp(weight, scale.repeat(cols // scale.shape[1], axis=1).astype(np.int32) - 127)
    if (whole := tensors.get(f"{scales}_scale_2")) is not None:
        return weight * (scale * whole).repeat(cols // scale.shape[1], axis=1)
    if (divisor := tensors.get(f"{scales}_global_scale")) is not None:
        return weight * (scale / divisor).repeat(cols // scale.shape[1], axis=1)
    return weight * scale.repeat(block[0], axis=0).repeat(block[1], axis=1)[:rows, :cols]


def e4m3_values() -> np.ndarray:
    """What each of the 256 codes of e4m3fn means: no infinity, NaN where all of exponent and mantissa is set."""
    code = np.arange(256)
    sign, exponent, mantissa = 1.0 - 2.0 * (code >> 7), (code >> 3) & 15, (code & 7) / 8
    values = sign * np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    values[(code & 127) == 127] = np.nan
    return values.astype(np.float32)
