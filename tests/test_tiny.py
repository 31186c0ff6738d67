"""make-tiny writes whole checkpoints in the published layout, the same bytes each time, or nothing."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from minimax_jax import tiny
from minimax_jax.config import Parallelism, load_config, load_generation_defaults
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.text.tokenizer import check_vocabulary, load_tokenizer
from minimax_jax.text.train import EOS, TURN
from minimax_jax.tiny import WEIGHT_FORMATS, TinyShape, WeightFormat, make_tiny
from tests.packed import decode_all, read_checkpoint

# Every key of the published config.json.
PUBLISHED_KEYS = {
    "architectures", "model_type", "auto_map", "vocab_size", "hidden_size", "intermediate_size",
    "shared_intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rotary_dim", "rope_theta", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attn_type_list",
    "num_local_experts", "num_experts_per_tok", "scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type",
    "tie_word_embeddings", "use_cache", "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "transformers_version",
}  # fmt: skip
SMALL = TinyShape(num_hidden_layers=1, vocab_size=512)


@pytest.fixture(scope="module", params=WEIGHT_FORMATS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[WeightFormat, Path]:
    start = time.monotonic()
    directory = make_tiny(tmp_path_factory.mktemp("made") / "tiny", weight_format=request.param)
    assert time.monotonic() - start < 30
    return request.param, directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}


def load_file(path: Path) -> dict[str, np.ndarray]:
    """With the safetensors library's own reader of the format; its numpy one knows no float8."""
    return {
        name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in deserialize(path.read_bytes())
    }


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def test_the_files_are_those_of_a_published_checkpoint(made: tuple[WeightFormat, Path]) -> None:
    weight_format, directory = made
    assert set(contents(directory)) == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
        *(f"model-{i:05d}-of-00003.safetensors" for i in range(3)),
    }  # fmt: skip
    keys = set(json.loads((directory / "config.json").read_text()))
    assert keys - {"quantization_config"} == PUBLISHED_KEYS
    assert ("quantization_config" in keys) == (weight_format not in ("bf16", "float32"))
    total = sum(len(data) for data in contents(directory).values())
    assert total < 20e6
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(directory).values())
    for file in {*index["weight_map"].values()}:
        listed = {name for name, where in index["weight_map"].items() if where == file}
        assert set(load_file(directory / file)) == listed
    sizes = [(directory / file).stat().st_size for file in {*index["weight_map"].values()}]
    assert max(sizes) < 1.5 * min(sizes)


def test_dtypes_are_the_published_ones(made: tuple[WeightFormat, Path]) -> None:
    weight_format, directory = made
    e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
    payload = {"fp8": e4m3, "mxfp8": e4m3, "mxfp4": np.dtype(np.uint8), "nvfp4": np.dtype(np.uint8)}
    scale = {"fp8": np.dtype(np.float32), "mxfp8": np.dtype(np.uint8), "mxfp4": np.dtype(np.uint8), "nvfp4": e4m3}
    plain = np.dtype(np.float32 if weight_format == "float32" else ml_dtypes.bfloat16)
    for name, tensor in tensors(directory).items():
        packed = ".experts." in name or ("_proj" in name and weight_format in ("fp8", "mxfp8"))
        if name.endswith(("gate.weight", "e_score_correction_bias", "weight_scale_2")):
            expected = np.dtype(np.float32)
        elif name.endswith(("weight_scale", "weight_scale_inv")):
            expected = scale[weight_format]
        elif weight_format in payload and packed:
            expected = payload[weight_format]
        else:
            expected = plain
        assert tensor.dtype == expected, name


def test_no_tensor_hides_a_mistake(made: tuple[WeightFormat, Path]) -> None:
    """Norms are not all ones, the bias is not zero, w1 and w3 differ in size, the gate needs float32."""
    _, directory = made
    config = load_config(directory)
    H, K = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found = tensors(directory)
    for name, tensor in found.items():
        if "norm" in name:
            assert tensor.astype(np.float32).std() > 0.1, name
        if name.endswith("e_score_correction_bias"):
            assert np.abs(tensor).max() > 0.01
        if name.endswith("gate.weight"):
            assert (tensor != tensor.astype(ml_dtypes.bfloat16).astype(np.float32)).any()
    attention = "model.layers.0.self_attn"
    assert found[f"{attention}.q_norm.weight"].shape == (H,)
    assert found[f"{attention}.k_norm.weight"].shape == (K,)
    exact = decode_all(read_checkpoint(directory))
    w1, w3 = (exact[f"model.layers.0.block_sparse_moe.experts.0.{w}.weight"] for w in ("w1", "w3"))
    assert w1.std() > 1.5 * w3.std()


def test_the_formats_hold_the_same_weights(tmp_path: Path) -> None:
    made = {f: read_checkpoint(make_tiny(tmp_path / f, weight_format=f, shape=SMALL)) for f in WEIGHT_FORMATS}
    each = {f: decode_all(found) for f, found in made.items()}
    for f in WEIGHT_FORMATS:
        assert each[f].keys() == made["float32"].keys()
    for name, exact in each["float32"].items():
        if name.endswith(("e_score_correction_bias", "gate.weight")):
            assert all((each[f][name] == exact).all() for f in WEIGHT_FORMATS)
            continue
        largest = np.abs(exact).max()
        assert np.abs(each["bf16"][name] - exact).max() <= largest / 256
        # A value is off by at most half a step: 1/16 of itself, or of the smallest normal number 2**-6.
        for f in ("fp8", "mxfp8"):
            error = np.abs(each[f][name] - exact)
            assert (error <= np.abs(exact) / 15 + largest / 448 / 256).all(), name
        # Half of the step from 4 to 6, and for MXFP4 what lies between 6 and 7 of its power of two.
        assert np.abs(each["nvfp4"][name] - exact).max() <= largest / 5, name
        assert np.abs(each["mxfp4"][name] - exact).max() <= largest / 4, name


