"""Coverage in both directions, a config held against the tensors, and what a plan tells about a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minimax_jax.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from minimax_jax.config import Parallelism
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.model import abstract_parameters
from tests.checkpoint.tiny_checkpoint import (
    BF16,
    FP8,
    FP8_BLOCK,
    is_packed,
    message,
    plan_of,
    random_tensors,
    shapes_of,
    specs_of,
    tiny_config,
    write_checkpoint,
)

EXPERT = "model.layers.1.block_sparse_moe.experts"


def test_specs_are_those_of_the_model() -> None:
    config = tiny_config()
    for parallelism in (Parallelism(), Parallelism(model=8)):
        specs = specs_of(config, parallelism)
        found = abstract_parameters(config, parallelism)
        assert {path: (spec.shape, spec.axes) for path, spec in found.items()} == {
            path: (spec.shape, spec.axes) for path, spec in specs.items()
        }
        assert {path for path, spec in found.items() if spec.kind == "float32"} == {
            path for path, spec in specs.items() if spec.kind == "float32"
        }


@pytest.mark.parametrize("fp8", [False, True])
def test_each_tensor_once_each_parameter_once(tmp_path: Path, fp8: bool, seed: int) -> None:
    config = tiny_config(quantization=FP8_BLOCK if fp8 else None)
    plan = plan_of(write_checkpoint(tmp_path, random_tensors(config, seed, fp8)), config, (1, 4))
    used = [name for names in plan.sources.values() for name in names]
    assert len(used) == len(set(used))
    assert set(used) == set(plan.checkpoint.tensors)
    assert plan.weights.keys() == plan.specs.keys() == plan.sources.keys()
    assert len(plan.scales) == (2 * (4 + 3 * 8) if fp8 else 0)
    assert plan.ignored == ()
    assert plan.checkpoint.bytes_read == 0


def test_mtp_modules_are_left_out(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    extra = ["model.mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight", "model.layers.7.mtp.weight"]
    tensors = random_tensors(config, seed) | {name: np.ones(2, BF16) for name in extra}
    assert plan_of(write_checkpoint(tmp_path, tensors), config).ignored == tuple(sorted(extra))


@pytest.mark.parametrize("name", ["model.mtp_norm.weight", "xmtp.weight", "model.layers.0.self_attn.k_proj.zero_point"])
def test_one_tensor_too_many(tmp_path: Path, seed: int, name: str) -> None:
    config = tiny_config()
    text = message(tmp_path, config, random_tensors(config, seed) | {name: np.ones(1, np.float32)})
    assert f"1 tensors that no parameter uses: {name}," in text
    assert "model-00001-of-00002.safetensors" in text


def test_many_tensors_too_many(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    extra = {f"extra.{i}.weight": np.ones(1, np.float32) for i in range(7)}
    text = message(tmp_path, config, random_tensors(config, seed) | extra)
    assert "extra.4.weight, ... (7 in all)" in text
    assert "extra.5" not in text


@pytest.mark.parametrize("name", list(shapes_of(tiny_config(num_hidden_layers=1, num_local_experts=2))))
def test_one_tensor_missing(tmp_path: Path, seed: int, name: str) -> None:
    config = tiny_config(num_hidden_layers=1, num_local_experts=2)
    tensors = random_tensors(config, seed)
    del tensors[name]
    text = message(tmp_path, config, tensors)
    assert f"lacks 1 of {len(tensors) + 1} tensors: {name}" in text


def test_many_tensors_missing(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    tensors = {name: value for name, value in random_tensors(config, seed).items() if ".w2." not in name}
    text = message(tmp_path, config, tensors)
    assert f"lacks 16 of {len(tensors) + 16} tensors" in text
    assert "experts.4.w2.weight, ... (16 in all)" in text
    assert "experts.5.w2" not in text


def test_renamed_tensors_are_told_on_both_sides(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    tensors = {name.replace("block_sparse_moe", "mlp"): value for name, value in random_tensors(config, seed).items()}
    text = message(tmp_path, config, tensors)
    assert "lacks 52 of" in text
    assert "52 that no parameter uses: model.layers.0.mlp." in text


@pytest.mark.parametrize("fp8", [False, True])
def test_lost_scale(tmp_path: Path, seed: int, fp8: bool) -> None:
    """An included layer without its scale is an error: stored in FP8, and also if it were stored in bfloat16."""
    config = tiny_config(quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    name = f"{EXPERT}.3.w1.weight"
    del tensors[name + "_scale_inv"]
    if not fp8:
        tensors[name] = tensors[name].astype(BF16)
    text = message(tmp_path, config, tensors)
    assert f"'{name}'" in text
    assert "scale" in text


def test_lost_weight_of_a_scale(tmp_path: Path, seed: int) -> None:
    config = tiny_config(quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    del tensors[f"{EXPERT}.3.w1.weight"]
    assert f"lacks 1 of {len(shapes_of(config))} tensors: {EXPERT}.3.w1.weight" in message(tmp_path, config, tensors)


def test_scale_of_a_norm(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed) | {"model.norm.weight_scale_inv": np.ones(1, np.float32)}
    assert "model.norm.weight_scale_inv" in message(tmp_path, config, tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(FP8)
    assert "expected a matrix" in message(tmp_path, config, tensors)


def test_experts_share_one_format(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed, fp8=True)
    tensors[f"{EXPERT}.2.w3.weight"] = tensors[f"{EXPERT}.2.w3.weight"].astype(BF16)
    del tensors[f"{EXPERT}.2.w3.weight_scale_inv"]
    text = message(tmp_path, config, tensors)
    assert f"'{EXPERT}.2.w3.weight'" in text
    assert "share one format" in text


def test_formats_differ_from_module_to_module(tmp_path: Path, seed: int) -> None:
    """Experts packed and attention not, as some exporters leave it."""
    config = tiny_config()
    packed = random_tensors(config, seed, fp8=True)
    tensors = {n: v for n, v in packed.items() if "_proj.weight_scale" not in n}
    tensors |= {n: v.astype(BF16) for n, v in packed.items() if n.endswith("_proj.weight")}
    plan = plan_of(write_checkpoint(tmp_path, tensors), config)
    assert {group: total.tensors for group, total in plan.formats.items()} == {
        ("embed_tokens", "BF16"): 1,
        ("lm_head", "BF16"): 1,
        ("norms", "BF16"): 1 + 2 * 4,
        ("attention", "BF16"): 2 * 4,
        ("router", "F32"): 4,
        ("experts", "FP8 per tensor"): 48,
    }


SHAPES: list[tuple[str, dict[str, int], str, str, str]] = [
    ("vocab_size", {"vocab_size": 128}, "model.embed_tokens.weight", "[64, 48]", "[128, 48]"),
    ("hidden_size", {"hidden_size": 96}, "model.embed_tokens.weight", "[64, 48]", "[64, 96]"),
    ("intermediate_size", {"intermediate_size": 64}, "experts.0.w1.weight", "[32, 48]", "[64, 48]"),
    ("num_attention_heads", {"num_attention_heads": 4}, "self_attn.q_proj.weight", "[64, 48]", "[32, 48]"),
    ("num_key_value_heads", {"num_key_value_heads": 4}, "self_attn.k_proj.weight", "[16, 48]", "[32, 48]"),
    ("head_dim", {"head_dim": 16}, "self_attn.q_proj.weight", "[64, 48]", "[128, 48]"),
    ("num_local_experts", {"num_local_experts": 16}, "gate.weight", "[8, 48]", "[16, 48]"),
    ("num_local_experts", {"num_local_experts": 4}, "gate.weight", "[8, 48]", "[4, 48]"),
]


@pytest.mark.parametrize(("field", "change", "name", "found", "expected"), SHAPES)
def test_config_that_contradicts_the_tensors(
    tmp_path: Path, seed: int, field: str, change: dict[str, int], name: str, found: str, expected: str
) -> None:
    text = message(tmp_path, tiny_config(**change), random_tensors(tiny_config(), seed))
    assert all(part in text for part in (f"{name}'", found, expected, f"{field} {change[field]}", ".safetensors"))


def test_fewer_layers_than_the_tensors(tmp_path: Path, seed: int) -> None:
    text = message(tmp_path, tiny_config(num_hidden_layers=1), random_tensors(tiny_config(), seed))
    assert all(part in text for part in ("'model.layers.1.", "num_hidden_layers 1", ".safetensors", "[48]"))


def test_more_layers_than_the_tensors(tmp_path: Path, seed: int) -> None:
    text = message(tmp_path, tiny_config(num_hidden_layers=3), random_tensors(tiny_config(), seed))
    assert "model.layers.2.input_layernorm.weight" in text
    assert "num_hidden_layers is 3, the tensors have 2" in text


def test_norm_sized_for_one_device(tmp_path: Path, seed: int) -> None:
    """Never skipped, never left at one: a q_norm of another size is an error."""
    config = tiny_config()
    tensors = random_tensors(config, seed)
    tensors["model.layers.1.self_attn.q_norm.weight"] = np.ones(8, BF16)
    text = message(tmp_path, config, tensors)
    assert all(part in text for part in ("model.layers.1.self_attn.q_norm.weight", "[8]", "[64]"))


@pytest.mark.parametrize("shape", [(64 * 48,), (48, 64), (64, 48, 1)])
def test_same_size_in_another_shape(tmp_path: Path, seed: int, shape: tuple[int, ...]) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].reshape(shape)
    assert "'lm_head.weight'" in message(tmp_path, config, tensors)


def test_dtype_is_told_before_the_shape(tmp_path: Path, seed: int) -> None:
    """A checkpoint in another packed format is named as that, not as a wrong config."""
    config = tiny_config()
    tensors = random_tensors(config, seed)
    tensors[f"{EXPERT}.0.w1.weight"] = np.ones((32, 12), np.int32)
    text = message(tmp_path, config, tensors)
    assert "dtype I32" in text
    assert "config.json" not in text


@pytest.mark.parametrize(
    ("name", "value"), [("lm_head.weight", np.int32), ("model.layers.0.self_attn.q_norm.weight", np.float64)]
)
def test_wrong_dtype(tmp_path: Path, seed: int, name: str, value: type) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed)
    tensors[name] = tensors[name].astype(value)
    assert f"'{name}'" in message(tmp_path, config, tensors)


def test_mesh_that_cannot_cut_the_model(tmp_path: Path, seed: int) -> None:
    config = tiny_config(vocab_size=65)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, random_tensors(config, seed)))
    with pytest.raises(ConfigError, match="vocab of 65 cannot be cut evenly over 2"):
        plan_of(checkpoint, config, (1, 2))


def test_bytes_per_device(tmp_path: Path, seed: int) -> None:
    """By hand: 64 x 48 embedding and head, 2 layers; experts 8 x 3 x 32 x 48 bytes and a scale for each matrix."""
    config = tiny_config(quantization=FP8_BLOCK)
    directory = write_checkpoint(tmp_path, random_tensors(config, seed, fp8=True))
    norms = 48 * 2 + 48 * 2 + 64 * 2 + 16 * 2
    router = 8 * 48 * 4 + 8 * 4
    attention = 2 * 64 * 48 + 2 * 16 * 48 + 4 * 4
    experts = 8 * 3 * (32 * 48 + 4)
    whole = 2 * 64 * 48 * 2 + 48 * 2 + 2 * (norms + router + attention + experts)
    assert plan_of(directory, config, (1, 1)).bytes_per_device() == whole
    assert plan_of(directory, config, (4, 1)).bytes_per_device() == whole
    # Over 4 devices each of the 2 key/value heads is held by two; a scale of a cut matrix is held by every device.
    norms = 48 * 2 + 48 * 2 + 16 * 2 + 8 * 2
    attention = 2 * 16 * 48 + 2 * 8 * 48 + 4 * 4
    for experts_placed in ("tensor", "expert"):
        experts = 8 * 3 * (8 * 48 + 4) if experts_placed == "tensor" else 2 * 3 * (32 * 48 + 4)
        cut = 2 * 16 * 48 * 2 + 48 * 2 + 2 * (norms + router + attention + experts)
        assert plan_of(directory, config, (1, 4), experts_placed).bytes_per_device() == cut
    formats = plan_of(directory, config).formats
    assert sum(total.bytes for total in formats.values()) == whole
    assert formats["experts", "FP8 per tensor"].tensors == 2 * 24
    assert formats["attention", "FP8 per tensor"].tensors == 2 * 4


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -0.5])
def test_bad_scales(tmp_path: Path, seed: int, wrong: float) -> None:
    config = tiny_config(quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    name = f"{EXPERT}.7.w2.weight_scale_inv"
    tensors[name] = np.full_like(tensors[name], wrong)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config)
    with pytest.raises(CheckpointError) as caught:
        plan.check_scales()
    assert all(part in str(caught.value) for part in (f"'{name}'", plan.checkpoint.tensors[name].file, str(wrong)))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 3e38])
def test_unusual_scales(tmp_path: Path, seed: int, value: float) -> None:
    config = tiny_config(quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    name = f"{EXPERT}.7.w2.weight_scale_inv"
    tensors[name] = np.full_like(tensors[name], value)
    plan_of(write_checkpoint(tmp_path, tensors), config).check_scales()


def test_published_sizes() -> None:
    """MiniMax-M2 itself, from names and shapes alone: the public counts of tensors and bytes, and what a mesh holds."""
    config = tiny_config(
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=256,
        num_experts_per_tok=8,
        quantization=FP8_BLOCK,
    )
    tensors: dict[str, TensorInfo] = {}
    for name, shape in shapes_of(config).items():
        dtype = "F8_E4M3" if is_packed(name) else "F32" if "gate" in name or "bias" in name else "BF16"
        tensors[name] = TensorInfo(name, "model.safetensors", dtype, shape, 0)
        if dtype == "F8_E4M3":
            scale, grid = f"{name}_scale_inv", (shape[0] // 128, shape[1] // 128)
            tensors[scale] = TensorInfo(scale, "model.safetensors", "F32", grid, 0)
    assert len(tensors) == 96_103
    assert sum(info.nbytes for info in tensors.values()) == 230_121_630_720
    checkpoint = Checkpoint(Path(), tensors, {})
    assert plan_of(checkpoint, config).bytes_per_device() == 230_121_630_720
    # Norms of the hidden size and routers are on every device. With 16 devices each of 8 key/value heads is on two.
    shared = (62 * 2 + 1) * 3072 * 2 + 62 * (256 * 3072 + 256) * 4
    heads = 62 * (128 * 2 + 2 * (128 * 3072 + 24 * 4))
    whole = 8 * heads
    for model, experts in ((16, "expert"), (16, "tensor")):
        plan = plan_of(checkpoint, config, (1, model), experts)
        cut = (230_121_630_720 - shared - whole) // model + shared + heads
        if experts == "expert":
            assert plan.bytes_per_device() == cut
        else:  # 96 of 128 rows: blocks of 32, so that a device has 3 scales where 12 / 16 would be exact
            assert plan.weights["layers.0.block_sparse_moe.experts.w13"].shape == (256, 2, 1536, 3072)
            assert plan.bytes_per_device() == cut + 62 * 256 * 3 * 24 * 4 * 9 // 4
