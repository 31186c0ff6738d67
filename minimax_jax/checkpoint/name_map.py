"""The one table from checkpoint tensors to parameters, for MiniMax-M2.

embed_tokens, norm, lm_head         one tensor each
q_proj, o_proj, norms, gate, bias   one tensor each, per layer
k_proj, v_proj, k_norm              one tensor, each head repeated where there are more devices than heads
experts.w13                         [E, 2, F, D] from w1 (gate) and w3 (up) of every expert
experts.w2                          [E, D, F] from w2 of every expert
self_attn.k_scale, v_scale          [] for an FP8 key/value cache, where the checkpoint has them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from minimax_jax.config import MiniMaxM2Config

IGNORED = "mtp"  # path component of multi-token-prediction modules, which generation does not use
# Scales of a quantised query or probability; attention computes both in the compute dtype.
IGNORED_SCALES = ("q_proj.output_scale", "q_proj.q_scale", "self_attn.q_scale", "prob_output_scale")

# Parameter -> the names that a key/value scale has inside `self_attn`: ModelOpt's, Quark's, compressed-tensors', and an
# older one that stands for both.
KV_SCALES: dict[str, tuple[str, ...]] = {
    "k_scale": ("k_proj.k_scale", "k_proj.output_scale", "k_scale", "kv_scale"),
    "v_scale": ("v_proj.v_scale", "v_proj.output_scale", "v_scale", "kv_scale"),
}

_V, _D, _E, _F = ("vocab_size",), ("hidden_size",), ("num_local_experts",), ("intermediate_size",)
_Q = ("num_attention_heads", "head_dim")
_KV = ("num_key_value_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one parameter is made.

    Attributes:
      sources: checkpoint names; those with {e} are stacked over experts, and several of them within each expert.
      dims: the config fields whose product is the size of each dimension of a source.
      linear: a linear layer, which a quantised checkpoint holds packed unless its config excludes it.
      packable: a packed source stays packed in memory.
      kv_heads: the first dimension goes by key/value heads.
      factor: one positive value, of whatever rank.
    """

    sources: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    linear: bool = False
    packable: bool = False
    kv_heads: bool = False
    factor: bool = False

    @property
    def per_expert(self) -> bool:
        """Whether every expert has tensors of its own."""
        return "{e}" in self.sources[0]


def _linear(name: str, rows: tuple[str, ...], cols: tuple[str, ...], kv_heads: bool = False) -> Rule:
    return Rule((f"model.layers.{{i}}.{name}.weight",), (rows, cols), linear=True, packable=True, kv_heads=kv_heads)


def _experts(names: Sequence[str], rows: tuple[str, ...], cols: tuple[str, ...]) -> Rule:
    prefix = "model.layers.{i}.block_sparse_moe.experts.{e}"
    return Rule(tuple(f"{prefix}.{name}.weight" for name in names), (rows, cols), linear=True, packable=True)


MINIMAX_M2: dict[str, Rule] = {
    "embed_tokens.weight": Rule(("model.embed_tokens.weight",), (_V, _D)),
    "norm.weight": Rule(("model.norm.weight",), (_D,)),
    "lm_head.weight": Rule(("lm_head.weight",), (_V, _D), packable=True),
    "layers.{i}.input_layernorm.weight": Rule(("model.layers.{i}.input_layernorm.weight",), (_D,)),
    "layers.{i}.post_attention_layernorm.weight": Rule(("model.layers.{i}.post_attention_layernorm.weight",), (_D,)),
    "layers.{i}.self_attn.q_proj.weight": _linear("self_attn.q_proj", _Q, _D),
    "layers.{i}.self_attn.k_proj.weight": _linear("self_attn.k_proj", _KV, _D, kv_heads=True),
    "layers.{i}.self_attn.v_proj.weight": _linear("self_attn.v_proj", _KV, _D, kv_heads=True),
    "layers.{i}.self_attn.o_proj.weight": _linear("self_attn.o_proj", _D, _Q),
    "layers.{i}.self_attn.q_norm.weight": Rule(("model.layers.{i}.self_attn.q_norm.weight",), (_Q,)),
    "layers.{i}.self_attn.k_norm.weight": Rule(("model.layers.{i}.self_attn.k_norm.weight",), (_KV,), kv_heads=True),
    "layers.{i}.block_sparse_moe.gate.weight": Rule(
        ("model.layers.{i}.block_sparse_moe.gate.weight",), (_E, _D), linear=True
    ),
    "layers.{i}.block_sparse_moe.e_score_correction_bias": Rule(
        ("model.layers.{i}.block_sparse_moe.e_score_correction_bias",), (_E,)
    ),
    "layers.{i}.block_sparse_moe.experts.w13": _experts(("w1", "w3"), _F, _D),
    "layers.{i}.block_sparse_moe.experts.w2": _experts(("w2",), _D, _F),
}


def expand(config: MiniMaxM2Config) -> Iterator[tuple[str, Rule, tuple[str, ...]]]:
    """(parameter path, its rule, checkpoint names in the order of the stack), a layer at a time."""
    for path, rule in MINIMAX_M2.items():
        if "{i}" not in path:
            yield path, rule, rule.sources
    for i in range(config.num_hidden_layers):
        for path, rule in MINIMAX_M2.items():
            if "{i}" in path:
                experts = config.num_local_experts if rule.per_expert else 1
                names = tuple(name.format(i=i, e=e) for e in range(experts) for name in rule.sources)
                yield path.format(i=i), rule, names


def has_kv_scales(tensors: Collection[str]) -> bool:
    """Whether a checkpoint brings scales for an FP8 key/value cache, for any layer."""
    return bool(_kv_scales(tensors))


def expand_kv_scales(config: MiniMaxM2Config, tensors: Collection[str]) -> Iterator[tuple[str, Rule, tuple[str, ...]]]:
    """As `expand`, for the key/value scales: each under the name that it has, or under the one it has elsewhere."""
    there_are = {name.rpartition(".self_attn.")[2] for name in _kv_scales(tensors)}
    usual = {
        parameter: next((name for name in spellings if name in there_are), spellings[0])
        for parameter, spellings in KV_SCALES.items()
    }
    for i in range(config.num_hidden_layers):
        for parameter, spellings in KV_SCALES.items():
            prefix = f"model.layers.{i}.self_attn"
            there = [name for name in spellings if f"{prefix}.{name}" in tensors]
            names = tuple(f"{prefix}.{name}" for name in there or (usual[parameter],))
            yield f"layers.{i}.self_attn.{parameter}", Rule(names, (), factor=True), names


def _kv_scales(tensors: Collection[str]) -> list[str]:
    """The names that are key/value scales of the model's own layers."""
    suffixes = tuple(f".self_attn.{name}" for names in KV_SCALES.values() for name in names)
    found = [name for name in tensors if name.endswith(suffixes)]
    return [name for name in found if name.startswith("model.layers.") and IGNORED not in name.split(".")]
