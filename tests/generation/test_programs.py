"""The abstract weights that programs are compiled for without a checkpoint, against those of real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from minimax_jax.checkpoint import load_parameters, open_checkpoint, plan_parameters
from minimax_jax.config import Parallelism, load_config
from minimax_jax.errors import ConfigError
from minimax_jax.generation.programs import WEIGHT_FORMATS, abstract_weights
from minimax_jax.model import abstract_parameters
from minimax_jax.sharding import make_mesh
from pallas_kernels.quant import QuantTensor

CHECKPOINTS = {
    "bfloat16": "m2-bf16",
    "fp8": "m2-fp8-block",
    "mxfp4": "m2-mxfp4-quark",
    "nvfp4": "m2-nvfp4-quark",
}


@pytest.mark.parametrize("experts", ["tensor", "expert"])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 4), (1, 8)])
@pytest.mark.parametrize("weight_format", list(CHECKPOINTS))
def test_as_a_checkpoint_is_loaded(shared: Path, weight_format: str, mesh: tuple[int, int], experts: Any) -> None:
    """Shape, dtype, sharding and format of every array."""
    directory = shared / "data" / "checkpoints" / CHECKPOINTS[weight_format]
    config, parallelism = load_config(directory), Parallelism(data=mesh[0], model=mesh[1], experts=experts)
    specs, devices = abstract_parameters(config, parallelism), make_mesh(parallelism)
    plan = plan_parameters(open_checkpoint(directory), config, specs, parallelism, "bfloat16")
    loaded = load_parameters(plan, specs, devices, parallelism)
    abstract = abstract_weights(config, parallelism, devices, weight_format)
    assert jax.tree.structure(abstract) == jax.tree.structure(loaded)
    for (path, wanted), (_, found) in zip(
        jax.tree.leaves_with_path(abstract), jax.tree.leaves_with_path(loaded), strict=True
    ):
        assert (wanted.shape, wanted.dtype, wanted.sharding) == (found.shape, found.dtype, found.sharding), path


def test_mxfp8_packs_what_fp8_packs(shared: Path) -> None:
    config, parallelism = load_config(shared / "data" / "checkpoints" / "m2-bf16"), Parallelism(model=2)
    mesh = make_mesh(parallelism)
    fp8, mxfp8 = (abstract_weights(config, parallelism, mesh, name) for name in ("fp8", "mxfp8"))
    packed = {path for path, weight in mxfp8.items() if isinstance(weight, QuantTensor)}
    assert packed == {path for path, weight in fp8.items() if isinstance(weight, QuantTensor)}
    assert len(packed) == 3 * (4 + 2)
    q_proj = mxfp8["layers.0.self_attn.q_proj.weight"]
    assert isinstance(q_proj, QuantTensor)
    assert (q_proj.shape, q_proj.scale.shape, q_proj.scale.dtype) == ((256, 128), (256, 4), "uint8")


def test_unknown_format(shared: Path) -> None:
    config, parallelism = load_config(shared / "data" / "checkpoints" / "m2-bf16"), Parallelism()
    with pytest.raises(ConfigError, match=f"'int4' is unknown; expected one of {', '.join(WEIGHT_FORMATS)}"):
        abstract_weights(config, parallelism, make_mesh(parallelism), "int4")
