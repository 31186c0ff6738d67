"""The attention kernels asked for by name: compiled in programs for a GPU, interpreted in others, or an error."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.dispatch import on_gpu
from pallas_kernels.errors import Unavailable


def run_kernel(op: str, args: Sequence[Any], refused_for: Sequence[Any], **static: Any) -> jax.Array:
    """The kernel of `op`, `pallas_kernels.<op>.kernel.<op>_pallas`, on `args`.

    Args:
      refused_for: arguments of the kernel module's `why_not`.
      static: the kernel's options.

    Raises:
      Unavailable: JAX has dropped the route that the kernels take, or the kernel cannot compute this.
    """
    try:
        module = importlib.import_module(f"pallas_kernels.{op}.kernel")
    except (ImportError, AttributeError) as error:
        raise Unavailable(op, "pallas", f"this JAX has no Pallas Triton route ({error})") from None
    why = module.why_not(*refused_for)
    if why is not None:
        raise Unavailable(op, "pallas", why)
    kernel = functools.partial(getattr(module, f"{op}_pallas"), **static)
    out: jax.Array = on_gpu(kernel, functools.partial(kernel, interpret=True), args)
    return out
