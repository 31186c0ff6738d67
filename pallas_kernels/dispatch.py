"""How every op chooses its implementation: a named one is that or an error, None takes the best there is."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from pallas_kernels.errors import Unavailable

Implementation = str | None

logger = logging.getLogger("pallas_kernels")


def choose(op: str, implementation: Implementation, available: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function for `implementation`; None means the first of `available`, which lists the best first.

    Raises:
      Unavailable: `implementation` names none of them.
    """
    if implementation is None:
        return next(iter(available.values()))
    if implementation not in available:
        raise Unavailable(op, implementation, f"there are {', '.join(sorted(available))}")
    return available[implementation]


def on_gpu(kernel: Callable[..., Any], elsewhere: Callable[..., Any], args: Sequence[Any]) -> Any:
    """kernel(*args) in programs for AMD and NVIDIA GPUs, elsewhere(*args) in others: settled at lowering.

    So a program that is compiled for a GPU on a machine without one gets the kernel.
    """
    return lax.platform_dependent(*args, cuda=kernel, rocm=kernel, default=elsewhere)


@functools.cache
def note_once(message: str) -> None:
    """A warning, the first time that it is given."""
    logger.warning(message)
