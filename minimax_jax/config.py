"""Model configs, frozen, from the published `config.json`, and every check that needs no weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from minimax_jax import config_keys
from minimax_jax.config_keys import Section, show
from minimax_jax.errors import ConfigError
from minimax_jax.quantization import QuantizationConfig, read_quantization

DTYPES = ("bfloat16", "float32")
MODEL_SIZES = (1, 2, 4, 8, 16)  # what a refusal proposes
EXPERT_WIDTH_UNIT = 16  # a device's part of an expert's width is a multiple of it


def load_config(directory: str | Path) -> MiniMaxM2Config:
    """The config of a checkpoint directory, from its `config.json`.

    Where that has no `quantization_config`, ModelOpt's `hf_quant_config.json` beside it tells the quantisation.

    Raises:
      ConfigError: no such file, not a JSON object, or a value that this package cannot compute with.
    """
    path = Path(directory) / "config.json"
    config = MiniMaxM2Config.from_dict(config_keys.read_json_object(path), source=str(path))
    beside = path.with_name("hf_quant_config.json")
    if config.quantization is None and beside.exists():
        section = Section(config_keys.read_json_object(beside), str(beside)).section("quantization")
        if section is not None and section.get("quant_algo") is not None:
            section = dataclasses.replace(section, data={**section.data, "quant_method": "modelopt"})
            config = dataclasses.replace(config, quantization=read_quantization(section))
    return config


def load_generation_defaults(directory: str | Path, config: MiniMaxM2Config) -> GenerationDefaults:
    """The sampling values and end-of-sequence ids that a checkpoint proposes, from its `generation_config.json`.

    Absent file or key: vLLM's neutral defaults, and the ids of `config.json`. An eos id outside the vocabulary could
    never be generated, so it is refused; in a file that transformers derived from its class defaults
    (`_from_model_config`) it is dropped, as in `config.json`. `repetition_penalty` and `min_p` are sampling values that
    vLLM would take from here and this package does not have: refused unless neutral. No other key is read.

    Raises:
      ConfigError: not a JSON object, or a value out of its range.
    """
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_token_ids=config.eos_token_ids)
    section = Section(config_keys.read_json_object(path), str(path))
    section.check_fixed({"repetition_penalty": (1,), "min_p": (0,)})
    eos = section.token_ids("eos_token_id")
    outside = [token for token in eos if token >= config.vocab_size]
    if outside and section.boolean("_from_model_config"):
        eos = tuple(token for token in eos if token < config.vocab_size)
    elif outside:
        raise section.error(f"eos_token_id {show(outside[0])} is outside the vocabulary of {config.vocab_size}")
    temperature = section.number("temperature", allow_zero=True)
    top_p = section.number("top_p", maximum=1.0)
    return GenerationDefaults(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(section.integer("top_k", minimum=-1) or 0, 0),  # vLLM: -1 and 0 both mean all tokens
        eos_token_ids=eos or config.eos_token_ids,
        do_sample=section.boolean("do_sample") or False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is spread: `data` x `model` devices, experts by width ("tensor") or whole ("expert")."""

    data: int = 1
    model: int = 1
    experts: Literal["tensor", "expert"] = "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a request gets that states nothing.

    `do_sample` is kept as found and, as in vLLM, changes nothing: temperature 0 is what asks for greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool = False


