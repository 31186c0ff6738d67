"""A parameter put together from its stored tensors, cut so that every device's part can be read by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from minimax_jax.checkpoint.formats import Stored
from minimax_jax.checkpoint.lazy import Dequantized, Lazy, LazyArray, LazyQuant, Stack, astype, regrid, repeat_heads
from minimax_jax.checkpoint.rules import Rule
from minimax_jax.checkpoint.safetensors_index import DTYPES
from minimax_jax.config import ModelConfig, Parallelism
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import DATA, MODEL, Axes, partition_spec
from pallas_kernels.quant import FormatName, codes_per_element

# Columns of an input that are quantised together.
_ACTIVATION_COLS: Mapping[FormatName, int] = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16, "fp8": 128}


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
class Builder:
    """Puts a parameter together from its stored tensors."""

    config: ModelConfig
    parallelism: Parallelism
    dtype: np.dtype[Any]

    def build(self, path: str, rule: Rule, spec: ParameterSpec, stored: Sequence[Stored]) -> Lazy:
        """The parameter, packed where all of its tensors are and it may be."""
        local_shape(spec.shape, spec.axes, self.parallelism)
        packed = [part for part in stored if isinstance(part.value, LazyQuant)]
        if packed and rule.packable and spec.kind == "matrix":
            for part in stored:
                if _shared(part) != _shared(stored[0]):
                    raise CheckpointError(
                        f"{stored[0].infos[0]} is {_describe(stored[0])}, {part.infos[0]} is {_describe(part)}; "
                        "the experts of a layer share one format"
                    )
            return self._packed(path, rule, spec, [cast(LazyQuant, part.value) for part in packed])
        for part in packed if spec.kind == "float32" else ():
            if cast(LazyQuant, part.value).format.activation is not None:
                raise ConfigError(
                    f"emulate_activation_quant: {part.infos[0]} is of a router, whose input stays as it is, but "
                    "quantization_config declares it quantised; leave the option off"
                )
        dtype = DTYPES["F32"] if spec.kind == "float32" else self._plain_dtype(stored)
        values = [
            Dequantized(part.value, dtype) if isinstance(part.value, LazyQuant) else astype(part.value, dtype)
            for part in stored
        ]
        return self._arrange(rule, values)

    def _packed(self, path: str, rule: Rule, spec: ParameterSpec, parts: Sequence[LazyQuant]) -> LazyQuant:
        """One block for the whole parameter: it divides every source's block, and a device's part of a cut axis."""
        matrix = (parts[0].shape[0], parts[0].shape[1])
        local = local_shape(spec.shape, spec.axes, self.parallelism)[-2:]
        counts = parts_of(spec.axes, self.parallelism)[-2:]
        rows, cols = (
            math.gcd(*(part.format.block[axis] for part in parts), *((local[axis],) if counts[axis] > 1 else ()))
            for axis in (0, 1)
        )
        format = dataclasses.replace(parts[0].format, block=(rows, cols))
        self._check_cut(path, parts[0], local[1], counts[1])

        def arrange(arrays: Sequence[LazyArray | None]) -> LazyArray | None:
            there = [array for array in arrays if array is not None]
            return self._arrange(rule, there) if there else None

        return LazyQuant(
            payload=self._arrange(rule, [part.payload for part in parts]),
            scale=self._arrange(rule, [regrid(part.scale, part.format.block, format.block, matrix) for part in parts]),
            format=format,
            global_scale=arrange([part.global_scale for part in parts]),
            input_scale=arrange([part.input_scale for part in parts]),
        )

    def _check_cut(self, path: str, part: LazyQuant, cols: int, count: int) -> None:
        """A device's columns hold whole words of codes, and whole groups of an input that is quantised."""
        if count == 1:
            return
        each, activation = codes_per_element(part.payload.dtype), part.format.activation
        if cols % each:
            raise ConfigError(
                f"{path} has {cols} columns on each of {count} devices, which cuts a word of {each} values; "
                "lower tensor_parallel_size"
            )
        if activation is not None and cols % _ACTIVATION_COLS[activation]:
            raise ConfigError(
                f"emulate_activation_quant: {path} has {cols} columns on each of {count} devices, which cuts the "
                f"groups of {_ACTIVATION_COLS[activation]} columns that its input is quantised in; lower "
                "tensor_parallel_size, or set expert_parallel for experts"
            )

    def _arrange(self, rule: Rule, arrays: Sequence[LazyArray]) -> LazyArray:
        """Stacks experts, or repeats key/value heads, of equal numbers of rows; a scalar belongs to all heads."""
        if rule.per_expert:
            each = len(rule.sources)
            experts = [Stack(arrays[e : e + each]) for e in range(0, len(arrays), each)] if each > 1 else arrays
            return Stack(experts)
        if not rule.kv_heads or not arrays[0].shape:
            return arrays[0]
        heads = self.config.num_key_value_heads
        times = self.config.num_kv_heads_on(self.parallelism) // heads
        return repeat_heads(arrays[0], arrays[0].shape[0] // heads, times)

    def _plain_dtype(self, stored: Sequence[Stored]) -> np.dtype[Any]:
        """bfloat16 where all tensors have it, so that nothing is widened in memory; the compute dtype otherwise."""
        bfloat16 = DTYPES["BF16"]
        same = all(isinstance(part.value, LazyArray) and part.value.dtype == bfloat16 for part in stored)
        return bfloat16 if same else self.dtype


def _shared(part: Stored) -> object:
    """What the matrices of one parameter have in common; FP8 blocks may differ, a common divisor is found."""
    if not isinstance(part.value, LazyQuant):
        return None
    format = part.value.format
    return format.name, format.global_divides, format.activation


def _describe(part: Stored) -> str:
    if not isinstance(part.value, LazyQuant):
        return f"{part.label} and not packed"
    format = part.value.format
    divides = " with a global scale that divides" if format.global_divides else ""
    return f"{part.label}{divides}" + (f" for {format.activation} inputs" if format.activation else "")
