"""Tile sizes of the portable kernels, in one table: by op, kind of device, rows in a tile and width of the codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from pallas_kernels.quant import QuantTensor, Weight

Op = Literal["gate_up", "down", "linear"]
DeviceKind = Literal["amd", "nvidia"]
FEW_ROWS = 16  # at most that many in a tile is the class "few"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Tile sizes of one kernel.

    Attributes:
      block_n: rows of the weight in a tile.
      block_k: decoded columns of a tile in one step; a format may need fewer.
      num_warps, num_stages: of Triton. A warp is 64 threads on AMD.
      block_m: most rows of x in a tile; for the experts the plan decides.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: int = 64


# Not measured on AMD: chosen for code without spilled registers, with matrix instructions and within 64 KiB of LDS.
_TABLE: dict[tuple[Op, DeviceKind, str, str], Tuning] = {
    ("gate_up", "amd", "few", "fp4"): Tuning(block_n=64, block_k=256, num_warps=4, num_stages=2),
    ("gate_up", "amd", "few", "wide"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("gate_up", "amd", "many", "fp4"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("gate_up", "amd", "many", "wide"): Tuning(block_n=64, block_k=64, num_warps=4, num_stages=2),
    ("down", "amd", "few", "fp4"): Tuning(block_n=64, block_k=256, num_warps=4, num_stages=2),
    ("down", "amd", "few", "wide"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("down", "amd", "many", "fp4"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("down", "amd", "many", "wide"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("linear", "amd", "few", "fp4"): Tuning(block_n=32, block_k=256, num_warps=4, num_stages=2),
    ("linear", "amd", "few", "wide"): Tuning(block_n=32, block_k=128, num_warps=4, num_stages=2),
    ("linear", "amd", "many", "fp4"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("linear", "amd", "many", "wide"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=2),
    ("gate_up", "nvidia", "few", "fp4"): Tuning(block_n=64, block_k=256, num_warps=4, num_stages=3),
    ("gate_up", "nvidia", "few", "wide"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
    ("gate_up", "nvidia", "many", "fp4"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
    ("gate_up", "nvidia", "many", "wide"): Tuning(block_n=64, block_k=64, num_warps=4, num_stages=3),
    ("down", "nvidia", "few", "fp4"): Tuning(block_n=64, block_k=256, num_warps=4, num_stages=3),
    ("down", "nvidia", "few", "wide"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
    ("down", "nvidia", "many", "fp4"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
    ("down", "nvidia", "many", "wide"): Tuning(block_n=64, block_k=64, num_warps=4, num_stages=3),
    ("linear", "nvidia", "few", "fp4"): Tuning(block_n=32, block_k=256, num_warps=4, num_stages=3),
    ("linear", "nvidia", "few", "wide"): Tuning(block_n=32, block_k=128, num_warps=4, num_stages=3),
    ("linear", "nvidia", "many", "fp4"): Tuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
    ("linear", "nvidia", "many", "wide"): Tuning(block_n=64, block_k=64, num_warps=4, num_stages=3),
}


def choose(
    op: Op,
    weight: Weight,
    rows: int,
    tuning: Tuning | Mapping[str, Any] | None = None,
    device: DeviceKind | None = None,
) -> Tuning:
    """The table's entry for tiles of `rows` rows of x, or what a caller gave: all of it, or some fields by name."""
    if isinstance(tuning, Tuning):
        return tuning
    fp4 = isinstance(weight, QuantTensor) and weight.format.name in ("mxfp4", "nvfp4")
    shape = ("few" if rows <= FEW_ROWS else "many", "fp4" if fp4 else "wide")
    entry = _TABLE[op, device or device_kind(), *shape]
    names = {field.name for field in dataclasses.fields(Tuning)}
    return dataclasses.replace(entry, **{name: value for name, value in (tuning or {}).items() if name in names})


def device_kind() -> DeviceKind:
    """Of the default device. On a CPU "amd": what is compiled there ahead of time is for AMD."""
    return "nvidia" if "NVIDIA" in jax.devices()[0].device_kind.upper() else "amd"
