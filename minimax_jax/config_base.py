"""What the configs of both models have in common: fields, checks, the meshes that a model can be cut to."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from minimax_jax.config_keys import Section, agreed, is_finite_number, is_int, show
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import QuantizationConfig, read_quantization

DTYPES = ("bfloat16", "float32")
MODEL_SIZES = (1, 2, 4, 8, 16)  # what a refusal proposes
WIDTH_UNIT = 16  # a device's part of the width of an expert or a dense MLP is a multiple of it

MlpType = Literal["dense", "sparse"]
LayerType = Literal["full_attention", "minimax_m3_sparse"]
ExpertPlacement = Literal["tensor", "expert"]

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_local_experts",
    "num_experts_per_tok",
)
_LARGEST = {"num_hidden_layers": 1000, "num_local_experts": 10_000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is spread: `data` x `model` devices, experts by width ("tensor") or whole ("expert")."""

    data: int = 1
    model: int = 1
    experts: ExpertPlacement = "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """A MiniMax language model. Field names as published."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ()  # `model_type` of the files that a class reads

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of one routed expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int  # channels of a head that turn with the position; the first ones
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    num_local_experts: int
    num_experts_per_tok: int
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    quantization: QuantizationConfig | None = None

    if TYPE_CHECKING:  # fields of one class, properties of the other

        @property
        @abc.abstractmethod
        def mlp_layer_types(self) -> tuple[MlpType, ...]:
            """Of each layer: one MLP, or routed experts."""

        @property
        @abc.abstractmethod
        def layer_types(self) -> tuple[LayerType, ...]:
            """Of each layer: attention over all earlier tokens, or over selected blocks of them."""

        @property
        @abc.abstractmethod
        def routed_scaling_factor(self) -> float:
            """The sum over the routed experts is multiplied by it."""

    def __post_init__(self) -> None:
        check_sizes(self, *SIZES, "head_dim", "rotary_dim")
        if too_large := _too_large(vars(self)):
            raise ConfigError(too_large)
        check_positive(self, "rope_theta", "rms_norm_eps")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            raise ConfigError(f"rotary_dim {self.rotary_dim} is not an even number of at most head_dim {self.head_dim}")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_local_experts "
                f"{self.num_local_experts}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {show(self.dtype)} is not supported; expected {' or '.join(DTYPES)}")
        for token in self.eos_token_ids:
            if not is_int(token) or not 0 <= token < self.vocab_size:
                raise ConfigError(f"eos_token_id {show(token)} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """A config of the class that reads the file's `model_type`, of those in `minimax_jax.config`.

        Raises:
          ConfigError: one line that names `source` and the key.
        """
        types = {name: kind for kind in ModelConfig.__subclasses__() for name in kind.MODEL_TYPES}
        section = open_config(data, source, *sorted(types))
        return types[section.data["model_type"]].from_dict(data, source)

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The published spelling; `from_dict` gives an equal config back."""

    def check_parallelism(self, parallelism: Parallelism) -> None:
        """Refuse a mesh that this model cannot be cut to, before any weight is read.

        A quantisation block is no reason: where a cut falls inside an FP8 block of scales (expert width 1536 over 8
        devices is 192 of blocks of 128), the loader cuts the grid finer and repeats each scale, which is exact.

        Raises:
          ConfigError: names the option, both numbers, and the sizes that would work.
        """
        p = parallelism
        for option, value in (("data_parallel_size", p.data), ("tensor_parallel_size", p.model)):
            if not is_int(value) or value < 1:
                raise ConfigError(f"{option} {show(value)} is not a whole number of at least 1")
        if p.experts not in ("tensor", "expert"):
            raise ConfigError(f"experts placed {show(p.experts)} is no placement; expected 'tensor' or 'expert'")
        reasons = self._uncut(p.model, p.experts)
        if reasons:
            sizes = [str(size) for size in MODEL_SIZES if not self._uncut(size, p.experts)]
            other: ExpertPlacement = "expert" if p.experts == "tensor" else "tensor"
            also = "" if self._uncut(p.model, other) else f"; {p.model} works with expert_parallel={other == 'expert'}"
            raise ConfigError(
                f"tensor_parallel_size {p.model}, expert_parallel={p.experts == 'expert'}: {', '.join(reasons)}; "
                f"tensor_parallel_size may be {', '.join(sizes)} for this model{also}"
            )

    def num_kv_heads_on(self, parallelism: Parallelism) -> int:
        """Key/value heads stored over the model axis: each head repeated where there are more devices than heads."""
        return max(self.num_key_value_heads, parallelism.model)

    def _widths(self, experts: ExpertPlacement) -> dict[str, str]:
        """The fields that are widths cut over the model axis, each with what is that wide."""
        return {"intermediate_size": "expert width"} if experts == "tensor" else {}

    def _uncut(self, model: int, experts: ExpertPlacement) -> list[str]:
        """What cannot be spread evenly over `model` devices, as sentences; empty when all can."""
        reasons = []
        for name in ("num_attention_heads", "vocab_size"):
            if getattr(self, name) % model:
                reasons.append(f"{name} {getattr(self, name)} is not a multiple of {model}")
        heads = self.num_key_value_heads
        if heads % model and model % heads:
            reasons.append(f"num_key_value_heads {heads} is neither a multiple nor a divisor of {model}")
        if experts == "expert" and self.num_local_experts % model:
            reasons.append(f"num_local_experts {self.num_local_experts} is not a multiple of {model}")
        for name, what in self._widths(experts).items() if model > 1 else ():  # one device holds any width whole
            if getattr(self, name) % (WIDTH_UNIT * model):
                reasons.append(
                    f"{name} {getattr(self, name)} ({what}) is not a multiple of "
                    f"{WIDTH_UNIT * model} ({WIDTH_UNIT} for each of {model})"
                )
        return reasons


def open_config(data: object, source: str, *model_types: str) -> Section:
    """The file's outermost object, if its `model_type` is one of these."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected a JSON object, found {show(data)}")
    section = Section(data, source)
    found = section.get("model_type")
    if not isinstance(found, str) or found not in model_types:
        expected = " or ".join(map(repr, model_types))
        raise section.error(f"model_type {show(found)} is not supported; expected {expected}")
    return section


def check_sizes(config: object, *names: str) -> None:
    """Refuse a field that is no whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if not is_int(value) or value < 1:
            raise ConfigError(f"{name} {show(value)} is not a whole number of at least 1")


def check_positive(config: object, *names: str) -> None:
    """Refuse a field that is no finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not is_finite_number(value) or value <= 0:
            raise ConfigError(f"{name} {show(value)} is not a finite number above 0")


def read_sizes(section: Section, *names: str) -> dict[str, Any]:
    """`SIZES`, further whole numbers by their names, and `rms_norm_eps`; none has a default."""
    aliases = {"num_local_experts": ("num_local_experts", "num_experts")}
    fields = {name: agreed(section, section.integers(*aliases.get(name, (name,)))) for name in (*SIZES, *names)}
    fields["rms_norm_eps"] = section.number("rms_norm_eps")
    check_missing(section, fields)
    if too_large := _too_large(fields):
        raise section.error(too_large)
    return fields


def _too_large(fields: Mapping[str, Any]) -> str:
    """What is wrong with a damaged file, whose list of parameters would never end; empty for any other."""
    for name, largest in _LARGEST.items():
        if fields[name] > largest:
            return f"{name} {fields[name]} is more than any model has; expected at most {largest}"
    return ""


def check_missing(section: Section, fields: Mapping[str, Any]) -> None:
    """Refuse fields without a value, all in one line."""
    if missing := [section.name(name) for name, value in fields.items() if value is None]:
        raise section.error(f"{', '.join(missing)} missing; there is no default")


def read_quantization_of(config: Section) -> QuantizationConfig | None:
    """`quantization_config`, or None where there is none."""
    section = config.section("quantization_config")
    return None if section is None else read_quantization(section)


def read_dtype(*sections: Section) -> str:
    """`dtype` or `torch_dtype`, with or without "torch."; bfloat16 where neither stands."""
    found = []
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if value is None:
                continue
            name = value.removeprefix("torch.") if isinstance(value, str) else None
            if name not in DTYPES:
                raise section.error(
                    f"{section.name(key)} {show(value)} is not supported; expected {' or '.join(DTYPES)}"
                )
            found.append((section.name(key), name))
    return agreed(sections[0], found) or "bfloat16"


def one_or_list(ids: tuple[int, ...]) -> int | list[int]:
    """Token ids as a `config.json` spells them."""
    return ids[0] if len(ids) == 1 else list(ids)
