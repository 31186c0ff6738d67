"""What the values of a scale may be."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from minimax_jax.checkpoint.safetensors_index import TensorInfo
from minimax_jax.errors import CheckpointError

ScaleKind = Literal["float", "e4m3", "e8m0", "positive"]


@dataclasses.dataclass(frozen=True)
class Scale:
    """A scale tensor and what its values may be: of blocks by their kind, "positive" for one that is a factor alone."""

    info: TensorInfo
    kind: ScaleKind


def check_scale(scale: Scale, values: np.ndarray) -> None:
    """Refuses values that no exporter writes.

    Raises:
      CheckpointError: names the tensor, the first such value and their number.
    """
    if not values.size:
        return
    expected = "finite values from 0"
    if scale.kind == "e8m0":
        if values.view(np.uint8).max() < 255:
            return
        flat, expected = values.reshape(-1).view(np.uint8), "bytes below 255, which is NaN"
        bad = flat[flat == 255]
    else:
        if scale.kind == "e4m3" and values.view(np.uint8).max() < 0x7F:  # no sign, no NaN: most files, no conversion
            return
        flat = values.reshape(-1).astype(np.float32)
        allowed = np.isfinite(flat) & (flat > 0 if scale.kind == "positive" else flat >= 0)
        bad = flat[~allowed]
        expected = "a finite value above 0" if scale.kind == "positive" else expected
    if bad.size:
        raise CheckpointError(
            f"{scale.info} holds {bad[0]} ({bad.size} such of {flat.size} scales), expected {expected}; "
            "the file is damaged"
        )
