"""What `inspect` tells about packed checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minimax_jax.config import Parallelism
from minimax_jax.inspection import describe_checkpoint

EXPERTS = {
    "m2-bf16": "BF16",
    "m2-fp8-block": "FP8 128x128",
    "m2-mxfp4-quark": "MXFP4",
    "m2-nvfp4-quark": "NVFP4",
    "m2-nvfp4-ct": "NVFP4",
    "m2-nvfp4-modelopt": "NVFP4",
}


@pytest.mark.parametrize("name", list(EXPERTS))
def test_formats_by_group_and_in_total(shared: Path, name: str) -> None:
    text = "\n".join(describe_checkpoint(shared / "data" / "checkpoints" / name, Parallelism()))
    formats = text[text.index("\nformats") : text.index("\ncoverage")].removeprefix("\nformats ")
    rows = [re.split(r"\s{2,}", line.strip()) for line in formats.splitlines()]
    groups = {group: (label, weights) for group, label, weights, _ in rows if group != "all"}
    assert groups["experts"] == (EXPERTS[name], "72 weights")
    if name != "m2-fp8-block":
        assert groups["attention"] == ("BF16", "12 weights")
    assert ("kv scales" in groups) == (name == "m2-nvfp4-modelopt")

    def stored(rows: list[list[str]]) -> int:
        return sum(int(count[1]) for row in rows if (count := re.search(r"(\d+) bytes", row[-1])))

    assert stored([row for row in rows if row[0] == "all"]) == stored([row for row in rows if row[0] != "all"])
    assert stored([row for row in rows if row[0] == "all"]) == stored(
        [re.split(r"\s{2,}", line) for line in text[text.index("stored as") : text.index("\nmodel ")].splitlines()]
    )
