"""The four compiled programs: `generation.loop` under one `shard_map` and one `jit` each, the cache donated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minimax_jax.cache import PAGE_SIZE, abstract_cache, cache_axes
from minimax_jax.config import ModelConfig, Parallelism
from minimax_jax.errors import ConfigError
from minimax_jax.generation import loop
from minimax_jax.generation.limits import MAX_STOP_IDS
from minimax_jax.generation.loop import Rows, Settings
from minimax_jax.generation.sampling import Sampling
from minimax_jax.model import abstract_parameters, has_kv_scales
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import Axes, partition_spec, shard_map
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quant import (
    PAYLOAD_DTYPES,
    SCALE_DTYPES,
    Format,
    FormatName,
    QuantTensor,
    Weight,
    codes_per_element,
)

Jitted = Callable[..., Any]

WEIGHT_FORMATS = ("bfloat16", "float32", "fp8", "mxfp8", "mxfp4", "nvfp4")
_BLOCKS: Mapping[FormatName, tuple[int, int]] = {
    "fp8": (128, 128),
    "mxfp8": (1, 32),
    "mxfp4": (1, 32),
    "nvfp4": (1, 16),
}
# Which parameters a published checkpoint of a format holds packed.
_PACKED_PARTS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("_proj.", ".experts."),
    "mxfp8": ("_proj.", ".experts."),
    "mxfp4": (".experts.", ".shared_experts."),
    "nvfp4": (".experts.", ".shared_experts."),
}


class Programs:
    """prefill, first_token, decode and all_logits for one mesh and one set of `Settings`.

    Shapes follow the arguments; with one batch size and one chunk each program compiles once.
    """

    def __init__(self, settings: Settings, mesh: Mesh, weights: Mapping[str, Weight]) -> None:
        """`weights`, which may be abstract, say by their structure what the programs take."""
        self.settings, self.mesh = settings, mesh
        p = settings.parallelism
        axes_of = abstract_parameters(settings.config, p, kv_scales=has_kv_scales(weights))
        placed = {path: weight_specs(weights[path], spec.axes, p) for path, spec in axes_of.items()}
        cache = jax.tree.map(lambda axes: partition_spec(axes, p), cache_axes(settings.config), is_leaf=is_axes)
        rows = partition_spec(("batch",), p)  # of a [B, ...] array, and of a tree of them

        def compile_(fn: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...]) -> Jitted:
            # Stated shardings: those that the compiler infers may be spelled differently, which would compile anew.
            return jax.jit(
                shard_map(fn, self.mesh, in_specs, out_specs),
                in_shardings=self._shardings(in_specs),
                out_shardings=self._shardings(out_specs),
                donate_argnums=donate,
            )

        bind = functools.partial
        self.prefill = compile_(
            bind(loop.prefill, settings), (placed, cache, rows, rows, rows, rows), (cache, rows), (1, 5)
        )
        self.all_logits = compile_(bind(loop.all_logits, settings), (placed, cache, rows, rows), (cache, rows), (1,))
        self.first_token = compile_(loop.first_token, (rows, rows, rows), (rows, rows), ())
        self.decode = compile_(bind(loop.decode, settings), (placed, cache, rows, rows), (cache, rows, rows), (1,))

    def _shardings(self, specs: Any) -> Any:
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    @property
    def compiled(self) -> int:
        """How many programs have been compiled so far."""
        programs: tuple[Any, ...] = (self.prefill, self.all_logits, self.first_token, self.decode)
        return sum(program._cache_size() for program in programs)


def abstract_programs(
    config: ModelConfig,
    parallelism: Parallelism,
    mesh: Mesh,
    *,
    weight_format: str = "bfloat16",
    dtype: jnp.dtype = jnp.dtype(jnp.bfloat16),
    max_num_seqs: int = 8,
    max_model_len: int = 4096,
    chunk: int = PAGE_SIZE,
    steps: int = 16,
    implementation: Implementation = None,
) -> dict[str, tuple[Jitted, tuple[Any, ...]]]:
    """Prefill and decode with abstract arguments, to compile without a device or a weight.

    Args:
      weight_format: one of WEIGHT_FORMATS.
    """
    weights = abstract_weights(config, parallelism, mesh, weight_format)
    programs = Programs(Settings(config, parallelism, dtype, steps, implementation), mesh, weights)
    cache = abstract_cache(config, parallelism, max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype)
    axes = cache_axes(config)

    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    cache = jax.tree.map(lambda leaf, a: place(leaf, partition_spec(a, parallelism)), cache, axes, is_leaf=is_axes)
    row_spec = partition_spec(("batch",), parallelism)

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return place(jax.ShapeDtypeStruct((max_num_seqs, *shape), dtype), row_spec)

    sampling = Sampling(
        temperature=rows(dtype=jnp.float32),
        top_k=rows(),
        top_p=rows(dtype=jnp.float32),
        seed=rows(2, dtype=jnp.uint32),
        stop_ids=rows(MAX_STOP_IDS),
        max_tokens=rows(),
        logprobs=rows(dtype=jnp.bool_),
    )
    state = Rows(rows(), rows(), rows(), rows(dtype=jnp.bool_))
    logits = rows(config.vocab_size, dtype=jnp.float32)
    return {
        "prefill": (programs.prefill, (weights, cache, rows(chunk), rows(chunk), rows(), logits)),
        "decode": (programs.decode, (weights, cache, state, sampling)),
    }


def abstract_weights(
    config: ModelConfig, parallelism: Parallelism, mesh: Mesh, weight_format: str = "bfloat16"
) -> dict[str, Weight]:
    """The shapes of a published checkpoint's weights, placed on `mesh`.

    FP8 (128 x 128 blocks) and MXFP8 hold attention and experts packed, MXFP4 and NVFP4 the experts; the rest is
    bfloat16 and the router float32.

    Raises:
      ConfigError: no such format.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ConfigError(f"weight format {weight_format!r} is unknown; expected one of {', '.join(WEIGHT_FORMATS)}")

    def place(shape: tuple[int, ...], dtype: Any, axes: Axes) -> Any:
        sharding = NamedSharding(mesh, partition_spec(axes, parallelism))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def abstract(path: str, spec: ParameterSpec) -> Weight:
        packed = spec.kind == "matrix" and any(part in path for part in _PACKED_PARTS.get(weight_format, ()))
        if not packed:
            wide = spec.kind == "float32" or weight_format == "float32"
            return place(spec.shape, jnp.float32 if wide else jnp.bfloat16, spec.axes)
        name = cast(FormatName, weight_format)
        sharding = NamedSharding(mesh, partition_spec(spec.axes, parallelism))
        counts = [whole // part for whole, part in zip(spec.shape, sharding.shard_shape(spec.shape), strict=True)]
        block = tuple(
            math.gcd(size, whole // count) if count > 1 else min(size, whole)
            for size, whole, count in zip(_BLOCKS[name], spec.shape[-2:], counts[-2:], strict=True)
        )
        format, dtype = Format(name, (block[0], block[1])), jnp.dtype(PAYLOAD_DTYPES[name])
        *lead, rows, cols = spec.shape
        grid = (*lead, -(-rows // block[0]), -(-cols // block[1]))
        return QuantTensor(
            payload=place((*lead, rows, cols // codes_per_element(dtype)), dtype, spec.axes),
            scale=place(grid, SCALE_DTYPES[name], spec.axes),
            format=format,
            global_scale=place(tuple(lead), jnp.float32, spec.axes[:-2]) if name == "nvfp4" else None,
        )

    return {path: abstract(path, spec) for path, spec in abstract_parameters(config, parallelism).items()}


def weight_specs(weight: Weight, axes: Axes, parallelism: Parallelism) -> Any:
    """The PartitionSpec of each array of a weight: its own axes, and for one value a matrix those of the stack."""
    whole = partition_spec(axes, parallelism)
    if not isinstance(weight, QuantTensor):
        return whole
    stack: Any = partition_spec(axes[:-2], parallelism)
    spec: Any = whole
    return dataclasses.replace(
        weight,
        payload=spec,
        scale=spec,
        global_scale=None if weight.global_scale is None else stack,
        input_scale=None if weight.input_scale is None else stack,
    )


def is_axes(node: Any) -> bool:
    """Whether a tree node is one array's logical axes."""
    return isinstance(node, tuple) and all(part is None or isinstance(part, str) for part in node)