_LARGEST = {"num_hidden_layers": 1000, "num_local_experts": 10_000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config:
    """MiniMax-M2, M2.1, M2.5, M2.7. Field names as published."""

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

    def __post_init__(self) -> None:
        for name in (*_SIZES, "head_dim", "rotary_dim"):
            value = getattr(self, name)
            if not config_keys.is_int(value) or value < 1:
                raise ConfigError(f"{name} {show(value)} is not a whole number of at least 1")
        for name, largest in _LARGEST.items():
            if getattr(self, name) > largest:  # a damaged file; the list of parameters would never end
                raise ConfigError(
                    f"{name} {getattr(self, name)} is more than any model has; expected at most {largest}"
                )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not config_keys.is_finite_number(value) or value <= 0:
                raise ConfigError(f"{name} {show(value)} is not a finite number above 0")
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
            if not config_keys.is_int(token) or not 0 <= token < self.vocab_size:
                raise ConfigError(f"eos_token_id {show(token)} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> MiniMaxM2Config:
        """A config from the published spelling, transformers 5's, or a mix of the two.

        Two spellings of one thing must agree. An absent `head_dim` is 128 and an absent rotary size is the whole head,
        as in transformers' class of this model; the sizes and `rope_theta` have no default. eos ids outside the
        vocabulary are dropped: transformers writes its class's ids whatever the vocabulary.

        Raises:
          ConfigError: one line that names `source` and the key.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"{source}: expected a JSON object, found {show(data)}")
        section = Section(data, source)
        if section.get("model_type") != "minimax_m2":
            raise section.error(f"model_type {show(section.get('model_type'))} is not supported; expected 'minimax_m2'")
        section.check_fixed(config_keys.M2_FIXED)
        quantization = _read_quantization(section)
        section.check_unknown(_M2_READ, config_keys.M2_FIXED, config_keys.M2_PER_LAYER, config_keys.M2_HARMLESS)

        aliases = {"num_local_experts": ("num_local_experts", "num_experts")}
        fields = {name: _agreed(section, _integers(section, *aliases.get(name, (name,)))) for name in _SIZES}
        fields["rms_norm_eps"] = section.number("rms_norm_eps")
        if missing := [name for name, value in fields.items() if value is None]:
            raise section.error(f"{', '.join(missing)} missing; there is no default")
        section.check_per_layer(config_keys.M2_PER_LAYER, fields["num_hidden_layers"])
        fields["head_dim"] = section.integer("head_dim") or 128
        fields["rope_theta"], fields["rotary_dim"] = _read_rope(section, fields["head_dim"])
        fields["dtype"] = _read_dtype(section)
        eos = section.token_ids("eos_token_id")
        fields["eos_token_ids"] = tuple(token for token in eos if token < fields["vocab_size"])
        try:
            return cls(**fields, quantization=quantization)
        except ConfigError as error:
            raise section.error(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """The published spelling; `from_dict` gives an equal config back."""
        data: dict[str, Any] = {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "attn_type_list": [1] * self.num_hidden_layers,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "minimax_m2",
            "num_attention_heads": self.num_attention_heads,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_local_experts": self.num_local_experts,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rotary_dim": self.rotary_dim,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "use_cache": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": self.vocab_size,
        }
        if self.eos_token_ids:
            data["eos_token_id"] = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        if self.quantization is not None:
            data["quantization_config"] = self.quantization.to_dict()
        return data

    def check_parallelism(self, parallelism: Parallelism) -> None:
        """Refuse a mesh that this model cannot be cut to, before any weight is read.

        A quantisation block is no reason: where a cut falls inside an FP8 block of scales (expert width 1536 over 8
        devices is 192 of blocks of 128), the loader cuts the grid finer and repeats each scale, which is exact.

        Raises:
          ConfigError: names the option, both numbers, and the sizes that would work.
        """
        p = parallelism
        for option, value in (("data_parallel_size", p.data), ("tensor_parallel_size", p.model)):
            if not config_keys.is_int(value) or value < 1:
                raise ConfigError(f"{option} {show(value)} is not a whole number of at least 1")
        if p.experts not in ("tensor", "expert"):
            raise ConfigError(f"experts placed {show(p.experts)} is no placement; expected 'tensor' or 'expert'")
        reasons = self._uncut(p.model, p.experts)
        if reasons:
            sizes = [str(size) for size in MODEL_SIZES if not self._uncut(size, p.experts)]
            other: Literal["tensor", "expert"] = "expert" if p.experts == "tensor" else "tensor"
            also = "" if self._uncut(p.model, other) else f"; {p.model} works with expert_parallel={other == 'expert'}"
            raise ConfigError(
                f"tensor_parallel_size {p.model}, expert_parallel={p.experts == 'expert'}: {', '.join(reasons)}; "
                f"tensor_parallel_size may be {', '.join(sizes)} for this model{also}"
            )

    def num_kv_heads_on(self, parallelism: Parallelism) -> int:
        """Key/value heads stored over the model axis: each head repeated where there are more devices than heads."""
        return max(self.num_key_value_heads, parallelism.model)

    def _uncut(self, model: int, experts: Literal["tensor", "expert"]) -> list[str]:
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
        # One device holds any width whole.
        if experts == "tensor" and model > 1 and self.intermediate_size % (EXPERT_WIDTH_UNIT * model):
            reasons.append(
                f"intermediate_size {self.intermediate_size} (expert width) is not a multiple of "
                f"{EXPERT_WIDTH_UNIT * model} ({EXPERT_WIDTH_UNIT} for each of {model})"
            )
        return reasons


_SIZES = (
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
_ROPE_READ = ("rope_theta", "rotary_dim", "partial_rotary_factor")
_M2_READ = frozenset(
    {
        *_SIZES,
        *_ROPE_READ,
        "model_type",
        "num_experts",
        "head_dim",
        "rope_parameters",
        "rope_scaling",
        "rms_norm_eps",
        "dtype",
        "torch_dtype",
        "eos_token_id",
        "quantization_config",
    }
)


def _read_quantization(config: Section) -> QuantizationConfig | None:
    """`quantization_config`, or None where there is none."""
    section = config.section("quantization_config")
    return None if section is None else read_quantization(section)


def _read_rope(config: Section, head_dim: int) -> tuple[float, int]:
    """`rope_theta` and `rotary_dim`, from the top level, `rope_parameters` and `rope_scaling`."""
    thetas, rotary = [], []
    for section in (config, config.section("rope_parameters"), config.section("rope_scaling")):
        if section is None:
            continue
        if section is not config:
            section.check_fixed(config_keys.ROPE_FIXED)
            section.check_unknown(_ROPE_READ, config_keys.ROPE_FIXED)
        if (theta := section.number("rope_theta")) is not None:
            thetas.append((section.name("rope_theta"), theta))
        rotary += _integers(section, "rotary_dim")
        if (factor := section.number("partial_rotary_factor", maximum=1.0)) is not None:
            label = f"{section.name('partial_rotary_factor')} {factor} of head_dim {head_dim}, which is"
            rotary.append((label, _rotated(factor, head_dim)))
    theta = _agreed(config, thetas)
    if theta is None:
        raise config.error("rope_theta missing, at the top level and in rope_parameters; there is no default")
    dim = _agreed(config, rotary)
    if rotary and (dim < 2 or dim > head_dim or dim % 2):
        raise config.error(f"{rotary[0][0]} {dim}: expected an even number from 2 to head_dim {head_dim}")
    return theta, head_dim if dim is None else dim


def _rotated(factor: float, head_dim: int) -> int:
    """Channels that a factor stands for: rounded down, as transformers does, save for the error of the product."""
    channels = factor * head_dim
    return round(channels) if abs(channels - round(channels)) < 1e-6 else int(channels)


def _read_dtype(config: Section) -> str:
    """`dtype` or `torch_dtype`, with or without "torch."; bfloat16 where neither stands."""
    found = []
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is None:
            continue
        name = value.removeprefix("torch.") if isinstance(value, str) else None
        if name not in DTYPES:
            raise config.error(f"{key} {show(value)} is not supported; expected {' or '.join(DTYPES)}")
        found.append((key, name))
    return _agreed(config, found) or "bfloat16"


def _integers(section: Section, *keys: str) -> list[tuple[str, int]]:
    """The keys that are there, each with its value."""
    return [(section.name(key), value) for key in keys if (value := section.integer(key)) is not None]


def _agreed(config: Section, found: Sequence[tuple[str, Any]]) -> Any:
    """The one value under all its spellings; None where there is none."""
    for label, value in found[1:]:
        if value != found[0][1]:
            raise config.error(f"{found[0][0]} {found[0][1]} and {label} {value} contradict each other; keep one")
    return found[0][1] if found else None
