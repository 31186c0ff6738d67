"""MiniMax-M3's files and options gone wrong: one line that names what is wrong, status 2, and no weight read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimax_jax.cli import main
from tests.checkpoint.altered import Edit, alter
from tests.checkpoint.tiny_checkpoint import Tensors

LAYERS = "language_model.model.layers"
VISION = "vision_tower.vision_model"
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
IN_FIVE = [0, 1, 1, 1, 1]


def text(**values: Any) -> dict[str, Edit]:
    """Keys of text_config, `...` for one to leave out."""
    return {"edit": lambda config: _put(config["text_config"], values)}


def sparse(**values: Any) -> dict[str, Edit]:
    """The same of its sparse_attention_config."""
    return {"edit": lambda config: _put(config["text_config"]["sparse_attention_config"], values)}


def _put(section: dict[str, Any], values: dict[str, Any]) -> None:
    section |= values
    for key in [key for key, value in section.items() if value is ...]:
        del section[key]


def drop(*parts: str) -> dict[str, Any]:
    return {"drop": parts}


def add(name: str, like: str, rows: int | None = None) -> dict[str, Callable[[Tensors], Tensors]]:
    """A tensor under another name, or the first rows of it."""
    return {"add": lambda tensors: {name: tensors[like][:rows]}}


def index_of(layer: int) -> str:
    return f"{LAYERS}.{layer}.self_attn.index_"


def move_indexer(tensors: Tensors) -> Tensors:
    """Layer 1's once more in layer 0, which has none by the config."""
    return {name.replace(".1.", ".0."): value for name, value in tensors.items() if name.startswith(index_of(1))}


BAD: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "blocks that pages do not hold": (
        sparse(sparse_block_size=24),
        [],
        ["page size 128 is not a multiple of", "index_block_size 24", "take a multiple of 24"],
    ),
    "blocks larger than a page": (sparse(sparse_block_size=256), [], ["page size 128", "index_block_size 256"]),
    "index heads": (
        sparse(sparse_num_index_heads=4),
        [],
        [
            "config.json: index_n_heads 4 is not num_key_value_heads 2",
            "one index head for each key/value head is supported, expected 2",
        ],
    ),
    "index heads of the tensors": (
        add(f"{index_of(1)}q_proj.weight", f"{index_of(1)}q_proj.weight", 32),
        [],
        [f"'{index_of(1)}q_proj.weight'", "[32, 128], expected [64, 128]", "index_n_heads 2 x index_head_dim 32; one"],
    ),
    "index head size": (
        sparse(sparse_index_dim=64),
        [],
        [f"'{index_of(1)}q_proj.weight'", "[64, 128], expected [128, 128]", "index_n_heads 2 x index_head_dim 64"],
    ),
    "a tensor of an indexer": (
        drop(f"{index_of(2)}k_norm"),
        [],
        ["lacks 1 of 137 tensors", f"{index_of(2)}k_norm.weight", "take all files of one checkpoint"],
    ),
    "all of an indexer": (
        drop(index_of(2)),
        [],
        ["lacks 4 of 137", "config.json says minimax_m3_sparse for layer 2, which has no indexer's tensors"],
    ),
    "an indexer in a dense layer": (
        {"add": move_indexer},
        [],
        [
            "4 tensors that no parameter uses",
            f"{index_of(0)}q_proj.weight",
            "config.json says full_attention for layer 0, which has an indexer's tensors",
        ],
    ),
    "context": (
        {},
        ["--max-model-len", "4097"],
        ["max_model_len 4097 is over the model's max_position_embeddings 4096; lower it"],
    ),
    "context with YaRN": (
        text(rope_scaling=YARN),
        ["--max-model-len", "8193"],
        ["max_model_len 8193 is over the model's max_position_embeddings 8192; lower it"],
    ),
    "positions past YaRN's": (
        text(rope_scaling=YARN, max_position_embeddings=10000),
        [],
        ["text_config.max_position_embeddings 10000", "YaRN's factor 2.0 times", "4096, which is 8192; lower it"],
    ),
    "kinds of attention": (
        sparse(sparse_attention_freq=IN_FIVE),
        [],
        ["sparse_attention_config.sparse_attention_freq has 5 entries, but num_hidden_layers is 4; give"],
    ),
    "kinds of MLPs": (
        text(moe_layer_freq=[0, 1, 1]),
        [],
        ["text_config.moe_layer_freq has 3 entries, but num_hidden_layers is 4"],
    ),
    "a norm of an indexer": (
        add(f"{index_of(3)}k_norm.weight", f"{index_of(3)}k_norm.weight", 16),
        [],
        [f"'{index_of(3)}k_norm.weight'", "[16], expected [32]", "index_head_dim 32; one of the two"],
    ),
    "limit zero": (text(swiglu_limit=0), [], ["text_config.swiglu_limit 0 is not a finite number (above 0)"]),
    "limit negative": (text(swiglu_limit=-7.0), [], ["text_config.swiglu_limit -7.0", "above 0"]),
    "limit missing": (text(swiglu_limit=...), [], ["text_config.swiglu_limit missing; there is no default"]),
    "a tensor of a shared expert": (
        drop(f"{LAYERS}.1.block_sparse_moe.shared_experts.gate_proj"),
        [],
        ["lacks 1 of 137", f"{LAYERS}.1.block_sparse_moe.shared_experts.gate_proj.weight", "take all files"],
    ),
    "all shared experts": (drop("shared_experts"), [], ["lacks 9 of 137", "shared_experts.up_proj.weight"]),
    "vision": (
        add(f"{VISION}.encoder.layers.0.mlp.fc3.weight", f"{VISION}.encoder.layers.0.mlp.fc1.weight"),
        [],
        ["has 1 tensors that", f"{VISION}.encoder.layers.0.mlp.fc3.weight", "expected the published names", "remove"],
    ),
    "a scale of vision without a name": (
        add("patch_merge_mlp.linear_1.gain", "patch_merge_mlp.linear_1.bias"),
        [],
        ["patch_merge_mlp.linear_1.gain, the first in model-0"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_name(
    shared: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, options, fragments = BAD[case]

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("minimax_jax.llm.load_parameters", load)
    directory = str(alter(shared / "data" / "checkpoints" / "m3-bf16", tmp_path, **changes))
    options = options or ["--max-model-len", "128"]
    for command in (["generate", "--prompt-ids", "1,2,3", "--model", directory], ["inspect", directory]):
        assert main([*command, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("minimax-jax: error: ")
        assert error.count("\n") == 1
        assert all(fragment in error for fragment in fragments), error


def test_a_copy_with_nothing_wrong(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In either spelling, with a scale beside a vision matrix, which text leaves out with it."""
    for name in ("m3-bf16", "m3-nvfp4-quark-inmem"):
        scale = {"model.multi_modal_projector.linear_1.weight_scale": np.ones((), np.float32)}
        directory = alter(shared / "data" / "checkpoints" / name, tmp_path / name, add=lambda _, scale=scale: scale)
        assert main(["inspect", str(directory)]) == 0
        assert "44 of the vision tower" in capsys.readouterr().out
