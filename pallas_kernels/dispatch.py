"""How every op chooses its implementation: a named one is that or an error, None takes the best there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Implementation = str | None


def choose(op: str, implementation: Implementation, available: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function for `implementation`; None means the first of `available`, which lists the best first.

    Raises:
      ValueError: `implementation` names none of them.
    """
    if implementation is None:
        return next(iter(available.values()))
    if implementation not in available:
        raise ValueError(f"{op}: implementation {implementation!r} is not available; choose from {sorted(available)}")
    return available[implementation]
