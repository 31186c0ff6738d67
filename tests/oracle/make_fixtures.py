"""Makes the checkpoints in tests/fixtures again: `python -m tests.oracle.make_fixtures [DIR]`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import MiniMaxM2ForCausalLM

from minimax_jax.quantize import PackedFormat, quantize_checkpoint
from tests.checkpoints import FIXTURES
from tests.oracle import m2

SEED = 2025
EOS, BOS = 250, 249
LENGTHS = (1, 17, 100, 300)
WITH_GREEDY = (17, 100)
NEW_TOKENS, LEAST_DISTINCT = 16, 12  # a continuation that repeats itself would hide what a cache gets wrong
LEAST_ROUTER_MARGIN, LEAST_TOP2_GAP = 4e-4, 1e-2  # 1e-4 is what logits may differ by

# As few weights as can be spread over eight devices in units of 16, with key/value heads repeated from two to eight.
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 5e6,
}
PLAIN = SHAPE | {"head_dim": 16, "rotary_dim": 8, "intermediate_size": 128}
# Two rows of blocks in w1, w3 and q_proj, two columns in w2 and o_proj; four devices and more cut them.
PACKED = SHAPE | {"head_dim": 32, "rotary_dim": 16, "intermediate_size": 256}
# One block of MXFP4 to a row of w1 and w3, four to one of w2, which eight devices cut in halves.
FP4 = SHAPE | {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "rotary_dim": 4, "intermediate_size": 128}
NAMES = ("tiny-m2-bf16", "tiny-m2-fp8-block", "tiny-m2-mxfp4", "tiny-m2-nvfp4")


def make_fixtures(directory: Path) -> None:
    """Write all checkpoints and their expectations; the same bytes each time, but for float sums in expected.npz."""
    make_plain(directory / NAMES[0])
    make_packed(directory / NAMES[1])
    make_fp4(directory / NAMES[2], "mxfp4", SEED + 2)
    make_fp4(directory / NAMES[3], "nvfp4", SEED + 3)


def make_plain(directory: Path) -> None:
    """bfloat16 in shards as transformers writes them, config in its spelling."""
    m2.save(m2.random_model(SEED, **PLAIN, eos_token_id=EOS, bos_token_id=BOS), directory, max_shard_size="130KB")
    _finish(directory)


def make_packed(directory: Path) -> None:
    """FP8 blocks of 128 x 128, config and names of shards as published."""
    with tempfile.TemporaryDirectory() as folder:
        plain = m2.save(m2.random_model(SEED + 1, **PACKED), Path(folder), spelling="published", max_shard_size="220KB")
        m2.quantize_fp8(plain, directory)
        unquantized = m2.dequantized_model(plain)
    _finish(directory, unquantized)


def make_fp4(directory: Path, weight_format: PackedFormat, seed: int) -> None:
    """Experts in FP4 by `minimax-jax quantize`, whose bytes other tests hold against Quark's; read by other code."""
    with tempfile.TemporaryDirectory() as folder:
        plain = m2.save(m2.random_model(seed, **FP4), Path(folder), spelling="published", max_shard_size="140KB")
        quantize_checkpoint(plain, directory, weight_format)
        unquantized = m2.dequantized_model(plain)
    _finish(directory, unquantized)


def _finish(directory: Path, unquantized: MiniMaxM2ForCausalLM | None = None) -> None:
    """Add generation_config.json and expected.npz, and make the files readable for all."""
    defaults = {"bos_token_id": BOS, "do_sample": True, "eos_token_id": EOS, "temperature": 1.0}
    defaults |= {"top_k": 40, "top_p": 0.95, "transformers_version": "4.46.1"}
    (directory / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")
    model = m2.dequantized_model(directory)
    np.savez_compressed(directory / "expected.npz", **expectation(model, unquantized or model))
    for file in directory.iterdir():
        file.chmod(0o644)


def expectation(model: MiniMaxM2ForCausalLM, unquantized: MiniMaxM2ForCausalLM) -> dict[str, np.ndarray]:
    """What expected.npz holds: prompts that stay clear of router ties, last logits, greedy continuations."""
    rng = np.random.default_rng(SEED)
    arrays: dict[str, Any] = {}
    for n in LENGTHS:
        ids, tokens, logits, margin = _first_clear(lambda n=n: rng.integers(256, size=n).tolist(), model, n)
        last = slice(max(0, n - 4), n)
        arrays[f"prompt{n}_ids"] = np.array(ids, np.int32)
        arrays[f"prompt{n}_logits"] = logits[last]
        arrays[f"prompt{n}_logits_unquantized"] = m2.oracle_logits(unquantized, ids)[0][last]
        arrays[f"prompt{n}_router_margin"] = np.float64(margin[:n].min())
        if n in WITH_GREEDY:
            best = np.sort(logits[n - 1 : -1], axis=-1)
            arrays[f"greedy{n}_ids"] = np.array(tokens, np.int32)
            arrays[f"greedy{n}_top2_gap"] = np.float64((best[:, -1] - best[:, -2]).min())
            arrays[f"greedy{n}_router_margin"] = np.float64(margin.min())
    return arrays


def _first_clear(
    draw: Callable[[], list[int]], model: MiniMaxM2ForCausalLM, n: int
) -> tuple[list[int], list[int], np.ndarray, np.ndarray]:
    """The first prompt drawn whose choices of experts and tokens are all clear, with its continuation."""
    for _ in range(1000):
        ids = draw()
        if m2.oracle_logits(model, ids)[1].min() < LEAST_ROUTER_MARGIN:
            continue  # before sixteen more runs
        tokens = _greedy(model, ids) if n in WITH_GREEDY else []
        logits, margin = m2.oracle_logits(model, [*ids, *tokens])
        best = np.sort(logits[n - 1 :], axis=-1)
        gap = (best[:, -1] - best[:, -2]).min()
        clear = margin.min() >= LEAST_ROUTER_MARGIN and gap >= LEAST_TOP2_GAP
        varied = not tokens or (len(set(tokens)) >= LEAST_DISTINCT and EOS not in tokens)
        if clear and varied:
            return ids, tokens, logits, margin
    raise RuntimeError(f"no prompt of {n} tokens stays clear of ties; change SEED")


def _greedy(model: MiniMaxM2ForCausalLM, ids: Sequence[int]) -> list[int]:
    tokens: list[int] = []
    for _ in range(NEW_TOKENS):
        tokens.append(int(m2.oracle_logits(model, [*ids, *tokens])[0][-1].argmax()))
    return tokens


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES
    for name in NAMES:
        shutil.rmtree(target / name, ignore_errors=True)
    make_fixtures(target)
