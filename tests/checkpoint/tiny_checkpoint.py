"""Small checkpoints for these tests, written byte by byte so that any part of them can be made wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minimax_jax.checkpoint import Checkpoint, LoadPlan, has_kv_scales, open_checkpoint, plan_parameters
from minimax_jax.config import MiniMaxM2Config, Parallelism, QuantizationConfig
from minimax_jax.errors import CheckpointError
from minimax_jax.parameters import ParameterSpec
from minimax_jax.quantization import ModuleSet, Scheme

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = {np.dtype(np.float32): "F32", BF16: "BF16", FP8: "F8_E4M3", np.dtype(np.int32): "I32", np.dtype(np.uint8): "U8"}
PARTS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
NAMES |= {np.dtype(np.float16): "F16", np.dtype(np.float64): "F64", np.dtype(np.int64): "I64"}

EXCLUDED = ("gate", "e_score_correction_bias", "lm_head")  # as published
FP8_BLOCK = QuantizationConfig(quant_method="fp8", exclude=ModuleSet(EXCLUDED, components=True))
Tensors = dict[str, np.ndarray]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# A layout's name -> its format, and the names that its parts have in place of "weight".
LAYOUTS = {
    "mxfp4-quark": ("mxfp4", "weight", "weight_scale", "", ""),
    "mxfp4-ct": ("mxfp4", "weight_packed", "weight_scale", "", ""),
    "nvfp4-quark": ("nvfp4", "weight", "weight_scale", "weight_scale_2", "input_scale_2"),
    "nvfp4-modelopt": ("nvfp4", "weight", "weight_scale", "weight_scale_2", "input_scale"),
    "nvfp4-ct": ("nvfp4", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "mxfp8-vendor": ("mxfp8", "weight", "weight_scale_inv", "", ""),
    "mxfp8-modelopt": ("mxfp8", "weight", "weight_scale", "", ""),
}


def tiny_config(**changes: Any) -> MiniMaxM2Config:
    """Two layers, four experts; every size differs from every other where it can."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rotary_dim": 4,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    return MiniMaxM2Config(**(fields | changes))


def specs_of(config: MiniMaxM2Config, parallelism: Parallelism) -> dict[str, ParameterSpec]:
    """Every parameter: logical shape, logical axes, kind."""
    V, D, F, E = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_local_experts
    Q = config.num_attention_heads * config.head_dim
    K = config.num_kv_heads_on(parallelism) * config.head_dim
    specs = {
        "embed_tokens.weight": ParameterSpec((V, D), ("vocab", "hidden")),
        "lm_head.weight": ParameterSpec((V, D), ("vocab", "hidden")),
        "norm.weight": ParameterSpec((D,), ("hidden",), "vector"),
    }
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm.weight": ParameterSpec((D,), ("hidden",), "vector"),
            "post_attention_layernorm.weight": ParameterSpec((D,), ("hidden",), "vector"),
            "self_attn.q_proj.weight": ParameterSpec((Q, D), ("heads", "hidden")),
            "self_attn.k_proj.weight": ParameterSpec((K, D), ("kv_heads", "hidden")),
            "self_attn.v_proj.weight": ParameterSpec((K, D), ("kv_heads", "hidden")),
            "self_attn.o_proj.weight": ParameterSpec((D, Q), ("hidden", "heads")),
            "self_attn.q_norm.weight": ParameterSpec((Q,), ("heads",), "vector"),
            "self_attn.k_norm.weight": ParameterSpec((K,), ("kv_heads",), "vector"),
            "block_sparse_moe.gate.weight": ParameterSpec((E, D), (None, "hidden"), "float32"),
            "block_sparse_moe.e_score_correction_bias": ParameterSpec((E,), (None,), "float32"),
            "block_sparse_moe.experts.w13": ParameterSpec((E, 2, F, D), ("experts", None, "expert_width", "hidden")),
            "block_sparse_moe.experts.w2": ParameterSpec((E, D, F), ("experts", "hidden", "expert_width")),
        }
        specs |= {f"layers.{i}.{name}": spec for name, spec in layer.items()}
    return specs


