"""The proof that tensors and parameters match one to one, and the errors that say where they do not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from minimax_jax.checkpoint.formats import SCALE_SUFFIX, check_dtype
from minimax_jax.checkpoint.name_map import IGNORED, Rule
from minimax_jax.checkpoint.safetensors_index import Checkpoint, name_some
from minimax_jax.config import MiniMaxM2Config
from minimax_jax.errors import CheckpointError

Entries = Mapping[str, tuple[Rule, tuple[str, ...]]]  # parameter path -> its rule and checkpoint names

_LIMITS = {
    "num_hidden_layers": re.compile(r"model\.layers\.(\d+)\."),
    "num_local_experts": re.compile(r"model\.layers\.\d+\.block_sparse_moe\.experts\.(\d+)\."),
}


def find_ignored(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Tensors that are known to belong to no parameter."""
    return tuple(sorted(name for name in checkpoint.tensors if IGNORED in name.split(".")))


def check_config(checkpoint: Checkpoint, config: MiniMaxM2Config, entries: Entries) -> None:
    """Holds dtypes, shapes and numbers of layers and experts of the tensors that are there against the config."""
    for rule, names in entries.values():
        expected = tuple(math.prod(getattr(config, field) for field in fields) for fields in rule.dims)
        for name in names:
            info = checkpoint.tensors.get(name)
            if info is None:
                continue
            check_dtype(info)
            if info.shape == expected:
                continue
            fields = [
                " x ".join(f"{field} {getattr(config, field)}" for field in dim)
                for place, dim in enumerate(rule.dims)
                if len(info.shape) != len(expected) or info.shape[place] != expected[place]
            ]
            raise CheckpointError(
                f"{info} has shape {list(info.shape)}, expected {list(expected)} from config.json's {', '.join(fields)}"
            )
    for name, info in checkpoint.tensors.items():
        for field, pattern in _LIMITS.items():
            found = pattern.match(name)
            limit = getattr(config, field)
            if found and int(found[1]) >= limit and IGNORED not in name.split("."):
                raise CheckpointError(f"{info} lies beyond config.json's {field} {limit}, expected 0 to {limit - 1}")


def check_missing(checkpoint: Checkpoint, entries: Entries, ignored: Sequence[str]) -> None:
    """Every parameter has its tensors."""
    wanted = [name for _, names in entries.values() for name in names]
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if not missing:
        return
    known = {*wanted, *(name + SCALE_SUFFIX for name in wanted), *ignored}
    unused = [name for name in checkpoint.tensors if name not in known]
    message = f"checkpoint '{checkpoint.directory}' lacks {len(missing)} of {len(wanted)} tensors: {name_some(missing)}"
    for field, pattern in _LIMITS.items():
        asked, there = _count(wanted, pattern), _count(checkpoint.tensors, pattern)
        if asked != there:
            message += f"; config.json's {field} is {asked}, the tensors have {there}"
    if unused:
        message += f"; it has {len(unused)} that no parameter uses: {name_some(unused)}"
    raise CheckpointError(message)


def check_unused(checkpoint: Checkpoint, sources: Mapping[str, Sequence[str]], ignored: Sequence[str]) -> None:
    """Every tensor is used once, or is on the ignore list."""
    used: dict[str, str] = {}
    for path, names in sources.items():
        for name in names:
            if name in used:
                raise ValueError(f"the name map uses '{name}' for {used[name]} and for {path}")
            used[name] = path
    left = checkpoint.tensors.keys() - used.keys() - set(ignored)
    unused = [info for name, info in checkpoint.tensors.items() if name in left]
    if unused:
        raise CheckpointError(
            f"checkpoint '{checkpoint.directory}' has {len(unused)} tensors that no parameter uses: "
            f"{name_some(info.name for info in unused)}, the first in {unused[0].file}; "
            f"only '{IGNORED}' modules are left out"
        )


def _count(names: Sequence[str] | Mapping[str, object], pattern: re.Pattern[str]) -> int:
    """How many layers, or experts, the names reach to."""
    return max((int(found[1]) + 1 for name in names if (found := pattern.match(name))), default=0)
