"""The published configs and two ways to try a change of them: parse it, or see it refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM2Config, MiniMaxM3Config, ModelConfig, QuantizationConfig, VisionConfig
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import ModuleSet


@pytest.fixture
def published() -> dict[str, Any]:
    """The published file of M2.5, key for key."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
    return data


@pytest.fixture
def m2() -> MiniMaxM2Config:
    """What the published file means."""
    return MiniMaxM2Config(
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        rope_theta=5e6,
        max_position_embeddings=196608,
        rms_norm_eps=1e-6,
        num_local_experts=256,
        num_experts_per_tok=8,
        quantization=QuantizationConfig(
            quant_method="fp8", exclude=ModuleSet(("gate", "e_score_correction_bias", "lm_head"), components=True)
        ),
    )


@pytest.fixture
def changed(published: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The published keys with some replaced, added, or left out (given as `...`)."""

    def change(**changes: Any) -> dict[str, Any]:
        return {key: value for key, value in {**published, **changes}.items() if value is not ...}

    return change


@pytest.fixture
def parse(changed: Callable[..., dict[str, Any]]) -> Callable[..., MiniMaxM2Config]:
    """The config of the changed file."""
    return lambda **changes: MiniMaxM2Config.from_dict(changed(**changes))


@pytest.fixture
def refuse(parse: Callable[..., MiniMaxM2Config]) -> Callable[..., str]:
    """The one line with which the changed file is refused; it names the file once and holds each fragment."""
    return refusing(parse)


def refusing(parse: Callable[..., ModelConfig]) -> Callable[..., str]:
    """A function that checks a refusal of `parse` and returns its line."""

    def check(*fragments: str, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(**changes)
        message = str(caught.value)
        assert message.startswith("config.json: ")
        assert message.count("config.json: ") == 1
        assert "\n" not in message
        for fragment in fragments:
            assert fragment in message
        return message

    return check


# ---- M3


@pytest.fixture
def published_m3() -> dict[str, Any]:
    """The published file of M3, key for key."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("published_m3.json").read_text())
    return data


@pytest.fixture
def m3() -> MiniMaxM3Config:
    """What the published file means."""
    return MiniMaxM3Config(
        vocab_size=200064,
        hidden_size=6144,
        intermediate_size=3072,
        dense_intermediate_size=12288,
        shared_intermediate_size=3072,
        num_hidden_layers=60,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        rotary_dim=64,
        rope_theta=5e6,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-6,
        num_local_experts=128,
        num_experts_per_tok=4,
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 57,
        layer_types=("full_attention",) * 3 + ("minimax_m3_sparse",) * 57,
        index_n_heads=4,
        index_head_dim=128,
        index_topk_blocks=16,
        index_block_size=128,
        routed_scaling_factor=2.0,
        swiglu_alpha=1.702,
        swiglu_beta=1.0,
        swiglu_limit=7.0,
        vision=VisionConfig(
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=16,
            patch_size=14,
            projector_hidden_size=6144,
            temporal_patch_size=2,
            spatial_merge_size=2,
            segment_max_frames=4,
            rope_theta=1e4,
            layer_norm_eps=1e-5,
        ),
        image_token_id=200025,
        video_token_id=200026,
    )


@pytest.fixture
def changed_m3(published_m3: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """M3's published keys with some replaced, added, or left out (given as `...`).

    A key is a path: `vision_config.patch_size`; `.key` is of the top level, `sparse.key` of the text part's
    `sparse_attention_config`, and any other of the text part.
    """

    def change(**changes: Any) -> dict[str, Any]:
        data = copy.deepcopy(published_m3)
        for path, value in changes.items():
            path = path.replace("sparse.", "text_config.sparse_attention_config.")
            if not path.startswith((".", "text_config.", "vision_config.")):
                path = f"text_config.{path}"
            *above, key = path.lstrip(".").split(".")
            place = data
            for name in above:
                place = place.setdefault(name, {})
            place.pop(key, None)
            if value is not ...:
                place[key] = value
        return data

    return change


@pytest.fixture
def parse_m3(changed_m3: Callable[..., dict[str, Any]]) -> Callable[..., MiniMaxM3Config]:
    """The config of the changed file."""
    return lambda **changes: MiniMaxM3Config.from_dict(changed_m3(**changes))


@pytest.fixture
def refuse_m3(parse_m3: Callable[..., MiniMaxM3Config]) -> Callable[..., str]:
    """As `refuse`."""
    return refusing(parse_m3)
