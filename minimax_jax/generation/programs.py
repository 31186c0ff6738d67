"""The four compiled programs: `generation.loop` under one `shard_map` and one `jit` each, the cache donated."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minimax_jax.cache import PAGE_SIZE, abstract_cache, cache_axes
from minimax_jax.config import MiniMaxM2Config, Parallelism
from minimax_jax.generation import loop
from minimax_jax.generation.limits import MAX_STOP_IDS
from minimax_jax.generation.loop import Rows, Settings
from minimax_jax.generation.sampling import Sampling
from minimax_jax.model import Weights, abstract_parameters
from minimax_jax.sharding import partition_spec, shard_map
from pallas_kernels.quant import QuantTensor

Jitted = Callable[..., Any]


class Programs:
    """prefill, first_token, decode and all_logits for one mesh and one set of `Settings`.

    Shapes follow the arguments; with one batch size and one chunk each program compiles once.
    """

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        self.settings, self.mesh = settings, mesh
        p = settings.parallelism
        specs = abstract_parameters(settings.config, p)
        weights = {path: partition_spec(spec.axes, p) for path, spec in specs.items()}
        cache = jax.tree.map(
            lambda axes: partition_spec(axes, p), cache_axes(settings.config.num_hidden_layers), is_leaf=is_axes
        )
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
            bind(loop.prefill, settings), (weights, cache, rows, rows, rows, rows), (cache, rows), (1, 5)
        )
        self.all_logits = compile_(bind(loop.all_logits, settings), (weights, cache, rows, rows), (cache, rows), (1,))
        self.first_token = compile_(loop.first_token, (rows, rows, rows), (rows, rows), ())
        self.decode = compile_(bind(loop.decode, settings), (weights, cache, rows, rows), (cache, rows, rows), (1,))

    def _shardings(self, specs: Any) -> Any:
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    @property
    def compiled(self) -> int:
        """How many programs have been compiled so far."""
        programs: tuple[Any, ...] = (self.prefill, self.all_logits, self.first_token, self.decode)
        return sum(program._cache_size() for program in programs)


def abstract_programs(
    config: MiniMaxM2Config,
    parallelism: Parallelism,
    mesh: Mesh,
    *,
    weight_format: str = "bfloat16",
    dtype: jnp.dtype = jnp.dtype(jnp.bfloat16),
    max_num_seqs: int = 8,
    max_model_len: int = 4096,
    chunk: int = PAGE_SIZE,
    steps: int = 16,
) -> dict[str, tuple[Jitted, tuple[Any, ...]]]:
    """Prefill and decode with abstract arguments, to compile without a device or a weight.

    Args:
      weight_format: "bfloat16", "float32", or "fp8" for attention and experts in 128 x 128 blocks.
    """
    programs = Programs(Settings(config, parallelism, dtype, steps), mesh)
    cache = abstract_cache(config, parallelism, max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype)
    axes = cache_axes(config.num_hidden_layers)

    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    cache = jax.tree.map(lambda leaf, a: place(leaf, partition_spec(a, parallelism)), cache, axes, is_leaf=is_axes)
    weights = _abstract_weights(config, parallelism, mesh, weight_format)
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


def _abstract_weights(config: MiniMaxM2Config, parallelism: Parallelism, mesh: Mesh, weight_format: str) -> Weights:
    def abstract(path: str, spec: Any) -> Any:
        sharding = NamedSharding(mesh, partition_spec(spec.axes, parallelism))
        if spec.kind == "float32":
            return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding)
        packed = weight_format == "fp8" and spec.kind == "matrix" and path.startswith("layers.")
        if not packed:
            dtype = jnp.float32 if weight_format == "float32" else jnp.bfloat16
            return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)
        local = sharding.shard_shape(spec.shape)[-2:]
        block = (math.gcd(128, local[0]), math.gcd(128, local[1]))
        grid = tuple(-(-size // b) for size, b in zip(spec.shape[-2:], block, strict=True))
        payload = jax.ShapeDtypeStruct(spec.shape, jnp.float8_e4m3fn, sharding=sharding)
        scale = jax.ShapeDtypeStruct((*spec.shape[:-2], *grid), jnp.float32, sharding=sharding)
        return QuantTensor(payload, scale, block)  # type: ignore[arg-type]

    return {path: abstract(path, spec) for path, spec in abstract_parameters(config, parallelism).items()}


def is_axes(node: Any) -> bool:
    """Whether a tree node is one array's logical axes."""
    return isinstance(node, tuple) and all(part is None or isinstance(part, str) for part in node)
