"""The name map: which checkpoint tensors make which parameter. Here MiniMax-M2's; M3's is in `name_map_m3`.

embed_tokens, norm, lm_head         one tensor each
q_proj, o_proj, norms, gate, bias   one tensor each, per layer
k_proj, v_proj, k_norm              one tensor, each head repeated where there are more devices than heads
experts.w13                         [E, 2, F, D] from w1 (gate) and w3 (up) of every expert
experts.w2                          [E, D, F] from w2 of every expert
self_attn.k_scale, v_scale          [] for an FP8 key/value cache, where the checkpoint has them
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from minimax_jax.checkpoint import name_map_m3
from minimax_jax.checkpoint.rules import KV, LAYER, D, E, Q, Rule, V, experts, linear, vector
from minimax_jax.config import MiniMaxM3Config, ModelConfig

IGNORED = "mtp"  # path component of multi-token-prediction modules, which generation does not use
# Scales of a quantised query or probability; attention computes both in the compute dtype.
IGNORED_SCALES = ("q_proj.output_scale", "q_proj.q_scale", "self_attn.q_scale", "prob_output_scale")

# Parameter -> the names that a key/value scale has inside `self_attn`: ModelOpt's, Quark's, compressed-tensors', and an
# older one that stands for both.
KV_SCALES: dict[str, tuple[str, ...]] = {
    "k_scale": ("k_proj.k_scale", "k_proj.output_scale", "k_scale", "kv_scale"),
    "v_scale": ("v_proj.v_scale", "v_proj.output_scale", "v_scale", "kv_scale"),
}

Entry = tuple[str, Rule, tuple[str, ...]]  # a parameter's path, its rule, checkpoint names in the order of the stack


def expand(config: ModelConfig, tensors: Collection[str]) -> Iterator[Entry]:
    """Every parameter of the model, a layer at a time; `tensors` are the checkpoint's, whose spelling is followed."""
    if isinstance(config, MiniMaxM3Config):
        rules = name_map_m3.rules(config, tensors)
    else:
        rules = _rules_m2(config)
    for path, rule in rules:
        yield path, rule, rule.names(config.num_local_experts)


def has_kv_scales(tensors: Collection[str]) -> bool:
    """Whether a checkpoint brings scales for an FP8 key/value cache, for any layer."""
    return bool(_kv_scales(tensors))


def expand_kv_scales(config: ModelConfig, tensors: Collection[str]) -> Iterator[Entry]:
    """As `expand`, for the key/value scales: each under the name that it has, or under the one it has elsewhere."""
    found = _kv_scales(tensors)
    prefix = found[0].partition("layers.")[0]
    there_are = {name.rpartition(".self_attn.")[2] for name in found}
    usual = {
        parameter: next((name for name in spellings if name in there_are), spellings[0])
        for parameter, spellings in KV_SCALES.items()
    }
    for i in range(config.num_hidden_layers):
        for parameter, spellings in KV_SCALES.items():
            attention = f"{prefix}layers.{i}.self_attn"
            there = [name for name in spellings if f"{attention}.{name}" in tensors]
            names = tuple(f"{attention}.{name}" for name in there or (usual[parameter],))
            yield f"layers.{i}.self_attn.{parameter}", Rule(names, (), factor=True), names


def _rules_m2(config: ModelConfig) -> Iterator[tuple[str, Rule]]:
    yield "embed_tokens.weight", Rule(("model.embed_tokens.weight",), (V, D))
    yield "norm.weight", vector("model.norm.weight", D)
    yield "lm_head.weight", Rule(("lm_head.weight",), (V, D), packable=True)
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}", f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{here}.{norm}.weight", vector(f"{there}.{norm}.weight", D)
        yield f"{here}.self_attn.q_proj.weight", linear(f"{there}.self_attn.q_proj", Q, D)
        yield f"{here}.self_attn.k_proj.weight", linear(f"{there}.self_attn.k_proj", KV, D, kv_heads=True)
        yield f"{here}.self_attn.v_proj.weight", linear(f"{there}.self_attn.v_proj", KV, D, kv_heads=True)
        yield f"{here}.self_attn.o_proj.weight", linear(f"{there}.self_attn.o_proj", D, Q)
        yield f"{here}.self_attn.q_norm.weight", vector(f"{there}.self_attn.q_norm.weight", Q)
        yield f"{here}.self_attn.k_norm.weight", Rule((f"{there}.self_attn.k_norm.weight",), (KV,), kv_heads=True)
        moe = f"{there}.block_sparse_moe"
        here = f"{here}.block_sparse_moe"
        yield f"{here}.gate.weight", Rule((f"{moe}.gate.weight",), (E, D), linear=True)
        yield f"{here}.e_score_correction_bias", vector(f"{moe}.e_score_correction_bias", E)
        w13, w2 = experts(f"{moe}.experts", ("w1", "w2", "w3"))
        yield f"{here}.experts.w13", w13
        yield f"{here}.experts.w2", w2


def _kv_scales(tensors: Collection[str]) -> list[str]:
    """The names that are key/value scales of the model's own layers."""
    suffixes = tuple(f".self_attn.{name}" for names in KV_SCALES.values() for name in names)
    found = [name for name in tensors if name.endswith(suffixes)]
    return [name for name in found if LAYER.match(name) and IGNORED not in name.split(".")]
