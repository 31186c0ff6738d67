"""Packed formats against the tools that define them: AMD Quark, compressed-tensors, NVIDIA ModelOpt.

Each test runs where its tool is installed; `make test-full` installs all three.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from minimax_jax.checkpoint import open_checkpoint
from minimax_jax.checkpoint.quantizers import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from minimax_jax.checkpoint.recipes import PackedFormat
from minimax_jax.checkpoint.shard_writer import ShardWriter
from minimax_jax.quantize import quantize_checkpoint
from pallas_kernels.quant import Format, QuantTensor, dequantize

pytestmark = pytest.mark.oracle

E4M3 = ml_dtypes.float8_e4m3fn
ROWS, COLS = 64, 256
MOE = "model.layers.0.block_sparse_moe"


@pytest.fixture(scope="module")
def quark() -> Any:
    os.environ.setdefault("QUARK_LOG_LEVEL", "error")
    pytest.importorskip("quark.torch")
    import quark.torch.kernel
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.utils.pack import create_pack_method

    return SimpleNamespace(
        template=LLMTemplate.get, quantizer=ModelQuantizer, kernel=quark.torch.kernel, pack_method=create_pack_method
    )


@pytest.fixture(scope="module")
def compressed_tensors() -> Any:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import mxfp4, nvfp4
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize as decode

    def scheme(group: int, scale_dtype: Any) -> Any:
        strategy = "tensor_group" if group == 16 else "group"
        args = QuantizationArgs(
            num_bits=4, type="float", symmetric=True, strategy=strategy, group_size=group, scale_dtype=scale_dtype
        )
        return QuantizationScheme(targets=["Linear"], weights=args)

    return SimpleNamespace(mxfp4=mxfp4, nvfp4=nvfp4, scheme=scheme, decode=decode)


@pytest.fixture(scope="module")
def modelopt() -> Any:
    pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    return SimpleNamespace(mxfp4=MXFP4QTensor, nvfp4=NVFP4QTensor, mxfp8=MXFP8QTensor)


# ---- decoding: random bytes


class Packed:
    """Random payload and scales of one format, for us and for torch."""

    def __init__(self, name: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.whole = np.float32(rng.uniform(1e-4, 1e-2))
        if name == "mxfp8":
            codes = rng.integers(256, size=(ROWS, COLS), dtype=np.uint8)
            self.payload = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8).view(E4M3)
        else:
            self.payload = rng.integers(256, size=(ROWS, COLS // 2), dtype=np.uint8)
        if name == "nvfp4":
            self.scale = rng.integers(1, 127, size=(ROWS, COLS // 16), dtype=np.uint8).view(E4M3)
        else:
            self.scale = rng.integers(20, 240, size=(ROWS, COLS // 32), dtype=np.uint8)
        self.name = name

    def ours(self, *, divides: bool = False, dtype: Any = jnp.float32) -> np.ndarray:
        whole = jnp.asarray(self.whole) if self.name == "nvfp4" else None
        format = Format(self.name, (1, 16 if self.name == "nvfp4" else 32), global_divides=divides)
        weight = QuantTensor(jnp.asarray(self.payload), jnp.asarray(self.scale), format, whole)
        return np.asarray(jax.jit(dequantize, static_argnums=1)(weight, dtype)).astype(np.float32)


def to_torch(values: np.ndarray) -> Any:
    if values.dtype == E4M3:
        return torch.from_numpy(values.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.array(values))


def powers(scale: np.ndarray) -> Any:
    return torch.from_numpy(np.ldexp(np.float32(1), scale.astype(np.int32) - 127))


def check_bits(ours: np.ndarray, theirs: Any) -> None:
    theirs = theirs.detach().float().numpy()
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_decode_as_quark(quark: Any, name: str, seed: int) -> None:
    packed = Packed(name, seed)
    values = quark.pack_method("per_group", "fp4").unpack(to_torch(packed.payload), True)
    if name == "mxfp4":
        scale, group = powers(packed.scale), 32
    else:
        scale, group = to_torch(packed.scale).float() * torch.tensor(packed.whole), 16
    check_bits(packed.ours(), quark.kernel.dequantize("fp4", values, scale, None, -1, group, "per_group"))


def test_decode_as_compressed_tensors(compressed_tensors: Any, seed: int) -> None:
    packed = Packed("nvfp4", seed)
    packed.whole = 1 / packed.whole
    helpers, scheme = compressed_tensors.nvfp4.helpers, compressed_tensors.scheme(16, torch.float8_e4m3fn)
    values = helpers.unpack_fp4_from_uint8(to_torch(packed.payload), ROWS, COLS, dtype=torch.float32)
    scale, whole = to_torch(packed.scale), torch.tensor([packed.whole])
    theirs = compressed_tensors.decode(
        x_q=values, scale=scale.float(), args=scheme.weights, global_scale=whole, dtype=torch.float32
    )
    check_bits(packed.ours(divides=True), theirs)
    state = {"weight_packed": to_torch(packed.payload), "weight_scale": scale, "weight_global_scale": whole}
    theirs = compressed_tensors.nvfp4.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    check_bits(packed.ours(divides=True, dtype=jnp.bfloat16), theirs)

    packed = Packed("mxfp4", seed + 1)
    state = {"weight_packed": to_torch(packed.payload), "weight_scale": to_torch(packed.scale)}
    theirs = compressed_tensors.mxfp4.MXFP4PackedCompressor.decompress(
        state, compressed_tensors.scheme(32, torch.uint8)
    )["weight"]
    check_bits(packed.ours(), theirs)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8"])
def test_decode_as_modelopt(modelopt: Any, name: str, seed: int) -> None:
    packed = Packed(name, seed)
    tensor = getattr(modelopt, name)(torch.Size((ROWS, COLS)), torch.float32, to_torch(packed.payload))
    block = {-1: 16 if name == "nvfp4" else 32}
    theirs = tensor.dequantize(
        dtype=torch.float32, scale=to_torch(packed.scale), double_scale=torch.tensor(packed.whole), block_sizes=block
    )
    ours = packed.ours()
    if name == "nvfp4":  # its code 8 is +0
        ours = ours + np.float32(0)
        theirs = theirs + 0
    check_bits(ours, theirs)


# ---- quantising


def levels(seed: int, rows: int = 128, cols: int = 512) -> np.ndarray:
    """[rows, cols] float32 whose blocks of 16 have unlike sizes; some blocks are zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols)) * 2.0 ** rng.uniform(-12, 6, (rows, cols // 16)).repeat(16, axis=1)
    values[:, 64:160] = 0
    values[3] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4"])
def test_quantise_as_quark(quark: Any, tmp_path: Path, weight_format: PackedFormat, seed: int) -> None:
    """Whole directories, file to file: all bytes and the config; signs of zero are Quark's too."""
    weight = levels(seed)
    half = ml_dtypes.bfloat16
    tensors = {
        "experts.0.w1": weight,
        "experts.0.w2": weight.astype(half),
        "experts.0.w3": weight.astype(np.float16),
        "experts.1.w1": np.zeros((64, 64), half),
        "experts.1.w2": weight * np.float32(1e-5),
        "experts.1.w3": weight * np.float32(1e-9),
        "experts.2.w1": weight * np.float32(1e30),
        "gate": weight,
    }
    tensors = {f"{MOE}.{name}.weight": value for name, value in tensors.items()}
    tensors |= {"lm_head.weight": weight.astype(half), "model.norm.weight": weight[0].astype(half)}
    tensors |= {"model.layers.0.self_attn.q_proj.weight": weight.astype(half), "model.embed_tokens.weight": weight}
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    source = tmp_path / "source"
    source.mkdir()
    layout = {name: (names[value.dtype.name], value.shape) for name, value in tensors.items()}
    with ShardWriter(source / "model.safetensors", layout) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    (source / "config.json").write_text(json.dumps({"model_type": "minimax_m2", "hidden_size": 512}))
    config = quark.template("minimax_m2").get_config(scheme=weight_format)
    quark.quantizer(config).direct_quantize_checkpoint(str(source), str(tmp_path / "theirs"), device="cpu")
    quantize_checkpoint(source, tmp_path / "ours", weight_format)
    with open_checkpoint(tmp_path / "ours") as ours, open_checkpoint(tmp_path / "theirs") as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in ours.tensors:
            assert ours.tensors[name].dtype == theirs.tensors[name].dtype, name
            assert ours.tensors[name].shape == theirs.tensors[name].shape, name
            assert ours.read(name).tobytes() == theirs.read(name).tobytes(), name
    found = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs")]
    for each in found:  # newer releases add to it
        each["quantization_config"]["version"] = re.match(r"[\d.]*\d", each["quantization_config"]["version"])[0]
    assert found[0] == found[1]


def test_quantise_as_compressed_tensors(compressed_tensors: Any, seed: int) -> None:
    weight = levels(seed).astype(ml_dtypes.bfloat16).astype(np.float32)
    payload, scale = quantize_mxfp4(weight)
    scheme = compressed_tensors.scheme(32, torch.uint8)
    state = {"weight": to_torch(weight).bfloat16(), "weight_scale": powers(scale).bfloat16()}
    theirs = compressed_tensors.mxfp4.MXFP4PackedCompressor.compress(state, scheme)
    np.testing.assert_array_equal(theirs["weight_scale"].numpy(), scale)
    codes = [np.stack([each & 15, each >> 4], axis=-1) for each in (payload, theirs["weight_packed"].numpy())]
    np.testing.assert_array_equal(codes[0], np.where(codes[1] == 8, 0, codes[1]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_quantise_as_modelopt(modelopt: Any, dtype: Any, seed: int) -> None:
    """But for the scales of blocks that are nearly zero, and the few that its order of divisions moves."""
    weight = levels(seed).astype(dtype).astype(np.float32)
    tensor, scale, whole = modelopt.nvfp4.quantize(to_torch(weight), 16)
    payload, ours, ours_whole = quantize_nvfp4(weight)
    assert float(whole) == ours_whole
    largest = np.abs(weight).reshape(ours.shape + (16,)).max(axis=-1)
    ratio = largest / (np.float32(6) * ours_whole)
    theirs = scale.view(torch.uint8).numpy()
    kept = ratio >= 2.0**-9
    moved = kept & (theirs != ours.view(np.uint8))
    assert (ratio.astype(E4M3).view(np.uint8)[kept] == theirs[kept]).all()  # that order is all that moves them
    assert moved.mean() < 0.01
    codes = [np.stack([each & 15, each >> 4], axis=-1) for each in (payload, tensor._quantized_data.numpy())]
    codes = [np.where(each == 8, 0, each).reshape(ours.shape + (16,)) for each in codes]
    same = kept & ~moved
    np.testing.assert_array_equal(codes[0][same], codes[1][same])
    assert same.mean() > 0.7

    tensor, scale = modelopt.mxfp8.quantize(to_torch(weight))
    payload, ours = quantize_mxfp8(weight)
    np.testing.assert_array_equal(scale.numpy(), ours)
    np.testing.assert_array_equal(tensor._quantized_data.view(torch.uint8).numpy(), payload.view(np.uint8))
