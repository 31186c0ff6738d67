"""What an operation refuses."""

from __future__ import annotations


class Unavailable(ValueError):
    """An implementation, asked for by name, that is not there or cannot compute this."""

    def __init__(self, op: str, implementation: str, why: str) -> None:
        super().__init__(
            f"{op}: implementation {implementation!r} is not available: {why}; leave it out, or take 'xla'"
        )
