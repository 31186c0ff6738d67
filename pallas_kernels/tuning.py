"""Tile sizes of the portable kernels, in one table: by op, kind of device, rows in a tile and width of the codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

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


AttentionOp = Literal["paged_attention", "sparse_attention", "block_scores"]


@dataclasses.dataclass(frozen=True)
class AttentionTuning:
    """Tile sizes of one attention kernel.

    Attributes:
      rows: most query rows (tokens times the heads that share a key) in a tile; for sparse attention the heads decide.
      keys: of one step of the loop; half as many where queries are float32.
      span: keys of a program: a decode step's row is cut into parts of at least that many, None is all of them.
      num_warps, num_stages: of Triton. A warp is 64 threads on AMD.
    """

    rows: int
    keys: int
    span: int | None
    num_warps: int
    num_stages: int


# "few" is decoding, "many" prefill. None is measured; those of AMD are chosen as above.
_ATTENTION: dict[tuple[AttentionOp, DeviceKind, str], AttentionTuning] = {
    ("paged_attention", "amd", "few"): AttentionTuning(rows=16, keys=64, span=512, num_warps=4, num_stages=2),
    ("paged_attention", "amd", "many"): AttentionTuning(rows=128, keys=32, span=None, num_warps=8, num_stages=2),
    ("sparse_attention", "amd", "few"): AttentionTuning(rows=16, keys=64, span=256, num_warps=4, num_stages=2),
    ("sparse_attention", "amd", "many"): AttentionTuning(rows=16, keys=64, span=None, num_warps=4, num_stages=2),
    ("block_scores", "amd", "few"): AttentionTuning(rows=16, keys=128, span=256, num_warps=4, num_stages=2),
    ("block_scores", "amd", "many"): AttentionTuning(rows=64, keys=64, span=1024, num_warps=4, num_stages=2),
    ("paged_attention", "nvidia", "few"): AttentionTuning(rows=16, keys=64, span=512, num_warps=4, num_stages=3),
    ("paged_attention", "nvidia", "many"): AttentionTuning(rows=64, keys=64, span=None, num_warps=4, num_stages=3),
    ("sparse_attention", "nvidia", "few"): AttentionTuning(rows=16, keys=64, span=256, num_warps=4, num_stages=3),
    ("sparse_attention", "nvidia", "many"): AttentionTuning(rows=16, keys=64, span=None, num_warps=4, num_stages=3),
    ("block_scores", "nvidia", "few"): AttentionTuning(rows=16, keys=128, span=256, num_warps=4, num_stages=3),
    ("block_scores", "nvidia", "many"): AttentionTuning(rows=64, keys=128, span=1024, num_warps=4, num_stages=3),
}


def choose_attention(
    op: AttentionOp,
    few: bool,
    dtype: jnp.dtype,
    tuning: AttentionTuning | Mapping[str, Any] | None = None,
    device: DeviceKind | None = None,
) -> AttentionTuning:
    """The table's entry for queries of `dtype`, or what a caller gave: all of it, or some fields by name."""
    if isinstance(tuning, AttentionTuning):
        return tuning
    entry = _ATTENTION[op, device or device_kind(), "few" if few else "many"]
    keys = entry.keys // 2 if dtype == jnp.float32 else entry.keys
    return dataclasses.replace(entry, **{"keys": keys} | dict(tuning or {}))


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
