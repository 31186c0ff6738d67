"""M3 configs that other programs wrote: checkpoints beside the checkout, transformers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.config import (
    GenerationDefaults,
    MiniMaxM3Config,
    ModelConfig,
    VisionConfig,
    load_config,
    load_generation_defaults,
)
from minimax_jax.errors import ConfigError

# ---- checkpoints beside the checkout

NAMES = ("m3-bf16", "m3-mxfp8", "m3-mxfp4-quark", "m3-nvfp4-quark", "m3-nvfp4-quark-inmem")
SHARED = MiniMaxM3Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    dense_intermediate_size=512,
    shared_intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    rotary_dim=16,
    rope_theta=5e6,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    num_local_experts=8,
    num_experts_per_tok=2,
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    layer_types=("full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"),
    index_n_heads=2,
    index_head_dim=32,
    index_topk_blocks=3,
    index_block_size=16,
    routed_scaling_factor=2.0,
    vision=VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        patch_size=14,
        projector_hidden_size=128,
    ),
    image_token_id=505,
    video_token_id=506,
)


@pytest.mark.parametrize("name", NAMES)
def test_shared_checkpoints(shared: Path, name: str) -> None:
    directory = shared / "data" / "checkpoints" / name
    config = load_config(directory)
    assert dataclasses.replace(config, quantization=None) == SHARED
    method = None if config.quantization is None else config.quantization.quant_method
    assert method == {"m3-bf16": None, "m3-mxfp8": "mxfp8"}.get(name, "quark")
    assert load_generation_defaults(directory, config) == GenerationDefaults(
        temperature=1.0, top_p=0.95, eos_token_ids=(500,), do_sample=True
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", NAMES[1:])
def test_what_the_shared_checkpoints_exclude(shared: Path, name: str) -> None:
    """The names of the list carry the vision-language prefix, those of the tensors need not."""
    quantization = load_config(shared / "data" / "checkpoints" / name).quantization
    assert quantization is not None
    assert quantization.declared("lm_head") is None
    attention = "model.layers.1.self_attn.q_proj"
    assert (quantization.declared(attention) is None) == (name != "m3-mxfp8")
    assert quantization.declared("model.layers.1.block_sparse_moe.experts.0.w1") is not None


# ---- files that transformers itself writes

TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 3,
    "routed_scaling_factor": 1.5,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 6.0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 7,
    "spatial_merge_size": 3,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN: dict[str, Any] = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OURS = MiniMaxM3Config(
    **{name: tuple(value) if isinstance(value, list) else value for name, value in TEXT.items()},
    rope_theta=1e4,
    vision=VisionConfig(**VISION, projector_hidden_size=40),
    image_token_id=7,
    video_token_id=8,
)


def theirs(text: dict[str, Any], **changes: Any) -> Any:
    """transformers' config of the sizes above."""
    transformers = pytest.importorskip("transformers")
    around: dict[str, Any] = {"image_token_index": 7, "video_token_index": 8, "projector_hidden_size": 40, **changes}
    return transformers.MiniMaxM3VLConfig(text_config={**TEXT, **text}, vision_config=dict(VISION), **around)


def read_by_transformers(config: MiniMaxM3Config) -> Any:
    """transformers' config of our published spelling, whose vision keys it does not all know; nor `torch_dtype`."""
    transformers = pytest.importorskip("transformers")
    data = config.to_dict()
    data["vision_config"].pop("model_type")  # which would make it build a CLIP's config
    compression = data["vision_config"].pop("img_token_compression_config")
    data["vision_config"] |= {name: compression[name] for name in ("spatial_merge_size", "temporal_patch_size")}
    if not config.eos_token_ids:
        data["text_config"]["eos_token_id"] = None
    del data["torch_dtype"]
    return transformers.MiniMaxM3VLConfig.from_dict(data)


