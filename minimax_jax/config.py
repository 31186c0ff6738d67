"""Model configs, frozen, from the published `config.json`, and every check that needs no weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from minimax_jax import config_keys, config_tables
from minimax_jax.config_base import (
    SIZES,
    LayerType,
    MlpType,
    ModelConfig,
    Parallelism,
    one_or_list,
    open_config,
    read_dtype,
    read_quantization_of,
    read_sizes,
)
from minimax_jax.config_keys import Section, show
from minimax_jax.config_m3 import MiniMaxM3Config
from minimax_jax.config_rope import ROPE_READ, YarnScaling, check_unscaled, read_rope
from minimax_jax.config_vision import VisionConfig
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import QuantizationConfig, read_quantization

__all__ = [
    "GenerationDefaults",
    "MiniMaxM2Config",
    "MiniMaxM3Config",
    "ModelConfig",
    "Parallelism",
    "QuantizationConfig",
    "VisionConfig",
    "YarnScaling",
    "load_config",
    "load_generation_defaults",
]


def load_config(directory: str | Path) -> ModelConfig:
    """The config of a checkpoint directory, from its `config.json`.

    Where that has no `quantization_config`, ModelOpt's `hf_quant_config.json` beside it tells the quantisation.

    Raises:
      ConfigError: no such file, not a JSON object, or a value that this package cannot compute with.
    """
    path = Path(directory) / "config.json"
    config = ModelConfig.from_dict(config_keys.read_json_object(path), source=str(path))
    beside = path.with_name("hf_quant_config.json")
    if config.quantization is None and beside.exists():
        section = Section(config_keys.read_json_object(beside), str(beside)).section("quantization")
        if section is not None and section.get("quant_algo") is not None:
            section = dataclasses.replace(section, data={**section.data, "quant_method": "modelopt"})
            config = dataclasses.replace(config, quantization=read_quantization(section))
    return config


def load_generation_defaults(directory: str | Path, config: ModelConfig) -> GenerationDefaults:
    """The sampling values and end-of-sequence ids that a checkpoint proposes, from its `generation_config.json`.

    Absent file or key: vLLM's neutral defaults, and the ids of `config.json`. An eos id outside the vocabulary could
    never be generated, so it is refused; in a file that transformers derived from its class defaults
    (`_from_model_config`) it is dropped, as in `config.json`. `repetition_penalty` and `min_p` are sampling values that
    vLLM would take from here and this package does not have: refused unless neutral. No other key is read.

    Raises:
      ConfigError: not a JSON object, or a value out of its range.
    """
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_token_ids=config.eos_token_ids)
    section = Section(config_keys.read_json_object(path), str(path))
    section.check_fixed({"repetition_penalty": (1,), "min_p": (0,)})
    eos = section.token_ids("eos_token_id")
    outside = [token for token in eos if token >= config.vocab_size]
    if outside and section.boolean("_from_model_config"):
        eos = tuple(token for token in eos if token < config.vocab_size)
    elif outside:
        raise section.error(f"eos_token_id {show(outside[0])} is outside the vocabulary of {config.vocab_size}")
    temperature = section.number("temperature", allow_zero=True)
    top_p = section.number("top_p", maximum=1.0)
    return GenerationDefaults(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(section.integer("top_k", minimum=-1) or 0, 0),  # vLLM: -1 and 0 both mean all tokens
        eos_token_ids=eos or config.eos_token_ids,
        do_sample=section.boolean("do_sample") or False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a request gets that states nothing.

    `do_sample` is kept as found and, as in vLLM, changes nothing: temperature 0 is what asks for greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(ModelConfig):
    """MiniMax-M2, M2.1, M2.5, M2.7. Field names as published."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("minimax_m2",)

    @property
    def mlp_layer_types(self) -> tuple[MlpType, ...]:
        """Every layer has routed experts."""
        types: tuple[MlpType, ...] = ("sparse",)
        return types * self.num_hidden_layers

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """Every layer attends to all earlier tokens."""
        types: tuple[LayerType, ...] = ("full_attention",)
        return types * self.num_hidden_layers

    @property
    def routed_scaling_factor(self) -> float:
        """The sum over the routed experts is taken as it is."""
        return 1.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> MiniMaxM2Config:
        """A config from the published spelling, transformers 5's, or a mix of the two.

        Two spellings of one thing must agree. An absent `head_dim` is 128 and an absent rotary size is the whole head,
        as in transformers' class of this model; the sizes and `rope_theta` have no default. eos ids outside the
        vocabulary are dropped: transformers writes its class's ids whatever the vocabulary.

        Raises:
          ConfigError: one line that names `source` and the key.
        """
        section = open_config(data, source, *cls.MODEL_TYPES)
        section.check_fixed(config_tables.M2_FIXED)
        quantization = read_quantization_of(section)
        section.check_unknown(_M2_READ, config_tables.M2_FIXED, config_tables.M2_PER_LAYER, config_tables.M2_HARMLESS)
        fields = read_sizes(section)
        section.check_per_layer(config_tables.M2_PER_LAYER, fields["num_hidden_layers"])
        fields["head_dim"] = section.integer("head_dim") or 128
        check_unscaled(section)
        fields["rope_theta"], rotary_dim = read_rope(section, fields["head_dim"])
        fields["rotary_dim"] = rotary_dim or fields["head_dim"]
        fields["dtype"] = read_dtype(section)
        eos = section.token_ids("eos_token_id")
        fields["eos_token_ids"] = tuple(token for token in eos if token < fields["vocab_size"])
        try:
            return cls(**fields, quantization=quantization)
        except ConfigError as error:
            raise section.error(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """The published spelling; `from_dict` gives an equal config back."""
        data: dict[str, Any] = {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "attn_type_list": [1] * self.num_hidden_layers,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "minimax_m2",
            "num_attention_heads": self.num_attention_heads,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_local_experts": self.num_local_experts,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rotary_dim": self.rotary_dim,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "use_cache": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": self.vocab_size,
        }
        if self.eos_token_ids:
            data["eos_token_id"] = one_or_list(self.eos_token_ids)
        if self.quantization is not None:
            data["quantization_config"] = self.quantization.to_dict()
        return data


_M2_READ = frozenset(
    {
        *SIZES,
        *ROPE_READ,
        "model_type",
        "num_experts",
        "head_dim",
        "rope_parameters",
        "rope_scaling",
        "rms_norm_eps",
        "dtype",
        "torch_dtype",
        "eos_token_id",
        "quantization_config",
    }
)
