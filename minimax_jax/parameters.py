"""What a parameter looks like before it has a value: its whole shape, its logical axes, and how it is kept."""

from __future__ import annotations

import dataclasses
from typing import Literal

from minimax_jax.sharding import Axes


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One parameter over the whole mesh.

    Attributes:
      shape: the logical shape; packed weights keep their own bytes but stand for this shape.
      axes: a logical axis name, or None, for each dimension.
      kind: "matrix" may be packed; "vector" is a norm weight; "float32" is always float32 in memory.
    """

    shape: tuple[int, ...]
    axes: Axes
    kind: Literal["matrix", "vector", "float32"] = "matrix"
