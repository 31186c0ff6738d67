"""Small checkpoints for these tests, written byte by byte so that any part of them can be made wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minimax_jax.checkpoint import Checkpoint, LoadPlan, open_checkpoint, plan_parameters
from minimax_jax.config import MiniMaxM2Config, Parallelism, QuantizationConfig
from minimax_jax.parameters import ParameterSpec

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = {np.dtype(np.float32): "F32", BF16: "BF16", FP8: "F8_E4M3", np.dtype(np.int32): "I32", np.dtype(np.uint8): "U8"}
NAMES |= {np.dtype(np.float16): "F16", np.dtype(np.float64): "F64", np.dtype(np.int64): "I64"}

EXCLUDED = ("gate", "e_score_correction_bias", "lm_head")  # as published
FP8_BLOCK = QuantizationConfig(quant_method="fp8", modules_to_not_convert=EXCLUDED)
Tensors = dict[str, np.ndarray]


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
) -> LoadPlan:
    """The plan for a (data, model) mesh."""
    parallelism = Parallelism(data=mesh[0], model=mesh[1], experts=experts)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return plan_parameters(checkpoint, config, specs_of(config, parallelism), parallelism, dtype)
