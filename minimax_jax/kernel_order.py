"""Puts packed experts in the order that a GPU's kernel reads, once, after loading; and says how they compute."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from minimax_jax.config import Parallelism
from minimax_jax.generation.programs import weight_specs
from minimax_jax.model import Weights
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import shard_map
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quant import QuantTensor, Weight
from pallas_kernels.tiles import arrange, can_arrange, in_range

MIN_CAPABILITY = 9.0  # CUDA: the kernel multiplies packed bfloat16


def arrange_experts(
    weights: Weights,
    specs: Mapping[str, ParameterSpec],
    mesh: Mesh,
    parallelism: Parallelism,
    dtype: jnp.dtype,
    implementation: Implementation = None,
) -> Weights:
    """The weights with each layer's FP4 experts in tile order where the tensor-core kernel will read them.

    That is on an NVIDIA GPU, in bfloat16, with a width that the order is defined for. Elsewhere nothing changes, and
    the kernels read the checkpoint's own order. Buffers of what is arranged are given up as it goes.
    """
    if dtype != jnp.bfloat16 or implementation not in (None, "pallas") or not _has_tensor_core_kernel(mesh):
        return weights
    arranged = dict(weights)
    for path in weights:
        if not path.endswith(".experts.w13"):
            continue
        pair = (path, path.removesuffix("w13") + "w2")
        if all(_can(weights[name], specs[name], mesh, parallelism) for name in pair):
            for name in pair:
                weight = arranged[name]
                assert isinstance(weight, QuantTensor)
                arranged[name] = _arrange(weight, specs[name], mesh, parallelism)
    return arranged


def describe(weights: Weights, mesh: Mesh, implementation: Implementation) -> str:
    """How packed weights will be computed, for the log: "mxfp4 decoded in Pallas kernels on gfx942"."""
    names = sorted({weight.format.name for weight in weights.values() if isinstance(weight, QuantTensor)})
    device = next(iter(mesh.devices.flat))
    on_gpu = device.platform in ("gpu", "cuda", "rocm")
    if not names:
        return f"plain weights on {device.device_kind}"
    emulated = any(isinstance(weight, QuantTensor) and weight.format.activation for weight in weights.values())
    if implementation is None:
        implementation = "pallas" if on_gpu and not emulated else "xla"
    where = {"pallas": "inside Pallas kernels", "xla": "by XLA", "reference": "by the reference"}[implementation]
    tiled = any(isinstance(weight, QuantTensor) and weight.format.order == "tiles" for weight in weights.values())
    order = ", experts in tile order" if tiled else ""
    return f"{', '.join(names)} weights decoded {where}, products in the compute dtype, on {device.device_kind}{order}"


def _has_tensor_core_kernel(mesh: Mesh) -> bool:
    device: Any = next(iter(mesh.devices.flat))
    if "NVIDIA" not in device.device_kind.upper():
        return False
    return float(getattr(device, "compute_capability", 0)) >= MIN_CAPABILITY


def _can(weight: Weight, spec: ParameterSpec, mesh: Mesh, parallelism: Parallelism) -> bool:
    """Whether every device's part can be arranged, and holds scales that the kernel computes exactly."""
    if not isinstance(weight, QuantTensor) or weight.format.activation is not None:
        return False
    local = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype), weight
    )
    if not can_arrange(local):
        return False
    if weight.format.name != "mxfp4":
        return True
    check = jax.jit(lambda w: in_range(arrange(w).scale))
    return bool(check(weight))


def _arrange(weight: QuantTensor, spec: ParameterSpec, mesh: Mesh, parallelism: Parallelism) -> QuantTensor:
    before = weight_specs(weight, spec.axes, parallelism)
    after = functools.partial(weight_specs, axes=spec.axes, parallelism=parallelism)
    out = after(jax.eval_shape(arrange, weight))
    run = jax.jit(shard_map(arrange, mesh, (before,), out), donate_argnums=0)
    arranged: QuantTensor = run(weight)
    return arranged
