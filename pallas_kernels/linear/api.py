"""The linear layer's product; chooses an implementation."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, choose, note_once, on_gpu
from pallas_kernels.errors import Unavailable
from pallas_kernels.linear.reference import linear_reference
from pallas_kernels.linear.xla import linear_xla
from pallas_kernels.quant import QuantTensor, Weight


def linear(x: jax.Array, weight: Weight, *, implementation: Implementation = None) -> jax.Array:
    """x times the transpose of `weight`.

    Args:
      x: [..., cols] float32 or bfloat16.
      weight: [rows, cols], plain or packed.
      implementation: "pallas" (interpreted where there is no GPU), "xla", "reference", or None: on a GPU the kernel for
        a packed weight that it can read, "xla" otherwise.

    Returns:
      [..., rows] float32, not yet rounded to x's dtype.

    Raises:
      Unavailable: the named implementation is none of these, or cannot compute this.
    """
    available: dict[str, Callable[..., Any]] = {"xla": linear_xla, "reference": linear_reference}
    packed = isinstance(weight, QuantTensor)
    if implementation == "pallas" or (implementation is None and packed):
        kernel, why = _kernel(weight)
        if kernel is not None:
            elsewhere = linear_xla if implementation is None else functools.partial(kernel, interpret=True)
            implementation, available["pallas"] = "pallas", functools.partial(_run, kernel, elsewhere)
        elif implementation == "pallas":
            raise Unavailable("linear", "pallas", why)
        else:
            note_once(f"linear: plain XLA instead of the kernel, because {why}")
    out: jax.Array = choose("linear", implementation, available)(x, weight)
    return out


def _run(kernel: Callable[..., Any], elsewhere: Callable[..., Any], x: jax.Array, weight: Weight) -> jax.Array:
    out: jax.Array = on_gpu(kernel, elsewhere, (x, weight))
    return out


def _kernel(weight: Weight) -> tuple[Callable[..., Any] | None, str]:
    """The kernel's function, or why it is not to be had: JAX will drop the route that it takes one day."""
    try:
        module = importlib.import_module("pallas_kernels.linear.kernel")
    except (ImportError, AttributeError) as error:
        return None, f"this JAX has no Pallas Triton route ({error})"
    if isinstance(weight, QuantTensor) and weight.format.activation is not None:
        return None, "the weight asks for its input to be quantised, which 'xla' and 'reference' emulate"
    why = module.why_not(weight)
    return (None, f"the weight has {why}") if why is not None else (module.linear_pallas, "")
