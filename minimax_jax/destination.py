"""A directory that appears complete or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from minimax_jax.errors import CheckpointError

logger = logging.getLogger("minimax_jax")

_LAST = ("model.safetensors.index.json", "config.json")  # a directory is a checkpoint once it has these


class Destination:
    """Files are written to a hidden folder of their own, which takes the wanted name when all are there.

    Args:
      directory: must not exist, or be empty.

    Raises:
      CheckpointError: it has files in it, or a file is in its way.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.exists = self.directory.exists()
        nearest = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        if not nearest.is_dir():
            raise CheckpointError(f"{nearest} is a file; name a directory that does not exist or is empty")
        # An existing directory may be a mount or where the user stands, so it stays and the files move into it.
        parent = self.directory if self.exists else self.directory.parent
        prefix = f".{self.directory.name}.partial-"
        left = sorted(parent.glob(f"{prefix}*"))
        if self.exists and any(path not in left for path in self.directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty; name a directory that does not exist or is empty")
        for path in left:
            logger.warning("%s is left from a run that was cut short; remove it unless one is going on", path)
        self.partial = parent / f"{prefix}{os.getpid()}"

    def __enter__(self) -> Path:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir()
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _finish(self) -> None:
        if not self.exists:
            self.partial.rename(self.directory)
            return
        for file in sorted(self.partial.iterdir(), key=lambda file: (file.name in _LAST, file.name == _LAST[-1])):
            file.rename(self.directory / file.name)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON file for people too."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
