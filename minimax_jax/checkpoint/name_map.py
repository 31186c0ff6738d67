"""The table from checkpoint tensors to parameters for MiniMax-M2, and the proof that it covers both sides.

    embed_tokens, norm, lm_head         one tensor each
    q_proj, o_proj, norms, gate, bias   one tensor each, per layer
    k_proj, v_proj, k_norm              one tensor, each head repeated where there are more devices than heads
    experts.w13                         [E, 2, F, D] from w1 (gate) and w3 (up) of every expert
    experts.w2                          [E, D, F] from w2 of every expert
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from minimax_jax.checkpoint.formats import SCALE_SUFFIX, Stored, find_stored
from minimax_jax.checkpoint.lazy import Dequantized, Lazy, LazyArray, LazyQuant, Stack, cast, regrid, repeat_heads
from minimax_jax.checkpoint.plan import FormatTotal, LoadPlan, local_shape, parts_of
from minimax_jax.checkpoint.safetensors_index import Checkpoint, TensorInfo, name_some
from minimax_jax.config import MiniMaxM2Config, Parallelism
from minimax_jax.errors import CheckpointError
from minimax_jax.parameters import ParameterSpec

_IGNORED = "mtp"  # path component of multi-token-prediction modules, which generation does not use

_V, _D, _E, _F = ("vocab_size",), ("hidden_size",), ("num_local_experts",), ("intermediate_size",)
_Q = ("num_attention_heads", "head_dim")
_KV = ("num_key_value_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one parameter is made.

    Attributes:
      sources: checkpoint names; more than one are stacked along a new axis behind that of the experts.
      dims: the config fields whose product is the size of each dimension of a source.
      linear: a linear layer, which a quantised checkpoint holds packed unless its config excludes it.
      packable: a packed source stays packed in memory.
      kv_heads: the first dimension goes by key/value heads.
    """

    sources: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    linear: bool = False
    packable: bool = False
    kv_heads: bool = False


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


def plan_parameters(
    checkpoint: Checkpoint,
    config: MiniMaxM2Config,
    specs: Mapping[str, ParameterSpec],
    parallelism: Parallelism,
    dtype: DTypeLike,
) -> LoadPlan:
    """Matches tensors and parameters one to one, reading none.

    Args:
      specs: every parameter of the model by path.
      dtype: the compute dtype; a plain weight is kept as it is where it is bfloat16 or already this.

    Raises:
      CheckpointError: a tensor is missing, left over, of another shape than `config` says, or stored in a way that
        cannot be read.
    """
    entries = {path: (rule, names) for path, rule, names in _expand(config)}
    if entries.keys() != specs.keys():
        raise ValueError(f"the name map and the model differ in: {name_some(sorted(entries.keys() ^ specs.keys()))}")
    ignored = {name for name in checkpoint.tensors if _IGNORED in name.split(".")}
    _check_shapes(checkpoint, config, entries)
    _check_layers(checkpoint, config, ignored)
    _check_missing(checkpoint, entries, ignored)

    weights: dict[str, Lazy] = {}
    stored: dict[str, list[Stored]] = {}
    for path, (rule, names) in entries.items():
        infos = [checkpoint.tensors[name] for name in names]
        stored[path] = [find_stored(checkpoint, info, config.quantization, rule.linear) for info in infos]
        weights[path] = _build(rule, specs[path], stored[path], config, parallelism, np.dtype(jnp.dtype(dtype)))
        if weights[path].shape != specs[path].shape:
            raise ValueError(f"the name map gives {path} {weights[path].shape}, the model {specs[path].shape}")
    sources = {path: tuple(info.name for part in parts for info in part.infos) for path, parts in stored.items()}
    _check_unused(checkpoint, sources, ignored)
    return LoadPlan(
        checkpoint=checkpoint,
        weights=weights,
        specs=dict(specs),
        sources=sources,
        scales=tuple(info for parts in stored.values() for part in parts for info in part.infos[1:]),
        formats=_totals(part for parts in stored.values() for part in parts),
        ignored=tuple(sorted(ignored)),
        parallelism=parallelism,
    )


