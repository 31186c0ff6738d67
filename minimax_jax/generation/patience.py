"""A limit on how long a program's first run may take: a GPU that hangs is reported instead of waited for."""

from __future__ import annotations

import logging
import time
from typing import Any

import jax

from minimax_jax.errors import ConfigError

logger = logging.getLogger("minimax_jax")

_LOOK = 0.02  # seconds between two looks
_SAY = 30.0  # seconds between two lines


class FirstRuns:
    """Waits for the first result of each program, and not for later ones.

    A compilation cannot be interrupted and is not counted: the clock starts when the program has been sent.
    """

    def __init__(self, limit: float) -> None:
        """`limit` in seconds."""
        self.limit = limit
        self._seen: set[str] = set()

    def wait(self, program: str, result: Any) -> None:
        """Returns once `result` is there, at once for a program that was waited for before.

        Raises:
          ConfigError: it is not there within the limit.
        """
        if program in self._seen:
            return
        self._seen.add(program)
        started = said = time.monotonic()
        for array in jax.tree.leaves(result):
            while not array.is_ready():
                now = time.monotonic()
                if now - started > self.limit:
                    raise ConfigError(
                        f"the first {program} step did not finish within startup_timeout {self.limit:g} s on "
                        f"{_devices(array)}: the device hangs or is far too slow; try implementation='xla', or raise "
                        "startup_timeout"
                    )
                if now - said > _SAY:
                    said = now
                    logger.info("waiting for the first %s step: %.0f of %g s", program, now - started, self.limit)
                time.sleep(_LOOK)


def _devices(array: Any) -> str:
    kinds = sorted({str(getattr(device, "device_kind", device)) for device in array.devices()})
    return ", ".join(kinds)
