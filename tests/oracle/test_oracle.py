"""The oracle itself: that it says what is expected of it, and that it would see a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors import safe_open
from transformers import MiniMaxM2ForCausalLM

from tests.checkpoints import cases, read_expected
from tests.oracle import m2

pytestmark = pytest.mark.oracle

CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "rotary_dim": 8,
}


def headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of every tensor of a directory, each of which may occur once."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                assert name not in found
                part = handle.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def published_layout(fp8: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The fact sheet's table of tensors, with CONFIG's sizes."""
    V, D, F, Q, K = 96, 48, 160, 128, 32
    table = {"model.embed_tokens.weight": ("BF16", (V, D)), "lm_head.weight": ("BF16", (V, D))}
    table["model.norm.weight"] = ("BF16", (D,))
    for i in range(2):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            table[f"{layer}{norm}.weight"] = ("BF16", (D,))
        table[f"{layer}self_attn.q_norm.weight"] = ("BF16", (Q,))
        table[f"{layer}self_attn.k_norm.weight"] = ("BF16", (K,))
        table[f"{layer}block_sparse_moe.gate.weight"] = ("F32", (4, D))
        table[f"{layer}block_sparse_moe.e_score_correction_bias"] = ("F32", (4,))
        linear = {"q_proj": (Q, D), "k_proj": (K, D), "v_proj": (K, D), "o_proj": (D, Q)}
        matrices = {f"self_attn.{name}": shape for name, shape in linear.items()}
        for e in range(4):
            for name, shape in {"w1": (F, D), "w3": (F, D), "w2": (D, F)}.items():
                matrices[f"block_sparse_moe.experts.{e}.{name}"] = shape
        for name, shape in matrices.items():
            table[f"{layer}{name}.weight"] = ("F8_E4M3" if fp8 else "BF16", shape)
            if fp8:
                grid = (-(-shape[0] // 128), -(-shape[1] // 128))
                table[f"{layer}{name}.weight_scale_inv"] = ("F32", grid)
    return table


@pytest.mark.parametrize("max_shard_size", ["50GB", "60KB"])
def test_save_pretrained_writes_the_published_names(tmp_path: Path, max_shard_size: str) -> None:
    model = m2.random_model(1, **CONFIG)
    plain = m2.save(model, tmp_path / "plain", max_shard_size=max_shard_size)
    assert headers(plain) == published_layout(fp8=False)
    files = sorted(file.name for file in plain.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (max_shard_size == "50GB")
    assert (plain / "model.safetensors.index.json").exists() == (len(files) > 1)
    packed = m2.quantize_fp8(plain, tmp_path / "fp8")
    assert headers(packed) == published_layout(fp8=True)
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(published_layout(fp8=True))


@pytest.mark.parametrize("spelling", ["transformers", "published", "mixed"])
def test_reader_agrees_with_from_pretrained(tmp_path: Path, spelling: str) -> None:
    directory = m2.save(m2.random_model(2, **CONFIG), tmp_path, spelling=spelling)
    theirs = MiniMaxM2ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    ours = m2.dequantized_model(directory)
    assert theirs.model.rotary_emb.inv_freq.tolist() == ours.model.rotary_emb.inv_freq.tolist()
    assert len(ours.model.rotary_emb.inv_freq) == 4
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


def test_fp8_scales_multiply(tmp_path: Path) -> None:
    model = m2.random_model(3, **CONFIG)
    packed = m2.quantize_fp8(m2.save(model, tmp_path / "plain"), tmp_path / "fp8")
    back = m2.dequantized_model(packed).state_dict()
    for name, value in model.state_dict().items():
        if "_proj" not in name:  # experts' stacks are gate_up_proj and down_proj
            assert torch.equal(value, back[name]), name
            continue
        assert not torch.equal(value, back[name])
        # Half a step of three mantissa bits, or of the smallest exponent at 1/448 of the block's largest.
        error = (back[name] - value).abs() - value.abs() / 16
        assert error.max() <= value.abs().max() * 2.0**-10 / 448 * 1.01, name


@pytest.mark.parametrize("directory", cases(), ids=lambda d: d.name)
def test_says_what_the_checkpoints_expect(directory: Path) -> None:
    model = m2.dequantized_model(directory)
    for prompt in read_expected(directory):
        ids = [*prompt.ids, *(prompt.greedy or [])]
        logits, margin = m2.oracle_logits(model, ids)
        last = logits[len(prompt.ids) - len(prompt.logits) : len(prompt.ids)]
        np.testing.assert_allclose(last, prompt.logits, atol=2e-5, rtol=0)
        assert abs(margin[: len(prompt.ids)].min() - prompt.router_margin) < 1e-6
        if prompt.greedy:
            assert logits[len(prompt.ids) - 1 : -1].argmax(axis=-1).tolist() == prompt.greedy


# ---- that the comparison sees mistakes


def swap_gate_and_up(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.roll(value.shape[1] // 2, dims=1) if name.endswith("gate_up_proj") else value


def norms_left_at_one(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(value) if name.endswith(("q_norm.weight", "k_norm.weight")) else value


def no_routing_bias(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value) if name.endswith("e_score_correction_bias") else value


def router_in_bf16(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float() if name.endswith("gate.weight") else value


def key_heads_swapped(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.roll(16, dims=0) if name.endswith("k_norm.weight") else value


@pytest.mark.parametrize(
    "mistake",
    [swap_gate_and_up, norms_left_at_one, no_routing_bias, router_in_bf16, key_heads_swapped],
    ids=lambda f: f.__name__,
)
def test_a_mistake_shows(mistake: Any) -> None:
    model = m2.random_model(4, **CONFIG)
    ids = np.random.default_rng(4).integers(96, size=40).tolist()
    right, margin = m2.oracle_logits(model, ids)
    model.load_state_dict({name: mistake(name, value) for name, value in model.state_dict().items()})
    wrong, _ = m2.oracle_logits(model, ids)
    with pytest.raises(AssertionError, match="logits differ by"):
        m2.compare([wrong], [right], [margin], atol=1e-3)  # ten times what is allowed


def test_rule_of_comparison() -> None:
    zeros, margin = np.zeros((100, 8), np.float32), np.full(100, 0.1, np.float32)
    assert m2.compare([zeros], [zeros], [margin]) == m2.Comparison(0.0, 100, 0)

    tie = margin.copy()
    tie[96] = 5e-6
    wrong = zeros.copy()
    wrong[97] = 9.0  # behind a tie
    assert m2.compare([zeros, wrong], [zeros, zeros], [margin, tie]) == m2.Comparison(0.0, 196, 4)
    with pytest.raises(AssertionError, match="differ by 9"):
        m2.compare([wrong], [zeros], [margin])
    wrong[95, 3] = 2e-4
    with pytest.raises(AssertionError, match=r"differ by 0\.0002"):
        m2.compare([wrong], [zeros], [tie])
    tie[94] = 5e-6
    with pytest.raises(AssertionError, match="6 of 100 positions left out"):
        m2.compare([zeros], [zeros], [tie])
    with pytest.raises(AssertionError, match="differ by inf"):
        m2.compare([zeros * np.nan], [zeros], [margin])
    with pytest.raises(AssertionError, match=r"logits are \(99, 8\)"):
        m2.compare([zeros[1:]], [zeros], [margin])


def test_greedy_check_finds_a_wrong_token() -> None:
    model = m2.random_model(5, **CONFIG)
    prompt = np.random.default_rng(5).integers(96, size=12).tolist()
    tokens: list[int] = []
    for _ in range(5):
        tokens.append(int(m2.oracle_logits(model, [*prompt, *tokens])[0][-1].argmax()))
    assert m2.check_greedy(model, prompt, tokens) == 5
    tokens[3] = (tokens[3] + 1) % 96
    with pytest.raises(AssertionError, match="token 3 is"):
        m2.check_greedy(model, prompt, tokens)
