"""From a plan to arrays on the mesh: each device's part is read by itself and sent before the next is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

import jax
from jax.sharding import Mesh, NamedSharding

from minimax_jax.checkpoint.lazy import Index, Lazy, LazyArray, LazyQuant, normalize
from minimax_jax.checkpoint.plan import LoadPlan
from minimax_jax.config import Parallelism
from minimax_jax.parameters import ParameterSpec
from minimax_jax.progress import Progress
from minimax_jax.sharding import Axes, named_sharding
from pallas_kernels.quant import QuantTensor, Weight

_THREADS = 8  # copying from mapped files waits for the disk, so more than there are CPUs


def load_parameters(
    plan: LoadPlan, specs: Mapping[str, ParameterSpec], mesh: Mesh, parallelism: Parallelism
) -> dict[str, Weight]:
    """Reads every parameter onto the mesh.

    Raises:
      CheckpointError: a scale is not finite and positive or zero (all are checked before any weight is read), or a
        file changed since the plan was made.
    """
    if plan.parallelism != parallelism or plan.specs != specs:
        raise ValueError("the plan was made for other parameters or another mesh")
    total = sum(_local_bytes(array, named_sharding(mesh, axes, parallelism)) for array, axes in plan.arrays())
    left = Counter(layer for path in plan.weights if (layer := _layer(path)))
    loaded: dict[str, Weight] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        plan.check_scales(pool)
        layers = len(left)
        with Progress("loading weights", total, "B", f"layers 0/{layers}") as progress:
            placer = _Placer(mesh, parallelism, pool, progress)
            for path, weight in plan.weights.items():
                loaded[path] = placer.place_weight(weight, specs[path].axes)
                if layer := _layer(path):
                    left[layer] -= 1
                    if not left[layer]:
                        del left[layer]
                        progress.set_note(f"layers {layers - len(left)}/{layers}")
    return loaded


class _Placer:
    """Sends arrays to the mesh, part by part."""

    def __init__(self, mesh: Mesh, parallelism: Parallelism, pool: Executor, progress: Progress) -> None:
        self.mesh, self.parallelism, self.pool, self.progress = mesh, parallelism, pool, progress
        self.sending: list[jax.Array] = []

    def place_weight(self, weight: Lazy, axes: Axes) -> Weight:
        """A parameter; each part of a packed one with its own logical axes."""
        if not isinstance(weight, LazyQuant):
            return self.place(weight, axes)
        return QuantTensor(
            payload=self.place(weight.payload, axes),
            scale=self.place(weight.scale, axes),
            format=weight.format,
            global_scale=None if weight.global_scale is None else self.place(weight.global_scale, axes[:-2]),
            input_scale=None if weight.input_scale is None else self.place(weight.input_scale, axes[:-2]),
        )

    def place(self, array: LazyArray, axes: Axes) -> jax.Array:
        """The whole array, spread as `axes` say.

        `jax.make_array_from_callback` would read replicated parts once for each device and hold all parts on the
        host before it sends the first; here at most two parts are there, one read while the one before is sent.
        """
        sharding = named_sharding(self.mesh, axes, self.parallelism)
        shards: list[jax.Array] = []
        for index, devices in _parts(array, sharding):
            part = array.read(index, self.pool)
            for sent in self.sending:
                sent.block_until_ready()
            self.sending = [jax.device_put(part, device) for device in devices]
            shards += self.sending
            self.progress.add(part.nbytes)
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _parts(array: LazyArray, sharding: NamedSharding) -> Iterator[tuple[Index, list[jax.Device]]]:
    """Each part that this process holds, once, with the devices that hold it."""
    parts: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        whole = normalize(index or (), array.shape)
        parts.setdefault(tuple((part.start, part.stop) for part in whole), []).append(device)
    for key, devices in parts.items():
        yield tuple(slice(*bounds) for bounds in key), devices


def _local_bytes(array: LazyArray, sharding: NamedSharding) -> int:
    """Bytes that this process will read into memory."""
    part = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return part * sum(1 for _ in _parts(array, sharding))


def _layer(path: str) -> str | None:
    found = re.match(r"layers\.\d+", path)
    return found[0] if found else None
