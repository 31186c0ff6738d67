"""M3's rotary embedding and YaRN: where it may stand, what it means, what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM3Config, YarnScaling, load_config
from minimax_jax.errors import ConfigError

Parse = Callable[..., MiniMaxM3Config]
Refuse = Callable[..., str]
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 524288}
PLACES = ("rope_scaling", "rope_parameters")


# ---- the rotary size (known failure 33)


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [
        ({}, 64),
        ({"partial_rotary_factor": ...}, 64),
        ({"rotary_dim": ...}, 64),
        ({"rotary_dim": ..., "partial_rotary_factor": 1}, 128),
        ({"rotary_dim": 128, "partial_rotary_factor": ...}, 128),
        ({"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}, 64),
        ({"rotary_dim": ..., "partial_rotary_factor": ..., "rope_parameters": {"partial_rotary_factor": 0.5}}, 64),
        ({"rotary_dim": 128, "partial_rotary_factor": ..., "rope_parameters": {"rope_theta": 5e6}}, 128),
        ({"partial_rotary_factor": ..., "rope_parameters": {}}, 64),
    ],
)
def test_rotary_size_in_any_spelling(parse_m3: Parse, changes: dict[str, Any], rotary_dim: int) -> None:
    config = parse_m3(**changes)
    assert (config.rotary_dim, config.rope_theta, config.yarn) == (rotary_dim, 5e6, None)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"rotary_dim": 32}, ["text_config.rotary_dim 32", "text_config.partial_rotary_factor 0.5", "is 64"]),
        ({"rotary_dim": 63, "partial_rotary_factor": ...}, ["text_config.rotary_dim 63", "even"]),
        ({"rotary_dim": 130, "partial_rotary_factor": ...}, ["text_config.rotary_dim 130", "head_dim 128"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["text_config.rope_scaling.type 'linear'"]),
        ({"rope_parameters": {"rope_type": "llama3"}}, ["text_config.rope_parameters.rope_type 'llama3'"]),
        ({"rope_parameters": {"factor": 2.0}}, ["text_config.rope_parameters.factor 2.0"]),
        ({"rope_scaling": {"type": "default", "beta_fast": 32}}, ["unknown key text_config.rope_scaling.beta_fast"]),
        ({"rope_parameters": {"full_attention": {}}}, ["unknown key text_config.rope_parameters.full_attention"]),
        (
            {"partial_rotary_factor": ..., "rope_parameters": {"rope_theta": 5e6}},
            ["text_config.rotary_dim 64", "without partial_rotary_factor", "all 128 channels", "add", "0.5"],
        ),
    ],
)
def test_rope_refused(refuse_m3: Refuse, changes: dict[str, Any], fragments: list[str]) -> None:
    refuse_m3(*fragments, **changes)


# ---- YaRN


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stated", [524288, 1048576, 4096])
def test_yarn(m3: MiniMaxM3Config, parse_m3: Parse, place: str, stated: int) -> None:
    """The file may state the positions before or after stretching; a context of 1M is what YaRN is asked for."""
    config = parse_m3(**{place: YARN, "max_position_embeddings": stated})
    yarn = YarnScaling(
        factor=2.0,
        original_max_position_embeddings=524288,
        attention_factor=0.1 * math.log(2) + 1,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
    )
    assert config == dataclasses.replace(m3, yarn=yarn, max_position_embeddings=1048576)
    assert MiniMaxM3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "yarn", "factor": 4}, {"factor": 4.0, "original_max_position_embeddings": 1000}),
        ({"type": "yarn", "rope_type": "yarn", "factor": 1}, {"factor": 1.0, "attention_factor": 1.0}),
        ({"type": "yarn", "factor": 1.5}, {"factor": 1.5}),
        ({"type": "yarn", "factor": 2.0, "attention_factor": 1}, {"attention_factor": 1.0}),
        ({"type": "yarn", "factor": 2.0, "attention_factor": 0.5, "mscale": 3}, {"attention_factor": 0.5}),
        (
            {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0},
            {"attention_factor": (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)},
        ),
        ({"type": "yarn", "factor": 2.0, "mscale": 0, "mscale_all_dim": 0}, {}),
        (
            {"type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 16, "truncate": False},
            {"beta_fast": 16.0, "beta_slow": 16.0, "truncate": False},
        ),
        ({"type": "yarn", "factor": 2.0, "attn_factor": 1.0, "extrapolation_factor": 1}, {}),
    ],
)
def test_yarn_parameters(parse_m3: Parse, scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse_m3(rope_scaling=scaling, max_position_embeddings=1000)
    assert config.yarn is not None
    for name, value in expected.items():
        assert getattr(config.yarn, name) == pytest.approx(value, rel=1e-12)
    assert config.max_position_embeddings == config.yarn.max_positions == int(1000 * scaling["factor"])


def test_yarn_over_both_places(parse_m3: Parse, refuse_m3: Refuse) -> None:
    alone = parse_m3(rope_scaling=YARN)
    assert parse_m3(rope_scaling=YARN, rope_parameters=YARN) == alone
    assert parse_m3(rope_scaling=YARN, rope_parameters={"rope_theta": 5e6}) == alone
    for key, value in (("factor", 1.5), ("original_max_position_embeddings", 262144), ("rope_type", "default")):
        refuse_m3(
            f"text_config.rope_parameters.{key}",
            f"text_config.rope_scaling.{key}",
            "contradict",
            rope_scaling=YARN,
            rope_parameters={**YARN, key: value},
        )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"factor": ...}, ["{}.factor missing", "no default"]),
        ({"factor": 0.5}, ["{}: YaRN's factor 0.5 is below 1"]),
        ({"factor": 0}, ["{}.factor 0", "above 0"]),
        ({"factor": math.nan}, ["{}.factor nan"]),
        ({"factor": "2"}, ["{}.factor '2'"]),
        ({"factor": True}, ["{}.factor True"]),
        ({"original_max_position_embeddings": 0}, ["{}.original_max_position_embeddings 0"]),
        ({"original_max_position_embeddings": 4096.0}, ["{}.original_max_position_embeddings 4096.0"]),
        (
            {"original_max_position_embeddings": 262144},
            ["text_config.max_position_embeddings 1048576", "factor 2.0", "262144", "which is 524288"],
        ),
        ({"beta_fast": 1, "beta_slow": 32}, ["{}: YaRN's beta_fast 1.0 is less than beta_slow 32.0"]),
        ({"beta_slow": -1}, ["{}.beta_slow -1"]),
        ({"attention_factor": 0}, ["{}.attention_factor 0"]),
        ({"mscale": 1.0}, ["{}.mscale 1.0", "{}.mscale_all_dim None", "both"]),
        ({"mscale_all_dim": 1.0}, ["{}.mscale_all_dim 1.0", "both"]),
        ({"truncate": 1}, ["{}.truncate 1"]),
        ({"attn_factor": 2.0}, ["{}.attn_factor 2.0"]),
        ({"trick": 2.0}, ["unknown key {}.trick"]),
        ({"type": "linear"}, ["{}.type 'linear'"]),
        ({"type": "default"}, ["{}.rope_type yarn", "{}.type default", "contradict"]),
        ({"rope_type": ["yarn"]}, ["{}.rope_type ['yarn']"]),
        ({"rope_type": "default"}, ["{}.factor 2.0 is not supported"]),
        ({"rope_type": ...}, ["{}.factor 2.0 is not supported"]),
    ],
)
def test_yarn_refused(refuse_m3: Refuse, place: str, changes: dict[str, Any], fragments: list[str]) -> None:
    scaling = {key: value for key, value in {**YARN, **changes}.items() if value is not ...}
    refuse_m3(*(fragment.format(f"text_config.{place}") for fragment in fragments), **{place: scaling})


def test_yarn_needs_a_base_above_one(refuse_m3: Refuse) -> None:
    refuse_m3("rope_theta 1.0", "above 1", rope_scaling=YARN, rope_theta=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 0.5},
        {"factor": math.inf},
        {"attention_factor": 0.0},
        {"original_max_position_embeddings": 0},
        {"beta_fast": 0.5},
        {"truncate": 1},
    ],
)
def test_a_scaling_made_in_code_is_checked_too(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 1.0}
    with pytest.raises(ConfigError, match=f"YaRN's {next(iter(changes))}"):
        YarnScaling(**{**values, **changes})


# ---- at the wrong level (known failure 52)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((place, scaling) for place in PLACES for scaling in (YARN, {"type": "default"}, "yarn")),
        ("rope_theta", 1e4),
        ("rotary_dim", 32),
        ("max_position_embeddings", 524288),
        ("head_dim", 64),
        ("hidden_size", 4096),
        ("layer_types", ["full_attention"] * 60),
        ("sparse_attention_config", {"sparse_topk_blocks": 8}),
        ("swiglu_beta", 0.5),
    ],
)
def test_text_keys_at_the_top_level_are_refused(refuse_m3: Refuse, key: str, value: Any) -> None:
    """An override outside `text_config` would silently do nothing in other readers."""
    refuse_m3(f"{key} {str(value)[:20]}" if not isinstance(value, str) else key, "text_config", **{f".{key}": value})


def test_the_way_out_of_a_scaling_at_the_top_level(refuse_m3: Refuse, parse_m3: Parse, tmp_path: Path) -> None:
    message = refuse_m3("rope_scaling {'rope_type': 'yarn'", "move it into text_config", **{".rope_scaling": YARN})
    assert "no effect" in message
    moved = parse_m3(rope_scaling=YARN)
    assert moved.yarn is not None
    # In both places it is the same table.
    assert parse_m3(**{".rope_scaling": YARN, "rope_scaling": YARN}) == moved
    refuse_m3(
        "contradict", "keep the one in text_config", **{".rope_scaling": {**YARN, "factor": 4}, "rope_scaling": YARN}
    )
    # Through a file, as a user would meet it.
    data = {**moved.to_dict(), "rope_parameters": YARN}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"rope_parameters .* move it into text_config"):
        load_config(tmp_path)


@pytest.mark.parametrize("value", [None, {}])
def test_nothing_at_the_top_level_is_no_override(m3: MiniMaxM3Config, parse_m3: Parse, value: Any) -> None:
    assert parse_m3(**{".rope_scaling": value, ".rope_parameters": value}) == m3


def test_equal_text_keys_at_the_top_level(m3: MiniMaxM3Config, parse_m3: Parse) -> None:
    """Some exporters repeat sizes outside; nothing is lost where they agree."""
    assert parse_m3(**{".hidden_size": 6144, ".vocab_size": 200064, ".max_position_embeddings": 1048576}) == m3
