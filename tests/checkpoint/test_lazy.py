"""Lazy arrays against numpy, and how many bytes they touch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from minimax_jax.checkpoint import Checkpoint, open_checkpoint
from minimax_jax.checkpoint.formats import find_stored
from minimax_jax.checkpoint.lazy import Dequantized, LazyArray, LazyQuant, Stack, Tensor, astype, regrid, repeat_heads
from pallas_kernels.quant import Format
from tests.checkpoint.tiny_checkpoint import BF16, FP8, LAYOUTS, Tensors, decode, pack_module, write_file


@pytest.fixture
def tensors(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal((12, 10), np.float32) for name in "abc"}
    values["half"] = values["a"].astype(np.float16)
    values["packed"] = values["b"].astype(FP8)
    values["scales"] = rng.uniform(0.5, 2.0, (3, 2)).astype(np.float32)
    return values


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: Tensors) -> Checkpoint:
    write_file(tmp_path / "model.safetensors", tensors)
    return open_checkpoint(tmp_path)


@pytest.fixture
def tensor(checkpoint: Checkpoint) -> Callable[[str], LazyArray]:
    return lambda name: Tensor(checkpoint, checkpoint.tensors[name])


def check_every_part(lazy: LazyArray, whole: np.ndarray) -> None:
    """Every pair of bounds of the first dimension, with a few of the last, reads as numpy would cut it."""
    assert lazy.shape == whole.shape
    bounds = [[slice(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in whole.shape]
    for number, first in enumerate(bounds[0]):
        last = bounds[-1][number % len(bounds[-1])]
        for index in ((first,), (first, *(slice(None) for _ in whole.shape[2:]), last)):
            found, expected = lazy.read(index), whole[index]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes(), index


def test_parts_of_a_tensor(tensor: Callable[[str], LazyArray], tensors: Tensors) -> None:
    check_every_part(tensor("a"), tensors["a"])


def test_parts_are_fresh_and_aligned(tensor: Callable[[str], LazyArray]) -> None:
    """Nothing that is read stays tied to the file, and the CPU back end can take it over as it is."""
    part = tensor("a").read((slice(1, 3),))
    part[:] = 0
    assert part.ctypes.data % 64 == 0
    assert tensor("a").read((slice(1, 3),)).any()


def test_only_the_asked_bytes_are_read(checkpoint: Checkpoint, tensor: Callable[[str], LazyArray]) -> None:
    stack = Stack([tensor("a"), tensor("b"), tensor("c")])
    stack.read((slice(1, 2), slice(3, 5), slice(0, 10)))
    assert checkpoint.bytes_read == 2 * 10 * 4
    stack.read((slice(0, 3), slice(0, 12), slice(4, 5)))
    assert checkpoint.bytes_read == 2 * 10 * 4 + 3 * 12 * 4


def test_stack(tensor: Callable[[str], LazyArray], tensors: Tensors) -> None:
    pairs = Stack([Stack([tensor("a"), tensor("b")]), Stack([tensor("c"), tensor("a")])])
    whole = np.stack([np.stack([tensors["a"], tensors["b"]]), np.stack([tensors["c"], tensors["a"]])])
    check_every_part(pairs, whole)
    with ThreadPoolExecutor(3) as pool:
        np.testing.assert_array_equal(pairs.read((), pool), whole)
    with pytest.raises(ValueError, match="cannot stack"):
        Stack([tensor("a"), tensor("scales")])


@pytest.mark.parametrize(("head", "times"), [(3, 2), (4, 3), (1, 4), (12, 2)])
def test_repeat_heads(tensor: Callable[[str], LazyArray], tensors: Tensors, head: int, times: int) -> None:
    heads = tensors["a"].reshape(12 // head, head, 10)
    check_every_part(repeat_heads(tensor("a"), head, times), np.repeat(heads, times, axis=0).reshape(-1, 10))


def test_repeat_no_heads(tensor: Callable[[str], LazyArray]) -> None:
    source = tensor("a")
    assert repeat_heads(source, 3, 1) is source
    with pytest.raises(ValueError, match="no multiple"):
        repeat_heads(source, 5, 2)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
@pytest.mark.parametrize("name", ["a", "half"])
def test_astype(tensor: Callable[[str], LazyArray], tensors: Tensors, name: str, dtype: np.dtype) -> None:
    check_every_part(astype(tensor(name), dtype), tensors[name].astype(dtype))
    repeated = np.repeat(tensors[name].reshape(3, 4, 10), 2, axis=0).reshape(24, 10)
    check_every_part(astype(repeat_heads(tensor(name), 4, 2), dtype), repeated.astype(dtype))


def test_astype_of_the_same_dtype(tensor: Callable[[str], LazyArray]) -> None:
    source = tensor("a")
    assert astype(source, np.dtype(np.float32)) is source


@pytest.mark.parametrize("new_block", [(4, 6), (2, 3), (4, 1), (1, 1), (1, 2)])
def test_regrid(tensor: Callable[[str], LazyArray], tensors: Tensors, new_block: tuple[int, int]) -> None:
    """12 x 10 in blocks of 4 x 6, the last of a row ragged."""
    rows = [row // (4 // new_block[0]) for row in range(-(-12 // new_block[0]))]
    cols = [col // (6 // new_block[1]) for col in range(-(-10 // new_block[1]))]
    check_every_part(regrid(tensor("scales"), (4, 6), new_block, (12, 10)), tensors["scales"][np.ix_(rows, cols)])


def test_regrid_cannot_approximate(tensor: Callable[[str], LazyArray]) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        regrid(tensor("scales"), (4, 6), (3, 6), (12, 10))


def test_regrid_reads_only_its_scales(checkpoint: Checkpoint, tensor: Callable[[str], LazyArray]) -> None:
    regrid(tensor("scales"), (4, 6), (2, 2), (12, 10)).read((slice(2, 4), slice(0, 3)))
    assert checkpoint.bytes_read == 4  # one scale


def test_dequantized(tensor: Callable[[str], LazyArray], tensors: Tensors) -> None:
    scale = np.repeat(np.repeat(tensors["scales"], 4, axis=0), 6, axis=1)[:, :10]
    values = tensors["packed"].astype(np.float32) * scale
    packed = LazyQuant(tensor("packed"), tensor("scales"), Format("fp8", (4, 6)))
    check_every_part(Dequantized(packed, np.dtype(np.float32)), values)
    check_every_part(Dequantized(packed, BF16), values.astype(BF16))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_dequantized_layouts(tmp_path: Path, seed: int, layout: str) -> None:
    """Every part of 6 x 48, odd columns and cut blocks among them."""
    tensors = pack_module("m", layout, (6, 48), np.random.default_rng(seed))
    write_file(tmp_path / "model.safetensors", tensors)
    packed = find_stored(open_checkpoint(tmp_path), "m.weight", None, linear=True).value
    assert isinstance(packed, LazyQuant)
    values = decode(tensors, "m.weight")
    check_every_part(Dequantized(packed, np.dtype(np.float32)), values)
    check_every_part(Dequantized(packed, BF16), values.astype(BF16))


def test_stack_of_scalars(tmp_path: Path) -> None:
    """A scalar of an array is a copy to numpy, not a part of it."""
    write_file(tmp_path / "model.safetensors", {f"s{i}": np.float32(i).reshape(()) for i in range(4)})
    checkpoint = open_checkpoint(tmp_path)
    scalars = [Tensor(checkpoint, checkpoint.tensors[f"s{i}"]) for i in range(4)]
    stack = Stack([Stack(scalars[:2]), Stack(scalars[2:])])
    np.testing.assert_array_equal(stack.read(), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(stack.read((slice(1, 2), slice(1, 2))), [[3]])
