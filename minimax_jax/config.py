"""Model configs, frozen, from the published `config.json`, and every check that needs no weight."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is spread: `data` x `model` devices, experts by width ("tensor") or whole ("expert")."""

    data: int = 1
    model: int = 1
    experts: Literal["tensor", "expert"] = "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What `quantization_config` declares; tensors decide first, this second."""

    quant_method: str
    weight_block_size: tuple[int, int] = (128, 128)
    modules_to_not_convert: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config:
    """MiniMax-M2, M2.1, M2.5, M2.7. Field names as published."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of one routed expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    num_local_experts: int
    num_experts_per_tok: int
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    quantization: QuantizationConfig | None = None

    def num_kv_heads_on(self, parallelism: Parallelism) -> int:
        """Key/value heads stored over the model axis: each head repeated where there are more devices than heads."""
        return max(self.num_key_value_heads, parallelism.model)
