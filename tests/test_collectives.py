"""The compiled steps run the collectives that the design names, and no others."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from minimax_jax.config import MiniMaxM2Config, Parallelism
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
    programs = abstract_programs(
        CONFIG,
        parallelism,
        make_mesh(parallelism),
        weight_format=weight_format,
        dtype=jnp.dtype(jnp.float32),
        max_num_seqs=4,
        max_model_len=256,
    )
    assert set(programs) == {"prefill", "decode"}
    for jitted, args in programs.values():
        found = count_collectives(jitted.lower(*args).compile().as_text())
        assert found == {"all-reduce": 1 + 3 * LAYERS, "all-gather": 1}
