"""Logits and greedy tokens against transformers, for random models that it saves itself.

Everything is in float32, so that what two right implementations differ by is the order of their sums.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from minimax_jax import LLM, SamplingParams
from tests.oracle import m2

pytestmark = pytest.mark.oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """What is not drawn at random, so that every way of placing, writing and spelling occurs."""

    data: int
    model: int
    expert_parallel: bool
    kv_heads: int
    weights: str  # "bf16", "float32", "fp8"
    spelling: str  # of config.json, see m2.respell
    rotary: str  # how the config is told: "rotary_dim", "partial_rotary_factor", "rope_parameters", "whole head"
    sharded: bool = False

    def __str__(self) -> str:
        placement = "expert" if self.expert_parallel else "tensor"
        return f"{self.data}x{self.model}-{placement}-{self.weights}-{self.spelling}-{self.rotary.replace(' ', '_')}"


CASES = [
    Case(1, 2, False, 4, "bf16", "transformers", "rotary_dim"),
    Case(1, 4, True, 1, "float32", "transformers", "partial_rotary_factor", sharded=True),
    Case(2, 2, False, 8, "fp8", "published", "rotary_dim"),
    Case(1, 8, False, 2, "fp8", "transformers", "rope_parameters", sharded=True),
    Case(1, 8, True, 4, "bf16", "mixed", "rotary_dim", sharded=True),
    Case(2, 1, True, 2, "bf16", "published", "whole head"),
    Case(1, 2, True, 1, "fp8", "mixed", "partial_rotary_factor"),
    Case(2, 4, False, 2, "float32", "transformers", "whole head"),
]
# MiniMax-M2's own numbers of heads and width, so that sixteen devices cut key/value heads and FP8 blocks as there.
WIDE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 128,
    "rope_theta": 5e6,
    "rotary_dim": 16,
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_config(case: Case, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    config = draw_config(rng, case)
    print(config)
    directory = write(seed, case.weights, config, tmp_path, case.spelling, "200KB" if case.sharded else "50GB")
    model = m2.dequantized_model(directory)
    prompts = [rng.integers(config["vocab_size"], size=n).tolist() for n in (1, int(rng.integers(18, 30)), 41)]
    expected = [m2.oracle_logits(model, ids) for ids in prompts]
    assert 1.5 < np.concatenate([logits for logits, _ in expected]).std() < 4

    for data, size, expert_parallel in ((1, 1, False), (case.data, case.model, case.expert_parallel)):
        llm = load(directory, data, size, expert_parallel)
        m2.compare([llm.logits(ids) for ids in prompts], *zip(*expected, strict=True))
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    checked = 0
    for ids, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
        assert len(output.outputs[0].token_ids) == 10
        checked += m2.check_greedy(model, ids, output.outputs[0].token_ids)
    assert checked >= 20  # of 30: the others stand behind a router tie


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of the WIDE model, and a prompt with its expectation."""
    weights, seed = request.param, 48
    print(f"seed {seed}")
    directory = write(seed, weights, WIDE, tmp_path_factory.mktemp(f"wide-{weights}"), "published", "10MB")
    model = m2.dequantized_model(directory)
    prompts = [np.random.default_rng(seed).integers(WIDE["vocab_size"], size=n).tolist() for n in (1, 60)]
    return directory, (prompts, *zip(*[m2.oracle_logits(model, ids) for ids in prompts], strict=True))


@pytest.mark.parametrize(
    ("size", "expert_parallel"), [(1, False), (16, False), (16, True)], ids=["1", "16-tensor", "16-expert"]
)
def test_48_heads_16_experts_width_1536(wide: tuple[Path, Any], size: int, expert_parallel: bool) -> None:
    directory, (prompts, expected, margins) = wide
    llm = load(directory, 1, size, expert_parallel)
    m2.compare([llm.logits(ids) for ids in prompts], expected, margins)


def draw_config(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Sizes at random among those that the case's mesh can cut."""
    m = case.model
    group = int(rng.choice([g for g in (1, 2, 3, 4, 6, 8, 12) if case.kv_heads * g % m == 0]))
    head_dim = int(rng.choice([8, 16, 24, 32, 40]))
    experts = int(rng.choice([n for n in (4, 6, 8, 16) if n % m == 0 or not case.expert_parallel]))
    unit = 16 * m
    least = -(-130 // unit) if case.weights == "fp8" else 1  # FP8: more than one block of 128
    config = {
        "num_key_value_heads": case.kv_heads,
        "num_attention_heads": case.kv_heads * group,
        "head_dim": head_dim,
        "num_local_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, min(experts, 6))),
        "intermediate_size": unit * int(rng.integers(least, least + 4)),
        "hidden_size": 8 * int(rng.integers(6, 25)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "vocab_size": m * int(rng.integers(100 // m, 400 // m)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-3])),
        "max_position_embeddings": int(rng.choice([64, 100, 4096])),
    }
    theta = float(rng.choice([1e4, 1e6, 5e6]))
    parts = [r for r in range(2, head_dim, 2) if int(head_dim * (r / head_dim)) == r]  # as transformers rounds
    rotary_dim = int(rng.choice(parts))
    if case.rotary == "rotary_dim":
        config |= {"rope_theta": theta, "rotary_dim": rotary_dim}
    elif case.rotary == "partial_rotary_factor":
        config |= {"rope_theta": theta, "partial_rotary_factor": rotary_dim / head_dim}
    elif case.rotary == "rope_parameters":
        factor = rotary_dim / head_dim
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
    else:
        config["rope_theta"] = theta
    return config


def write(seed: int, weights: str, config: dict[str, Any], folder: Path, spelling: str, max_shard_size: str) -> Path:
    """A checkpoint of a random model, written by transformers; in FP8 rewritten in the vendor's layout."""
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    model = m2.random_model(seed, dtype=dtype, **config)
    plain = m2.save(model, folder / "plain", dtype=dtype, spelling=spelling, max_shard_size=max_shard_size)
    return m2.quantize_fp8(plain, folder / "fp8") if weights == "fp8" else plain


def load(directory: Path, data: int, size: int, expert_parallel: bool) -> LLM:
    """With chunks shorter than the prompts, so that attention also reads what earlier chunks left in the cache."""
    return LLM(
        directory,
        dtype="float32",
        tensor_parallel_size=size,
        data_parallel_size=data,
        expert_parallel=expert_parallel,
        max_model_len=64,
        max_num_seqs=4,
        prefill_chunk_size=32,
        steps_per_call=4,
    )
