"""Small untrained MiniMax-M2 checkpoints in the published layout, for demonstrations and tests."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.text.train import EOS, MIN_VOCAB_SIZE, TURN, train_tokenizer

WeightFormat = Literal["bf16", "fp8", "float32"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("bf16", "fp8", "float32")

_FP8_BLOCK = 128
_FP8_MAX = 448.0  # largest float8_e4m3fn
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
      weight_format: "bf16"; "fp8" for 128 x 128 blocks as published (norms, embedding, head and router are not FP8);
        "float32".
      shape: sizes of the model.

    Raises:
      ConfigError: a format, seed or size that cannot be made.
      CheckpointError: the directory has files in it or cannot be written.
    """
    shape = shape or TinyShape()
    _check(seed, weight_format, shape)
    directory = Path(directory).expanduser()
    try:
        with _Destination(directory) as partial:
            ids = _write_tokenizer(partial, shape.vocab_size)
            _write_weights(partial, _tensors(shape, seed, weight_format))
            _write_json(partial / "generation_config.json", _generation_config(ids))
            _write_json(partial / "config.json", _config(shape, weight_format))
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


class _Destination:
    """Files are written to a folder of their own, which takes the wanted name when all are there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.exists = self.directory.exists()
        nearest = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        if not nearest.is_dir():
            raise CheckpointError(f"{nearest} is a file; name a directory that does not exist or is empty")
        if self.exists and any(self.directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty; name a directory that does not exist or is empty")
        # An existing directory may be a mount or where the user stands, so it stays and the files move into it.
        parent = self.directory if self.exists else self.directory.parent
        self.partial = parent / f".{self.directory.name}.partial-{os.getpid()}"

    def __enter__(self) -> Path:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir()
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _finish(self) -> None:
        if not self.exists:
            self.partial.rename(self.directory)
            return
        # A directory is a checkpoint once it has a config.
        for file in sorted(self.partial.iterdir(), key=lambda file: (file.name == "config.json", file.name)):
            file.rename(self.directory / file.name)


def _write_tokenizer(directory: Path, vocab_size: int) -> dict[str, int]:
    data = resources.files("minimax_jax") / "data"
    text = (data / "gsm8k_excerpt.txt").read_text(encoding="utf-8")
    template = (data / "chat_template.jinja").read_text(encoding="utf-8")
    return train_tokenizer(directory, text, vocab_size=vocab_size, chat_template=template)


def _config(shape: TinyShape, weight_format: WeightFormat) -> dict[str, Any]:
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
    if weight_format == "fp8":
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        }
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
        if weight_format != "fp8":
            yield from plain(f"{name}.weight", value)
            return
        payload, scale = quantize_blocks(value)
        yield f"{name}.weight", payload
        yield f"{name}.weight_scale_inv", scale

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


def quantize_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, columns] float32 -> float8_e4m3fn, and a float32 multiplier for each 128 x 128 block, the last ragged."""
    grid = tuple(-(-size // _FP8_BLOCK) for size in weight.shape)
    padded = np.zeros([n * _FP8_BLOCK for n in grid], np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = np.abs(padded).reshape(grid[0], _FP8_BLOCK, grid[1], _FP8_BLOCK).max(axis=(1, 3))
    scale = np.where(largest > 0, largest / np.float32(_FP8_MAX), 1).astype(np.float32)
    wide = scale.repeat(_FP8_BLOCK, axis=0).repeat(_FP8_BLOCK, axis=1)
    payload = np.clip(padded / wide, -_FP8_MAX, _FP8_MAX)[: weight.shape[0], : weight.shape[1]]
    return np.ascontiguousarray(payload).astype(ml_dtypes.float8_e4m3fn), scale


def _write_weights(directory: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Shards of about equal size, numbered from 0 as published, and their index."""
    items = list(tensors)
    total = sum(value.nbytes for _, value in items)
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(_SHARDS)]
    written = 0
    for name, value in items:
        shards[min(_SHARDS - 1, written * _SHARDS // total)][name] = value
        written += value.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i:05d}-of-{_SHARDS:05d}.safetensors"
        (directory / file).write_bytes(save(shard, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
