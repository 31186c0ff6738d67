"""`minimax-jax quantize`: rounding rules, whole directories, refusals, and what a failure leaves behind."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minimax_jax import LLM, quantize
from minimax_jax.checkpoint import open_checkpoint, shard_writer
from minimax_jax.checkpoint.quantizers import (
    decode_e4m3,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from minimax_jax.checkpoint.recipes import PACKED_FORMATS, PackedFormat
from minimax_jax.checkpoint.shard_writer import ShardWriter
from minimax_jax.cli import main
from minimax_jax.config import load_config
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.quantize import quantize_checkpoint
from minimax_jax.tiny import TinyShape, WeightFormat, make_tiny
from tests.checkpoint.altered import alter, load
from tests.checkpoints import FIXTURES
from tests.packed import decode, decode_all, e4m3_values, read_checkpoint, read_safetensors

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
SMALL = TinyShape(num_hidden_layers=1, vocab_size=512)
MOE = "model.layers.0.block_sparse_moe"
RULES = {"mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4, "mxfp8": quantize_mxfp8, "fp8": quantize_fp8}


def matrix(seed: int, rows: int = 64, cols: int = 256) -> np.ndarray:
    """Levels that differ from block to block, as bfloat16 or float32 values, with zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols)) * 2.0 ** rng.uniform(-12, 6, (rows, cols // 16)).repeat(16, axis=1)
    values[rng.random((rows, cols)) < 0.02] = 0
    return values.astype(ml_dtypes.bfloat16 if seed % 2 else np.float32).astype(np.float32)


def codes_of(payload: np.ndarray) -> np.ndarray:
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1)


def no_sign_of_zero(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 8, 0, codes)


# ---- rounding rules


@pytest.fixture(scope="module")
def vectors(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "data" / "fp4_vectors.json").read_text())


def hexes(words: list[str]) -> np.ndarray:
    return np.array([int(word, 16) for word in words], np.uint8)


def test_elements_round_as_the_vectors_say(vectors: dict[str, Any]) -> None:
    """Each beside a 4, which makes the block's scale one; what is larger than 6 saturates."""
    for entry in vectors["e2m1_rounding_RNE_saturating"]:
        block = np.full((1, 32), 4, np.float32)
        block[0, 5] = entry["x"]
        if abs(entry["x"]) >= 7:
            continue  # would change the scale
        payload, scale = quantize_mxfp4(block)
        assert scale[0, 0] == 127
        code = codes_of(payload)[0, 5]
        assert code == no_sign_of_zero(np.array(int(entry["code"], 16))), entry
        assert code != 8  # as Quark writes it


def test_scale_bytes_of_the_even_rule(vectors: dict[str, Any]) -> None:
    for entry in vectors["mx_scale_byte_by_mode_from_amax"]:
        block = np.zeros((1, 32), np.float32)
        block[0, 17] = -entry["amax"]
        assert quantize_mxfp4(block)[1][0, 0] == entry["even"], entry


def test_quantised_vectors(vectors: dict[str, Any]) -> None:
    case = vectors["mxfp4_quantise"]
    payload, scale = quantize_mxfp4(np.array(case["x"], np.float32)[None])
    assert (scale[0] == hexes(case["even"]["scale_u8"])).all()
    assert (codes_of(payload) == no_sign_of_zero(codes_of(hexes(case["even"]["weight_u8"])[None]))).all()
    case = vectors["nvfp4_quantise"]
    payload, block, whole = quantize_nvfp4(np.array(case["x"], np.float32)[None])
    assert whole.view(np.uint32) == int(case["weight_scale_2_f32_bits"], 16)
    assert (block.view(np.uint8)[0] == hexes(case["weight_scale_e4m3"])).all()
    assert (codes_of(payload) == no_sign_of_zero(codes_of(hexes(case["weight_u8"])[None]))).all()


