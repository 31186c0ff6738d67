"""Copies of a checkpoint in which something is missing, added, or said otherwise; and any checkpoint in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from minimax_jax.checkpoint import load_parameters, open_checkpoint, plan_parameters
from minimax_jax.config import ModelConfig, Parallelism, load_config
from minimax_jax.model import Weights, abstract_parameters
from minimax_jax.sharding import make_mesh
from tests.checkpoint.tiny_checkpoint import Tensors, write_checkpoint

Edit = Callable[[dict[str, Any]], None]


def alter(
    source: Path,
    target: Path,
    *,
    drop: Collection[str] = (),
    add: Callable[[Tensors], Tensors] | None = None,
    edit: Edit | None = None,
) -> Path:
    """Writes `source` to `target`, without what no one reads here (a tokenizer, expectations).

    Args:
      drop: parts of names; every tensor whose name holds one of them is left out.
      add: from all tensors, those to add or replace.
      edit: changes the config in place.
    """
    with open_checkpoint(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for part in drop:
        left = {name: value for name, value in tensors.items() if part not in name}
        assert len(left) < len(tensors), f"no tensor is named like {part}"
        tensors = left
    write_checkpoint(target, tensors | (add(tensors) if add else {}))
    config = json.loads((source / "config.json").read_text())
    if edit is not None:
        edit(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(directory: Path, emulate: bool = False) -> tuple[ModelConfig, Weights]:
    """A checkpoint's config and its weights on one device, for computing in float32."""
    config, parallelism = load_config(directory), Parallelism()
    specs = abstract_parameters(config, parallelism)
    with open_checkpoint(directory) as checkpoint:
        plan = plan_parameters(checkpoint, config, specs, parallelism, np.float32, emulate_activation_quant=emulate)
        return config, load_parameters(plan, specs, make_mesh(parallelism), parallelism)
