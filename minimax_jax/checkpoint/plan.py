"""What will be loaded, from where, and what it costs: decided and checked before any weight is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from minimax_jax.checkpoint.build import Builder, local_shape
from minimax_jax.checkpoint.coverage import (
    Entries,
    check_config,
    check_missing,
    check_unused,
    find_ignored,
    find_vision,
)
from minimax_jax.checkpoint.formats import Stored, find_stored
from minimax_jax.checkpoint.lazy import Lazy, LazyArray, LazyQuant, Tensor, take_part
from minimax_jax.checkpoint.name_map import expand, expand_kv_scales, has_kv_scales
from minimax_jax.checkpoint.rules import Rule
from minimax_jax.checkpoint.safetensors_index import Checkpoint, name_some
from minimax_jax.checkpoint.scales import Scale, check_scale
from minimax_jax.config import ModelConfig, Parallelism
from minimax_jax.errors import ConfigError
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import Axes

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
      formats: (group of modules, a format's name) -> its totals.
      ignored: tensors that are known not to belong to the model.
      vision: tensors of its vision tower and projector, which text does not need.
      parallelism: the mesh that block scales and key/value heads are laid out for.
    """

    checkpoint: Checkpoint
    weights: Mapping[str, Lazy]
    specs: Mapping[str, ParameterSpec]
    sources: Mapping[str, tuple[str, ...]]
    scales: tuple[Scale, ...]
    formats: Mapping[tuple[str, str], FormatTotal]
    ignored: tuple[str, ...]
    vision: tuple[str, ...]
    parallelism: Parallelism

    def arrays(self) -> Iterable[tuple[LazyArray, Axes]]:
        """Each array that will be in memory, with its logical axes."""
        for path, weight in self.weights.items():
            axes = self.specs[path].axes
            yield from weight.arrays(axes) if isinstance(weight, LazyQuant) else [(weight, axes)]

    def bytes_per_device(self) -> int:
        """Bytes of weights on each device: payloads and scales, replicated arrays in full."""
        return sum(
            math.prod(local_shape(array.shape, axes, self.parallelism)) * array.dtype.itemsize
            for array, axes in self.arrays()
        )

    def check_scales(self, pool: Executor | None = None) -> None:
        """Reads every scale, and no weight.

        Raises:
          CheckpointError: a scale is NaN, infinite or negative, or zero where it scales a whole matrix.
        """
        groups = [self.scales[i : i + _SCALES_AT_ONCE] for i in range(0, len(self.scales), _SCALES_AT_ONCE)]
        for _ in (pool.map if pool else map)(self._check_group, groups):
            pass

    def _check_group(self, scales: Sequence[Scale]) -> None:
        for scale in scales:
            check_scale(scale, self.checkpoint.read(scale.info.name))


def plan_parameters(
    checkpoint: Checkpoint,
    config: ModelConfig,
    specs: Mapping[str, ParameterSpec],
    parallelism: Parallelism,
    dtype: DTypeLike,
    *,
    emulate_activation_quant: bool = False,
) -> LoadPlan:
    """Matches tensors and parameters one to one, reading none.

    Args:
      specs: every parameter of the model by path, key/value scales among them where `has_kv_scales` says so.
      dtype: the compute dtype; a plain weight stays as it is where it is bfloat16, and is cast to this otherwise.
      emulate_activation_quant: keep what the config declares of each input's quantisation, and its static scales.

    Raises:
      CheckpointError: a tensor is missing, left over, of another shape than `config` says, or stored in a way that
        cannot be read.
      ConfigError: a dimension cannot be cut evenly over the mesh, or an input's quantisation cannot be emulated.
    """
    entries = {path: (rule, names) for path, rule, names in expand(config, checkpoint.tensors)}
    if has_kv_scales(checkpoint.tensors):
        entries |= {path: (rule, names) for path, rule, names in expand_kv_scales(config, checkpoint.tensors)}
    if entries.keys() != specs.keys():
        raise ValueError(f"the name map and the model differ in {name_some(sorted(entries.keys() ^ specs.keys()))}")
    ignored, vision = find_ignored(checkpoint), find_vision(checkpoint, config)
    check_config(checkpoint, config, entries)
    check_missing(checkpoint, config, entries, ignored + vision)
    builder = Builder(config, parallelism, np.dtype(jnp.dtype(dtype)))
    weights: dict[str, Lazy] = {}
    stored: dict[str, list[Stored]] = {}
    for path, (rule, names) in entries.items():
        if rule.factor:
            stored[path] = [_factor(checkpoint, names[0])]
        else:
            stored[path] = [
                _take_part(
                    find_stored(checkpoint, name, config.quantization, rule.linear, emulate_activation_quant), rule
                )
                for name in names
            ]
        weights[path] = builder.build(path, rule, specs[path], stored[path])
        if weights[path].shape != specs[path].shape:
            raise ValueError(f"the name map gives {path} {weights[path].shape}, the model {specs[path].shape}")
    sources = {path: tuple(info.name for part in parts for info in part.infos) for path, parts in stored.items()}
    check_unused(checkpoint, config, entries, sources, ignored + vision)
    quantised = [weight for weight in weights.values() if isinstance(weight, LazyQuant)]
    if emulate_activation_quant and not any(weight.format.activation for weight in quantised):
        raise ConfigError(
            "emulate_activation_quant: the checkpoint's quantization_config declares no quantised activations; "
            "leave the option off"
        )
    # One scale may stand for two parameters, and is checked once.
    scales = {scale.info.name: scale for parts in stored.values() for part in parts for scale in part.scales}
    return LoadPlan(
        checkpoint=checkpoint,
        weights=weights,
        specs=dict(specs),
        sources=sources,
        scales=tuple(scales.values()),
        formats=_totals(stored, entries),
        ignored=ignored,
        vision=vision,
        parallelism=parallelism,
    )


def _factor(checkpoint: Checkpoint, name: str) -> Stored:
    """One value that stands for itself, such as a key/value scale."""
    info = checkpoint.tensors[name]
    return Stored((info,), Tensor(checkpoint, info, ()), info.dtype, (Scale(info, "positive"),))


def _take_part(stored: Stored, rule: Rule) -> Stored:
    """What a parameter takes of a matrix that holds several."""
    return dataclasses.replace(stored, value=take_part(stored.value, rule.part))


def _totals(stored: Mapping[str, Sequence[Stored]], entries: Entries) -> dict[tuple[str, str], FormatTotal]:
    """A total for each format in each group of modules; a scale counts with its weight."""
    totals: dict[tuple[str, str], FormatTotal] = {}
    for path, parts in stored.items():
        for part in parts:
            key = (_group(path), part.label)
            before = totals.get(key, FormatTotal(0, 0))
            size = sum(info.nbytes for info in part.infos) // entries[path][0].part[1]
            totals[key] = FormatTotal(before.tensors + 1, before.bytes + size)
    return totals


def _group(path: str) -> str:
    """The kind of module that a parameter belongs to."""
    if ".experts." in path:
        return "experts"
    if ".indexer." in path:
        return "indexer"
    if ".shared_experts." in path:
        return "shared experts"
    if ".mlp." in path:
        return "dense layers"
    if ".block_sparse_moe." in path:
        return "router"
    if "norm" in path:
        return "norms"
    if path.endswith(("k_scale", "v_scale")):
        return "kv scales"
    return "attention" if ".self_attn." in path else path.removesuffix(".weight")
