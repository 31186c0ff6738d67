"""Compiled programs kept on disk between runs."""

from __future__ import annotations

import os
import zlib
from pathlib import Path


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX has been told where (JAX_COMPILATION_CACHE_DIR)."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minimax_jax"
    # A GPU's kind is part of JAX's own key; a CPU's instructions are not, and home folders move between machines.
    name = f"xla-cpu-{cpu_instructions()}" if jax.default_backend() == "cpu" else "xla"
    jax.config.update("jax_compilation_cache_dir", str(base / name))


def cpu_instructions() -> str:
    """A short name for the set of instructions of this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{zlib.crc32(features.encode()):08x}"
