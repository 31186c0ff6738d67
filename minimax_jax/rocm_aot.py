"""Compiles jitted functions for AMD GPUs on a machine without one: XLA's own AMD pipeline, nothing is run.

The compiler is inside JAX's ROCm plugin. It is loaded from a folder (`plugin/`, an unpacked jax-rocm7-pjrt of JAX's
version) after stand-ins for the ROCm libraries (`stubs/`); `make rocm-env` makes both. Do this in a process of its own:
a failed check inside the compiler ends the process.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jax

from minimax_jax.errors import ConfigError


def compile_only_devices(toolchain: Path, target_config: Path, count: int) -> list[Any]:
    """`count` devices of one host that programs can be compiled for, but not run on.

    Args:
      toolchain: the folder that `make rocm-env` makes.
      target_config: the GPU, as XLA's GpuTargetConfigProto in text form.

    Raises:
      ConfigError: a file is missing.
    """
    from jax._src.lib import xla_client  # compile-only topologies have no public name

    plugin = toolchain / "plugin" / "jax_plugins" / "xla_rocm7" / "xla_rocm_plugin.so"
    for path in (plugin, target_config):
        if not path.is_file():
            raise ConfigError(f"no file {path}; `make rocm-env` makes the toolchain")
    for library in sorted((toolchain / "stubs").glob("*.so*")):
        if library.suffix not in (".c", ".map"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # the plugin finds it by its soname
    api = xla_client.load_pjrt_plugin_dynamically("rocm", str(plugin))
    if not xla_client.pjrt_plugin_initialized("rocm"):
        xla_client.initialize_pjrt_plugin("rocm")
    topology: Any = xla_client.make_c_api_device_topology(
        api, "", target_config=target_config.read_text(), topology=f"1x1x{count}"
    )
    devices: list[Any] = topology._make_compile_only_devices()
    return devices


def compile_for_rocm(jitted: Any, args: tuple[Any, ...]) -> jax.stages.Compiled:
    """The whole pipeline for a jitted function whose abstract arguments are sharded over compile-only devices."""
    compiled: jax.stages.Compiled = jitted.trace(*args).lower(lowering_platforms=("rocm",)).compile()
    return compiled
