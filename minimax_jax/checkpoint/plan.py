"""What will be loaded, from where, and what it costs: decided and checked before any weight is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from minimax_jax.checkpoint.coverage import check_config, check_missing, check_unused, find_ignored
from minimax_jax.checkpoint.formats import Stored, find_stored
from minimax_jax.checkpoint.lazy import Dequantized, Lazy, LazyArray, LazyQuant, Stack, astype, regrid, repeat_heads
from minimax_jax.checkpoint.name_map import Rule, expand
from minimax_jax.checkpoint.safetensors_index import DTYPES, Checkpoint, TensorInfo, name_some
from minimax_jax.config import MiniMaxM2Config, Parallelism
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import DATA, MODEL, Axes, partition_spec

_SCALES_AT_ONCE = 256  # tensors that one thread checks in a row


@dataclasses.dataclass(frozen=True)
class FormatTotal:
    """How much of a checkpoint is in one format: weights, and their bytes on disk with scales."""

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

    def arrays(self) -> Iterable[tuple[LazyArray, Axes]]:
        """Each array that will be in memory, with its logical axes."""
        for path, weight in self.weights.items():
            for array in (weight.payload, weight.scale) if isinstance(weight, LazyQuant) else (weight,):
                yield array, self.specs[path].axes

    def bytes_per_device(self) -> int:
        """Bytes of weights on each device: payloads and scales, replicated arrays in full."""
        return sum(
            math.prod(local_shape(array.shape, axes, self.parallelism)) * array.dtype.itemsize
            for array, axes in self.arrays()
        )

    def check_scales(self, pool: Executor | None = None) -> None:
        """Reads every scale, and no weight.

        Raises:
          CheckpointError: a scale is NaN, infinite or negative.
        """
        groups = [self.scales[i : i + _SCALES_AT_ONCE] for i in range(0, len(self.scales), _SCALES_AT_ONCE)]
        for _ in (pool.map if pool else map)(self._check_group, groups):
            pass

    def _check_group(self, infos: Sequence[TensorInfo]) -> None:
        for info in infos:
            values = self.checkpoint.read(info.name).astype(np.float32)
            if values.size and not (values.min() >= 0 and values.max() < np.inf):  # NaN fails both
                flat = values.reshape(-1)
                bad = flat[~(np.isfinite(flat) & (flat >= 0))]
                raise CheckpointError(
                    f"{info} holds {bad[0]} ({bad.size} such of {flat.size} scales), expected finite values from 0; "
                    "the file is damaged"
                )


def plan_parameters(
    checkpoint: Checkpoint,
    config: MiniMaxM2Config,
    specs: Mapping[str, ParameterSpec],
    parallelism: Parallelism,
    dtype: DTypeLike,
) -> LoadPlan:
    """Matches tensors and parameters one to one, reading none.

    Args:
      specs: every parameter of the model by path.
      dtype: the compute dtype; a plain weight stays as it is where it is bfloat16, and is cast to this otherwise.

    Raises:
      CheckpointError: a tensor is missing, left over, of another shape than `config` says, or stored in a way that
        cannot be read.
      ConfigError: a dimension cannot be cut evenly over the mesh.
    """
    entries = {path: (rule, names) for path, rule, names in expand(config)}
    if entries.keys() != specs.keys():
        raise ValueError(f"the name map and the model differ in {name_some(sorted(entries.keys() ^ specs.keys()))}")
    ignored = find_ignored(checkpoint)
    check_config(checkpoint, config, entries)
    check_missing(checkpoint, entries, ignored)
    builder = _Builder(config, parallelism, np.dtype(jnp.dtype(dtype)))
    weights: dict[str, Lazy] = {}
    stored: dict[str, list[Stored]] = {}
    for path, (rule, names) in entries.items():
        infos = [checkpoint.tensors[name] for name in names]
        stored[path] = [find_stored(checkpoint, info, config.quantization, rule.linear) for info in infos]
        weights[path] = builder.build(rule, specs[path], stored[path])
        if weights[path].shape != specs[path].shape:
            raise ValueError(f"the name map gives {path} {weights[path].shape}, the model {specs[path].shape}")
    sources = {path: tuple(info.name for part in parts for info in part.infos) for path, parts in stored.items()}
    check_unused(checkpoint, sources, ignored)
    every = [part for parts in stored.values() for part in parts]
    return LoadPlan(
        checkpoint=checkpoint,
        weights=weights,
        specs=dict(specs),
        sources=sources,
        scales=tuple(info for part in every for info in part.infos[1:]),
        formats=_totals(every),
        ignored=ignored,
        parallelism=parallelism,
    )


def parts_of(axes: Axes, parallelism: Parallelism) -> tuple[int, ...]:
    """Over how many devices each dimension is spread."""
    sizes = {None: 1, DATA: parallelism.data, MODEL: parallelism.model}
    return tuple(sizes[axis] for axis in partition_spec(axes, parallelism))


def local_shape(shape: tuple[int, ...], axes: Axes, parallelism: Parallelism) -> tuple[int, ...]:
    """A device's part of an array.

    Raises:
      ConfigError: a dimension cannot be cut evenly.
    """
    parts = parts_of(axes, parallelism)
    for size, axis, count in zip(shape, axes, parts, strict=True):
        if size % count:
            raise ConfigError(f"{axis} of {size} cannot be cut evenly over {count} devices; lower tensor_parallel_size")
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Puts a parameter together from its stored tensors."""

    config: MiniMaxM2Config
    parallelism: Parallelism
    dtype: np.dtype[Any]

    def build(self, rule: Rule, spec: ParameterSpec, stored: Sequence[Stored]) -> Lazy:
        """The parameter, packed where all of its tensors are and it may be."""
        local_shape(spec.shape, spec.axes, self.parallelism)
        packed = [part for part in stored if isinstance(part.value, LazyQuant)]
        if packed and rule.packable and spec.kind == "matrix":
            if len(packed) < len(stored):
                plain = next(part for part in stored if part not in packed)
                raise CheckpointError(
                    f"{packed[0].infos[0]} is packed, {plain.infos[0]} is not; the experts of a layer share one format"
                )
            return self._packed(rule, spec, [cast(LazyQuant, part.value) for part in packed])
        dtype = DTYPES["F32"] if spec.kind == "float32" else self._plain_dtype(stored)
        values = [
            Dequantized(part.value, dtype) if isinstance(part.value, LazyQuant) else astype(part.value, dtype)
            for part in stored
        ]
        return self._arrange(rule, values, self.config.head_dim)

    def _packed(self, rule: Rule, spec: ParameterSpec, parts: Sequence[LazyQuant]) -> LazyQuant:
        """One block for the whole parameter: it divides every source's block, and a device's part of a cut axis."""
        matrix = parts[0].shape
        local = local_shape(spec.shape, spec.axes, self.parallelism)[-2:]
        counts = parts_of(spec.axes, self.parallelism)[-2:]
        rows, cols = (
            math.gcd(*(part.block[axis] for part in parts), *((local[axis],) if counts[axis] > 1 else ()))
            for axis in (0, 1)
        )
        scales = [regrid(part.scale, part.block, (rows, cols), (matrix[0], matrix[1])) for part in parts]
        payload = self._arrange(rule, [part.payload for part in parts], self.config.head_dim)
        return LazyQuant(payload, self._arrange(rule, scales, self.config.head_dim // rows), (rows, cols))

    def _arrange(self, rule: Rule, arrays: Sequence[LazyArray], head: int) -> LazyArray:
        """Stacks experts, or repeats key/value heads of `head` rows."""
        if rule.per_expert:
            each = len(rule.sources)
            experts = [Stack(arrays[e : e + each]) for e in range(0, len(arrays), each)] if each > 1 else arrays
            return Stack(experts)
        if not rule.kv_heads:
            return arrays[0]
        heads = self.config.num_key_value_heads
        return repeat_heads(arrays[0], head, self.config.num_kv_heads_on(self.parallelism) // heads)

    def _plain_dtype(self, stored: Sequence[Stored]) -> np.dtype[Any]:
        """bfloat16 where all tensors have it, so that nothing is widened in memory; the compute dtype otherwise."""
        bfloat16 = DTYPES["BF16"]
        same = all(isinstance(part.value, LazyArray) and part.value.dtype == bfloat16 for part in stored)
        return bfloat16 if same else self.dtype


def _totals(stored: Iterable[Stored]) -> dict[str, FormatTotal]:
    totals: dict[str, FormatTotal] = {}
    for part in stored:
        before = totals.get(part.label, FormatTotal(0, 0))
        totals[part.label] = FormatTotal(before.tensors + 1, before.bytes + sum(info.nbytes for info in part.infos))
    return totals
