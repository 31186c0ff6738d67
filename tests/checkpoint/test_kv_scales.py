"""Scales of an FP8 key/value cache, under each tool's names."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from minimax_jax.checkpoint import LazyArray, load_parameters
from minimax_jax.config import Parallelism
from minimax_jax.errors import CheckpointError
from minimax_jax.model import abstract_parameters
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import make_mesh
from tests.checkpoint.tiny_checkpoint import (
    message,
    plan_of,
    random_tensors,
    tiny_config,
    write_checkpoint,
)

SPELLINGS = [
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_scale", "v_scale"),
    ("kv_scale", "kv_scale"),
]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("names", SPELLINGS)
def test_kv_scales(tmp_path: Path, seed: int, names: tuple[str, str], shape: tuple[int, ...]) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed)
    for i in range(2):
        for name, value in zip(names, (0.5, 0.25), strict=True):
            tensors[f"model.layers.{i}.self_attn.{name}"] = np.full(shape, value + i, np.float32)
        tensors[f"model.layers.{i}.self_attn.q_proj.output_scale"] = np.ones(shape, np.float32)
        tensors[f"model.layers.{i}.self_attn.prob_output_scale"] = np.ones(shape, np.float32)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, (1, 4))
    plan.check_scales()
    assert len(plan.ignored) == 4
    assert len(plan.scales) == (2 if names[0] == names[1] else 4)
    for i in range(2):
        found = [plan.weights[f"layers.{i}.self_attn.{part}_scale"] for part in "kv"]
        assert all(isinstance(scale, LazyArray) and scale.shape == () for scale in found)
        values = [float(scale.read()) for scale in found if isinstance(scale, LazyArray)]
        assert values == [0.25 + i if names[0] == names[1] else 0.5 + i, 0.25 + i]
    weights = load_parameters(plan, plan.specs, make_mesh(plan.parallelism), plan.parallelism)
    for path in ("layers.0.self_attn.k_scale", "layers.1.self_attn.v_scale"):
        loaded = weights[path]
        assert isinstance(loaded, jax.Array)
        assert loaded.dtype == np.float32
        assert loaded.is_fully_replicated
    assert float(weights["layers.1.self_attn.v_scale"]) == 1.25  # type: ignore[arg-type]


def test_kv_scales_that_are_refused(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    plain = random_tensors(config, seed)
    scale = np.full((), 0.5, np.float32)
    all_of = {f"model.layers.{i}.self_attn.{p}_proj.{p}_scale": scale for i in range(2) for p in "kv"}
    lost = {name: value for name, value in all_of.items() if "layers.1.self_attn.v" not in name}
    text = message(tmp_path / "lost", config, plain | lost)
    assert "lacks 1 of" in text
    assert "model.layers.1.self_attn.v_proj.v_scale" in text
    twice = all_of | {"model.layers.1.self_attn.kv_scale": scale}
    text = message(tmp_path / "twice", config, plain | twice)
    assert all(part in text for part in ("k_proj.k_scale'", "kv_scale'", "two spellings"))
    wide = all_of | {"model.layers.1.self_attn.k_proj.k_scale": np.ones(2, np.float32)}
    assert "k_proj.k_scale' (F32 [2]" in message(tmp_path / "wide", config, plain | wide)
    for wrong in (0.0, -1.0, np.nan):
        bad = all_of | {"model.layers.1.self_attn.k_proj.k_scale": np.full((), wrong, np.float32)}
        plan = plan_of(write_checkpoint(tmp_path / str(wrong), plain | bad), config)
        with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.k_scale.*above 0"):
            plan.check_scales()


def test_specs_with_kv_scales() -> None:
    config = tiny_config()
    found, without = (abstract_parameters(config, Parallelism(), kv_scales=there) for there in (True, False))
    assert found.keys() - without.keys() == {f"layers.{i}.self_attn.{part}_scale" for i in range(2) for part in "kv"}
    assert found["layers.1.self_attn.v_scale"] == ParameterSpec((), (), "float32")
