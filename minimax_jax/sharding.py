"""Meshes, the table from logical axis to mesh axis, and every collective. No other module names a mesh axis.

Logical axes: each parameter and cache array states one name (or None) per dimension; `LOGICAL_AXES` says over which
mesh axis a name is spread. Inside `shard_map` modules see a device's part and call the collectives below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from minimax_jax.config_base import Parallelism
from minimax_jax.errors import ConfigError

Axes = tuple[str | None, ...]

DATA, MODEL = "data", "model"

_ALWAYS: dict[str, str | None] = {
    "batch": DATA,  # rows of a step
    "pages": DATA,  # pages of the cache
    "vocab": MODEL,  # rows of the embedding and of the head
    "heads": MODEL,  # query heads (times head_dim)
    "kv_heads": MODEL,  # key/value heads after replication (times head_dim), and M3's index heads
    "mlp_width": MODEL,  # of dense layers and shared experts
    "hidden": None,
}
# Experts: either each expert's width is split, or whole experts are spread.
LOGICAL_AXES: dict[str, dict[str, str | None]] = {
    "tensor": {**_ALWAYS, "experts": None, "expert_width": MODEL},
    "expert": {**_ALWAYS, "experts": MODEL, "expert_width": None},
}


def partition_spec(axes: Axes, parallelism: Parallelism) -> PartitionSpec:
    """Logical axes of an array -> its PartitionSpec on the ("data", "model") mesh."""
    table = LOGICAL_AXES[parallelism.experts]
    return PartitionSpec(*(None if axis is None else table[axis] for axis in axes))


def make_mesh(parallelism: Parallelism, devices: Sequence[Any] | None = None) -> Mesh:
    """A (data, model) mesh over the first data x model devices.

    Raises:
      ConfigError: there are fewer devices than the mesh needs.
    """
    devices = jax.devices() if devices is None else devices
    need = parallelism.data * parallelism.model
    if len(devices) < need:
        raise ConfigError(
            f"mesh (data {parallelism.data}, model {parallelism.model}) needs {need} devices, found {len(devices)}; "
            "lower tensor_parallel_size or data_parallel_size (CPU: XLA_FLAGS=--xla_force_host_platform_device_count)"
        )
    grid = np.array(devices[:need]).reshape(parallelism.data, parallelism.model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def named_sharding(mesh: Mesh, axes: Axes, parallelism: Parallelism) -> NamedSharding:
    """Where an array with these logical axes lives."""
    return NamedSharding(mesh, partition_spec(axes, parallelism))


def shard_map(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` as the whole package uses it: varying-axes checks off, which Pallas calls need."""
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def model_psum(x: jax.Array) -> jax.Array:
    """Sum over the devices that share a model: the one all-reduce after a row-split matmul."""
    return lax.psum(x, MODEL)


def model_all_gather(x: jax.Array, axis: int) -> jax.Array:
    """Concatenate the parts of `x` along `axis` over the devices that share a model."""
    return lax.all_gather(x, MODEL, axis=axis, tiled=True)


def model_index() -> jax.Array:
    """This device's place on the model axis, int32."""
    return lax.axis_index(MODEL)
