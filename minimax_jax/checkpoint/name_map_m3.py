"""MiniMax-M3's name map, for both spellings of its checkpoints.

                published                                    transformers' own, as Quark writes from memory
prefix          language_model.model.                        model.language_model.
head            language_model.lm_head                       lm_head
experts         block_sparse_moe.experts.E.{w1, w2, w3}      mlp.experts.E.{gate_proj, down_proj, up_proj}
router          block_sparse_moe.gate, and beside it         mlp.gate, and inside it
                e_score_correction_bias                      e_score_correction_bias
shared expert   block_sparse_moe.shared_experts.             mlp.shared_experts.{gate_up_proj, down_proj}
                {gate_proj, up_proj, down_proj}
dense layers    mlp.{gate_proj, up_proj, down_proj}          mlp.{gate_up_proj, down_proj}
indexer         self_attn.index_{q, k}_{proj, norm}          self_attn.indexer.{q, k}_{proj, norm}

Parameters have the published names, with `indexer.` for `index_`. Of a fused gate_up_proj the first half of the rows is
gate. A text-only checkpoint has the prefix `model.`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator

from minimax_jax.checkpoint.rules import KV, LAYER, PREFIXES, D, E, Fields, Q, Rule, V, experts, linear, vector
from minimax_jax.config import MiniMaxM3Config

VISION = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")  # after an optional `model.`
INDEXER = re.compile(rf"{LAYER.pattern}self_attn\.index(?:er\.|_)")  # a tensor of the layer that it names

# The modules of both spellings; transformers merges patches inside the projector.
_VISION_MODULE = re.compile(
    r"vision_tower\.(vision_model\.)?(embeddings\.(patch_embedding|proj)|pre_layrnorm|(encoder\.)?layers\.\d+\."
    r"(layer_norm[12]|mlp\.fc[12]|self_attn\.(q|k|v|out)_proj))|(multi_modal_projector|patch_merge_mlp)\.linear_[12]"
    r"|multi_modal_projector\.merge_linear_[12]"
)

_SHARED: Fields = ("shared_intermediate_size",)
_DENSE: Fields = ("dense_intermediate_size",)
_HEAD: Fields = ("head_dim",)
_INDEX_Q: Fields = ("index_n_heads", "index_head_dim")
_INDEX: Fields = ("index_head_dim",)


@dataclasses.dataclass(frozen=True)
class _Spelling:
    """How one checkpoint names what the two spellings name differently."""

    prefix: str
    head: str
    moe: str = "block_sparse_moe"
    bias: str = "e_score_correction_bias"
    experts: tuple[str, str, str] = ("w1", "w2", "w3")
    index: str = "index_"
    router_is_linear: bool = True


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower or its projector."""
    return name.removeprefix("model.").startswith(VISION)


def is_vision_module(module: str) -> bool:
    """Whether the tower or its projector has a module of that name."""
    return _VISION_MODULE.fullmatch(module.removeprefix("model.")) is not None


def rules(config: MiniMaxM3Config, tensors: Collection[str]) -> Iterator[tuple[str, Rule]]:
    """(parameter path, its rule), a layer at a time, in the spelling that `tensors` have."""
    spelling = _find_spelling(tensors)
    prefix = spelling.prefix
    yield "embed_tokens.weight", Rule((f"{prefix}embed_tokens.weight",), (V, D))
    yield "norm.weight", vector(f"{prefix}norm.weight", D)
    yield "lm_head.weight", Rule((f"{spelling.head}.weight",), (V, D), packable=True)
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}", f"{prefix}layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{here}.{norm}.weight", vector(f"{there}.{norm}.weight", D)
        yield from _attention(f"{here}.self_attn", f"{there}.self_attn")
        if config.layer_types[i] == "minimax_m3_sparse":
            yield from _indexer(f"{here}.self_attn.indexer", f"{there}.self_attn.{spelling.index}")
        if config.mlp_layer_types[i] == "dense":
            yield from _mlp(f"{here}.mlp", f"{there}.mlp", _DENSE, tensors)
        else:
            yield from _moe(f"{here}.block_sparse_moe", f"{there}.{spelling.moe}", spelling, tensors)


def _attention(here: str, there: str) -> Iterator[tuple[str, Rule]]:
    yield f"{here}.q_proj.weight", linear(f"{there}.q_proj", Q, D)
    yield f"{here}.k_proj.weight", linear(f"{there}.k_proj", KV, D, kv_heads=True)
    yield f"{here}.v_proj.weight", linear(f"{there}.v_proj", KV, D, kv_heads=True)
    yield f"{here}.o_proj.weight", linear(f"{there}.o_proj", D, Q)
    for norm in ("q_norm", "k_norm"):
        yield f"{here}.{norm}.weight", vector(f"{there}.{norm}.weight", _HEAD)


def _indexer(here: str, there: str) -> Iterator[tuple[str, Rule]]:
    yield f"{here}.q_proj.weight", linear(f"{there}q_proj", _INDEX_Q, D, kv_heads=True)
    yield f"{here}.k_proj.weight", linear(f"{there}k_proj", _INDEX, D)
    for norm in ("q_norm", "k_norm"):
        yield f"{here}.{norm}.weight", vector(f"{there}{norm}.weight", _INDEX)


def _mlp(here: str, there: str, width: Fields, tensors: Collection[str]) -> Iterator[tuple[str, Rule]]:
    fused = f"{there}.gate_up_proj"
    if any(f"{fused}.weight{suffix}" in tensors for suffix in ("", "_packed")):
        yield f"{here}.gate_proj.weight", linear(fused, width, D, part=(0, 2))
        yield f"{here}.up_proj.weight", linear(fused, width, D, part=(1, 2))
    else:
        yield f"{here}.gate_proj.weight", linear(f"{there}.gate_proj", width, D)
        yield f"{here}.up_proj.weight", linear(f"{there}.up_proj", width, D)
    yield f"{here}.down_proj.weight", linear(f"{there}.down_proj", D, width)


def _moe(here: str, there: str, spelling: _Spelling, tensors: Collection[str]) -> Iterator[tuple[str, Rule]]:
    # In transformers' own modules the router is no linear layer, so no list of exclusions names it there.
    yield f"{here}.gate.weight", Rule((f"{there}.gate.weight",), (E, D), linear=spelling.router_is_linear)
    yield f"{here}.e_score_correction_bias", vector(f"{there}.{spelling.bias}", E)
    w13, w2 = experts(f"{there}.experts", spelling.experts)
    yield f"{here}.experts.w13", w13
    yield f"{here}.experts.w2", w2
    yield from _mlp(f"{here}.shared_experts", f"{there}.shared_experts", _SHARED, tensors)


def _find_spelling(tensors: Collection[str]) -> _Spelling:
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[0])
    head = "language_model.lm_head" if prefix == PREFIXES[0] else "lm_head"
    if any(".mlp.experts." in name for name in tensors):
        names = ("gate_proj", "down_proj", "up_proj")
        return _Spelling(prefix, head, "mlp", "gate.e_score_correction_bias", names, "indexer.", False)
    return _Spelling(prefix, head)
