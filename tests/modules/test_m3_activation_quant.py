"""M3's dense MLP, shared expert and experts with quantised inputs, against numpy: ml_dtypes casts and plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.checkpoint import open_checkpoint
from minimax_jax.config import MiniMaxM3Config
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.quantize import quantize_checkpoint
from tests.checkpoint.altered import alter, load
from tests.kernels.oracle import FORMATS, Packed, f32, plain
from tests.modules.m3_parts import DENSE, OFF, PARTS, SPARSE, Case, Matrix, check, random_case, switched_off
from tests.packed import decode, read_checkpoint

EXPERTS = ".experts."


@pytest.mark.parametrize("kind", [OFF, *FORMATS])
def test_every_part_in_every_format(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, kind)
    x, want = case.inputs(rng, 1.5)
    check(case.run(x), want)
    off = switched_off(case)
    kept = off.expected(x)
    if kind == "mxfp4":  # the others' way without it is compared elsewhere
        check(off.run(x), kept)
    for part in PARTS:
        difference = np.abs(kept[part] - want[part]).max()
        assert difference == 0 if kind == OFF else difference > 1e-2 * np.abs(want[part]).max()


@pytest.mark.parametrize(("kind", "experts"), [("mxfp8", "tensor"), ("mxfp4", "tensor"), ("nvfp4", "expert")])
def test_on_four_devices(kind: str, experts: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, kind)
    x, want = case.inputs(rng, 1.5)
    check(case.run(x, devices=4, experts=experts), want)


# ---- checkpoints, which say themselves what is quantised


CHECKPOINTS = {  # the format of each part's (input, hidden) products
    "m3-mxfp8": {"dense": ("mxfp8", "mxfp8"), "shared": ("mxfp8", "mxfp8"), "block": ("mxfp8", "mxfp8")},
    "m3-mxfp4-quark": {"dense": (None, None), "shared": ("mxfp4", "mxfp4"), "block": ("mxfp4", "mxfp4")},
    "m3-nvfp4-quark": {"dense": (None, None), "shared": ("nvfp4", "nvfp4"), "block": ("nvfp4", "nvfp4")},
    "m3-nvfp4-quark-inmem": {"dense": ("nvfp4", None), "shared": ("nvfp4", "nvfp4"), "block": ("nvfp4", "nvfp4")},
    "fp8": {"dense": ("fp8", "fp8"), "shared": ("fp8", "fp8"), "block": ("fp8", "fp8")},
    "mixed": {"dense": ("mxfp8", "mxfp8"), "shared": ("mxfp8", "mxfp8"), "block": ("nvfp4", "nvfp4")},
}


def directory_of(name: str, checkpoints: Path, made: Path) -> Path:
    """A checkpoint that is there, or is made from those: by our tool, or as ModelOpt mixes formats of modules."""
    if name == "fp8":
        return quantize_checkpoint(checkpoints / "m3-bf16", made, "fp8").directory
    if name != "mixed":
        return checkpoints / name
    with open_checkpoint(checkpoints / "m3-nvfp4-quark") as other:
        experts = {
            name.replace("input_scale_2", "input_scale"): other.read(name) for name in other.tensors if EXPERTS in name
        }
    with open_checkpoint(checkpoints / "m3-mxfp8") as base:
        packed = [name.removesuffix(".weight_scale_inv") for name in base.tensors if name.endswith("_scale_inv")]
    algorithms = {module: {"quant_algo": "NVFP4" if EXPERTS in module else "MXFP8"} for module in packed}
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    return alter(
        checkpoints / "m3-mxfp8",
        made,
        drop=[EXPERTS],
        add=lambda _: experts,
        edit=lambda config: config.update(quantization_config=declared),
    )


def stored(tensors: dict[str, np.ndarray], module: str, scheme: str | None, part: tuple[int, int] = (0, 1)) -> Matrix:
    """A module's weight, or one of n parts of its rows, as its bytes say."""
    values = decode(tensors, f"{module}.weight")
    i, n = part
    values = values[i * len(values) // n : (i + 1) * len(values) // n]
    a = np.ones((), f32)
    if scheme == "nvfp4":
        (scale,) = (found for last in ("", "_2") if (found := tensors.get(f"{module}.input_scale{last}")) is not None)
        a = f32(1) / scale.reshape(())
    return Matrix(Packed(jnp.zeros(()), values, np.ones(()), a), scheme)


def stack(parts: list[Any]) -> Matrix:
    """Matrices with a new first axis."""
    arrays = [np.stack([getattr(part.packed, name) for part in parts]) for name in ("blocks", "factor", "a")]
    return Matrix(Packed(jnp.zeros(()), *arrays), parts[0].scheme)


def matrices_of(tensors: dict[str, np.ndarray], schemes: dict[str, tuple[str | None, str | None]]) -> dict[str, Matrix]:
    """The two layers' weights, in either spelling of their names."""
    prefix = next(name for name in tensors if name.endswith("layers.0.input_layernorm.weight")).removesuffix(
        "0.input_layernorm.weight"
    )
    published = f"{prefix}1.block_sparse_moe.gate.weight" in tensors
    moe_at = f"{prefix}{SPARSE}." + ("block_sparse_moe" if published else "mlp")
    found = {}
    for here, there, part in (
        ("mlp", f"{prefix}{DENSE}.mlp", "dense"),
        ("block_sparse_moe.shared_experts", f"{moe_at}.shared_experts", "shared"),
    ):
        for i, name in enumerate(("gate_proj", "up_proj")):
            if f"{there}.gate_up_proj.weight" in tensors:
                matrix = stored(tensors, f"{there}.gate_up_proj", schemes[part][0], (i, 2))
            else:
                matrix = stored(tensors, f"{there}.{name}", schemes[part][0])
            found[f"{here}.{name}.weight"] = matrix
        found[f"{here}.down_proj.weight"] = stored(tensors, f"{there}.down_proj", schemes[part][1])
    names = ("w1", "w3", "w2") if published else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (
        [stored(tensors, f"{moe_at}.experts.{e}.{name}", schemes["block"][name == names[2]]) for e in range(8)]
        for name in names
    )
    found["block_sparse_moe.experts.w13"] = stack([stack(list(pair)) for pair in zip(gate, up, strict=True)])
    found["block_sparse_moe.experts.w2"] = stack(down)
    found["block_sparse_moe.gate.weight"] = stored(tensors, f"{moe_at}.gate", None)
    bias = tensors[f"{moe_at}.{'' if published else 'gate.'}e_score_correction_bias"]
    found["block_sparse_moe.e_score_correction_bias"] = Matrix(plain(bias), None)
    return found


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_where_a_checkpoint_declares_it(shared: Path, tmp_path: Path, name: str, seed: int) -> None:
    """And nowhere else: a plain layer of a quantised checkpoint keeps its input."""
    directory = directory_of(name, shared / "data" / "checkpoints", tmp_path / "made")
    config, weights = load(directory, emulate=True)
    assert isinstance(config, MiniMaxM3Config)
    case = Case(config, weights, matrices_of(read_checkpoint(directory), CHECKPOINTS[name]))
    x, want = case.inputs(np.random.default_rng(seed), 1.0)
    check(case.run(x), want)
    # The default, and the same weights without a word of their inputs.
    _, usual = load(directory)
    off = switched_off(case)
    assert jax.tree.structure(usual) == jax.tree.structure(off.weights)
    kept = off.expected(x)
    for part, schemes in CHECKPOINTS[name].items():
        assert (np.abs(kept[part] - want[part]).max() > 1e-2 * np.abs(want[part]).max()) == any(schemes)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("m3-nvfp4-quark", "language_model.model.layers.2.block_sparse_moe.shared_experts.up_proj"),
        ("m3-nvfp4-quark", "language_model.model.layers.3.block_sparse_moe.experts.5.w2"),
        ("m3-nvfp4-quark-inmem", "model.language_model.layers.0.mlp.gate_up_proj"),
        ("m3-nvfp4-quark-inmem", "model.language_model.layers.1.mlp.experts.7.gate_proj"),
    ],
)
def test_a_static_scale_that_is_not_there(shared: Path, tmp_path: Path, name: str, module: str) -> None:
    """No other module's is taken; without the option no one reads it."""
    source = shared / "data" / "checkpoints" / name
    directory = alter(source, tmp_path, drop=[f"{module}.input_scale_2"])
    load(directory)
    with pytest.raises(CheckpointError, match="static activation scale") as caught:
        load(directory, emulate=True)
    message = str(caught.value)
    assert f"module '{module}'" in message
    assert "leave the option off" in message
    assert "\n" not in message


def test_nothing_to_quantise(shared: Path) -> None:
    with pytest.raises(ConfigError, match=r"emulate_activation_quant: .* declares no quantised activations"):
        load(shared / "data" / "checkpoints" / "m3-bf16", emulate=True)
