"""Meshes: which are accepted, and what a refusal says."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM2Config, Parallelism, QuantizationConfig
from minimax_jax.errors import ConfigError


@pytest.mark.parametrize("experts", ["tensor", "expert"])
@pytest.mark.parametrize("model", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("data", [1, 2, 3])
def test_published_model_fits_every_mesh(m2: MiniMaxM2Config, experts: Any, model: int, data: int) -> None:
    """Among them 1536 / 8 = 192 and 1536 / 16 = 96, which cut FP8 blocks of 128 and are exact all the same."""
    m2.check_parallelism(Parallelism(data=data, model=model, experts=experts))


def test_a_block_size_is_never_a_reason(m2: MiniMaxM2Config) -> None:
    for block in ((128, 128), (1, 128), (64, 96), (4096, 4096)):
        config = dataclasses.replace(m2, quantization=QuantizationConfig(quant_method="fp8", weight_block_size=block))
        for model in (1, 2, 4, 8, 16):
            config.check_parallelism(Parallelism(model=model))


@pytest.mark.parametrize(
    ("changes", "parallelism", "fragments"),
    [
        ({}, {"model": 3}, ["tensor_parallel_size 3", "num_key_value_heads 8", "may be 1, 2, 4, 8, 16 for"]),
        ({}, {"model": 5}, ["num_attention_heads 48 is not a multiple of 5", "vocab_size 200064", "intermediate_size"]),
        ({}, {"model": 32}, ["num_attention_heads 48 is not a multiple of 32"]),
        ({}, {"model": 6}, ["num_key_value_heads 8 is neither a multiple nor a divisor of 6"]),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            {"model": 8},
            ["num_attention_heads 12 is not a multiple of 8", "may be 1, 2, 4 for"],
        ),
        (
            {"num_local_experts": 12},
            {"model": 8, "experts": "expert"},
            [
                "num_local_experts 12 is not a multiple of 8",
                "may be 1, 2, 4 for",
                "8 works with expert_parallel=False",
            ],
        ),
        (
            {"intermediate_size": 96},
            {"model": 4, "experts": "tensor"},
            [
                "intermediate_size 96",
                "64 (16 for each of 4)",
                "may be 1, 2 for",
                "4 works with expert_parallel=True",
            ],
        ),
        ({"vocab_size": 514}, {"model": 4}, ["vocab_size 514 is not a multiple of 4", "may be 1, 2 for"]),
        ({}, {"model": 0}, ["tensor_parallel_size 0"]),
        ({}, {"model": -2}, ["tensor_parallel_size -2"]),
        ({}, {"model": True}, ["tensor_parallel_size True"]),
        ({}, {"model": 2.0}, ["tensor_parallel_size 2.0"]),
        ({}, {"data": 0}, ["data_parallel_size 0"]),
        ({}, {"data": "2"}, ["data_parallel_size '2'"]),
        ({}, {"experts": "rows"}, ["'rows'", "'tensor' or 'expert'"]),
    ],
)
def test_refused_meshes(
    m2: MiniMaxM2Config, changes: dict[str, Any], parallelism: dict[str, Any], fragments: list[str]
) -> None:
    config = dataclasses.replace(m2, **changes)
    with pytest.raises(ConfigError) as caught:
        config.check_parallelism(Parallelism(**parallelism))
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"intermediate_size": 40}, "expert"),
        ({"intermediate_size": 40}, "tensor"),
        ({"num_local_experts": 13}, "expert"),
        ({"vocab_size": 511}, "tensor"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "tensor"),
    ],
)
def test_one_device_takes_any_model(m2: MiniMaxM2Config, changes: dict[str, Any], experts: Any) -> None:
    dataclasses.replace(m2, **changes).check_parallelism(Parallelism(experts=experts))


def test_an_accepted_mesh_gives_every_device_whole_heads(m2: MiniMaxM2Config, seed: int) -> None:
    """Whatever is accepted: a device's query heads all read key/value heads that the device holds."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(2000):
        kv_heads, group = rng.randint(1, 12), rng.randint(1, 8)
        model = rng.choice([1, 2, 3, 4, 6, 8, 16])
        config = dataclasses.replace(
            m2, num_key_value_heads=kv_heads, num_attention_heads=kv_heads * group, vocab_size=48 * 512
        )
        p = Parallelism(model=model)
        try:
            config.check_parallelism(p)
        except ConfigError:
            continue
        accepted += 1
        heads, stored = config.num_attention_heads // model, config.num_kv_heads_on(p)
        assert stored % model == 0
        assert stored % kv_heads == 0
        repeat, local = stored // kv_heads, stored // model
        for device in range(model):
            held = {(device * local + i) // repeat for i in range(local)}
            needed = {(device * heads + i) // group for i in range(heads)}
            assert needed <= held
    assert accepted > 300


@pytest.mark.parametrize(("model", "stored"), [(1, 8), (4, 8), (8, 8), (16, 16)])
def test_kv_heads_are_repeated_where_devices_outnumber_them(m2: MiniMaxM2Config, model: int, stored: int) -> None:
    assert m2.num_kv_heads_on(Parallelism(model=model)) == stored