def test_tokenizer_config_and_defaults_fit_each_other(made: tuple[WeightFormat, Path]) -> None:
    _, directory = made
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    check_vocabulary(tokenizer, config.vocab_size)
    assert config.vocab_size % 16 == 0
    assert 0 < config.vocab_size - tokenizer.vocab_size <= 16  # as published, a few rows without a token
    eos = tokenizer.token_id(EOS)
    assert eos is not None
    assert load_generation_defaults(directory, config).eos_token_ids == (eos,) == tokenizer.eos_token_ids
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["bos_token_id"] == tokenizer.token_id(TURN)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("experts", ["tensor", "expert"])
@pytest.mark.parametrize("model", [1, 2, 4, 8])
def test_every_mesh_can_cut_it_and_every_tensor_is_used(
    made: tuple[WeightFormat, Path], model: int, experts: Any
) -> None:
    import jax.numpy as jnp

    from minimax_jax.checkpoint import open_checkpoint, plan_parameters
    from minimax_jax.model import abstract_parameters

    _, directory = made
    config = load_config(directory)
    parallelism = Parallelism(model=model, experts=experts)
    config.check_parallelism(parallelism)
    specs = abstract_parameters(config, parallelism)
    plan = plan_parameters(open_checkpoint(directory), config, specs, parallelism, jnp.bfloat16)
    assert plan.ignored == ()
    assert plan.weights.keys() == specs.keys()
    plan.check_scales()


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_the_same_arguments_give_the_same_bytes(weight_format: WeightFormat, tmp_path: Path) -> None:
    a, b, other = (
        contents(make_tiny(tmp_path / name, seed=seed, weight_format=weight_format, shape=SMALL))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert a == b
    assert a["tokenizer.json"] == other["tokenizer.json"]
    assert a["model-00000-of-00003.safetensors"] != other["model-00000-of-00003.safetensors"]


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        make_tiny(tmp_path, shape=SMALL)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_file_is_no_destination(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        make_tiny(tmp_path / "file", shape=SMALL)
    with pytest.raises(CheckpointError, match=r"/file is a file"):
        make_tiny(tmp_path / "file" / "x" / "y", shape=SMALL)
    with pytest.raises(CheckpointError, match=r"^cannot write /proc/no-such-place: [^\n]*$"):
        make_tiny("/proc/no-such-place", shape=SMALL)


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    inode = (tmp_path / "empty").stat().st_ino
    a = contents(make_tiny(tmp_path / "empty", shape=SMALL))
    assert (tmp_path / "empty").stat().st_ino == inode  # it may be a mount, or where the user stands
    assert a == contents(make_tiny(tmp_path / "new" / "deep", shape=SMALL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["deep"]


def test_files_have_the_users_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        directory = make_tiny(tmp_path / "a", shape=SMALL)
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o644}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, error: BaseException
) -> None:
    destination = tmp_path / "a"
    if exists:
        destination.mkdir()
    calls = []

    def save(*_: Any, **__: Any) -> bytes:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return b"x"

    monkeypatch.setattr(tiny, "save", save)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        make_tiny(destination, shape=SMALL)
    assert len(calls) == 2
    if isinstance(caught.value, CheckpointError):
        assert str(caught.value) == f"cannot write {destination}: No space left on device"
    assert [path.name for path in tmp_path.rglob("*")] == (["a"] if exists else [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_format": "int4"}, "format is 'int4'"),
        ({"seed": -1}, "seed is -1"),
        ({"shape": TinyShape(num_hidden_layers=0)}, "num_hidden_layers is 0"),
        ({"shape": TinyShape(vocab_size=100)}, "vocab_size is 100"),
        (
            {"shape": TinyShape(hidden_size=80), "weight_format": "mxfp4"},
            "hidden_size is 80; mxfp4 needs a multiple",
        ),
        ({"shape": TinyShape(intermediate_size=24), "weight_format": "nvfp4"}, "intermediate_size is 24; nvfp4 needs"),
        (
            {"shape": TinyShape(head_dim=2), "weight_format": "mxfp8"},
            "num_attention_heads x head_dim is 16; mxfp8",
        ),
    ],
)
def test_impossible_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny(tmp_path / "a", **arguments)
    assert not (tmp_path / "a").exists()


@pytest.mark.oracle
@pytest.mark.parametrize("weight_format", ["bf16", "float32"])
def test_transformers_loads_it_whole(tmp_path: Path, weight_format: WeightFormat) -> None:
    import torch
    import transformers

    directory = make_tiny(tmp_path / "a", weight_format=weight_format)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    foreign = transformers.AutoTokenizer.from_pretrained(directory)
    own = load_tokenizer(directory)
    assert own is not None
    messages = [{"role": "user", "content": "Tom has 12 apples. 温度?"}]
    ids = own.apply_chat_template(messages)
    assert list(foreign.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == ids
    logits = model(torch.tensor([ids])).logits
    assert 0.5 < logits.std() < 5
