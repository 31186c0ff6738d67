"""How one weight is stored: every form of a scale, and each way in which tensors and config contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.checkpoint import LazyQuant, open_checkpoint
from minimax_jax.checkpoint.formats import Stored, find_stored
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.quantization import ModuleSet, QuantizationConfig, Scheme
from pallas_kernels.quant import Format, QuantTensor, dequantize
from tests.checkpoint.tiny_checkpoint import (
    BF16,
    EXCLUDED,
    FP8,
    FP8_BLOCK,
    LAYOUTS,
    Tensors,
    decode,
    pack_module,
    quantization_of,
    write_file,
)

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
    return find_stored(open_checkpoint(directory), name, quantization, linear)


def decoded(part: Stored, dtype: jnp.dtype) -> np.ndarray:
    """The weight's values."""
    assert isinstance(part.value, LazyQuant)
    payload, scale = jnp.asarray(part.value.payload.read()), jnp.asarray(part.value.scale.read())
    whole = None if part.value.global_scale is None else jnp.asarray(part.value.global_scale.read())
    return np.asarray(dequantize(QuantTensor(payload, scale, part.value.format, whole), dtype))


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
    assert part.value.format.block == block
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
    assert part.value.format.block == (64, 32)
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
    with pytest.raises(CheckpointError, match=r"BF16.*expected F8_E4M3 or U8"):
        stored(tmp_path, np.ones((128, 128), BF16), np.ones((1, 1), np.float32))


def test_packed_weight_without_scale(tmp_path: Path) -> None:
    """A lost scale is an error and never a one, whatever the config says."""
    for quantization in (FP8_BLOCK, None):
        with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale'.*never assumed"):
            stored(tmp_path, np.ones((128, 128), FP8), None, quantization)


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.int64])
def test_weight_of_a_wrong_dtype(tmp_path: Path, dtype: type) -> None:
    with pytest.raises(CheckpointError, match=f"{NAME}.*expected BF16"):
        stored(tmp_path, np.ones((128, 128), dtype), None, None)


def test_packed_without_quantization_config(tmp_path: Path) -> None:
    part = stored(tmp_path, np.ones((256, 256), FP8), np.ones((2, 2), np.float32), None)
    assert part.label == "FP8 128x128"


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.block_sparse_moe.gate.weight"])
def test_excluded_modules(tmp_path: Path, name: str) -> None:
    """Stored plain they stay plain; packed or with a scale they contradict the config."""
    module = name.removesuffix(".weight")
    assert stored(tmp_path, np.ones((128, 128), BF16), None, name=name).label == "BF16"
    with pytest.raises(CheckpointError, match=rf"packed.*excludes its module '{module}' by the entry '\w+'"):
        stored(tmp_path, np.ones((128, 128), FP8), np.ones((1, 1), np.float32), name=name)
    with pytest.raises(CheckpointError, match=f"{module}.weight_scale_inv.*scales tensor '{name}'"):
        stored(tmp_path, np.ones((128, 128), BF16), np.ones((1, 1), np.float32), name=name)


def test_included_module_stored_plain(tmp_path: Path) -> None:
    """It may be a lost scale, and the config says that it is packed."""
    for dtype in (BF16, np.float32):
        with pytest.raises(CheckpointError, match=f"{NAME}.*list of exclusions"):
            stored(tmp_path, np.ones((128, 128), dtype), None)
    assert stored(tmp_path, np.ones((128, 128), BF16), None, None).label == "BF16"
    other = QuantizationConfig(quant_method="fp8", exclude=ModuleSet((*EXCLUDED, NAME.removesuffix(".weight"))))
    assert stored(tmp_path, np.ones((128, 128), BF16), None, other).label == "BF16"
    assert stored(tmp_path, np.ones((128, 128), BF16), None, linear=False).label == "BF16"


# ---- the other formats

MODULE = "model.layers.3.block_sparse_moe.experts.5.w1"
LABELS = {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "mxfp8": "MXFP8"}


def find(directory: Path, tensors: Tensors, quantization: QuantizationConfig | None = None, **options: bool) -> Stored:
    """How a checkpoint of one module is understood."""
    write_file(directory / "model.safetensors", tensors)
    return find_stored(open_checkpoint(directory), f"{MODULE}.weight", quantization, True, **options)


