"""The compiled steps run the collectives that the design names, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import pytest

from minimax_jax.config import MiniMaxM2Config, MiniMaxM3Config, ModelConfig, Parallelism
from minimax_jax.generation.programs import abstract_programs
from minimax_jax.hlo import count_collectives
from minimax_jax.sharding import make_mesh

LAYERS = 3
CONFIG = MiniMaxM2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    rotary_dim=16,
    rope_theta=5e6,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    num_local_experts=8,
    num_experts_per_tok=2,
)
M3 = MiniMaxM3Config(
    **{field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    | {
        "num_hidden_layers": 2,
        "mlp_layer_types": ("dense", "sparse"),
        "layer_types": ("full_attention", "minimax_m3_sparse"),
    },
    dense_intermediate_size=512,
    shared_intermediate_size=256,
    index_n_heads=2,
    index_head_dim=32,
    index_topk_blocks=2,
    index_block_size=16,
    routed_scaling_factor=2.0,
)


@pytest.mark.parametrize(
    ("parallelism", "weight_format"),
    [
        (Parallelism(model=8), "fp8"),
        (Parallelism(data=2, model=4, experts="expert"), "bfloat16"),
        (Parallelism(data=2, model=8), "float32"),
    ],
    ids=["1x8 tensor fp8", "2x4 expert bf16", "2x8 tensor f32"],
)
def test_three_all_reduces_a_layer(parallelism: Parallelism, weight_format: str) -> None:
    """A layer: qk-norm sums, o_proj, experts. A step: the embedding's all-reduce and the logits' all-gather."""
    check(CONFIG, parallelism, weight_format, 3 * LAYERS)


def test_two_all_reduces_a_layer_of_m3() -> None:
    """Dense or sparse: routed and shared experts meet in one, the norms and the indexer need none."""
    check(M3, Parallelism(data=2, model=4), "bfloat16", 2 * 2, programs=("decode",))


def check(
    config: ModelConfig,
    parallelism: Parallelism,
    weight_format: str,
    in_layers: int,
    programs: Sequence[str] = ("prefill", "decode"),
) -> None:
    found = abstract_programs(
        config,
        parallelism,
        make_mesh(parallelism),
        weight_format=weight_format,
        dtype=jnp.dtype(jnp.float32),
        max_num_seqs=4,
        max_model_len=256,
    )
    assert set(found) == {"prefill", "decode"}
    for jitted, args in (found[name] for name in programs):
        counts = count_collectives(jitted.lower(*args).compile().as_text())
        assert counts == {"all-reduce": 1 + in_layers, "all-gather": 1}
