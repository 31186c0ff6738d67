"""The config of MiniMax-M3: the text part, and the sizes of its vision tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from minimax_jax.config_base import (
    SIZES,
    ExpertPlacement,
    LayerType,
    MlpType,
    ModelConfig,
    check_positive,
    check_sizes,
    one_or_list,
    open_config,
)
from minimax_jax.config_keys import is_finite_number, is_int, show
from minimax_jax.config_m3_keys import (
    IMAGE,
    INDEX,
    LAYER_TYPES,
    MLP_TYPES,
    TEXT_MODEL_TYPE,
    VIDEO,
    WIDTHS,
    either,
    read_fields,
)
from minimax_jax.config_rope import YarnScaling
from minimax_jax.config_vision import VisionConfig
from minimax_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM3Config(ModelConfig):
    """MiniMax-M3's text part. Field names as published, those of the indexer as in transformers.

    Attributes:
      dense_intermediate_size: width of the MLP of a "dense" layer.
      shared_intermediate_size: width of the one shared expert of a "sparse" layer.
      mlp_layer_types, layer_types: one a layer.
      index_n_heads: one for each key/value head, which attends to the blocks that its index head selects.
      index_topk_blocks: blocks that a query attends to, its own among them.
      index_block_size: tokens of a block.
      routed_scaling_factor: the sum over the routed experts is multiplied by it, the shared expert is not.
      swiglu_alpha, swiglu_beta, swiglu_limit: g sigmoid(alpha g) (u + beta) with g <= limit and |u| <= limit.
      max_position_embeddings: as published; with YaRN its factor times the original length.
      vision: None for a text-only file.
      image_token_id, video_token_id: places of a prompt that embeddings replace; None where there is no such token.
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("minimax_m3_vl", TEXT_MODEL_TYPE)

    dense_intermediate_size: int
    shared_intermediate_size: int
    mlp_layer_types: tuple[MlpType, ...]
    layer_types: tuple[LayerType, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk_blocks: int
    index_block_size: int
    routed_scaling_factor: float
    swiglu_alpha: float = 1.702
    swiglu_beta: float = 1.0
    swiglu_limit: float = 7.0
    yarn: YarnScaling | None = None
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, *WIDTHS, *INDEX)
        check_positive(self, "routed_scaling_factor", "swiglu_alpha", "swiglu_limit")
        if not is_finite_number(self.swiglu_beta) or self.swiglu_beta < 0:
            raise ConfigError(f"swiglu_beta {show(self.swiglu_beta)} is not a finite number (at least 0)")
        for name, kinds in (("mlp_layer_types", MLP_TYPES), ("layer_types", LAYER_TYPES)):
            value = getattr(self, name)
            if not isinstance(value, tuple) or len(value) != self.num_hidden_layers:
                raise ConfigError(f"{name} {show(value)} is not a tuple of num_hidden_layers {self.num_hidden_layers}")
            for layer, kind in enumerate(value):
                if kind not in kinds.values():
                    raise ConfigError(f"{name} holds {show(kind)} for layer {layer}; expected {either(kinds.values())}")
        if self.index_n_heads != self.num_key_value_heads:
            raise ConfigError(
                f"index_n_heads {self.index_n_heads} is not num_key_value_heads {self.num_key_value_heads}: only one "
                f"index head for each key/value head is supported, expected {self.num_key_value_heads}"
            )
        if self.rotary_dim > self.index_head_dim:
            raise ConfigError(
                f"rotary_dim {self.rotary_dim} is more than index_head_dim {self.index_head_dim}; index heads turn the "
                "same channels as the others"
            )
        if self.yarn is not None and self.max_position_embeddings != self.yarn.max_positions:
            raise ConfigError(
                f"max_position_embeddings {self.max_position_embeddings} is not YaRN's factor {self.yarn.factor} times "
                f"original_max_position_embeddings {self.yarn.original_max_position_embeddings}, which is "
                f"{self.yarn.max_positions}"
            )
        if self.yarn is not None and self.rope_theta <= 1:
            raise ConfigError(f"rope_theta {self.rope_theta} is not above 1, which YaRN's ramp needs")
        for name in ("image_token_id", "video_token_id"):
            token = getattr(self, name)
            if token is not None and (not is_int(token) or not 0 <= token < self.vocab_size):
                raise ConfigError(f"{name} {show(token)} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> MiniMaxM3Config:
        """A config from the published nested spelling, transformers 5's, or a mix; or the text part alone.

        Two spellings of one thing must agree. Absent: `head_dim` is 128 and `swiglu_beta` is 1; the other
        sizes, the kinds of the layers, `swiglu_alpha`, `swiglu_limit`, `rope_theta` and the rotary size have no
        default. Token ids outside the vocabulary are dropped: transformers writes its class's ids whatever the
        vocabulary.

        Raises:
          ConfigError: one line that names `source` and the key.
        """
        root = open_config(data, source, *cls.MODEL_TYPES)
        fields = read_fields(root)
        try:
            return cls(**fields)
        except ConfigError as error:
            raise root.error(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """The published spelling; `from_dict` gives an equal config back."""
        data: dict[str, Any] = {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "text_config": self._text_dict(),
            "torch_dtype": self.dtype,
        }
        if self.vision is not None:
            data |= {
                "img_token_compression_config": self.vision.compression(),
                "multimodal_projector_bias": True,
                "projector_hidden_act": "gelu",
                "projector_hidden_size": self.vision.projector_hidden_size,
                "vision_config": self.vision.to_dict(),
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            }
        for key, token in ((IMAGE[0], self.image_token_id), (VIDEO[0], self.video_token_id)):
            if token is not None:
                data[key] = token
        if self.quantization is not None:
            data["quantization_config"] = self.quantization.to_dict()
        return data

    def _text_dict(self) -> dict[str, Any]:
        frequencies = [int(kind == "minimax_m3_sparse") for kind in self.layer_types]
        data: dict[str, Any] = {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "attention_output_gate": False,
            **{name: getattr(self, name) for name in (*SIZES, *WIDTHS)},
            "head_dim": self.head_dim,
            "hidden_act": "swigluoai",
            "moe_layer_freq": [int(kind == "sparse") for kind in self.mlp_layer_types],
            "n_shared_experts": 1,
            # transformers takes the rotary size from this key, others from the next.
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "rotary_dim": self.rotary_dim,
            "qk_norm_type": "per_head",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "routed_scaling_factor": self.routed_scaling_factor,
            "scoring_func": "sigmoid",
            "sparse_attention_config": {
                "use_sparse_attention": True,
                **{theirs: getattr(self, ours) for ours, theirs in INDEX.items()},
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_score_type": "max",
                "sparse_attention_freq": frequencies,
                "sparse_disable_index_value": frequencies,
            },
            "swiglu_alpha": self.swiglu_alpha,
            "swiglu_beta": self.swiglu_beta,
            "swiglu_limit": self.swiglu_limit,
            "tie_word_embeddings": False,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
        }
        if self.yarn is not None:
            data["rope_scaling"] = {"rope_type": "yarn", **dataclasses.asdict(self.yarn)}
        if self.eos_token_ids:
            data["eos_token_id"] = one_or_list(self.eos_token_ids)
        return data

    def _widths(self, experts: ExpertPlacement) -> dict[str, str]:
        """Also the shared expert's and the dense MLP's, by width however the routed experts are placed."""
        widths = super()._widths(experts)
        if "sparse" in self.mlp_layer_types:
            widths["shared_intermediate_size"] = "shared expert's width"
        if "dense" in self.mlp_layer_types:
            widths["dense_intermediate_size"] = "dense width"
        return widths
