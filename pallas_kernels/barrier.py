"""When XLA may make what a device loop starts from."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import lax

T = TypeVar("T")


def when_needed(start: T, x: jax.Array) -> T:
    """`start`, constants that a loop will overwrite, made only once `x` is there.

    XLA makes the copies for the loops of all layers as soon as it can, which is at once, and each then waits for its
    turn: in the model's steps as many buffers as there are layers.
    """
    waited: tuple[T, jax.Array] = lax.optimization_barrier((start, x))
    return waited[0]