def same_text(config: MiniMaxM3Config, text: Any) -> None:
    """Each field of ours has the value that transformers computes with."""
    for name in sorted(TEXT.keys() - {"rotary_dim"}):
        mine, other = getattr(config, name), getattr(text, name)
        assert mine == (tuple(other) if isinstance(other, list) else other), name
    assert config.rope_theta == text.rope_parameters["rope_theta"]
    assert config.rotary_dim == int(text.head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0))


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"rope_parameters": dict(ROPE)}, {}),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {}),
        ({"rope_parameters": dict(ROPE), "dtype": "float32"}, {"dtype": "float32"}),
        ({"rope_parameters": dict(ROPE), "eos_token_id": [3, 4]}, {"eos_token_ids": (3, 4)}),
        ({"rope_parameters": {"rope_theta": 1e4}, "rotary_dim": 16}, {"rotary_dim": 16}),
    ],
)
def test_save_pretrained(tmp_path: Path, spelling: dict[str, Any], expected: dict[str, Any]) -> None:
    written = theirs(spelling)
    written.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config == dataclasses.replace(OURS, **expected)
    same_text(config, written.text_config)  # type: ignore[arg-type]
    assert MiniMaxM3Config.from_dict(written.to_dict()) == config
    # Ours, read by transformers, says the same; and so does what transformers then writes.
    back = read_by_transformers(config)
    same_text(config, back.text_config)
    assert back.vision_config.spatial_merge_size == 3
    assert back.vision_config.rope_parameters["rope_theta"] == 1e4
    assert MiniMaxM3Config.from_dict(back.to_dict()) == dataclasses.replace(config, dtype="bfloat16")


def test_text_part_of_transformers_alone(tmp_path: Path) -> None:
    written = theirs({"rope_parameters": dict(ROPE)})
    written.text_config.save_pretrained(tmp_path)
    alone = dataclasses.replace(OURS, vision=None, image_token_id=None, video_token_id=None)
    assert load_config(tmp_path) == alone


@pytest.mark.oracle
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.9},
        {"factor": 1.0, "original_max_position_embeddings": 512},
        {"original_max_position_embeddings": None},
    ],
)
def test_yarn_of_transformers(tmp_path: Path, place: str, changes: dict[str, Any]) -> None:
    """The scaling of cos and sin is what transformers computes, and what it writes is read."""
    pytest.importorskip("torch")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {key: value for key, value in {**YARN, **changes}.items() if value is not None}
    written = theirs({place: scaling})
    written.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.yarn is not None
    _, attention_factor = rope_utils._compute_yarn_parameters(written.text_config)
    assert config.yarn.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    for name in ("factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"):
        default = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "original_max_position_embeddings": 512}
        assert getattr(config.yarn, name) == scaling.get(name, default.get(name))
    assert (config.rope_theta, config.rotary_dim) == (1e4, 8)
    # Through our spelling transformers computes the same table, and what it then writes is the same config.
    back = read_by_transformers(config)
    frequencies, _ = rope_utils._compute_yarn_parameters(written.text_config)
    theirs_back, factor = rope_utils._compute_yarn_parameters(back.text_config)
    assert theirs_back.tolist() == frequencies.tolist()
    assert factor == config.yarn.attention_factor
    assert MiniMaxM3Config.from_dict(back.to_dict()) == config


def test_rope_at_the_top_level_changes_nothing_in_transformers() -> None:
    """Why it is refused here (known failure 52): transformers keeps the key and computes without it."""
    plain = theirs({"rope_parameters": dict(ROPE)})
    outside = theirs({"rope_parameters": dict(ROPE)}, rope_theta=2e4, rotary_dim=4)
    assert outside.text_config.to_dict() == plain.text_config.to_dict()
    for key, value in (("rope_theta", 2e4), ("rope_scaling", YARN), ("rope_parameters", YARN)):
        with pytest.raises(ConfigError, match=rf"{key} .*text_config"):
            MiniMaxM3Config.from_dict({**plain.to_dict(), key: value})
    with pytest.raises(ConfigError, match=r"rotary_dim 4 at the top level and text_config.rotary_dim 8 contradict"):
        MiniMaxM3Config.from_dict({**outside.to_dict(), "rope_theta": None})


def test_defaults_of_the_transformers_class(m3: MiniMaxM3Config, published_m3: dict[str, Any]) -> None:
    """Its own lists of layers, and a rotary size that it does not follow itself; the rest is the published model."""
    transformers = pytest.importorskip("transformers")
    data = transformers.MiniMaxM3VLConfig().to_dict()
    with pytest.raises(ConfigError, match=r"rotary_dim 64 beside .* turns all 128 channels"):
        MiniMaxM3Config.from_dict(data)
    data["text_config"]["rope_parameters"]["partial_rotary_factor"] = 0.5
    expected = dataclasses.replace(
        m3,
        max_position_embeddings=524288,
        mlp_layer_types=("sparse",) * 60,
        layer_types=("full_attention",) * 60,
        eos_token_ids=(200020,),
    )
    assert MiniMaxM3Config.from_dict(data) == expected
    # The published file through transformers and back.
    del published_m3["vision_config"]["model_type"]  # transformers' loader coerces it
    read = transformers.MiniMaxM3VLConfig.from_dict(published_m3)
    assert MiniMaxM3Config.from_dict(read.to_dict()) == dataclasses.replace(m3, eos_token_ids=(200020,))


