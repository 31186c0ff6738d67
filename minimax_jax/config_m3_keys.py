"""Reading a `config.json` of MiniMax-M3: two spellings of its text part, alone or in the object around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from minimax_jax import config_tables
from minimax_jax.config_base import (
    SIZES,
    LayerType,
    MlpType,
    check_missing,
    read_dtype,
    read_quantization_of,
    read_sizes,
)
from minimax_jax.config_keys import Section, agreed, is_int, show
from minimax_jax.config_rope import ROPE_READ, YarnScaling, read_rope, read_yarn
from minimax_jax.config_vision import read_vision
from minimax_jax.quantization import QuantizationConfig

TEXT_MODEL_TYPE = "minimax_m3_vl_text"  # of a text part that stands alone
WIDTHS = ("dense_intermediate_size", "shared_intermediate_size")
# Field -> its name in `sparse_attention_config`.
INDEX = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_block_size": "sparse_block_size",
}
MLP_TYPES: dict[Any, MlpType] = {0: "dense", 1: "sparse"}
LAYER_TYPES: dict[Any, LayerType] = {0: "full_attention", 1: "minimax_m3_sparse"}
_EVERYWHERE = frozenset({"eos_token_id", "dtype", "torch_dtype", "quantization_config"})
_TEXT_ONLY = frozenset(
    {
        *SIZES,
        *WIDTHS,
        *INDEX,
        *ROPE_READ,
        "num_experts",
        "head_dim",
        "rope_parameters",
        "rope_scaling",
        "rms_norm_eps",
        "mlp_layer_types",
        "moe_layer_freq",
        "layer_types",
        "sparse_attention_config",
        "routed_scaling_factor",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
    }
)
_SPARSE_READ = frozenset({*INDEX.values(), "sparse_attention_freq", "sparse_disable_index_value"})
IMAGE = ("image_token_index", "image_token_id")
VIDEO = ("video_token_index", "video_token_id")
_ROOT_READ = frozenset(
    {
        *_EVERYWHERE,
        *IMAGE,
        *VIDEO,
        "model_type",
        "text_config",
        "vision_config",
        "img_token_compression_config",
        "projector_hidden_size",
        "merged_hidden_size",
    }
)


def read_fields(root: Section) -> dict[str, Any]:
    """The fields of a `MiniMaxM3Config`, from a file of either `model_type` of it."""
    if root.get("model_type") == TEXT_MODEL_TYPE:
        return _read_text(root, root)
    text = root.section("text_config")
    if text is None:
        raise root.error("text_config missing; this model's sizes stand there")
    root.check_fixed(config_tables.M3_ROOT_FIXED)
    _check_text_keys_at_root(root, text)
    root.check_unknown(_ROOT_READ, _TEXT_ONLY, config_tables.M3_ROOT_FIXED, config_tables.M3_ROOT_HARMLESS)
    fields = _read_text(root, text)
    vision = read_vision(root)
    merged = root.integer("merged_hidden_size")  # which transformers derives
    if vision is not None and merged not in (None, fields["hidden_size"] * vision.spatial_merge_size**2):
        raise root.error(
            f"merged_hidden_size {merged} contradicts hidden_size {fields['hidden_size']} and spatial_merge_size "
            f"{vision.spatial_merge_size}; it is hidden_size times the square"
        )
    for name, keys in (("image_token_id", IMAGE), ("video_token_id", VIDEO)):
        token = agreed(root, [(key, each) for key in keys if (each := root.integer(key, minimum=0)) is not None])
        fields[name] = token if token is not None and token < fields["vocab_size"] else None
    return fields | {"vision": vision}


def _read_text(root: Section, text: Section) -> dict[str, Any]:
    """The fields of the text part; `root` is the same object or the one around it."""
    places = [root] if text is root else [root, text]
    text.check_fixed(config_tables.M3_TEXT_FIXED)
    quantization = _read_quantization(places)
    text.check_unknown(_TEXT_ONLY, _EVERYWHERE, config_tables.M3_TEXT_FIXED, config_tables.M3_TEXT_HARMLESS)
    sparse = text.section("sparse_attention_config") or dataclasses.replace(text, data={})
    sparse.check_fixed(config_tables.M3_SPARSE_FIXED)
    sparse.check_unknown(_SPARSE_READ, config_tables.M3_SPARSE_FIXED)

    fields = read_sizes(text, *WIDTHS)
    index = {ours: agreed(text, text.integers(ours) + sparse.integers(theirs)) for ours, theirs in INDEX.items()}
    fields |= index | {"routed_scaling_factor": text.number("routed_scaling_factor")}
    check_missing(text, fields)
    layers = fields["num_hidden_layers"]
    fields["mlp_layer_types"] = _kinds(layers, MLP_TYPES, (text, "mlp_layer_types"), (text, "moe_layer_freq"))
    attention = (text, "layer_types"), (sparse, "sparse_attention_freq")
    fields["layer_types"] = _kinds(layers, LAYER_TYPES, *attention)
    _check_index_values(sparse, fields["layer_types"])
    fields["head_dim"] = text.integer("head_dim") or 128
    fields["rope_theta"], fields["rotary_dim"] = read_rope(text, fields["head_dim"])
    if fields["rotary_dim"] is None:
        raise text.error(f"{text.name('rotary_dim')} and partial_rotary_factor missing; there is no default")
    _check_rotary(text, fields["rotary_dim"], fields["head_dim"])
    yarn = read_yarn(text, fields["max_position_embeddings"])
    if yarn is not None:
        fields["max_position_embeddings"] = _stretched(text, yarn, fields["max_position_embeddings"])
    fields |= _read_activation(text)
    fields["dtype"] = read_dtype(*places)
    vocabulary = fields["vocab_size"]
    eos = [
        (place.name("eos_token_id"), ids)
        for place in places
        if (ids := tuple(token for token in place.token_ids("eos_token_id") if token < vocabulary))
    ]
    fields["eos_token_ids"] = agreed(root, eos) or ()
    return fields | {"yarn": yarn, "quantization": quantization}


def _check_text_keys_at_root(root: Section, text: Section) -> None:
    """Refuse a text key outside `text_config` that says more than `text_config` does: other readers ignore it there."""
    for key in (key for key in root.data if key in _TEXT_ONLY):
        outside, inside = root.get(key), text.get(key)
        if outside is None or outside == {} or outside == inside:
            continue
        if inside is None:
            raise root.error(
                f"{key} {show(outside)} stands at the top level, where it has no effect on this model; move it into "
                "text_config"
            )
        raise root.error(
            f"{key} {show(outside)} at the top level and {text.name(key)} {show(inside)} contradict each other; keep "
            "the one in text_config"
        )


def _kinds(layers: int, kinds: Mapping[int, Any], *places: tuple[Section, str]) -> tuple[Any, ...]:
    """The kind of each layer, from lists of kinds or of numbers that stand for them; one value means all layers."""
    result: tuple[Any, ...] = ()
    first = ""
    for section, key in places:
        value = section.get(key)
        if value is None:
            continue
        name = section.name(key)
        meanings: Mapping[Any, Any] = kinds if key.endswith("_freq") else {kind: kind for kind in kinds.values()}
        items = value if isinstance(value, list) else [value] * layers
        if len(items) != layers:
            raise section.error(
                f"{name} has {len(items)} entries, but num_hidden_layers is {layers}; give one for each layer"
            )
        for layer, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, int | str) or item not in meanings:
                raise section.error(f"{name} holds {show(item)} for layer {layer}; expected {either(meanings)}")
        found = tuple(meanings[item] for item in items)
        for layer, (one, other) in enumerate(zip(result, found, strict=False)):
            if one != other:
                raise section.error(
                    f"{first} and {name} contradict each other: layer {layer} is {one!r} and {other!r}; keep one"
                )
        first, result = first or name, found
    if not first:
        names = " and ".join(section.name(key) for section, key in places)
        raise places[0][0].error(f"{names} missing; there is no default for the kinds of the layers")
    return result


def _check_index_values(sparse: Section, layer_types: tuple[LayerType, ...]) -> None:
    """Refuse an index branch with values of its own, whose tensors no published checkpoint has."""
    key = "sparse_disable_index_value"
    value = sparse.get(key)
    if value is None or (is_int(value) and value == 1):
        return
    if not isinstance(value, list) or len(value) != len(layer_types):
        raise sparse.error(f"{sparse.name(key)} {show(value)} is not a list of 1, one for each layer")
    for layer, (item, kind) in enumerate(zip(value, layer_types, strict=True)):
        if kind == "minimax_m3_sparse" and not (is_int(item) and item == 1):
            raise sparse.error(f"{sparse.name(key)} holds {show(item)} for layer {layer}; only 1 is supported")


def _check_rotary(text: Section, rotary_dim: int, head_dim: int) -> None:
    """Refuse a `rotary_dim` that transformers, to judge by its spelling the writer of the file, does not follow.

    Its class keeps the key, but turns `partial_rotary_factor` of a head, all of it where that is absent.
    """
    rope = text.section("rope_parameters")
    factors = [place.get("partial_rotary_factor") for place in (text, rope) if place is not None]
    if rope is not None and rope.data and rotary_dim != head_dim and set(factors) == {None}:
        raise text.error(
            f"{text.name('rotary_dim')} {rotary_dim} beside {text.name('rope_parameters')} without "
            f"partial_rotary_factor, with which transformers turns all {head_dim} channels of a head; add "
            f"partial_rotary_factor {rotary_dim / head_dim} or, for all, set rotary_dim to {head_dim}"
        )


def _stretched(text: Section, yarn: YarnScaling, stated: int) -> int:
    """Positions of a model with YaRN: those it stretches to, also where the file states the original length."""
    if stated > yarn.max_positions:
        raise text.error(
            f"{text.name('max_position_embeddings')} {stated} is more than YaRN's factor {yarn.factor} times "
            f"original_max_position_embeddings {yarn.original_max_position_embeddings}, which is {yarn.max_positions}; "
            "lower it, or raise the factor"
        )
    return yarn.max_positions


def _read_activation(text: Section) -> dict[str, float]:
    """The constants of SwiGLU-OAI; a beta that is absent, as it is in the published file, is the class's."""
    found = {name: text.number(name) for name in ("swiglu_alpha", "swiglu_limit")}
    check_missing(text, found)
    beta = text.number("swiglu_beta", allow_zero=True)
    return {name: value for name, value in {**found, "swiglu_beta": beta}.items() if value is not None}


def _read_quantization(places: list[Section]) -> QuantizationConfig | None:
    """`quantization_config` of the file or of its text part."""
    found = [config for place in places if (config := read_quantization_of(place)) is not None]
    if any(config != found[0] for config in found):
        names = " and ".join(place.name("quantization_config") for place in places)
        raise places[0].error(f"{names} contradict each other; keep one")
    return found[0] if found else None


def either(kinds: Iterable[Any]) -> str:
    """What may stand, for a message."""
    return " or ".join(map(repr, kinds))