def shapes_of(config: MiniMaxM2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published layout."""
    V, D, F, E = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_local_experts
    Q, K = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for i in range(config.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (Q, D),
            "self_attn.k_proj.weight": (K, D),
            "self_attn.v_proj.weight": (K, D),
            "self_attn.o_proj.weight": (D, Q),
            "self_attn.q_norm.weight": (Q,),
            "self_attn.k_norm.weight": (K,),
            "block_sparse_moe.gate.weight": (E, D),
            "block_sparse_moe.e_score_correction_bias": (E,),
        }
        for e in range(E):
            for name, shape in {"w1": (F, D), "w3": (F, D), "w2": (D, F)}.items():
                layer[f"block_sparse_moe.experts.{e}.{name}.weight"] = shape
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def is_packed(name: str) -> bool:
    """Whether the published FP8 layout packs this tensor."""
    return "_proj." in name or ".experts." in name


def random_tensors(
    config: MiniMaxM2Config, seed: int, fp8: bool = False, block: tuple[int, int] = (128, 128)
) -> Tensors:
    """The published layout with random values: bfloat16, float32 router, and with `fp8` packed linear layers."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in shapes_of(config).items():
        values = rng.standard_normal(shape, np.float32)
        if fp8 and is_packed(name):
            tensors[name] = values.astype(FP8)
            grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
            tensors[name + "_scale_inv"] = rng.uniform(0.5, 2.0, grid).astype(np.float32)
        else:
            tensors[name] = values if "gate" in name or "bias" in name else values.astype(BF16)
    return tensors


def quantization_of(layout: str, exclude: Sequence[str] = ("lm_head", "*self_attn*", "*gate")) -> QuantizationConfig:
    """What the config of a checkpoint in this layout declares."""
    name: Any = LAYOUTS[layout][0]
    return QuantizationConfig(quant_method="test", exclude=ModuleSet(tuple(exclude)), default=Scheme(name, name))


def pack_module(module: str, layout: str, shape: tuple[int, int], rng: np.random.Generator) -> Tensors:
    """A random packed weight of `shape`: every code, and scales that differ from block to block."""
    name, weight, scale, global_scale, input_scale = LAYOUTS[layout]
    rows, cols = shape
    grid = (rows, -(-cols // (16 if name == "nvfp4" else 32)))
    tensors: Tensors = {}
    if name == "mxfp8":
        tensors[weight] = rng.standard_normal(shape, np.float32).astype(FP8)
    else:
        tensors[weight] = rng.integers(0, 256, (rows, cols // 2), np.uint8)
    if name == "nvfp4":
        tensors[scale] = rng.uniform(0.5, 300, grid).astype(FP8)
        one = (1,) if layout == "nvfp4-ct" else ()
        factor = rng.uniform(300, 3000, one) if layout == "nvfp4-ct" else rng.uniform(3e-4, 3e-3, one)
        tensors[global_scale] = np.asarray(factor, np.float32)
        tensors[input_scale] = np.asarray(rng.uniform(0.5, 2.0, one), np.float32)
    else:
        tensors[scale] = rng.integers(118, 128, grid, np.uint8)
    return {f"{module}.{part}": value for part, value in tensors.items()}


def pack(tensors: Tensors, layout: str, seed: int, modules: str = ".experts.") -> Tensors:
    """The tensors with each module whose name holds `modules` packed anew."""
    rng = np.random.default_rng(seed)
    packed: Tensors = {}
    for name, value in tensors.items():
        if modules in name:
            packed |= pack_module(name.removesuffix(".weight"), layout, (value.shape[0], value.shape[1]), rng)
        else:
            packed[name] = value
    return packed


def decode(tensors: Tensors, name: str, block: tuple[int, int] = (128, 128)) -> np.ndarray:
    """The values of the weight `name`, by its tensors alone; a plain one as it is."""
    parts = {part: tensors.get(name.removesuffix("weight") + part) for part in PARTS} if "weight" in name else {}
    payload = tensors[name] if name in tensors else tensors[name + "_packed"]
    scale = next((parts[part] for part in ("weight_scale", "weight_scale_inv") if parts.get(part) is not None), None)
    if scale is None:
        return payload
    values = E2M1[unpack(payload)] if payload.dtype == np.uint8 else payload.astype(np.float32)
    if scale.dtype == np.uint8:
        each = np.exp2(scale.astype(np.float32) - 127)
        return values * np.repeat(each, 32, axis=1)[:, : values.shape[1]]
    if payload.dtype == np.uint8:
        factor, divisor = parts["weight_scale_2"], parts["weight_global_scale"]
        each = scale.astype(np.float32)
        each = each * factor if factor is not None else each / divisor
        return values * np.repeat(each, 16, axis=1)[:, : values.shape[1]]
    scale = scale.astype(np.float32)
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    rows, cols = block
    if scale.size == 1:
        rows, cols = values.shape
    elif scale.shape == (values.shape[0], 1):
        rows, cols = 1, values.shape[1]
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            values[r * rows : (r + 1) * rows, c * cols : (c + 1) * cols] *= scale[r, c]
    return values


def unpack(payload: np.ndarray) -> np.ndarray:
    """Codes of FP4 bytes: the even column in the low half."""
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape(*payload.shape[:-1], -1)


def write_file(path: Path, tensors: Mapping[str, np.ndarray], header_changes: Mapping[str, Any] | None = None) -> None:
    """One safetensors file; `header_changes` overwrites entries of its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        raw = value.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header | dict(header_changes or {})).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(directory: Path, tensors: Mapping[str, np.ndarray], shards: int = 2) -> Path:
    """Shards, zero-based as published, and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_file(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Mapping[str, str]) -> None:
    """Only the index."""
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)})
    (directory / "model.safetensors.index.json").write_text(text)


def read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> file."""
    weight_map: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def plan_of(
    source: Path | Checkpoint,
    config: MiniMaxM2Config,
    mesh: Sequence[int] = (1, 1),
    experts: Any = "tensor",
    dtype: str = "float32",
    emulate: bool = False,
) -> LoadPlan:
    """The plan for a (data, model) mesh."""
    parallelism = Parallelism(data=mesh[0], model=mesh[1], experts=experts)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    specs = specs_of(config, parallelism)
    if has_kv_scales(checkpoint.tensors):
        scales = [f"layers.{i}.self_attn.{name}_scale" for i in range(config.num_hidden_layers) for name in "kv"]
        specs |= dict.fromkeys(scales, ParameterSpec((), (), "float32"))
    return plan_parameters(checkpoint, config, specs, parallelism, dtype, emulate_activation_quant=emulate)


def message(directory: Path, config: MiniMaxM2Config, tensors: Tensors, **options: Any) -> str:
    """The one line with which planning fails, and no tensor is read for it."""
    checkpoint = open_checkpoint(write_checkpoint(directory, tensors))
    with pytest.raises(CheckpointError) as caught:
        plan_of(checkpoint, config, **options)
    assert "\n" not in str(caught.value)
    assert checkpoint.bytes_read == 0
    return str(caught.value)
