"""Checkpoints in FP4 and MXFP8: coverage, widths, scales, and the quantisation of inputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimax_jax.checkpoint import LazyQuant
from minimax_jax.config import MiniMaxM2Config
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.quantization import ModuleSet, Scheme
from tests.checkpoint.tiny_checkpoint import (
    FP8,
    FP8_BLOCK,
    LAYOUTS,
    Tensors,
    message,
    pack,
    pack_module,
    plan_of,
    quantization_of,
    random_tensors,
    shapes_of,
    tiny_config,
    write_checkpoint,
)

EXPERT = "model.layers.1.block_sparse_moe.experts"


def packed_checkpoint(layout: str, seed: int, **sizes: int) -> tuple[MiniMaxM2Config, Tensors]:
    """Experts in `layout`, the rest plain, and the config that says so."""
    config = tiny_config(quantization=quantization_of(layout), **sizes)
    return config, pack(random_tensors(config, seed), layout, seed)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_packed_layouts_are_covered(tmp_path: Path, seed: int, layout: str) -> None:
    config, tensors = packed_checkpoint(layout, seed)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, (1, 2))
    used = [name for names in plan.sources.values() for name in names]
    assert sorted(used) == sorted(tensors)
    label = LAYOUTS[layout][0].upper()
    assert plan.formats["experts", label].tensors == 2 * 24
    packed = [value for name, value in tensors.items() if ".experts." in name]
    assert plan.formats["experts", label].bytes == sum(value.nbytes for value in packed)
    assert len(plan.scales) == 2 * 24 * (2 if label == "NVFP4" else 1)
    plan.check_scales()


@pytest.mark.parametrize("shape", [(32, 25), (32, 48), (32, 12), (31, 24), (24, 32)])
def test_packed_width_that_does_not_match(tmp_path: Path, seed: int, shape: tuple[int, int]) -> None:
    config, tensors = packed_checkpoint("mxfp4-quark", seed)
    name = f"{EXPERT}.3.w1.weight"
    tensors[name] = np.ones(shape, np.uint8)
    text = message(tmp_path, config, tensors)
    parts = (f"'{name}'", str(list(shape)), "expected [32, 24], two values of [32, 48] in a byte", ".safetensors")
    assert all(part in text for part in parts)


def test_odd_width_cannot_be_packed(tmp_path: Path, seed: int) -> None:
    config, tensors = packed_checkpoint("mxfp4-quark", seed, hidden_size=47)
    assert "expected [32, 24], two values of [32, 47] in a byte" in message(tmp_path, config, tensors)


@pytest.mark.parametrize("layout", ["mxfp4-quark", "nvfp4-ct"])
def test_missing_packed_weight(tmp_path: Path, seed: int, layout: str) -> None:
    config, tensors = packed_checkpoint(layout, seed)
    del tensors[f"{EXPERT}.3.w1.{LAYOUTS[layout][1]}"]
    text = message(tmp_path, config, tensors)
    assert f"lacks 1 of {len(shapes_of(config))} tensors: {EXPERT}.3.w1.weight" in text
    assert "no parameter uses" not in text


def test_experts_of_two_formats(tmp_path: Path, seed: int) -> None:
    """The error names both; w1 and w3 too are experts of one layer."""
    config, tensors = packed_checkpoint("mxfp4-quark", seed)
    config = dataclasses.replace(config, quantization=None)
    for layout, label in (("nvfp4-quark", "is NVFP4;"), ("nvfp4-ct", "NVFP4 with a global scale that divides;")):
        other = {name: value for name, value in tensors.items() if f"{EXPERT}.2.w3." not in name}
        other |= pack_module(f"{EXPERT}.2.w3", layout, (32, 48), np.random.default_rng(seed))
        text = message(tmp_path / layout, config, other)
        assert all(part in text for part in (f"'{EXPERT}.0.w1.weight'", "is MXFP4,", f"'{EXPERT}.2.w3.", label))
    quark, ct = (pack(random_tensors(config, seed), layout, seed) for layout in ("nvfp4-quark", "nvfp4-ct"))
    mixed = {name: value for name, value in quark.items() if f"{EXPERT}.5.w2." not in name}
    mixed |= {name: value for name, value in ct.items() if f"{EXPERT}.5.w2." in name}
    assert "global scale that divides" in message(tmp_path / "mixed", config, mixed)


def test_layers_may_differ(tmp_path: Path, seed: int) -> None:
    """And so may w13 and w2 of one layer: formats are per tensor, never per layer."""
    config = tiny_config()
    plain = random_tensors(config, seed)
    first, second = (f"layers.{i}.block_sparse_moe.experts." for i in range(2))
    mxfp4, nvfp4 = (pack(plain, layout, seed) for layout in ("mxfp4-quark", "nvfp4-ct"))
    tensors = {name: value for name, value in plain.items() if ".experts." not in name}
    tensors |= {name: value for name, value in mxfp4.items() if first in name and ".w2." not in name}
    tensors |= {name: value for name, value in plain.items() if first in name and ".w2." in name}
    tensors |= {name: value for name, value in nvfp4.items() if second in name}
    plan = plan_of(write_checkpoint(tmp_path, tensors), config)
    assert {key[1] for key in plan.formats if key[0] == "experts"} == {"BF16", "MXFP4", "NVFP4"}


BAD_SCALES: list[tuple[str, str, Any, str]] = [
    ("mxfp4-quark", "weight_scale", 255, "bytes below 255"),
    ("mxfp8-vendor", "weight_scale_inv", 255, "bytes below 255"),
    ("nvfp4-quark", "weight_scale", np.nan, "finite values from 0"),
    ("nvfp4-quark", "weight_scale", -0.5, "finite values from 0"),
    *(("nvfp4-quark", "weight_scale_2", wrong, "a finite value above 0") for wrong in (0.0, -1.0, np.nan, np.inf)),
    *(("nvfp4-ct", "weight_global_scale", wrong, "a finite value above 0") for wrong in (0.0, -1.0, np.nan, np.inf)),
]


@pytest.mark.parametrize(("layout", "part", "wrong", "expected"), BAD_SCALES)
def test_bad_scales_of_other_formats(
    tmp_path: Path, seed: int, layout: str, part: str, wrong: float, expected: str
) -> None:
    config, tensors = packed_checkpoint(layout, seed)
    name = f"{EXPERT}.7.w2.{part}"
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] = wrong
    plan = plan_of(write_checkpoint(tmp_path, tensors), config)
    with pytest.raises(CheckpointError) as caught:
        plan.check_scales()
    fragments = (f"'{name}'", ".safetensors", f"holds {wrong}", "(1 such", expected)
    assert all(fragment in str(caught.value) for fragment in fragments)


def test_every_allowed_byte_of_a_scale(tmp_path: Path, seed: int) -> None:
    """E8M0 0 to 254; E4M3 without a sign, and its -0."""
    for layout, allowed in (("mxfp4-quark", range(255)), ("nvfp4-quark", [*range(0x7F), 0x80])):
        config, tensors = packed_checkpoint(layout, seed)
        name = f"{EXPERT}.7.w1.weight_scale"
        for start in range(0, len(allowed), 64):
            value = np.resize(np.array(allowed[start : start + 64], np.uint8), tensors[name].shape)
            tensors[name] = value.view(tensors[name].dtype)
            plan_of(write_checkpoint(tmp_path / layout, tensors), config).check_scales()


# ---- activations


def test_emulation_keeps_the_input_scales(tmp_path: Path, seed: int) -> None:
    """One for each of w1, w3 and w2 of each expert, as stored; in memory and in the check of scales."""
    config, tensors = packed_checkpoint("nvfp4-ct", seed)
    directory = write_checkpoint(tmp_path, tensors)
    plan = plan_of(directory, config, emulate=True)
    w13, w2 = (plan.weights[f"layers.1.block_sparse_moe.experts.{name}"] for name in ("w13", "w2"))
    assert isinstance(w13, LazyQuant)
    assert isinstance(w2, LazyQuant)
    assert w13.format.activation == w2.format.activation == "nvfp4"
    assert w13.input_scale is not None
    assert w2.input_scale is not None
    for e in range(8):
        for i, name in enumerate(("w1", "w3")):
            assert w13.input_scale.read()[e, i] == tensors[f"{EXPERT}.{e}.{name}.input_global_scale"][0]
        assert w2.input_scale.read()[e] == tensors[f"{EXPERT}.{e}.w2.input_global_scale"][0]
    without = plan_of(directory, config)
    assert plan.bytes_per_device() == without.bytes_per_device() + 2 * 24 * 4
    assert len(plan.scales) == len(without.scales) + 2 * 24
    tensors[f"{EXPERT}.3.w3.input_global_scale"][:] = 0
    write_checkpoint(tmp_path, tensors)
    plan_of(directory, config).check_scales()
    with pytest.raises(CheckpointError, match=r"3\.w3\.input_global_scale.*holds 0\.0.*above 0"):
        plan_of(directory, config, emulate=True).check_scales()


def test_emulation_takes_no_other_experts_scale(tmp_path: Path, seed: int) -> None:
    config, tensors = packed_checkpoint("nvfp4-modelopt", seed)
    del tensors[f"{EXPERT}.3.w2.input_scale"]
    plan_of(write_checkpoint(tmp_path, tensors), config)
    assert f"module '{EXPERT}.3.w2'" in message(tmp_path, config, tensors, emulate=True)


@pytest.mark.parametrize(
    ("layout", "width", "works", "refused"),
    [("mxfp4-quark", 256, 8, 16), ("mxfp8-vendor", 256, 8, 16), ("nvfp4-quark", 128, 8, 16)],
)
def test_mesh_that_cuts_an_activation_group(
    tmp_path: Path, seed: int, layout: str, width: int, works: int, refused: int
) -> None:
    sizes = {"num_hidden_layers": 1, "intermediate_size": width, "num_attention_heads": 16, "num_local_experts": 16}
    config, tensors = packed_checkpoint(layout, seed, **sizes)
    directory = write_checkpoint(tmp_path, tensors)
    plan_of(directory, config, (1, works), emulate=True)
    plan_of(directory, config, (1, refused), "expert", emulate=True)
    plan_of(directory, config, (1, refused))
    text = rf"emulate_activation_quant: layers\.0\.block_sparse_moe\.experts\.w2 has {width // refused} columns"
    with pytest.raises(ConfigError, match=text):
        plan_of(directory, config, (1, refused), emulate=True)


def test_fp8_activation_groups(tmp_path: Path, seed: int) -> None:
    config = tiny_config(num_hidden_layers=1, intermediate_size=512, head_dim=128, quantization=FP8_BLOCK)
    directory = write_checkpoint(tmp_path, random_tensors(config, seed, fp8=True))
    plan = plan_of(directory, config, (1, 4), emulate=True)
    assert all(weight.format.activation == "fp8" for weight in plan.weights.values() if isinstance(weight, LazyQuant))
    with pytest.raises(ConfigError, match=r"w2 has 64 columns on each of 8 devices.*groups of 128"):
        plan_of(directory, config, (1, 8), emulate=True)


def test_nothing_to_emulate(tmp_path: Path, seed: int) -> None:
    config, tensors = packed_checkpoint("mxfp4-quark", seed)
    directory = write_checkpoint(tmp_path, tensors)
    weights_only = dataclasses.replace(quantization_of("mxfp4-quark"), default=Scheme("mxfp4"))
    for quantization in (None, weights_only):
        with pytest.raises(ConfigError, match=r"emulate_activation_quant: .* declares no quantised activations"):
            plan_of(directory, dataclasses.replace(config, quantization=quantization), emulate=True)


def test_a_packed_router_is_not_emulated(tmp_path: Path, seed: int) -> None:
    """It is decoded when it is loaded, so what the config declares of its input would be left out without a word."""
    config = tiny_config(num_hidden_layers=1, quantization=dataclasses.replace(FP8_BLOCK, exclude=ModuleSet()))
    tensors = random_tensors(config, seed, fp8=True)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    tensors[name] = tensors[name].astype(FP8)
    tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
    directory = write_checkpoint(tmp_path, tensors)
    plan_of(directory, config)
    with pytest.raises(ConfigError, match=rf"^emulate_activation_quant: tensor '{name}' .* router.* the option off$"):
        plan_of(directory, config, emulate=True)
