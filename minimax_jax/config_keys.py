"""Reading one JSON object of a checkpoint's settings: typed values, and what each key that is no field may hold.

Principle: a key is a field of the config, or it is fixed (the model is computed with one value of it, and another value
is refused by name), or it is known not to touch inference (ignored), or it is unknown and refused by name. `null` and
an absent key mean the same everywhere, and keys with a leading underscore are a writer's private notes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from minimax_jax.errors import ConfigError

# Key -> the values under which the model is computed as in this package; the first is named in a refusal.
M2_FIXED: Mapping[str, tuple[Any, ...]] = {
    # Published keys.
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "shared_intermediate_size": (0,),
    "tie_word_embeddings": (False,),
    # Attention.
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "sliding_window": (None, 0, False),
    "use_sliding_window": (False,),
    "attn_window_size": (None, 0, False),
    "attention_sinks": (None, 0, False),
    "use_attention_sinks": (False,),
    "attn_sinks": (None, 0, False),
    "logit_softcap": (None, 0, False),
    "logit_softcapping": (None, 0, False),
    "attn_logit_softcap": (None, 0, False),
    "attn_logit_softcapping": (None, 0, False),
    "final_logit_softcap": (None, 0, False),
    "final_logit_softcapping": (None, 0, False),
    "router_logit_softcapping": (None, 0, False),
    "attention_output_gate": (False,),
    "attn_output_gate": (False,),
    "sparse_attention_config": (None, {}, False),
    "is_causal": (True,),
    "use_rope": (True,),
    "rope_interleave": (False,),
    # Experts.
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1,),
    "n_group": (1,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None,),
    # Norms and scales around the layers.
    "use_gemma_norm": (False,),
    "postnorm": (False,),
    "layernorm_full_attention_alpha": (1,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_alpha": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_alpha": (1,),
    "layernorm_mlp_beta": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    # transformers: every config may carry these.
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
}

# One value for each layer; a plain value stands for every layer.
M2_PER_LAYER: Mapping[str, Any] = {
    "attn_type_list": 1,  # 0 would be lightning attention
    "layer_types": "full_attention",
    "mlp_layer_types": "sparse",
    "moe_layer_freq": 1,
}

# Group -> keys that do not touch inference, separated by spaces.
_HARMLESS_GROUPS: Mapping[str, str] = {
    "bookkeeping, labels and output switches that transformers writes into any config, old or new": (
        "architectures auto_map transformers_version name_or_path use_cache return_dict output_hidden_states "
        "output_attentions torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder "
        "tie_encoder_decoder tie_last_hidden_states cross_attention_hidden_size attn_implementation "
        "experts_implementation gradient_checkpointing id2label label2id num_labels problem_type finetuning_task "
        "task_specific_params tokenizer_class prefix bos_token_id pad_token_id sep_token_id decoder_start_token_id"
    ),
    "training": (
        "initializer_range attention_dropout hidden_dropout router_aux_loss_coef router_jitter_noise "
        "output_router_logits"
    ),
    "multi-token prediction: announced, its tensors were never published": (
        "use_mtp num_mtp_modules mtp_transformer_layers num_nextn_predict_layers"
    ),
    # A dense width though every layer has experts, the gate of the absent shared expert, grouping (the number of
    # groups is checked), the rope base of the absent windowed layers.
    "of M2's first release, without effect": "mlp_intermediate_size shared_moe_mode use_grouped_topk swa_rope_theta",
    "a re-exporter's marks": "unsloth_fixed unsloth_version",
    "sampling values that old configs carry; generation_config.json is where they are read": (
        "max_length max_new_tokens min_length early_stopping do_sample num_beams num_beam_groups num_return_sequences "
        "temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff diversity_penalty repetition_penalty "
        "encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
        "suppress_tokens begin_suppress_tokens output_scores return_dict_in_generate num_assistant_tokens "
        "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind"
    ),
}
M2_HARMLESS = frozenset(key for keys in _HARMLESS_GROUPS.values() for key in keys.split())

ROPE_FIXED: Mapping[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "factor": (1,),
    "attention_factor": (1,),
}


def show(value: object) -> str:
    """A value as an error message shows it: one line, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a ConfigError of one line that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object_without_contradictions)
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a checkpoint directory with its {path.name}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not usable JSON: nested too deeply") from None
    except ValueError as error:  # a syntax error, an encoding error, or a number of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {show(data)}")
    return data


