"""Bytes of a checkpoint are e4m3fn on every chip: they stay as they are and decode as such, never as e4m3fnuz."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from minimax_jax.checkpoint import LazyQuant, open_checkpoint
from minimax_jax.checkpoint.formats import find_stored
from pallas_kernels.quant import QuantTensor, dequantize
from tests.checkpoint.tiny_checkpoint import FP8, write_file

FINITE = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)


def loaded(directory: Path, payload: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A weight's float32 values by way of a checkpoint."""
    write_file(directory / "model.safetensors", {"m.weight": payload.view(FP8), "m.weight_scale_inv": scale})
    part = find_stored(open_checkpoint(directory), "m.weight", None, linear=True).value
    assert isinstance(part, LazyQuant)
    read = part.payload.read()
    assert read.tobytes() == payload.tobytes()
    weight = QuantTensor(jnp.asarray(read), jnp.asarray(part.scale.read()), part.format)
    return np.asarray(jax.jit(dequantize, static_argnums=1)(weight, jnp.float32))


def test_every_finite_byte(tmp_path: Path) -> None:
    payload = np.resize(FINITE, (8, 32))
    want = payload.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(loaded(tmp_path, payload, np.ones((8, 1), np.float32)), want)
    bytes_e8m0 = np.full((8, 1), 127, np.uint8)
    np.testing.assert_array_equal(loaded(tmp_path, payload, bytes_e8m0), want)
    other = payload.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32)
    assert not np.array_equal(want, other)  # what reading them as the chip's own type would give


def test_table_of_both_readings(shared: Path, tmp_path: Path) -> None:
    """The table's real values; re-encoded bytes with a doubled scale would give the same, and are not needed."""
    rows = json.loads((shared / "data" / "fp4_vectors.json").read_text())["e4m3fn_to_fnuz"]
    before, after = (np.array([int(row[key], 16) for row in rows], np.uint8) for key in ("byte", "byte_after"))
    want = np.array([row["e4m3fn"] for row in rows], np.float32)
    got = loaded(tmp_path, np.resize(before, (1, 32)), np.ones((), np.float32))[0, : len(rows)]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    np.testing.assert_array_equal(2 * after.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32), want)