def test_transformers_generics_are_no_unknown_keys(m3: MiniMaxM3Config, published_m3: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    generics = {
        **dict.fromkeys(transformers.GenerationConfig._get_default_generation_params(), 1),
        **transformers.PretrainedConfig().to_dict(),
    }
    published = published_m3["text_config"], published_m3["vision_config"]
    defaults = transformers.MiniMaxM3VLConfig(text_config=published[0]).to_dict()
    merged = {**generics, **defaults, **published_m3}
    for key, mine in zip(("text_config", "vision_config"), published, strict=True):
        merged[key] = {**generics, **defaults[key], **mine}
    assert MiniMaxM3Config.from_dict(merged) == dataclasses.replace(m3, eos_token_ids=(200020,))


def test_random_sizes_through_transformers(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        layers, heads, kv_heads = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 4)
        head_dim = rng.choice([8, 16, 32])
        rotary_dim = rng.randrange(2, head_dim + 1, 2)
        text = {
            "num_hidden_layers": layers,
            "num_attention_heads": heads * kv_heads,
            "num_key_value_heads": kv_heads,
            "index_n_heads": kv_heads,
            "head_dim": head_dim,
            "index_head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "rope_parameters": {
                "rope_theta": float(rng.randint(2, 10**7)),
                "partial_rotary_factor": rotary_dim / head_dim,
            },
            "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(layers)],
            "layer_types": [rng.choice(["full_attention", "minimax_m3_sparse"]) for _ in range(layers)],
            "index_topk_blocks": rng.randint(1, 20),
            "swiglu_limit": rng.uniform(0.5, 10),
            "routed_scaling_factor": rng.uniform(0.5, 3),
        }
        written = theirs(text)
        written.save_pretrained(tmp_path)
        config = load_config(tmp_path)
        assert isinstance(config, MiniMaxM3Config)
        same_text(config, written.text_config)
        assert MiniMaxM3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_saved_model_brings_class_defaults_for_eos(tmp_path: Path) -> None:
    """eos 200020 is not in a small model's vocabulary, in neither file an error; nor are its placeholders."""
    transformers = pytest.importorskip("transformers")
    written = transformers.MiniMaxM3VLConfig(text_config={**TEXT, "rope_parameters": dict(ROPE)})
    written.save_pretrained(tmp_path)
    transformers.GenerationConfig.from_model_config(written).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert isinstance(config, MiniMaxM3Config)
    assert (config.eos_token_ids, config.image_token_id, config.video_token_id) == ((), None, None)
    assert load_generation_defaults(tmp_path, config) == GenerationDefaults()


# ---- generation_config.json


def test_generation_defaults(m3: MiniMaxM3Config, tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path, m3) == GenerationDefaults()
    own = dataclasses.replace(m3, eos_token_ids=(7,))
    assert load_generation_defaults(tmp_path, own).eos_token_ids == (7,)
    data = {"bos_token_id": 200019, "do_sample": True, "eos_token_id": 200020, "temperature": 1.0, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    assert load_generation_defaults(tmp_path, own) == GenerationDefaults(
        temperature=1.0, top_p=0.95, top_k=0, eos_token_ids=(200020,), do_sample=True
    )
    with pytest.raises(ConfigError, match="eos_token_id 200020 is outside the vocabulary of 200010"):
        load_generation_defaults(
            tmp_path, dataclasses.replace(m3, vocab_size=200010, image_token_id=None, video_token_id=None)
        )


def test_hf_quant_config_beside(m3: MiniMaxM3Config, published_m3: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_m3))
    exclude = ["lm_head", "language_model.model.layers.*.self_attn*"]
    quantization = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": exclude}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    config = load_config(tmp_path)
    assert config.quantization is not None
    assert config.quantization.quant_method == "modelopt"
    assert config.quantization.declared("model.layers.5.self_attn.q_proj") is None
    assert dataclasses.replace(config, quantization=None) == m3