def random_module(layout: str, seed: int, shape: tuple[int, int] = (24, 96)) -> Tensors:
    """One packed module."""
    return pack_module(MODULE, layout, shape, np.random.default_rng(seed))


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(tmp_path: Path, seed: int, layout: str, declared: bool) -> None:
    """The tensors alone tell the format; every tensor counts as used, and block scales keep their bytes."""
    tensors = random_module(layout, seed)
    part = find(tmp_path, tensors, quantization_of(layout) if declared else None)
    name = LAYOUTS[layout][0]
    assert isinstance(part.value, LazyQuant)
    assert part.label == LABELS[name]
    assert part.value.format == Format(name, (1, 16 if name == "nvfp4" else 32), global_divides=layout == "nvfp4-ct")
    assert part.value.shape == (24, 96)
    assert {info.name for info in part.infos} == set(tensors)
    assert part.value.input_scale is None
    assert len(part.scales) == (2 if name == "nvfp4" else 1)
    scale = next(value for tensor, value in tensors.items() if "weight_scale" in tensor and value.ndim == 2)
    assert part.value.scale.read().tobytes() == scale.tobytes()
    # XLA may divide by one value as it multiplies by its inverse: a last bit.
    ulp = 2**-22 if layout == "nvfp4-ct" else 0
    found = decoded(part, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(found, decode(tensors, f"{MODULE}.weight"), rtol=ulp, atol=0)


def test_scales_in_other_shards_and_spellings(tmp_path: Path, seed: int) -> None:
    """E8M0 as its own dtype, a global scale of rank 0, 1 or 2, in bfloat16."""
    tensors = random_module("mxfp4-quark", seed)
    entry = {f"{MODULE}.weight_scale": {"dtype": "F8_E8M0", "shape": [24, 3], "data_offsets": [24 * 48, 24 * 51]}}
    write_file(tmp_path / "model.safetensors", tensors, entry)
    part = find_stored(open_checkpoint(tmp_path), f"{MODULE}.weight", None, linear=True)
    assert isinstance(part.value, LazyQuant)
    assert part.value.scale.dtype == np.uint8
    for shape in ((), (1,), (1, 1)):
        tensors = random_module("nvfp4-quark", seed)
        tensors[f"{MODULE}.weight_scale_2"] = np.full(shape, 0.0078125, BF16)
        part = find(tmp_path, tensors)
        assert isinstance(part.value, LazyQuant)
        assert part.value.global_scale is not None
        whole = part.value.global_scale.read()
        assert (whole.shape, whole.dtype, float(whole)) == ((), np.float32, 0.0078125)


Change = tuple[str, Callable[[Tensors], object], str]
U8, F32 = np.dtype(np.uint8), np.dtype(np.float32)


def put(name: str, value: np.ndarray) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{MODULE}.{name}": value})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{MODULE}.{name}")


REFUSED: list[Change] = [
    ("mxfp4-quark", drop("weight_scale"), r"w1\.weight'.*has no 'model\S+w1\.weight_scale'.*never assumed"),
    ("mxfp4-ct", drop("weight_scale"), r"w1\.weight_packed'.*has no .*w1\.weight_scale'.*never assumed"),
    ("mxfp8-vendor", drop("weight_scale_inv"), r"w1\.weight'.*has no .*never assumed"),
    ("nvfp4-quark", drop("weight_scale"), r"w1\.weight'.*has no .*never assumed"),
    ("nvfp4-quark", drop("weight_scale_2"), r"has no 'model\S+w1\.weight_scale_2'.*global scale of NVFP4.*never"),
    ("nvfp4-ct", drop("weight_global_scale"), r"has no 'model\S+w1\.weight_global_scale'.*never assumed"),
    ("mxfp4-quark", put("weight_scale", np.ones((24, 6), U8)), r"\[24, 6\].*expected \[24, 3\].*MXFP4"),
    ("mxfp4-quark", put("weight_scale", np.ones((72,), U8)), r"\[72\].*expected \[24, 3\]"),
    ("mxfp4-quark", put("weight_scale", np.ones((24, 3), F32)), r"F32.*expected U8 \(MXFP4\) or F8_E4M3 \(NVFP4\)"),
    ("nvfp4-quark", put("weight_scale", np.ones((24, 3), FP8)), r"\[24, 3\].*expected \[24, 6\].*NVFP4"),
    ("nvfp4-quark", put("weight_scale", np.ones((24, 3), U8)), r"weight_scale_2'.*MXFP4, which has none"),
    ("nvfp4-quark", put("weight_scale_2", np.ones((24,), F32)), r"weight_scale_2'.*\[24\].*expected one value"),
    ("nvfp4-quark", put("weight_scale_2", np.ones((), U8)), r"weight_scale_2'.*expected one value in BF16"),
    ("mxfp8-vendor", put("weight_scale_inv", np.ones((24, 3), FP8)), r"F8_E4M3.*expected U8 \(MXFP8\), or BF16"),
    ("mxfp8-vendor", put("weight_scale_inv", np.ones((24, 2), U8)), r"\[24, 2\].*expected \[24, 3\].*MXFP8"),
    ("mxfp8-vendor", put("weight_scale_2", np.ones((), F32)), r"weight_scale_2'.*MXFP8, which has none"),
    ("mxfp8-vendor", put("weight_scale", np.ones((24, 3), U8)), r"weight_scale'.*weight_scale_inv'.*two spellings"),
    ("mxfp4-quark", put("weight_packed", np.ones((24, 48), U8)), r"w1\.weight'.*weight_packed'.*two spellings"),
    ("nvfp4-quark", put("weight_global_scale", np.ones(1, F32)), r"weight_scale_2'.*weight_global_scale'.*two spell"),
    ("nvfp4-quark", put("input_scale", np.ones((), F32)), r"input_scale'.*input_scale_2'.*two spellings"),
    ("nvfp4-ct", put("weight_packed", np.ones((24, 48), FP8)), r"weight_packed'.*F8_E4M3, expected U8"),
    ("mxfp4-quark", put("input_scale_2", np.ones((), F32)), r"input_scale_2'.*does not belong"),
    ("mxfp4-quark", put("weight", np.ones((24, 96), BF16)), r"weight_scale'.*scales.*weight'.*expected F8_E4M3 or U8"),
    ("mxfp4-quark", put("weight", np.ones((24, 2, 24), U8)), r"expected a matrix"),
]


