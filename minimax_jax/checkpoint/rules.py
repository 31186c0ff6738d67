"""How a parameter is made of checkpoint tensors: what the name maps are written in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

Fields = tuple[str, ...]  # config fields whose product is a size

V: Fields = ("vocab_size",)
D: Fields = ("hidden_size",)
E: Fields = ("num_local_experts",)
F: Fields = ("intermediate_size",)
Q: Fields = ("num_attention_heads", "head_dim")
KV: Fields = ("num_key_value_heads", "head_dim")

# What stands before `layers` in the names of the language model, alone or inside a model that also sees.
PREFIXES = ("language_model.model.", "model.language_model.", "model.")
LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, PREFIXES))})layers\.(\d+)\.")
EXPERT = re.compile(LAYER.pattern.replace(r"(\d+)", r"\d+") + r"(?:block_sparse_moe|mlp)\.experts\.(\d+)\.")


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
      part: (i, n) for the i-th of n equal parts of the source's rows; other parameters have the others.
    """

    sources: tuple[str, ...]
    dims: tuple[Fields, ...]
    linear: bool = False
    packable: bool = False
    kv_heads: bool = False
    factor: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def per_expert(self) -> bool:
        """Whether every expert has tensors of its own."""
        return "{e}" in self.sources[0]

    def names(self, experts: int) -> tuple[str, ...]:
        """The checkpoint names in the order of the stack."""
        return tuple(name.format(e=e) for e in range(experts if self.per_expert else 1) for name in self.sources)


def vector(name: str, size: Fields) -> Rule:
    """A norm's weight, or a bias."""
    return Rule((name,), (size,))


def linear(name: str, rows: Fields, cols: Fields, *, kv_heads: bool = False, part: tuple[int, int] = (0, 1)) -> Rule:
    """The module `name`, packed or not."""
    return Rule((f"{name}.weight",), (rows, cols), linear=True, packable=True, kv_heads=kv_heads, part=part)


def experts(prefix: str, names: Sequence[str]) -> tuple[Rule, Rule]:
    """w13 and w2 of all experts, whose modules are `prefix`, a number, and one of `names`: gate, down, up."""
    gate, down, up = (f"{prefix}.{{e}}.{name}.weight" for name in names)
    return (
        Rule((gate, up), (F, D), linear=True, packable=True),
        Rule((down,), (D, F), linear=True, packable=True),
    )
