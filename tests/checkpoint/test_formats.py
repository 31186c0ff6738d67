"""How one weight is stored: every form of a scale, and each way in which tensors and config contradict each other."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.checkpoint import LazyQuant, open_checkpoint
from minimax_jax.checkpoint.formats import Stored, find_stored, is_excluded
from minimax_jax.config import QuantizationConfig
from minimax_jax.errors import CheckpointError
from pallas_kernels.quant import QuantTensor, dequantize
from tests.checkpoint.tiny_checkpoint import BF16, EXCLUDED, FP8, FP8_BLOCK, write_file

NAME = "model.layers.0.self_attn.q_proj.weight"
SCALE = NAME + "_scale_inv"


def stored(
    directory: Path,
    weight: np.ndarray,
    scale: np.ndarray | None,
    quantization: QuantizationConfig | None = FP8_BLOCK,
    name: str = NAME,
    linear: bool = True,
) -> Stored:
    """How a checkpoint with just this weight is understood."""
    tensors = {name: weight} if scale is None else {name: weight, name + "_scale_inv": scale}
    write_file(directory / "model.safetensors", tensors)
    checkpoint = open_checkpoint(directory)
    return find_stored(checkpoint, checkpoint.tensors[name], quantization, linear)


def decoded(part: Stored, dtype: jnp.dtype) -> np.ndarray:
    """The weight's values."""
    assert isinstance(part.value, LazyQuant)
    payload, scale = jnp.asarray(part.value.payload.read()), jnp.asarray(part.value.scale.read())
    assert scale.dtype == jnp.float32
    return np.asarray(dequantize(QuantTensor(payload, scale, part.value.block), dtype))


