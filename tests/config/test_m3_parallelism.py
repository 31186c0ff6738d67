"""Meshes of M3: which are accepted, and what a refusal says."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from minimax_jax.config import MiniMaxM3Config, Parallelism
from minimax_jax.errors import ConfigError


@pytest.mark.parametrize("experts", ["tensor", "expert"])
@pytest.mark.parametrize("model", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("data", [1, 3])
def test_published_model_fits_every_mesh(m3: MiniMaxM3Config, experts: Any, model: int, data: int) -> None:
    m3.check_parallelism(Parallelism(data=data, model=model, experts=experts))


ONLY_DENSE: dict[str, Any] = {"mlp_layer_types": ("dense",) * 60}
ONLY_SPARSE: dict[str, Any] = {"mlp_layer_types": ("sparse",) * 60}


@pytest.mark.parametrize(
    ("changes", "parallelism", "fragments"),
    [
        ({}, {"model": 3}, ["num_key_value_heads 4", "num_attention_heads 64", "may be 1, 2, 4, 8, 16 for"]),
        ({}, {"model": 6}, ["num_key_value_heads 4 is neither a multiple nor a divisor of 6"]),
        ({}, {"model": 128}, ["num_attention_heads 64 is not a multiple of 128"]),
        ({"vocab_size": 200066}, {"model": 4}, ["vocab_size 200066 is not a multiple of 4", "may be 1, 2 for"]),
        (
            {"intermediate_size": 96},
            {"model": 4},
            ["intermediate_size 96 (expert width)", "64 (16 for each of 4)", "4 works with expert_parallel=True"],
        ),
        (
            {"shared_intermediate_size": 96},
            {"model": 4},
            ["shared_intermediate_size 96 (shared expert's width)", "64 (16 for each of 4)", "may be 1, 2 for"],
        ),
        (
            {"shared_intermediate_size": 96},
            {"model": 4, "experts": "expert"},
            ["shared_intermediate_size 96 (shared expert's width)", "may be 1, 2 for"],
        ),
        (
            {"dense_intermediate_size": 48},
            {"model": 2, "experts": "expert"},
            ["dense_intermediate_size 48 (dense width)", "32 (16 for each of 2)", "may be 1 for"],
        ),
        (
            {"num_local_experts": 12},
            {"model": 8, "experts": "expert"},
            ["num_local_experts 12 is not a multiple of 8", "8 works with expert_parallel=False"],
        ),
        (
            {"intermediate_size": 16, "shared_intermediate_size": 16, "dense_intermediate_size": 16},
            {"model": 2},
            ["intermediate_size 16 (expert", "shared_intermediate_size 16", "dense_intermediate_size 16", "be 1 for"],
        ),
        ({}, {"model": 0}, ["tensor_parallel_size 0"]),
        ({}, {"data": "2"}, ["data_parallel_size '2'"]),
        ({}, {"experts": "rows"}, ["'rows'", "'tensor' or 'expert'"]),
    ],
)
def test_refused_meshes(
    m3: MiniMaxM3Config, changes: dict[str, Any], parallelism: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(m3, **changes).check_parallelism(Parallelism(**parallelism))
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    if "shared" in str(changes) or "dense" in str(changes):
        assert "works with" not in message  # these are cut by width in either placement


def test_widths_of_layers_that_are_not_there(m3: MiniMaxM3Config) -> None:
    for experts in ("tensor", "expert"):
        p = Parallelism(model=8, experts=experts)  # type: ignore[arg-type]
        dataclasses.replace(m3, dense_intermediate_size=40, **ONLY_SPARSE).check_parallelism(p)
        dataclasses.replace(m3, shared_intermediate_size=40, **ONLY_DENSE).check_parallelism(p)
        for changes in ({"dense_intermediate_size": 40} | ONLY_DENSE, {"shared_intermediate_size": 40} | ONLY_SPARSE):
            with pytest.raises(ConfigError, match=next(iter(changes))):
                dataclasses.replace(m3, **changes).check_parallelism(p)


def test_one_device_takes_any_width(m3: MiniMaxM3Config) -> None:
    widths = ("intermediate_size", "shared_intermediate_size", "dense_intermediate_size")
    for name, experts in itertools.product(widths, ("tensor", "expert")):
        dataclasses.replace(m3, **{name: 41}).check_parallelism(Parallelism(experts=experts))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "stored"), [(1, 4), (2, 4), (4, 4), (8, 8), (16, 16)])
def test_kv_heads_are_repeated_where_devices_outnumber_them(m3: MiniMaxM3Config, model: int, stored: int) -> None:
    assert m3.num_kv_heads_on(Parallelism(model=model)) == stored
