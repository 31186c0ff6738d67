"""Rotary position embedding as a `config.json` states it: base, turned channels, and YaRN for M3's text part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from minimax_jax.config_keys import Section, agreed, is_finite_number, is_int, show
from minimax_jax.errors import ConfigError

ROPE_READ = frozenset({"rope_theta", "rotary_dim", "partial_rotary_factor"})

ROPE_FIXED: Mapping[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "factor": (1,),
    "attention_factor": (1,),
}

_YARN_NUMBERS = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_YARN_READ = frozenset(
    {*ROPE_READ, *_YARN_NUMBERS, "rope_type", "type", "original_max_position_embeddings", "truncate"}
)
# Spellings of other readers for what is one here.
_YARN_FIXED: Mapping[str, tuple[Any, ...]] = {"attn_factor": (1,), "extrapolation_factor": (1,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071), with the meaning that transformers gives the names.

    Attributes:
      factor: positions are stretched to `factor` times the original length; at least 1.
      original_max_position_embeddings: the length of training.
      beta_fast, beta_slow: turns over the original length at and above which a channel pair keeps its frequency, and at
        and below which its frequency is divided by `factor`; a linear ramp over the pairs lies between.
      attention_factor: cos and sin are multiplied by it.
      truncate: the ends of the ramp are rounded outwards to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not is_finite_number(value) or value <= 0:
                raise ConfigError(f"YaRN's {name} {show(value)} is not a finite number above 0")
        if self.factor < 1:
            raise ConfigError(
                f"YaRN's factor {self.factor} is below 1; it stretches, 1 leaves the positions as they are"
            )
        if self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"YaRN's beta_fast {self.beta_fast} is less than beta_slow {self.beta_slow}; expected at least as much"
            )
        original = self.original_max_position_embeddings
        if not is_int(original) or original < 1:
            raise ConfigError(
                f"YaRN's original_max_position_embeddings {show(original)} is not a whole number of at least 1"
            )
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"YaRN's truncate {show(self.truncate)} is neither true nor false")

    @property
    def max_positions(self) -> int:
        """Positions that the stretched table is made for."""
        return int(self.factor * self.original_max_position_embeddings)


def default_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """`attention_factor` of a config that states none: 0.1 ln(factor) + 1, or the ratio of two such with an mscale."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def rope_sections(config: Section) -> list[Section]:
    """`rope_parameters` and `rope_scaling`, those that are there."""
    found = (config.section("rope_parameters"), config.section("rope_scaling"))
    return [section for section in found if section is not None]


def check_unscaled(config: Section) -> None:
    """Refuse a `rope_parameters` or `rope_scaling` that scales, or holds a key that no one knows."""
    for section in rope_sections(config):
        section.check_fixed(ROPE_FIXED)
        section.check_unknown(ROPE_READ, ROPE_FIXED)


def read_rope(config: Section, head_dim: int) -> tuple[float, int | None]:
    """`rope_theta` and `rotary_dim` (None: stated nowhere), from the config, `rope_parameters` and `rope_scaling`."""
    thetas, rotary = [], []
    for section in (config, *rope_sections(config)):
        if (theta := section.number("rope_theta")) is not None:
            thetas.append((section.name("rope_theta"), theta))
        rotary += section.integers("rotary_dim")
        if (factor := section.number("partial_rotary_factor", maximum=1.0)) is not None:
            label = f"{section.name('partial_rotary_factor')} {factor} of head_dim {head_dim}, which is"
            rotary.append((label, _rotated(factor, head_dim)))
    theta = agreed(config, thetas)
    if theta is None:
        place = f"in {config.prefix.removesuffix('.')}" if config.prefix else "at the top level"
        raise config.error(f"rope_theta missing, {place} and in rope_parameters; there is no default")
    dim = agreed(config, rotary)
    if rotary and (dim < 2 or dim > head_dim or dim % 2):
        raise config.error(f"{rotary[0][0]} {dim}: expected an even number from 2 to head_dim {head_dim}")
    return theta, dim


def read_yarn(config: Section, max_positions: int | None) -> YarnScaling | None:
    """YaRN where `rope_parameters` or `rope_scaling` asks for it; any other scaling is refused.

    Args:
      max_positions: `max_position_embeddings` of the config, the original length of a YaRN that states none.
    """
    sections = rope_sections(config)
    types = []
    for section in sections:
        section.check_fixed({"rope_type": ("default", "yarn"), "type": ("default", "yarn")})
        types += [
            (section.name(key), section.get(key)) for key in ("rope_type", "type") if section.get(key) is not None
        ]
    if agreed(config, types) != "yarn":
        check_unscaled(config)
        return None
    values: dict[str, Any] = {}
    for section in sections:
        section.check_fixed(_YARN_FIXED)
        section.check_unknown(_YARN_READ, _YARN_FIXED)
    for key in _YARN_NUMBERS:
        zero = key.startswith("mscale")  # 0 is transformers' spelling of none
        values[key] = agreed(
            config, [(s.name(key), v) for s in sections if (v := s.number(key, allow_zero=zero)) is not None]
        )
    key = "original_max_position_embeddings"
    values[key] = agreed(config, [pair for s in sections for pair in s.integers(key)]) or max_positions
    truncate = agreed(config, [(s.name("truncate"), v) for s in sections if (v := s.boolean("truncate")) is not None])
    where = types[0][0].rpartition(".")[0]
    for name in ("factor", key):
        if values[name] is None:
            raise config.error(f"{where}.{name} missing; YaRN has no default for it")
    mscale, all_dim = values.pop("mscale"), values.pop("mscale_all_dim")
    if bool(mscale) != bool(all_dim) and values["attention_factor"] is None:
        raise config.error(
            f"{where}.mscale {mscale} and {where}.mscale_all_dim {all_dim}: only both together have one meaning; "
            "give both or attention_factor"
        )
    if values["attention_factor"] is None:
        values["attention_factor"] = default_attention_factor(max(values["factor"], 1.0), mscale, all_dim)
    try:
        return YarnScaling(
            **{name: value for name, value in values.items() if value is not None},
            truncate=True if truncate is None else truncate,
        )
    except ConfigError as error:
        raise config.error(f"{where}: {error}") from None


def _rotated(factor: float, head_dim: int) -> int:
    """Channels that a factor stands for: rounded down, as transformers does, save for the error of the product."""
    channels = factor * head_dim
    return round(channels) if abs(channels - round(channels)) < 1e-6 else int(channels)