@pytest.mark.parametrize(
    ("shape", "scale_shape", "block", "label"),
    [
        ((256, 256), (), (256, 256), "FP8 per tensor"),
        ((256, 256), (1,), (256, 256), "FP8 per tensor"),
        ((256, 256), (1, 1), (256, 256), "FP8 per tensor"),
        ((256, 256), (256, 1), (1, 256), "FP8 per row"),
        ((256, 256), (256,), (1, 256), "FP8 per row"),
        ((256, 256), (2, 2), (128, 128), "FP8 128x128"),
        ((300, 200), (3, 2), (128, 128), "FP8 128x128"),
        ((64, 200), (1, 2), (64, 128), "FP8 128x128"),
    ],
)
def test_forms_of_a_scale(
    tmp_path: Path, shape: tuple[int, int], scale_shape: tuple[int, ...], block: tuple[int, int], label: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape, np.float32).astype(FP8)
    scale = np.asarray(rng.uniform(0.25, 2.0, scale_shape), np.float32)
    part = stored(tmp_path, weight, scale)
    assert isinstance(part.value, LazyQuant)
    assert part.value.block == block
    assert part.label == label
    assert [info.name for info in part.infos] == [NAME, SCALE]
    rows, cols = np.arange(shape[0]), np.arange(shape[1])
    if scale.size == 1:
        each = np.full(shape, scale.reshape(-1)[0])
    elif scale.size == shape[0]:
        each = np.broadcast_to(scale.reshape(-1, 1), shape)
    else:
        each = scale[np.ix_(rows // 128, cols // 128)]
    np.testing.assert_array_equal(decoded(part, jnp.dtype(jnp.float32)), weight.astype(np.float32) * each)


def test_scalar_of_a_half(tmp_path: Path, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((256, 256), np.float32).astype(FP8)
    part = stored(tmp_path, weight, np.float32(0.5).reshape(()))
    np.testing.assert_array_equal(decoded(part, jnp.dtype(jnp.float32)), weight.astype(np.float32) * 0.5)


def test_decoded_values_leave_fp8(tmp_path: Path) -> None:
    """1.75 x 0.01 is near 0.0175 in bfloat16; in eight bits it would be off by more than a per cent."""
    part = stored(tmp_path, np.full((128, 128), 1.75, FP8), np.full((1, 1), 0.01, np.float32))
    values = decoded(part, jnp.dtype(jnp.bfloat16))
    assert values.dtype == BF16
    np.testing.assert_allclose(values.astype(np.float32), 0.0175, rtol=2**-8)


def test_other_block_size(tmp_path: Path) -> None:
    quantization = QuantizationConfig(quant_method="fp8", weight_block_size=(64, 32))
    part = stored(tmp_path, np.ones((128, 128), FP8), np.ones((2, 4), np.float32), quantization)
    assert isinstance(part.value, LazyQuant)
    assert part.value.block == (64, 32)
    assert part.label == "FP8 64x32"


def test_bfloat16_scales_are_widened(tmp_path: Path) -> None:
    part = stored(tmp_path, np.ones((128, 128), FP8), np.full((1, 1), 0.75, BF16))
    np.testing.assert_array_equal(decoded(part, jnp.dtype(jnp.float32)), 0.75)


@pytest.mark.parametrize("scale_shape", [(2, 3), (3, 2), (2,), (4, 1), (1, 256), (2, 2, 1)])
def test_scale_of_another_shape(tmp_path: Path, scale_shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        stored(tmp_path, np.ones((256, 256), FP8), np.ones(scale_shape, np.float32))
    assert all(text in str(caught.value) for text in (str(list(scale_shape)), "[2, 2]", "[256, 256]", SCALE))


def test_scale_without_packed_weight(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"BF16.*expected F8_E4M3"):
        stored(tmp_path, np.ones((128, 128), BF16), np.ones((1, 1), np.float32))


def test_packed_weight_without_scale(tmp_path: Path) -> None:
    """A lost scale is an error and never a one, whatever the config says."""
    for quantization in (FP8_BLOCK, None):
        with pytest.raises(CheckpointError, match=f"'{SCALE}'.*never assumed"):
            stored(tmp_path, np.ones((128, 128), FP8), None, quantization)


def test_scale_of_another_format(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="U8"):
        stored(tmp_path, np.ones((128, 128), FP8), np.ones((1, 1), np.uint8))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64])
def test_weight_of_a_wrong_dtype(tmp_path: Path, dtype: type) -> None:
    with pytest.raises(CheckpointError, match=f"{NAME}.*expected BF16"):
        stored(tmp_path, np.ones((128, 128), dtype), None, None)


def test_packed_without_quantization_config(tmp_path: Path) -> None:
    part = stored(tmp_path, np.ones((256, 256), FP8), np.ones((2, 2), np.float32), None)
    assert part.label == "FP8 128x128"


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.block_sparse_moe.gate.weight"])
def test_excluded_modules(tmp_path: Path, name: str) -> None:
    """Stored plain they stay plain; stored packed, with a scale, the tensors decide."""
    assert stored(tmp_path, np.ones((128, 128), BF16), None, name=name).label == "BF16"
    part = stored(tmp_path, np.ones((128, 128), FP8), np.ones((1, 1), np.float32), name=name)
    assert part.label == "FP8 per tensor"


def test_included_module_stored_plain(tmp_path: Path) -> None:
    """It may be a lost scale, and the config says that it is packed."""
    for dtype in (BF16, np.float32):
        with pytest.raises(CheckpointError, match=f"{NAME}.*modules_to_not_convert"):
            stored(tmp_path, np.ones((128, 128), dtype), None)
    assert stored(tmp_path, np.ones((128, 128), BF16), None, None).label == "BF16"
    other = QuantizationConfig(quant_method="fp8", modules_to_not_convert=(*EXCLUDED, NAME.removesuffix(".weight")))
    assert stored(tmp_path, np.ones((128, 128), BF16), None, other).label == "BF16"
    assert stored(tmp_path, np.ones((128, 128), BF16), None, linear=False).label == "BF16"


@pytest.mark.parametrize(
    ("module", "excluded"),
    [
        ("model.layers.0.block_sparse_moe.gate", True),
        ("lm_head", True),
        ("model.layers.0.block_sparse_moe.gate_proj", False),
        ("model.layers.0.block_sparse_moe.aggregate", False),
        ("model.layers.0.self_attn.q_proj", False),
        ("model.layers.1.self_attn.q_proj", True),
        ("model.layers.11.self_attn.q_proj", False),
        ("model.layers.2.self_attn.q_proj", True),
        ("model.layers.22.self_attn.q_proj", False),
    ],
)
def test_excluded_by_whole_path_components(module: str, excluded: bool) -> None:
    entries = (*EXCLUDED, "model.layers.1.self_attn.q_proj", "layers.2")
    assert is_excluded(module, QuantizationConfig(quant_method="fp8", modules_to_not_convert=entries)) is excluded
