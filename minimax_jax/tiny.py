"""Small untrained MiniMax-M2 checkpoints in the published layout, for demonstrations and tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from minimax_jax.checkpoint.recipes import (
    BLOCK_COLUMNS,
    PACKED_FORMATS,
    PackedFormat,
    declare,
    is_linear,
    is_packed,
    pack,
)
from minimax_jax.destination import Destination, write_json
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.text.train import EOS, MIN_VOCAB_SIZE, TURN, train_tokenizer

WeightFormat = Literal["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "float32"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "float32")

_SHARDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyShape:
    """Sizes; the defaults can be cut over 1, 2, 4 or 8 devices, with key/value heads repeated over 4 and 8."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 4096


def make_tiny(
    directory: Path | str,
    *,
    seed: int = 0,
    weight_format: WeightFormat = "bf16",
    shape: TinyShape | None = None,
) -> Path:
    """Writes a checkpoint with a tokenizer trained on the text in `data/` and a chat template.

    The directory appears complete or not at all. The same arguments give the same bytes.

    Args:
      directory: must not exist, or be empty.
      seed: of the random weights.
      weight_format: "bf16"; "float32"; "fp8" for 128 x 128 blocks and "mxfp8", both in the vendor's layout (norms,
        embedding, head and router are bf16 or float32); "mxfp4" and "nvfp4" in Quark's, where attention is bf16 too.
      shape: sizes of the model.

    Raises:
      ConfigError: a format, seed or size that cannot be made.
      CheckpointError: the directory has files in it or cannot be written.
    """
    shape = shape or TinyShape()
    _check(seed, weight_format, shape)
    directory = Path(directory).expanduser()
    try:
        with Destination(directory) as partial:
            ids = _write_tokenizer(partial, shape.vocab_size)
            tensors = dict(_tensors(shape, seed, weight_format))
            _write_weights(partial, tensors)
            write_json(partial / "generation_config.json", _generation_config(ids))
            write_json(partial / "config.json", _config(shape, weight_format, tensors))
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}") from error
    return directory


def _check(seed: int, weight_format: str, shape: TinyShape) -> None:
    if weight_format not in WEIGHT_FORMATS:
        raise ConfigError(f"format is {weight_format!r}; expected one of {', '.join(WEIGHT_FORMATS)}")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; expected an integer of at least 0")
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        if value < 1:
            raise ConfigError(f"{field.name} is {value}; expected an integer of at least 1")
    if shape.num_hidden_layers > 1000:
        raise ConfigError(f"num_hidden_layers is {shape.num_hidden_layers}; expected at most 1000")
    if shape.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size is {shape.vocab_size}; the tokenizer needs at least {MIN_VOCAB_SIZE}")
    block = BLOCK_COLUMNS.get(weight_format, 1)
    for name in ("hidden_size", "intermediate_size"):
        if (size := getattr(shape, name)) % block:
            raise ConfigError(f"{name} is {size}; {weight_format} needs a multiple of {block}")
    if weight_format == "mxfp8" and (size := shape.num_attention_heads * shape.head_dim) % block:
        raise ConfigError(f"num_attention_heads x head_dim is {size}; {weight_format} needs a multiple of {block}")


def _write_tokenizer(directory: Path, vocab_size: int) -> dict[str, int]:
    data = resources.files("minimax_jax") / "data"
    text = (data / "gsm8k_excerpt.txt").read_text(encoding="utf-8")
    template = (data / "chat_template.jinja").read_text(encoding="utf-8")
    return train_tokenizer(directory, text, vocab_size=vocab_size, chat_template=template)


def _config(shape: TinyShape, weight_format: WeightFormat, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Every key of the published file."""
    config: dict[str, Any] = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * shape.num_hidden_layers,
        "auto_map": {
            "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
            "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
        },
        "hidden_act": "silu",
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": shape.head_dim // 2,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "transformers_version": "4.46.1",
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        **dataclasses.asdict(shape),
    }
    if (packed := _packed(weight_format)) is not None:
        linear = (name.removesuffix(".weight") for name, value in tensors.items() if is_linear(name, value.shape))
        config["quantization_config"] = declare(packed, [module for module in linear if not is_packed(module, packed)])
    return dict(sorted(config.items()))


def _generation_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": ids[TURN],
        "do_sample": True,
        "eos_token_id": ids[EOS],
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "transformers_version": "4.46.1",
    }


def _tensors(shape: TinyShape, seed: int, weight_format: WeightFormat) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by its published name, layer after layer; the same draws whatever the format."""
    rng = np.random.default_rng(seed)
    D, F = shape.hidden_size, shape.intermediate_size
    H, K = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim

    def normal(*sizes: int, level: float = 1.0) -> np.ndarray:
        return (level * rng.standard_normal(sizes)).astype(np.float32)

    def matrix(rows: int, columns: int, level: float = 1.0) -> np.ndarray:
        return normal(rows, columns, level=level / math.sqrt(columns))

    def plain(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield name, value if weight_format == "float32" else value.astype(ml_dtypes.bfloat16)

    def linear(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        packed = _packed(weight_format)
        if packed is not None and is_packed(name, packed):
            yield from pack(f"{name}.weight", value, packed).items()
        else:
            yield from plain(f"{name}.weight", value)

    yield from plain("model.embed_tokens.weight", normal(shape.vocab_size, D))
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield from plain(f"{layer}.{norm}.weight", 1 + normal(D, level=0.2))
        for name, rows, columns in (("q_proj", H, D), ("k_proj", K, D), ("v_proj", K, D), ("o_proj", D, H)):
            yield from linear(f"{layer}.self_attn.{name}", matrix(rows, columns))
        for norm, width in (("q_norm", H), ("k_norm", K)):
            yield from plain(f"{layer}.self_attn.{norm}.weight", 1 + normal(width, level=0.2))
        moe = f"{layer}.block_sparse_moe"
        yield f"{moe}.gate.weight", matrix(shape.num_local_experts, D)
        yield f"{moe}.e_score_correction_bias", normal(shape.num_local_experts, level=0.1)
        for e in range(shape.num_local_experts):
            # Gate and up projections of different sizes, so that one taken for the other shows.
            for name, rows, columns, level in (("w1", F, D, 1.5), ("w3", F, D, 0.75), ("w2", D, F, 1.0)):
                yield from linear(f"{moe}.experts.{e}.{name}", matrix(rows, columns, level))
    yield from plain("model.norm.weight", 1 + normal(D, level=0.2))
    yield from plain("lm_head.weight", matrix(shape.vocab_size, D, level=2.0))


def _packed(weight_format: WeightFormat) -> PackedFormat | None:
    return next((packed for packed in PACKED_FORMATS if packed == weight_format), None)


def _write_weights(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Shards of about equal size, numbered from 0 as published, and their index."""
    total = sum(value.nbytes for value in tensors.values())
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(_SHARDS)]
    written = 0
    for name, value in tensors.items():
        shards[min(_SHARDS - 1, written * _SHARDS // total)][name] = value
        written += value.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i:05d}-of-{_SHARDS:05d}.safetensors"
        (directory / file).write_bytes(save(shard, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)