def _expand(config: MiniMaxM2Config) -> Iterator[tuple[str, Rule, list[str]]]:
    """(parameter path, its rule, checkpoint names in the order of the stack), a layer at a time."""
    for path, rule in MINIMAX_M2.items():
        if "{i}" not in path:
            yield path, rule, list(rule.sources)
    for i in range(config.num_hidden_layers):
        for path, rule in MINIMAX_M2.items():
            if "{i}" in path:
                experts = config.num_local_experts if "{e}" in rule.sources[0] else 1
                names = [name.format(i=i, e=e) for e in range(experts) for name in rule.sources]
                yield path.format(i=i), rule, names


Entries = Mapping[str, tuple[Rule, list[str]]]


def _check_shapes(checkpoint: Checkpoint, config: MiniMaxM2Config, entries: Entries) -> None:
    """Shapes of the tensors that are there, against the config; a packed dtype of another format is told first."""
    for rule, names in entries.values():
        expected = tuple(math.prod(getattr(config, field) for field in fields) for fields in rule.dims)
        for name in names:
            info = checkpoint.tensors.get(name)
            if info is None or info.shape == expected:
                continue
            find_stored(checkpoint, info, None, rule.linear)
            wrong = [
                " x ".join(f"{field} {getattr(config, field)}" for field in fields)
                for place, fields in enumerate(rule.dims)
                if len(info.shape) != len(expected) or info.shape[place] != expected[place]
            ]
            raise CheckpointError(
                f"{info} has shape {list(info.shape)}, expected {list(expected)} from config.json's {', '.join(wrong)}"
            )


def _check_layers(checkpoint: Checkpoint, config: MiniMaxM2Config, ignored: set[str]) -> None:
    """Layers and experts beyond those of the config."""
    limits = {"num_hidden_layers": r"model\.layers\.(\d+)\.", "num_local_experts": r".*\.experts\.(\d+)\."}
    for field, pattern in limits.items():
        number = re.compile(pattern)
        for name, info in checkpoint.tensors.items():
            found = None if name in ignored else number.match(name)
            if found and int(found[1]) >= getattr(config, field):
                raise CheckpointError(
                    f"{info} has shape {list(info.shape)} and lies beyond config.json's {field} {getattr(config, field)}, "
                    f"expected numbers from 0 to {getattr(config, field) - 1}"
                )


def _check_missing(checkpoint: Checkpoint, entries: Entries, ignored: set[str]) -> None:
    wanted = [name for _, names in entries.values() for name in names]
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if not missing:
        return
    known = {*wanted, *(name + SCALE_SUFFIX for name in wanted), *ignored}
    unused = [name for name in checkpoint.tensors if name not in known]
    layers = {int(found[1]) for name in wanted if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    empty = [
        i for i in sorted(layers) if not any(name.startswith(f"model.layers.{i}.") for name in checkpoint.tensors)
    ]
    raise CheckpointError(
        f"checkpoint '{checkpoint.directory}' lacks {len(missing)} of {len(wanted)} tensors: {name_some(missing)}"
        + (f"; it has nothing of layers {empty[0]} to {empty[-1]}, but num_hidden_layers is {len(layers)}" * bool(empty) if empty else "")
        + (f"; it has {len(unused)} that no parameter uses: {name_some(unused)}" if unused else "")
    )


def _check_unused(checkpoint: Checkpoint, sources: Mapping[str, Sequence[str]], ignored: set[str]) -> None:
    """Every tensor of the checkpoint is used once, or is on the ignore list."""
    used: dict[str, str] = {}
    for path, names in sources.items():
        for name in names:
            if name in used:
                raise ValueError(f"the name map uses '{name}' for {used[name]} and for {path}")
            used[name] = path
    unused = [info for name, info in checkpoint.tensors.items() if name not in used and name not in ignored]
    if unused:
        raise CheckpointError(
            f"checkpoint '{checkpoint.directory}' has {len(unused)} tensors that no parameter uses: "
            f"{name_some(info.name for info in unused)}, the first in {unused[0].file}; only '{_IGNORED}' modules are ignored"
        )
