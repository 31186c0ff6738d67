"""The routed experts' product; chooses an implementation."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.activation import SwiGLU
from pallas_kernels.dispatch import Implementation, choose, note_once
from pallas_kernels.errors import Unavailable
from pallas_kernels.grouped_moe.reference import grouped_moe_reference
from pallas_kernels.grouped_moe.xla import grouped_moe_xla
from pallas_kernels.quant import Weight


def grouped_moe(
    x: jax.Array,
    w13: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    *,
    activation: SwiGLU,
    implementation: Implementation = None,
) -> jax.Array:
    """Sum over k of expert_weights[n, k] * w2[e] @ activation(w13[e, 0] @ x[n], w13[e, 1] @ x[n]).

    Here e = expert_ids[n, k].

    Args:
      x: [N, D] float32 or bfloat16.
      w13: [E, 2, F, D] plain or packed: gate (w1) at [:, 0], up (w3) at [:, 1].
      w2: [E, D, F] plain or packed.
      expert_ids: [N, k] int32; an id outside 0..E-1 adds nothing (a pad, or an expert of another device).
      expert_weights: [N, k] float32.
      activation: applied in float32, rounded once to x's dtype.
      implementation: "pallas" (interpreted where there is no GPU), "xla", "reference", or None: the kernels on a GPU
        where they can compute this, "xla" elsewhere.

    Returns:
      [N, D] float32.

    Raises:
      Unavailable: the named implementation is none of these, or cannot compute this.
    """
    available: dict[str, Callable[..., Any]] = {"xla": grouped_moe_xla, "reference": grouped_moe_reference}
    if implementation in (None, "pallas"):
        kernels, why = _kernels(w13, w2)
        if kernels is not None:
            available["pallas"] = kernels
            if implementation is None:
                implementation, available["pallas"] = "pallas", functools.partial(kernels, interpret=_xla(activation))
        elif implementation == "pallas":
            raise Unavailable("grouped_moe", "pallas", why)
        else:
            note_once(f"grouped_moe: plain XLA instead of the kernels, because {why}")
    fn = choose("grouped_moe", implementation, available)
    out: jax.Array = fn(x, w13, w2, expert_ids, expert_weights, activation)
    return out


def _xla(activation: SwiGLU) -> Callable[..., jax.Array]:
    return functools.partial(grouped_moe_xla, activation=activation)


def _kernels(w13: Weight, w2: Weight) -> tuple[Callable[..., Any] | None, str]:
    """The kernels' function, or why it is not to be had: JAX will drop the route that they take one day."""
    try:
        module = importlib.import_module("pallas_kernels.grouped_moe.pallas")
    except (ImportError, AttributeError) as error:
        return None, f"this JAX has no Pallas Triton route ({error})"
    why = module.unsupported(w13, w2)
    return (None, why) if why is not None else (module.grouped_moe_pallas, "")
