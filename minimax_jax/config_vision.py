"""Sizes of MiniMax-M3's vision tower and projector."""

from __future__ import annotations

import dataclasses
from typing import Any

from minimax_jax import config_tables
from minimax_jax.config_base import check_missing, check_positive, check_sizes
from minimax_jax.config_keys import Section, agreed
from minimax_jax.errors import ConfigError

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
_PATCHES = ("spatial_merge_size", "temporal_patch_size")
_COMPRESSION = "img_token_compression_config"
_VISION_READ = frozenset(
    {
        *_SIZES,
        *_PATCHES,
        _COMPRESSION,
        "layer_norm_eps",
        "rope_theta",
        "rope_parameters",
        "vision_segment_max_frames",
    }
)
_ROPE_FIXED = {"rope_type": ("axial", "default"), "type": ("axial", "default"), "partial_rotary_factor": (1,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower, and the projector behind it, of `model_type: minimax_m3_vl`.

    Attributes:
      patch_size, temporal_patch_size: pixels of a patch's side, frames in it; it has 3 channels.
      spatial_merge_size: side of the square of projected patches that becomes one token.
      projector_hidden_size: inner width of both projector MLPs.
      segment_max_frames: most temporal patches that attend to one another.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    projector_hidden_size: int
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    segment_max_frames: int = 4
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, *_SIZES, *_PATCHES, "projector_hidden_size", "segment_max_frames")
        check_positive(self, "rope_theta", "layer_norm_eps")
        if self.hidden_size % self.num_attention_heads or self.head_dim < 6:
            raise ConfigError(
                f"hidden_size {self.hidden_size} of {self.num_attention_heads} num_attention_heads: expected whole "
                "heads of at least 6, two channels for each axis of the rotary embedding"
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        """`vision_config` in the published spelling."""
        return {
            "hidden_act": "gelu",
            "hidden_size": self.hidden_size,
            _COMPRESSION: self.compression(),
            "intermediate_size": self.intermediate_size,
            "layer_norm_eps": self.layer_norm_eps,
            "model_type": "clip_vision_model",
            "num_attention_heads": self.num_attention_heads,
            "num_channels": 3,
            "num_hidden_layers": self.num_hidden_layers,
            "patch_size": self.patch_size,
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": self.rope_theta,
            "vision_segment_max_frames": self.segment_max_frames,
        }

    def compression(self) -> dict[str, Any]:
        """`img_token_compression_config`, which the published file has twice."""
        return {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": self.spatial_merge_size,
            "temporal_patch_size": self.temporal_patch_size,
        }


def read_vision(root: Section) -> VisionConfig | None:
    """`vision_config` and what else of the tower and projector stands around it; None for a text-only file.

    Absent: 2 for the temporal patch and the merged square, 4 frames, 10000 and 1e-5, as in transformers' class.
    """
    section = root.section("vision_config")
    nested = [_compression(each) for each in (root, section) if each is not None]
    if section is None:
        return None
    section.check_fixed(config_tables.M3_VISION_FIXED)
    section.check_unknown(_VISION_READ, config_tables.M3_VISION_FIXED, config_tables.M3_VISION_HARMLESS)
    rope = section.section("rope_parameters")
    if rope is not None:
        rope.check_fixed(_ROPE_FIXED)
        rope.check_unknown({"rope_theta"}, _ROPE_FIXED)
    places = [each for each in (section, *nested) if each is not None]
    thetas = [
        (each.name("rope_theta"), value)
        for each in (section, rope)
        if each is not None and (value := each.number("rope_theta")) is not None
    ]
    fields: dict[str, Any] = {name: section.integer(name) for name in _SIZES}
    check_missing(section, fields)
    projector = root.integer("projector_hidden_size")
    if projector is None:
        raise root.error("projector_hidden_size missing; there is no default")
    optional: dict[str, Any] = {
        **{name: agreed(root, [pair for each in places for pair in each.integers(name)]) for name in _PATCHES},
        "segment_max_frames": section.integer("vision_segment_max_frames"),
        "layer_norm_eps": section.number("layer_norm_eps"),
        "rope_theta": agreed(root, thetas),
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    try:
        return VisionConfig(**fields, projector_hidden_size=projector)
    except ConfigError as error:
        raise root.error(f"vision_config: {error}") from None


def _compression(config: Section) -> Section | None:
    """`img_token_compression_config`, checked."""
    section = config.section(_COMPRESSION)
    if section is not None:
        section.check_fixed(config_tables.M3_COMPRESSION_FIXED)
        section.check_unknown(_PATCHES, config_tables.M3_COMPRESSION_FIXED)
    return section
