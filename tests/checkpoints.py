"""Checkpoints with expected logits: the small ones in tests/fixtures, and those beside the checkout where present."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent / "fixtures"
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data" / "checkpoints"
FIXTURE_NAMES = ("m2-bf16", "m2-fp8-block", "m2-mxfp4", "m2-nvfp4")  # in FIXTURES, with "tiny-" in front
NAMES = ("m2-bf16", "m2-fp8-block", "m2-mxfp4-quark", "m2-nvfp4-quark", "m2-nvfp4-ct", "m2-nvfp4-modelopt")  # BESIDE


@dataclasses.dataclass(frozen=True)
class Expected:
    """One prompt of expected.npz.

    Attributes:
      ids: the prompt.
      logits: [n, V] float32, the last n positions of the prompt.
      greedy: the likeliest tokens that follow, eos never among them; None where the file has none.
      router_margin: smallest gap between the last chosen and the first rejected expert over layers and positions.
    """

    ids: list[int]
    logits: np.ndarray
    greedy: list[int] | None
    router_margin: float


def cases() -> list[Path]:
    """Directories of all M2 checkpoints that there are; with MINIMAX_REQUIRE_SHARED=1 also the absent ones."""
    beside = [BESIDE / name for name in NAMES]
    if os.environ.get("MINIMAX_REQUIRE_SHARED") != "1":
        beside = [directory for directory in beside if directory.is_dir()]
    return [FIXTURES / f"tiny-{name}" for name in FIXTURE_NAMES] + beside


def read_expected(directory: Path) -> list[Expected]:
    """All prompts of a checkpoint, shortest first."""
    with np.load(directory / "expected.npz") as file:
        sizes = sorted(int(found[1]) for name in file if (found := re.fullmatch(r"prompt(\d+)_ids", name)))
        return [
            Expected(
                ids=file[f"prompt{n}_ids"].tolist(),
                logits=file[f"prompt{n}_logits"],
                greedy=file[f"greedy{n}_ids"].tolist() if f"greedy{n}_ids" in file else None,
                router_margin=float(file[f"prompt{n}_router_margin"]),
            )
            for n in sizes
        ]