@pytest.mark.parametrize("parity", [0, 1], ids=["float32", "bfloat16"])
def test_each_rule_against_plain_arithmetic(seed: int, parity: int) -> None:
    """Element by element, in float64 and ml_dtypes' casts."""
    weight = matrix(2 * (seed // 2) + parity)
    blocks = weight.reshape(len(weight), -1, 32).astype(np.float64)
    largest = np.abs(blocks).max(axis=-1)
    mantissa, exponent = np.frexp(largest)  # mantissa from 0.5 on
    payload, scale = quantize_mxfp4(weight)
    assert (scale == exponent - 1 + (mantissa >= 0.875) - 2 + 127).all()
    values = np.ldexp(blocks, (127 - scale.astype(int))[..., None]).astype(np.float32)
    want = np.clip(values, -6, 6).astype(E2M1).view(np.uint8).reshape(weight.shape)
    assert (codes_of(payload) == no_sign_of_zero(want)).all()

    payload, scale = quantize_mxfp8(weight)
    assert (np.ldexp(448.0, scale.astype(int) - 127) >= largest).all()
    assert (np.ldexp(448.0, scale.astype(int) - 128) < largest).all()  # no smaller one would do
    want = np.ldexp(blocks, (127 - scale.astype(int))[..., None]).astype(np.float32).astype(E4M3)
    assert (payload.view(np.uint8) == want.view(np.uint8).reshape(weight.shape)).all()

    payload, scale, whole = quantize_nvfp4(weight)
    assert whole == np.abs(weight).max() / np.float32(2688)
    sixteens = weight.reshape(len(weight), -1, 16)
    want = (np.maximum(np.abs(sixteens).max(axis=-1) / np.float32(6), np.finfo(np.float32).eps) / whole).astype(E4M3)
    assert (scale.view(np.uint8) == want.view(np.uint8)).all()
    step = (want.astype(np.float32) * whole)[..., None]
    kept = np.broadcast_to(step > 0, sixteens.shape)  # the others are zeros whatever their codes
    values = np.divide(sixteens, step, out=np.zeros_like(sixteens), where=kept).clip(-6, 6)
    want = values.astype(E2M1).view(np.uint8)
    assert (codes_of(payload).reshape(want.shape)[kept] == no_sign_of_zero(want)[kept]).all()
    assert kept.mean() > 0.5


@pytest.mark.parametrize("shape", [(128, 128), (64, 128), (130, 300), (1, 1), (257, 129)])
def test_fp8_blocks_keep_their_largest_value(shape: tuple[int, int], seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    payload, scale = quantize_fp8(weight)
    assert payload.shape == shape
    assert scale.shape == tuple(-(-n // 128) for n in shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            assert np.abs(payload[block].astype(np.float32)).max() == 448
            assert scale[i, j] == np.abs(weight[block]).max() / np.float32(448)
            want = (weight[block] / scale[i, j]).clip(-448, 448).astype(E4M3)
            assert (payload[block].view(np.uint8) == want.view(np.uint8)).all()


def test_zeros_stay_zeros() -> None:
    zeros = np.zeros((3, 64), np.float32)
    payload, scale = quantize_mxfp4(zeros)
    assert not payload.any()
    assert (scale == 1).all()  # as Quark writes it
    payload, scale, whole = quantize_nvfp4(zeros)
    assert not payload.any()
    assert (scale.view(np.uint8) == 0x38).all()  # as Quark, which makes both scales its epsilon
    assert whole == np.finfo(np.float32).eps
    weight = np.vstack([zeros, np.ones((1, 64), np.float32)])
    payload, scale, whole = quantize_nvfp4(weight)
    assert not payload[:3].any()
    assert not scale[:3].view(np.uint8).any()
    payload, scale = quantize_mxfp8(zeros)
    assert not payload.view(np.uint8).any()
    payload, scale = quantize_fp8(zeros)
    assert not payload.view(np.uint8).any()
    assert (scale == 1).all()


def test_extremes_decode_to_finite_values_near_them() -> None:
    for size in (1e-45, 2.0**-127, 2.0**-126, 1e-30, 3.0e38):
        weight = np.full((1, 32), size, np.float32)
        weight[0, ::2] *= -1
        payload, scale = quantize_mxfp4(weight)
        tensors = {"w": payload, "w_scale": scale}
        got = decode(tensors, "w")
        assert np.isfinite(got).all()
        assert np.abs(got - weight).max() <= max(0.34 * size, 2.0**-126)
        payload, scale = quantize_mxfp8(weight)
        with np.errstate(over="ignore"):
            got = decode({"w": e4m3_values()[payload.view(np.uint8)], "w_scale_inv": scale}, "w")
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, weight, rtol=1 / 16, atol=2.0**-136)


def test_e4m3_table() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode_e4m3(codes.view(E4M3)), e4m3_values())


# ---- a file, a part at a time


def test_parts_in_any_order_make_the_file_that_the_library_reads(tmp_path: Path, seed: int) -> None:
    from safetensors import deserialize

    rng = np.random.default_rng(seed)
    tensors = {
        "a.scale": rng.integers(256, size=(7, 3), dtype=np.uint8),
        "b": rng.standard_normal((5, 2, 3)).astype(np.float32),
        "scalar": np.float32(3.5),
        "c": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
    }
    names = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16"}
    layout = {name: (names[value.dtype.name], value.shape) for name, value in tensors.items()}
    with ShardWriter(tmp_path / "x.safetensors", layout) as writer:
        for name, value in reversed(tensors.items()):
            for i in reversed(range(value.shape[0] if value.shape else 1)):
                writer.write(name, value[i : i + 1] if value.shape else value, i)
    found = dict(deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert bytes(found[name]["data"]) == value.tobytes()
        assert tuple(found[name]["shape"]) == value.shape


# ---- directories


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny(tmp_path_factory.mktemp("source") / "bf16", shape=SMALL)
    (directory / "notes").mkdir()
    (directory / "notes" / "a.txt").write_text("kept")
    (directory / ".hidden").write_text("not kept")
    (directory / "stray.safetensors").write_bytes(b"not in the index")
    return directory


def listing(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("weight_format", PACKED_FORMATS)
def test_only_what_the_format_packs_changes(source: Path, tmp_path: Path, weight_format: PackedFormat) -> None:
    done = quantize_checkpoint(source, tmp_path / "out", weight_format)
    with open_checkpoint(source) as before, open_checkpoint(done.directory) as after:
        packed = [name for name in before.tensors if after.tensors[name].dtype in ("U8", "F8_E4M3")]
        experts = [name for name in before.tensors if ".experts." in name]
        attention = [name for name in before.tensors if name.endswith("_proj.weight")]
        assert set(packed) == set(experts if weight_format in ("mxfp4", "nvfp4") else experts + attention)
        assert done.packed == len(packed)
        assert done.kept == len(before.tensors) - len(packed)
        for name, info in before.tensors.items():
            assert after.tensors[name].file == info.file
            if name not in packed:
                assert after.read(name).tobytes() == before.read(name).tobytes()
                assert after.tensors[name].dtype == info.dtype
        for name, info in after.tensors.items():
            assert info.offset % info.numpy_dtype.itemsize == 0
            if name not in before.tensors:
                assert info.file == before.tensors[re.sub(r"_scale(_2|_inv)?$", "", name)].file
    was, now = listing(source), listing(done.directory)
    same = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes/a.txt"]
    assert all(was[name] == now[name] for name in same)
    assert now.keys() == was.keys() - {".hidden", "stray.safetensors"}
    index = json.loads(now["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == done.bytes
    config = json.loads(now["config.json"])
    method = {"mxfp4": "quark", "nvfp4": "quark"}.get(weight_format, weight_format)
    assert config.pop("quantization_config")["quant_method"] == method
    assert config == json.loads(was["config.json"])
    load_config(done.directory)


@pytest.mark.parametrize("weight_format", PACKED_FORMATS)
def test_the_bytes_are_those_of_the_rules(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_format: PackedFormat
) -> None:
    """Taken in parts of 128 rows or whole: the same bytes, and those of the whole matrix."""
    whole = listing(quantize_checkpoint(source, tmp_path / "whole", weight_format).directory)
    monkeypatch.setattr(quantize, "_PART", 1000)
    parts = quantize_checkpoint(source, tmp_path / "parts", weight_format).directory
    assert listing(parts) == whole
    rule = RULES[weight_format]
    names = {"mxfp4": ("_scale",), "nvfp4": ("_scale", "_scale_2")}.get(weight_format, ("_scale_inv",))
    with open_checkpoint(source) as before, open_checkpoint(parts) as after:
        for expert in (f"{MOE}.experts.{e}.{w}.weight" for e in range(8) for w in ("w1", "w2", "w3")):
            for suffix, value in zip(("", *names), rule(before.read(expert).astype(np.float32)), strict=True):
                assert after.read(expert + suffix).tobytes() == value.tobytes(), expert + suffix
    if weight_format == "nvfp4":
        globals_ = read_checkpoint(parts)
        assert globals_[f"{MOE}.experts.0.w1.weight_scale_2"] != globals_[f"{MOE}.experts.0.w3.weight_scale_2"]


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "mxfp8"])
def test_an_fp8_source_is_decoded_first(tmp_path: Path, weight_format: PackedFormat) -> None:
    """Experts are packed from its exact values, its scales go, and what is not packed becomes bfloat16."""
    source = FIXTURES / "tiny-m2-fp8-block"
    before = read_checkpoint(source)
    if weight_format != "nvfp4":  # its rows of 16 are half an MX block
        with pytest.raises(CheckpointError, match=r"columns are a multiple of 32; .*--exclude"):
            quantize_checkpoint(source, tmp_path / "out", weight_format)
        source = make_tiny(tmp_path / "fp8", weight_format="fp8", shape=SMALL)
        before = read_checkpoint(source)
    after = read_checkpoint(quantize_checkpoint(source, tmp_path / "out", weight_format).directory)
    exact, got = decode_all(before), decode_all(after)
    assert exact.keys() == got.keys()
    for name in exact:
        if ".experts." in name or (weight_format == "mxfp8" and "_proj" in name):
            if weight_format == "nvfp4":
                payload, _, whole = quantize_nvfp4(exact[name])
                assert (after[name] == payload).all()
                assert after[f"{name}_scale_2"] == whole
            error = {"mxfp4": 0.26, "nvfp4": 0.2, "mxfp8": 0.07}[weight_format]
            assert np.abs(got[name] - exact[name]).max() <= error * np.abs(exact[name]).max()
        elif "_proj" in name:
            assert (got[name] == exact[name].astype(ml_dtypes.bfloat16).astype(np.float32)).all(), name
        else:
            assert (got[name] == exact[name]).all(), name
    config = load_config(tmp_path / "out")
    assert config.quantization is not None
    assert config.quantization.quant_method == ("mxfp8" if weight_format == "mxfp8" else "quark")


def test_m3s_norms_are_never_shifted(shared: Path, tmp_path: Path) -> None:
    """A Gemma norm's weight is an offset from one: written twice and loaded, zeros stay zeros, and all else itself."""
    m3 = shared / "data" / "checkpoints" / "m3-bf16"
    zeros = alter(m3, tmp_path / "zeros", add=lambda t: {n: 0 * v for n, v in t.items() if n.endswith("norm.weight")})
    for name, source in (("zeros", zeros), ("all", m3)):
        once = quantize_checkpoint(source, tmp_path / f"{name}-fp8", "fp8").directory
        twice = quantize_checkpoint(once, tmp_path / f"{name}-mxfp4", "mxfp4").directory
        _, before = load(source)
        norms = [path for path in before if "norm" in path]
        assert len(norms) == 4 * 4 + 1 + 3 * 2  # of each layer, of the whole, of each indexer
        for directory in (once, twice):
            _, after = load(directory)
            for path in norms:
                np.testing.assert_array_equal(np.asarray(after[path]), np.asarray(before[path]))
                assert np.asarray(after[path]).any() == (name == "all")


def test_excluded_modules_stay_and_are_named(source: Path, tmp_path: Path) -> None:
    exclude = ["*.experts.3.*", r"re:.*\.experts\.[45]\.w2$", f"{MOE}.experts.6.w1"]
    done = quantize_checkpoint(source, tmp_path / "out", "mxfp4", exclude=exclude)
    kept = [f"{MOE}.experts.{m}" for m in ("3.w1", "3.w2", "3.w3", "4.w2", "5.w2", "6.w1")]
    found = json.loads((done.directory / "config.json").read_text())["quantization_config"]["exclude"]
    attention = [f"model.layers.0.self_attn.{p}_proj" for p in "kqvo"]
    assert found == sorted(["lm_head", f"{MOE}.gate", *attention, *kept])
    tensors = read_checkpoint(done.directory)
    assert all(tensors[f"{module}.weight"].dtype == np.float32 for module in kept)
    assert tensors[f"{MOE}.experts.4.w1.weight"].dtype == np.uint8
    vendor = quantize_checkpoint(source, tmp_path / "fp8", "fp8", exclude=["*o_proj"]).directory
    found = json.loads((vendor / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert found == ["gate", "e_score_correction_bias", "lm_head", "model.layers.0.self_attn.o_proj"]


CHAIN = [("m2-bf16", "mxfp4", "m2-mxfp4-quark"), ("m2-bf16", "nvfp4", "m2-nvfp4-quark")]
CHAIN += [("m2-bf16", "fp8", "m2-fp8-block"), ("m3-bf16", "mxfp8", "m3-mxfp8")]
CHAIN += [("m3-bf16", "mxfp4", "m3-mxfp4-quark"), ("m3-bf16", "nvfp4", "m3-nvfp4-quark")]


@pytest.mark.parametrize(("name", "weight_format", "wanted"), CHAIN, ids=[wanted for *_, wanted in CHAIN])
def test_the_bytes_and_the_config_are_those_of_quark_and_the_vendor(
    shared: Path, tmp_path: Path, name: str, weight_format: PackedFormat, wanted: str
) -> None:
    """M2 and M3 with vision, against checkpoints that Quark 0.13 wrote; FP8 and MXFP8 against another script's."""
    checkpoints = shared / "data" / "checkpoints"
    done = quantize_checkpoint(checkpoints / name, tmp_path / "out", weight_format)
    with open_checkpoint(done.directory) as ours, open_checkpoint(checkpoints / wanted) as theirs:
        names = {name for name in theirs.tensors if not name.endswith("input_scale_2")}  # of a calibration
        assert ours.tensors.keys() == names
        for name in names:
            assert ours.tensors[name].dtype == theirs.tensors[name].dtype, name
            assert ours.tensors[name].shape == theirs.tensors[name].shape, name
            assert ours.read(name).tobytes() == theirs.read(name).tobytes(), name
            if "quark" in wanted:
                assert ours.tensors[name].file == theirs.tensors[name].file
    declared = [
        json.loads((directory / "config.json").read_text())["quantization_config"]
        for directory in (done.directory, checkpoints / wanted)
    ]
    if weight_format == "mxfp8":  # the order of the list
        for section in declared:
            section["ignored_layers"].sort()
    assert declared[0] == declared[1]


@pytest.mark.parametrize("weight_format", ["bf16", *PACKED_FORMATS])
def test_a_quantised_model_runs_and_is_near(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, weight_format: WeightFormat, capsys: Any
) -> None:
    """Through the command line; the same weights as `make-tiny --format` packs, so near the plain model's logits."""
    source = tmp_path_factory.getbasetemp() / "model-float32"
    if not source.exists():
        make_tiny(source, weight_format="float32", shape=SMALL)
    directory = source
    if weight_format != "bf16":
        directory = tmp_path / "out"
        assert main(["quantize", str(source), str(directory), "--format", weight_format]) == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert re.search(rf"wrote {directory}: \d+ weights as {weight_format}, ", err)
        made = make_tiny(tmp_path / "made", weight_format=weight_format, shape=SMALL)
        ours, theirs = read_checkpoint(directory), read_checkpoint(made)
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in ours if ".experts." in name)
        configs = [json.loads((path / "config.json").read_text()) for path in (directory, made)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    ids = list(range(1, 40))
    logits = LLM(directory, dtype="float32", max_num_seqs=1, max_model_len=64).logits(ids)
    assert np.isfinite(logits).all()
    plain = LLM(source, dtype="float32", max_num_seqs=1, max_model_len=64).logits(ids)
    difference = np.abs(logits - plain)
    print(weight_format, "mean difference", difference.mean(), "of", plain.std())
    limit = {"bf16": 0.0, "fp8": 0.15, "mxfp8": 0.15, "mxfp4": 0.6, "nvfp4": 0.5}[weight_format]
    assert difference.mean() <= limit * plain.std()
    assert weight_format == "bf16" or difference.max() > 1e-3  # it did run with the packed weights


# ---- memory


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A checkpoint of 400 MB in one shard by a process that may hold 150 MB more than it starts with."""
    rows, cols, experts = 512, 1024, 400
    layout = {f"{MOE}.experts.{e}.w1.weight": ("BF16", (rows, cols)) for e in range(experts)}
    source = tmp_path / "source"
    source.mkdir()
    weight = (np.random.default_rng(0).standard_normal((rows, cols))).astype(ml_dtypes.bfloat16)
    with ShardWriter(source / "model.safetensors", layout) as writer:
        for name in layout:
            writer.write(name, weight)
    (source / "config.json").write_text("{}")
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from minimax_jax.quantize import quantize_checkpoint\n"
        "peak = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) / 1e3\n"
        "before = peak()\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], sys.argv[3])\n"
        "print(peak() - before)\n"
    )
    for weight_format in ("nvfp4", "fp8"):
        command = [sys.executable, "-c", code, str(source), str(tmp_path / weight_format), weight_format]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(weight_format, done.stdout.strip(), "MB more")
        assert float(done.stdout) < 150


# ---- failures


def test_a_kill_in_the_middle_leaves_nothing_that_looks_whole(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from minimax_jax import quantize\n"
        "write = quantize._write_job\n"
        "def slow(*args):\n"
        "    time.sleep(0.05)\n"
        "    write(*args)\n"
        "quantize._write_job = slow\n"
        "print('ready', flush=True)\n"
        "quantize.quantize_checkpoint(sys.argv[1], sys.argv[2], 'mxfp4')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while not (left := list(tmp_path.glob(".out.partial-*/*.safetensors"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert left
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("config.json"))
    assert not list(tmp_path.rglob("*.index.json"))


def test_another_run_after_a_kill_says_what_is_left(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".out.partial-1").mkdir()
    quantize_checkpoint(source, tmp_path / "out", "mxfp4")
    assert f"{tmp_path / '.out.partial-1'} is left from a run that was cut short" in caplog.text
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, error: BaseException
) -> None:
    destination = tmp_path / "out"
    if exists:
        destination.mkdir()
    pwrite, calls = os.pwrite, []

    def failing(*args: Any) -> int:
        calls.append(1)
        if len(calls) == 30:
            raise error
        return pwrite(*args)

    monkeypatch.setattr(shard_writer.os, "pwrite", failing)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        quantize_checkpoint(source, destination, "nvfp4")
    if isinstance(caught.value, CheckpointError):
        assert str(caught.value) == f"cannot write {destination}: No space left on device"
    assert [path.name for path in tmp_path.rglob("*")] == (["out"] if exists else [])


def test_a_disk_that_is_too_small_is_refused_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda _: SimpleNamespace(free=400_000))
    with pytest.raises(CheckpointError, match=r"/out needs 1 MB, but its disk has 0 MB free"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp8")
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^cannot write /proc/no-such-place: [^\n]*$"):
        quantize_checkpoint(source, "/proc/no-such-place", "mxfp4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert main(["quantize", str(source), str(tmp_path / "full"), "--format", "fp8"]) == 2
    assert re.fullmatch(
        r"minimax-jax: error: .* is not empty; name a directory that does not exist or is empty\n",
        capsys.readouterr().err,
    )
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, source, "fp8")


def rewritten(source: Path, directory: Path, change: Any, config: Any = None) -> Path:
    """The checkpoint in one file, its tensors as `change` leaves them."""
    directory.mkdir()
    with open_checkpoint(source) as checkpoint:
        tensors = {name: (info.dtype, checkpoint.read(name)) for name, info in checkpoint.tensors.items()}
    change(tensors)
    layout = {name: (dtype, value.shape) for name, (dtype, value) in tensors.items()}
    with ShardWriter(directory / "model.safetensors", layout) as writer:
        for name, (_, value) in tensors.items():
            writer.write(name, value)
    data = json.loads((source / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(data))
    return directory


EXPERT = f"{MOE}.experts.2.w3.weight"


def poison(value: float, name: str = EXPERT) -> Any:
    def change(tensors: Any) -> None:
        tensors[name][1].reshape(-1)[5] = value

    return change


@pytest.mark.parametrize("weight_format", PACKED_FORMATS)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_weight_that_is_not_finite_is_named(
    source: Path, tmp_path: Path, weight_format: PackedFormat, value: float
) -> None:
    bad = rewritten(source, tmp_path / "bad", poison(value))
    with pytest.raises(CheckpointError, match=rf"tensor '{EXPERT}' .* is not finite at \[0, 5\]; it cannot"):
        quantize_checkpoint(bad, tmp_path / "out", weight_format)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(bad, tmp_path / "out", weight_format, exclude=["*.experts.2.w3"])  # copied as it is


def test_a_bad_fp8_scale_or_code_is_named(tmp_path: Path) -> None:
    fp8 = make_tiny(tmp_path / "fp8", weight_format="fp8", shape=SMALL)
    bad = rewritten(fp8, tmp_path / "scale", lambda tensors: tensors[f"{EXPERT}_scale_inv"][1].fill(-1))
    with pytest.raises(CheckpointError, match=rf"tensor '{EXPERT}_scale_inv' .* negative or not finite"):
        quantize_checkpoint(bad, tmp_path / "out", "mxfp4")
    bad = rewritten(fp8, tmp_path / "code", poison(np.nan))
    with pytest.raises(CheckpointError, match=rf"tensor '{EXPERT}' .* is not finite at \[0, 5\]"):
        quantize_checkpoint(bad, tmp_path / "out", "mxfp4")

    def narrow(tensors: Any) -> None:
        tensors[f"{EXPERT}_scale_inv"] = ("F32", np.ones((5, 7), np.float32))

    bad = rewritten(fp8, tmp_path / "grid", narrow)
    with pytest.raises(CheckpointError, match=r"_scale_inv' .* does not fit .*\[2, 1\]"):
        quantize_checkpoint(bad, tmp_path / "out", "mxfp4")
    bad = rewritten(fp8, tmp_path / "alone", lambda tensors: tensors.pop(f"{EXPERT}_scale_inv"))
    with pytest.raises(CheckpointError, match=rf"tensor '{EXPERT}' .* is quantized already"):
        quantize_checkpoint(bad, tmp_path / "out", "mxfp4")
    with pytest.raises(CheckpointError, match="is FP8 already; choose another format"):
        quantize_checkpoint(fp8, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "mxfp8"])
def test_static_input_scales_of_fp8_are_left_out(tmp_path: Path, weight_format: PackedFormat) -> None:
    """Beside NVFP4 one would pass for the global scale of its inputs; beside a plain weight it scales nothing."""

    def add(tensors: Any) -> None:
        for name in [name for name in tensors if name.endswith(("w1.weight", "q_proj.weight"))]:
            tensors[name.replace("weight", "input_scale")] = ("F32", np.array(0.01, np.float32))

    fp8 = make_tiny(tmp_path / "fp8", weight_format="fp8", shape=SMALL)
    static = rewritten(fp8, tmp_path / "static", add)
    done = quantize_checkpoint(static, tmp_path / "out", weight_format).directory
    assert not [name for name in read_checkpoint(done) if "input_scale" in name]
    assert main(["inspect", str(done)]) == 0


def test_an_input_scale_of_a_plain_weight_is_refused(source: Path, tmp_path: Path) -> None:
    name = EXPERT.replace("weight", "input_scale")
    bad = rewritten(source, tmp_path / "bad", lambda tensors: tensors.update({name: ("F32", np.ones((), np.float32))}))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' .* is of a weight that is quantized already"):
        quantize_checkpoint(bad, tmp_path / "out", "nvfp4")


def test_files_beside_the_weights(source: Path, tmp_path: Path) -> None:
    """One that cannot be copied is named before anything is written; ModelOpt's words on the source stay behind."""
    bad = rewritten(source, tmp_path / "bad", lambda tensors: None)
    (bad / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (bad / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"^{bad / 'tokenizer.json'} is a link to nothing, or no file; fetch it"):
        quantize_checkpoint(bad, tmp_path / "new" / "out", "mxfp4")
    assert not (tmp_path / "new").exists()
    (bad / "tokenizer.json").unlink()
    done = quantize_checkpoint(bad, tmp_path / "out", "mxfp4").directory
    assert sorted(path.name for path in done.iterdir()) == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("value", ["fp8", 5, ["fp8"]])
def test_values_of_the_config_that_are_no_object_or_name(tmp_path: Path, capsys: Any, value: Any) -> None:
    fp8 = make_tiny(tmp_path / "fp8", weight_format="fp8", shape=SMALL)
    bad = rewritten(fp8, tmp_path / "bad", lambda tensors: None, {"quantization_config": value})
    assert main(["quantize", str(bad), str(tmp_path / "out"), "--format", "mxfp4"]) == 2
    assert re.fullmatch(
        rf"minimax-jax: error: {bad}/config\.json: quantization_config .* is not an object\n", capsys.readouterr().err
    )
    odd = rewritten(fp8, tmp_path / "odd", lambda tensors: None, {"dtype": value, "torch_dtype": {"text": "bfloat16"}})
    done = quantize_checkpoint(odd, tmp_path / "widened", "mxfp4").directory
    with open_checkpoint(done) as checkpoint:
        assert checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].dtype == "BF16"


@pytest.mark.parametrize("made", ["mxfp4", "nvfp4", "mxfp8"])
def test_a_packed_source_is_refused_by_name(tmp_path: Path, made: WeightFormat) -> None:
    packed = make_tiny(tmp_path / "packed", weight_format=made, shape=SMALL)
    with pytest.raises(CheckpointError, match=rf"{packed} is quantized already \(quant_method '(quark|mxfp8)'\)"):
        quantize_checkpoint(packed, tmp_path / "out", "mxfp4")
    # Its config says nothing: the tensors do.
    bare = rewritten(packed, tmp_path / "bare", lambda tensors: None, {"quantization_config": None})
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.0\..*' .* is of a weight that is quantized"):
        quantize_checkpoint(bare, tmp_path / "out", "mxfp4")


def test_other_refusals(source: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ConfigError, match="format is 'int4'; expected one of mxfp4"):
        quantize_checkpoint(source, tmp_path / "out", "int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--exclude '\*\.w9' names no module of"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4", exclude=["*.w1", "*.w9"])
    with pytest.raises(ConfigError, match=r"--exclude 're:\(' is not a regular expression"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4", exclude=["re:("])
    with pytest.raises(CheckpointError, match="has no weight that mxfp4 would pack"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4", exclude=["*experts*"])
    with pytest.raises(CheckpointError, match="is not a directory"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "out", "mxfp4")
    assert main(["quantize", str(source), "", "--format", "fp8"]) == 2
    assert main(["quantize", str(source), str(tmp_path / "out"), "--format", "q4"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert not any(tmp_path.iterdir())


def test_reading_what_was_written_needs_no_help(source: Path, tmp_path: Path) -> None:
    """The files as a stranger reads them."""
    done = quantize_checkpoint(source, tmp_path / "out", "mxfp4").directory
    files = sorted(done.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05d}-of-00003.safetensors" for i in range(3)]
    for file in files:
        for name, value in read_safetensors(file).items():
            assert np.isfinite(value).all(), name
    assert {path.stat().st_mode & 0o777 for path in done.iterdir() if path.is_file()} == {0o666 & ~umask()}


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
