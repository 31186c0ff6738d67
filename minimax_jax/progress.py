"""Progress of long work: a bar on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger("minimax_jax")

_INTERVAL = 10.0  # seconds between log lines


class Progress:
    """Counts what is done of `total`; used as a context manager.

    Args:
      what: the work, such as "loading weights".
      total: how much there is.
      unit: what is counted: "B" is shown as GB, anything else by number.
      note: more to show, such as "layers 0/62"; may be set again at any time.
    """

    def __init__(self, what: str, total: int, unit: str, note: str = "") -> None:
        self._what, self._total, self._unit, self._done = what, total, unit, 0
        self._start = self._last = time.monotonic()
        self._bar = (
            tqdm(total=total, unit=unit, unit_scale=unit == "B", desc=what, postfix=note or None)
            if sys.stderr.isatty()
            else None
        )
        self._note = note

    def add(self, count: int) -> None:
        """`count` more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._done and time.monotonic() - self._last > _INTERVAL:
            self._last = time.monotonic()
            left = (self._last - self._start) * (self._total - self._done) / self._done
            logger.info("%s: %s, %.0f s left", self._what, self._state(), left)

    def set_note(self, note: str) -> None:
        """Show `note` beside the count from now on."""
        self._note = note
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif error is None:
            logger.info("%s: %s in %.1f s", self._what, self._state(), time.monotonic() - self._start)

    def _state(self) -> str:
        if self._unit == "B":
            counted = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
        else:
            counted = f"{self._done} of {self._total} {self._unit}"
        return f"{counted}, {self._note}" if self._note else counted
