"""The proof that tensors and parameters match one to one, and the errors that say where they do not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from minimax_jax.checkpoint.formats import PARTS, PLAIN, cols_per_element, find_weight
from minimax_jax.checkpoint.name_map import IGNORED, IGNORED_SCALES
from minimax_jax.checkpoint.name_map_m3 import INDEXER, VISION, is_vision, is_vision_module
from minimax_jax.checkpoint.rules import EXPERT, LAYER, Rule
from minimax_jax.checkpoint.safetensors_index import Checkpoint, name_some
from minimax_jax.config import MiniMaxM3Config, ModelConfig
from minimax_jax.errors import CheckpointError

Entries = Mapping[str, tuple[Rule, tuple[str, ...]]]  # parameter path -> its rule and checkpoint names

_LIMITS = {"num_hidden_layers": LAYER, "num_local_experts": EXPERT}


def find_ignored(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Tensors that are known to belong to no parameter."""
    scales = tuple(f".{name}" for name in IGNORED_SCALES)
    return tuple(sorted(name for name in checkpoint.tensors if IGNORED in name.split(".") or name.endswith(scales)))


def find_vision(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """Tensors of the vision tower and its projector, which text does not need.

    Raises:
      CheckpointError: one that has the name of none of their modules.
    """
    if not isinstance(config, MiniMaxM3Config):
        return ()
    names = sorted(name for name in checkpoint.tensors if is_vision(name))
    unknown = [name for name in names if not _is_part_of_vision(name)]
    if unknown:
        raise CheckpointError(
            f"checkpoint '{checkpoint.directory}' has {len(unknown)} tensors that this model's vision tower and "
            f"projector do not: {name_some(unknown)}, the first in {checkpoint.tensors[unknown[0]].file}; expected the "
            f"published names under {', '.join(VISION)}; remove them, or take the files of one checkpoint"
        )
    return tuple(names)


def _is_part_of_vision(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last in ("bias", *PARTS) and is_vision_module(module)


def check_config(checkpoint: Checkpoint, config: ModelConfig, entries: Entries) -> None:
    """Holds dtypes, shapes and numbers of layers and experts of the tensors that are there against the config."""
    for path, (rule, names) in entries.items():
        if rule.factor:
            _check_factor(checkpoint, path, names)
            continue
        shape = tuple(math.prod(getattr(config, field) for field in fields) for fields in rule.dims)
        shape = (rule.part[1] * shape[0], *shape[1:])
        for name in names:
            info = find_weight(checkpoint, name)
            if info is None:
                continue
            each = cols_per_element(info)
            expected = (*shape[:-1], -(-shape[-1] // each))
            if info.shape == expected and shape[-1] % each == 0:
                continue
            fields = [
                f"{rule.part[1]} x " * (rule.part[1] > 1 and place == 0)
                + " x ".join(f"{field} {getattr(config, field)}" for field in dim)
                for place, dim in enumerate(rule.dims)
                if len(info.shape) != len(expected) or info.shape[place] != expected[place]
            ]
            how = f", two values of {list(shape)} in a byte," if each > 1 else ""
            raise CheckpointError(
                f"{info} has shape {list(info.shape)}, expected {list(expected)}{how} from config.json's "
                f"{', '.join(fields)}; one of the two is of another checkpoint"
            )
    for name, info in checkpoint.tensors.items():
        for field, pattern in _LIMITS.items():
            found = pattern.match(name)
            limit = getattr(config, field)
            if found and int(found[1]) >= limit and IGNORED not in name.split("."):
                raise CheckpointError(f"{info} lies beyond config.json's {field} {limit}, expected 0 to {limit - 1}")


def check_missing(checkpoint: Checkpoint, config: ModelConfig, entries: Entries, ignored: Sequence[str]) -> None:
    """Every parameter has its tensors."""
    wanted = [name for _, names in entries.values() for name in names]
    missing = [name for name in wanted if name not in checkpoint.tensors and find_weight(checkpoint, name) is None]
    if not missing:
        return
    modules = [name.removesuffix(".weight") for name in wanted if name.endswith(".weight")]
    known = {*wanted, *(f"{module}.{part}" for module in modules for part in PARTS), *ignored}
    unused = [name for name in checkpoint.tensors if name not in known]
    message = f"checkpoint '{checkpoint.directory}' lacks {len(missing)} of {len(wanted)} tensors: {name_some(missing)}"
    for field, pattern in _LIMITS.items():
        asked, there = _count(wanted, pattern), _count(checkpoint.tensors, pattern)
        if asked != there:
            message += f"; config.json's {field} is {asked}, the tensors have {there}"
    if unused:
        message += f"; it has {len(unused)} that no parameter uses: {name_some(unused)}"
    message += _indexers_differ(checkpoint, config)
    raise CheckpointError(f"{message}; take all files of one checkpoint, config.json among them")


def check_unused(
    checkpoint: Checkpoint,
    config: ModelConfig,
    entries: Entries,
    sources: Mapping[str, Sequence[str]],
    ignored: Sequence[str],
) -> None:
    """Every tensor is used once, or is on the ignore list; `kv_scale` and a fused matrix stand for two parameters."""
    used: dict[str, list[str]] = {}
    for path, names in sources.items():
        for name in names:
            used.setdefault(name, []).append(path)
    for name, paths in used.items():
        parts = sorted(entries[path][0].part for path in paths)
        if parts != [(i, parts[0][1]) for i in range(parts[0][1])] and not name.endswith(".kv_scale"):
            raise ValueError(f"the name map uses parts {parts} of '{name}', for {', '.join(paths)}")
    left = checkpoint.tensors.keys() - used.keys() - set(ignored)
    unused = [info for name, info in checkpoint.tensors.items() if name in left]
    if unused:
        raise CheckpointError(
            f"checkpoint '{checkpoint.directory}' has {len(unused)} tensors that no parameter uses: "
            f"{name_some(info.name for info in unused)}, the first in {unused[0].file}; "
            f"only '{IGNORED}' modules, scales of queries and, of a model that sees, its vision are left out"
            f"{_indexers_differ(checkpoint, config)}"
        )


def _indexers_differ(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """For a message: the first layer that has an indexer by the config and none by the tensors, or the reverse."""
    if not isinstance(config, MiniMaxM3Config):
        return ""
    there = {int(found[1]) for name in checkpoint.tensors if (found := INDEXER.match(name))}
    for layer, kind in enumerate(config.layer_types):
        if (kind == "minimax_m3_sparse") != (layer in there):
            has = "an indexer's" if layer in there else "no indexer's"
            return f"; config.json says {kind} for layer {layer}, which has {has} tensors"
    return ""


def _check_factor(checkpoint: Checkpoint, path: str, names: Sequence[str]) -> None:
    infos = [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]
    if len(infos) > 1:
        raise CheckpointError(f"{infos[0]} and {infos[1]} are two spellings of {path}, expected one; remove the other")
    for info in infos:
        if info.dtype not in PLAIN or math.prod(info.shape) != 1:
            raise CheckpointError(f"{info} is {path}, expected one value in {', '.join(PLAIN)}")


def _count(names: Sequence[str] | Mapping[str, object], pattern: re.Pattern[str]) -> int:
    """How many layers, or experts, the names reach to."""
    return max((int(found[1]) + 1 for name in names if (found := pattern.match(name))), default=0)