@dataclasses.dataclass(frozen=True)
class Section:
    """A JSON object and how its keys are named in messages: `source: prefix.key`.

    Every reader returns None for a key that is absent or null.
    """

    data: Mapping[str, Any]
    source: str
    prefix: str = ""

    def name(self, key: str) -> str:
        """The key with the objects around it; odd characters escaped, so that a message stays one line."""
        return self.prefix + (key if key.isidentifier() else show(key))

    def error(self, message: str) -> ConfigError:
        """The error to raise, with the file in front."""
        return ConfigError(f"{self.source}: {message}")

    def get(self, key: str) -> Any:
        """The raw value."""
        return self.data.get(key)

    def section(self, key: str) -> Section | None:
        """A nested object."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{self.name(key)} {show(value)} is not an object")
        return Section(value, self.source, f"{self.name(key)}.")

    def integer(self, key: str, minimum: int = 1) -> int | None:
        """A whole number; true and 3.0 are none."""
        value = self.get(key)
        if value is None or (is_int(value) and value >= minimum):
            return value
        raise self.error(f"{self.name(key)} {show(value)} is not a whole number of at least {minimum}")

    def number(self, key: str, *, allow_zero: bool = False, maximum: float = math.inf) -> float | None:
        """A finite positive number."""
        value = self.get(key)
        if value is None:
            return None
        if is_finite_number(value) and (value > 0 or (allow_zero and value == 0)) and value <= maximum:
            return float(value)
        bounds = ("at least 0" if allow_zero else "above 0") + ("" if maximum == math.inf else f", at most {maximum}")
        raise self.error(f"{self.name(key)} {show(value)} is not a finite number ({bounds})")

    def boolean(self, key: str) -> bool | None:
        """true or false."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.error(f"{self.name(key)} {show(value)} is neither true nor false")

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent is empty."""
        value = self.get(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.error(f"{self.name(key)} {show(value)} is not a list of strings")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, in order, each once; absent is empty."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_int(token) and token >= 0 for token in ids):
            raise self.error(f"{self.name(key)} {show(value)} is neither a token id nor a list of token ids")
        return tuple(dict.fromkeys(ids))

    def check_fixed(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse by name a key that would change the computation."""
        for key, allowed in fixed.items():
            value = self.get(key)
            if value is not None and not any(_same(value, choice) for choice in allowed):
                expected = "null" if allowed[0] is None else show(allowed[0])
                raise self.error(f"{self.name(key)} {show(value)} is not supported; expected {expected}")

    def check_per_layer(self, table: Mapping[str, Any], layers: int) -> None:
        """Refuse a per-layer list of another length, or with a layer of another kind."""
        for key, expected in table.items():
            value = self.get(key)
            if value is None or _same(value, expected):
                continue
            if not isinstance(value, list):
                raise self.error(
                    f"{self.name(key)} {show(value)} is not a list of {show(expected)}, one for each layer"
                )
            if len(value) != layers:
                raise self.error(f"{self.name(key)} has {len(value)} entries, but num_hidden_layers is {layers}")
            for layer, item in enumerate(value):
                if not _same(item, expected):
                    raise self.error(
                        f"{self.name(key)} holds {show(item)} for layer {layer}; only {show(expected)} is supported"
                    )

    def check_unknown(self, *known: Collection[str]) -> None:
        """Refuse by name the keys that no table knows."""
        unknown = [
            self.name(key)
            for key, value in self.data.items()
            if value is not None and not key.startswith("_") and not any(key in names for names in known)
        ]
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise self.error(
                f"unknown key {', '.join(unknown[:5])}{more}: it may change what the model computes; "
                "remove it from the file if it does not"
            )


def is_int(value: object) -> TypeGuard[int]:
    """A whole number; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """An int or float that a float holds; a bool is none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _same(value: object, choice: object) -> bool:
    """Equal, where true is not 1."""
    return isinstance(value, bool) == isinstance(choice, bool) and value == choice


def _object_without_contradictions(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice with two values is refused rather than decided by its order."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and not _same(result[key], value):
            raise ConfigError(f"key {show(key)} stands twice, as {show(result[key])} and {show(value)}")
        result[key] = value
    return result
