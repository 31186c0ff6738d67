"""Progress of loading: a bar in bytes on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger("minimax_jax")

_INTERVAL = 10.0  # seconds between log lines


class Progress:
    """Counts bytes and layers; used as a context manager."""

    def __init__(self, total_bytes: int, total_layers: int) -> None:
        self._total, self._layers = total_bytes, total_layers
        self._done, self._layers_done = 0, 0
        self._start = self._last = time.monotonic()
        self._bar = (
            tqdm(total=total_bytes, unit="B", unit_scale=True, desc="loading weights", postfix=self._layer_text())
            if sys.stderr.isatty()
            else None
        )

    def add_bytes(self, count: int) -> None:
        """`count` more bytes are in memory."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last > _INTERVAL:
            self._last = time.monotonic()
            elapsed = self._last - self._start
            left = elapsed * (self._total - self._done) / self._done
            logger.info("loading weights: %s, %.0f s left", self._state(), left)

    def add_layer(self) -> None:
        """One more layer is complete."""
        self._layers_done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(self._layer_text(), refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif error is None:
            logger.info("loaded weights: %s in %.1f s", self._state(), time.monotonic() - self._start)

    def _state(self) -> str:
        return f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {self._layer_text()}"

    def _layer_text(self) -> str:
        return f"layers {self._layers_done}/{self._layers}"
