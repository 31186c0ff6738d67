"""What will be loaded, from where, and what it costs; made by `plan_parameters`, before any weight is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from minimax_jax.checkpoint.lazy import Lazy, LazyQuant
from minimax_jax.checkpoint.safetensors_index import Checkpoint, TensorInfo
from minimax_jax.config import Parallelism
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import DATA, MODEL, Axes, partition_spec


@dataclasses.dataclass(frozen=True)
class FormatTotal:
    """How much of a checkpoint is in one format: weights, and their bytes with scales."""

    tensors: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Every parameter of the model and the tensors that fill it, proved to match one to one.

    Attributes:
      weights: parameter path -> what reads it.
      specs: parameter path -> shape, logical axes and kind.
      sources: parameter path -> names of the tensors that it is made of; each tensor belongs to one parameter.
      scales: every scale tensor among them.
      formats: a format's name -> its totals.
      ignored: tensors that are known not to belong to the model.
      parallelism: the mesh that block scales and key/value heads are laid out for.
    """

    checkpoint: Checkpoint
    weights: Mapping[str, Lazy]
    specs: Mapping[str, ParameterSpec]
    sources: Mapping[str, tuple[str, ...]]
    scales: tuple[TensorInfo, ...]
    formats: Mapping[str, FormatTotal]
    ignored: tuple[str, ...]
    parallelism: Parallelism

    def bytes_per_device(self) -> int:
        """Bytes of weights on each device: payloads and scales, replicated arrays in full."""
        total = 0
        for path, weight in self.weights.items():
            axes = self.specs[path].axes
            for array in (weight.payload, weight.scale) if isinstance(weight, LazyQuant) else (weight,):
                total += math.prod(local_shape(array.shape, axes, self.parallelism)) * array.dtype.itemsize
        return total

    def check_scales(self) -> None:
        """Reads every scale, and no weight.

        Raises:
          CheckpointError: a scale is NaN, infinite or negative.
        """
        for info in self.scales:
            values = self.checkpoint.read(info.name).astype(np.float32).reshape(-1)
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            if bad.size:
                raise CheckpointError(
                    f"{info} holds {values[bad[0]]} as scale {bad[0]} ({bad.size} bad of {values.size}), "
                    "expected finite values from 0; the file is damaged"
                )


def parts_of(axes: Axes, parallelism: Parallelism) -> tuple[int, ...]:
    """How many devices each dimension is spread over."""
    sizes = {None: 1, DATA: parallelism.data, MODEL: parallelism.model}
    return tuple(sizes[axis] for axis in partition_spec(axes, parallelism))


def local_shape(shape: tuple[int, ...], axes: Axes, parallelism: Parallelism) -> tuple[int, ...]:
    """A device's part of an array.

    Raises:
      ConfigError: a dimension cannot be cut evenly.
    """
    local = []
    for size, axis, parts in zip(shape, axes, parts_of(axes, parallelism), strict=True):
        if size % parts:
            raise ConfigError(f"{axis} of {size} cannot be cut evenly over {parts} devices; lower tensor_parallel_size")
        local.append(size // parts)
    return tuple(local)