@pytest.mark.parametrize(("layout", "change", "fragment"), REFUSED)
def test_refused(tmp_path: Path, seed: int, layout: str, change: Callable[[Tensors], object], fragment: str) -> None:
    """One line with the module's tensor, its file, and what was expected; with and without a config."""
    tensors = random_module(layout, seed)
    change(tensors)
    for quantization in (None, quantization_of(layout)):
        with pytest.raises(CheckpointError, match=fragment) as caught:
            find(tmp_path, tensors, quantization)
        text = str(caught.value)
        assert "\n" not in text
        assert MODULE in text
        assert "model.safetensors" in text


def test_global_scale_of_the_other_tool(tmp_path: Path, seed: int) -> None:
    """A divisor beside `weight`, or a multiplier beside `weight_packed`, has no known direction."""
    for layout, own, other in (
        ("nvfp4-quark", "weight_scale_2", "weight_global_scale"),
        ("nvfp4-ct", "weight_global_scale", "weight_scale_2"),
    ):
        tensors = random_module(layout, seed)
        tensors[f"{MODULE}.{other}"] = tensors.pop(f"{MODULE}.{own}")
        with pytest.raises(CheckpointError, match=rf"has no '\S+{own}'.*but tensor '\S+{other}'"):
            find(tmp_path, tensors)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_config_against_tensors(tmp_path: Path, seed: int, layout: str) -> None:
    """Excluded but packed, declared but plain, declared as another format: each names the module."""
    tensors = random_module(layout, seed)
    with pytest.raises(CheckpointError, match=rf"packed.*excludes its module '{MODULE}' by the entry '\*experts\.5\*'"):
        find(tmp_path, tensors, quantization_of(layout, ["*experts.5*"]))
    for other in ("mxfp4-quark", "nvfp4-ct", "mxfp8-vendor"):
        if LAYOUTS[other][0] != LAYOUTS[layout][0]:
            with pytest.raises(CheckpointError, match=rf"{LABELS[LAYOUTS[layout][0]]}, but .* declares .*'{MODULE}'"):
                find(tmp_path, tensors, quantization_of(other))
    with pytest.raises(CheckpointError, match=rf"declares fp8 for module '{MODULE}'"):
        find(tmp_path, tensors, FP8_BLOCK)
    plain = {f"{MODULE}.weight": np.ones((24, 96), BF16)}
    with pytest.raises(CheckpointError, match=rf"has no scale, but .*{LAYOUTS[layout][0]}.*'{MODULE}'"):
        find(tmp_path, plain, quantization_of(layout))
    undeclared = QuantizationConfig(quant_method="test", default=None)
    assert find(tmp_path, plain, undeclared).label == "BF16"
    assert find(tmp_path, tensors, undeclared).label == LABELS[LAYOUTS[layout][0]]


# ---- activations


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_activation_scales(tmp_path: Path, seed: int, layout: str) -> None:
    """Kept only to emulate; a static one that is missing is refused by name then, and only then."""
    tensors, quantization = random_module(layout, seed), quantization_of(layout)
    name, static = LAYOUTS[layout][0], LAYOUTS[layout][4]
    part = find(tmp_path, tensors, quantization, emulate_activation_quant=True)
    assert isinstance(part.value, LazyQuant)
    assert part.value.format.activation == name
    if name != "nvfp4":
        assert part.value.input_scale is None
        return
    assert part.value.input_scale is not None
    np.testing.assert_array_equal(part.value.input_scale.read(), tensors[f"{MODULE}.{static}"].reshape(()))
    assert len(part.scales) == 3
    del tensors[f"{MODULE}.{static}"]
    assert find(tmp_path, tensors, quantization).label == "NVFP4"
    with pytest.raises(CheckpointError, match=rf"static activation scale for module '{MODULE}'.*{static}.*never"):
        find(tmp_path, tensors, quantization, emulate_activation_quant=True)


def test_activations_that_are_not_emulated(tmp_path: Path, seed: int) -> None:
    scheme = Scheme("mxfp4", not_emulated="MXFP4 weights with FP8 activations")
    quantization = QuantizationConfig(quant_method="test", default=scheme)
    tensors = random_module("mxfp4-quark", seed)
    find(tmp_path, tensors, quantization)
    with pytest.raises(ConfigError, match=rf"emulate_activation_quant: module '{MODULE}'.*FP8 activations.*off"):
        find(tmp_path, tensors, quantization, emulate_activation_quant=True)
