"""Loading onto simulated devices, against a plain numpy reading of the same tensors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax.sharding import Mesh

from minimax_jax import progress
from minimax_jax.checkpoint import LazyQuant, LoadPlan, load_parameters, open_checkpoint
from minimax_jax.checkpoint.safetensors_index import DTYPES
from minimax_jax.config import MiniMaxM2Config, Parallelism, QuantizationConfig, load_config
from minimax_jax.errors import CheckpointError
from minimax_jax.sharding import make_mesh, named_sharding
from pallas_kernels.quant import PAYLOAD_DTYPES, SCALE_DTYPES, Format, QuantTensor, Weight, codes_per_element
from tests.checkpoint.tiny_checkpoint import (
    BF16,
    E2M1,
    FP8_BLOCK,
    LAYOUTS,
    Tensors,
    decode,
    pack,
    plan_of,
    quantization_of,
    random_tensors,
    read_index,
    shapes_of,
    tiny_config,
    unpack,
    write_checkpoint,
    write_file,
)
from tests.checkpoints import NAMES

MESHES = [(1, 1), (1, 8), (2, 4)]
PLACEMENTS = ["tensor", "expert"]


def mesh_of(plan: LoadPlan) -> Mesh:
    return make_mesh(plan.parallelism)


def load(plan: LoadPlan) -> dict[str, Weight]:
    return load_parameters(plan, plan.specs, mesh_of(plan), plan.parallelism)


def expected_values(config: MiniMaxM2Config, tensors: Tensors, parallelism: Parallelism) -> dict[str, np.ndarray]:
    """Each parameter as one array, put together by hand."""
    heads = max(config.num_key_value_heads, parallelism.model)

    def repeated(values: np.ndarray) -> np.ndarray:
        split = values.reshape(config.num_key_value_heads, config.head_dim, *values.shape[1:])
        rows = [split[head * config.num_key_value_heads // heads] for head in range(heads)]
        return np.concatenate(rows)

    expected = {}
    for name in tensors:
        name = name.removesuffix("_packed")
        path = name.removeprefix("model.")
        if ".experts." in name or "_scale" in name.rpartition(".")[2]:
            continue
        values = decode(tensors, name)
        expected[path] = repeated(values) if re.search(r"k_proj|v_proj|k_norm", name) else values
    for i in range(config.num_hidden_layers):
        for part in "kv":
            scale = tensors.get(f"model.layers.{i}.self_attn.{part}_proj.{part}_scale")
            expected |= {} if scale is None else {f"layers.{i}.self_attn.{part}_scale": scale}
        prefix = f"model.layers.{i}.block_sparse_moe.experts"
        w13, w2 = [], []
        for e in range(config.num_local_experts):
            w13.append(np.stack([decode(tensors, f"{prefix}.{e}.{name}.weight") for name in ("w1", "w3")]))
            w2.append(decode(tensors, f"{prefix}.{e}.w2.weight"))
        expected[f"layers.{i}.block_sparse_moe.experts.w13"] = np.stack(w13)
        expected[f"layers.{i}.block_sparse_moe.experts.w2"] = np.stack(w2)
    return expected


def decode_local(
    payload: np.ndarray, scale: np.ndarray, format: Format, global_scale: np.ndarray | None = None
) -> np.ndarray:
    """`QuantTensor`'s own rule in numpy, which compiles nothing."""
    values = E2M1[unpack(payload.view(np.uint8))] if payload.dtype == np.uint32 else payload.astype(np.float32)
    rows, cols = values.shape[-2:]
    block = format.block
    assert scale.shape[-2:] == (-(-rows // block[0]), -(-cols // block[1])), "just the scales of its own blocks"
    each = np.exp2(scale.astype(np.float32) - 127) if scale.dtype == np.uint8 else scale.astype(np.float32)
    if global_scale is not None:
        whole = global_scale[..., None, None]
        each = each / whole if format.global_divides else each * whole
    return values * each[..., np.arange(rows)[:, None] // block[0], np.arange(cols) // block[1]]


def decode_weight(weight: Weight) -> np.ndarray:
    """A whole parameter's values."""
    if isinstance(weight, jax.Array):
        return np.asarray(weight)
    whole = None if weight.global_scale is None else np.asarray(weight.global_scale)
    return decode_local(np.asarray(weight.payload), np.asarray(weight.scale), weight.format, whole)


def local_parts(weight: Weight) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """What each device holds, decoded from its own payload and scales alone; the slices are the payload's."""
    if isinstance(weight, jax.Array):
        for shard in weight.addressable_shards:
            yield shard.index, np.asarray(shard.data)
        return
    scales = {shard.device: np.asarray(shard.data) for shard in weight.scale.addressable_shards}
    factors: dict[jax.Device, np.ndarray | None] = dict.fromkeys(scales)
    if weight.global_scale is not None:
        factors |= {shard.device: np.asarray(shard.data) for shard in weight.global_scale.addressable_shards}
    for shard in weight.payload.addressable_shards:
        cols, each = shard.index[-1], codes_per_element(weight.payload.dtype)
        cols = slice(*(None if bound is None else bound * each for bound in (cols.start, cols.stop)))
        part = decode_local(np.asarray(shard.data), scales[shard.device], weight.format, factors[shard.device])
        yield (*shard.index[:-1], cols), part


def check(weights: Mapping[str, Weight], expected: Mapping[str, np.ndarray], plan: LoadPlan) -> None:
    """Whole arrays, each device's part and the placement, all exact."""
    assert weights.keys() == expected.keys()
    devices = plan.parallelism.data * plan.parallelism.model
    for path, weight in weights.items():
        values = expected[path]
        assert weight.shape == plan.specs[path].shape == values.shape
        axes = plan.specs[path].axes
        for array in jax.tree.leaves(weight):
            assert len(array.sharding.device_set) == devices
            sharding = named_sharding(mesh_of(plan), axes if array.ndim == len(axes) else axes[:-2], plan.parallelism)
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        count = 0
        for index, part in local_parts(weight):
            assert part.tobytes() == values[index].astype(part.dtype).tobytes(), (path, index)
            count += 1
        assert count == devices


def read_with_the_library(directory: Path) -> Tensors:
    """Every tensor as safetensors itself finds it."""
    tensors: Tensors = {}
    for file in sorted(set(read_index(directory).values())):
        for name, found in safetensors.deserialize((directory / file).read_bytes()):
            tensors[name] = np.frombuffer(found["data"], DTYPES[found["dtype"]]).reshape(found["shape"])
    return tensors


@pytest.mark.parametrize("experts", PLACEMENTS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_published_layouts(shared: Path, name: str, mesh: tuple[int, int], experts: str) -> None:
    directory = shared / "data" / "checkpoints" / name
    config = load_config(directory)
    plan = plan_of(directory, config, mesh, experts, "bfloat16")
    weights = load(plan)
    check(weights, expected_values(config, read_with_the_library(directory), plan.parallelism), plan)
    w2 = weights["layers.2.block_sparse_moe.experts.w2"]
    gate = weights["layers.2.block_sparse_moe.gate.weight"]
    assert isinstance(gate, jax.Array)
    assert gate.dtype == jnp.float32
    assert isinstance(weights["layers.2.self_attn.q_proj.weight"], QuantTensor) == (name == "m2-fp8-block")
    if name == "m2-bf16":
        assert isinstance(w2, jax.Array)
        assert w2.dtype == jnp.bfloat16
        return
    assert isinstance(w2, QuantTensor)
    assert w2.format.activation is None
    assert w2.input_scale is None
    assert w2.payload.dtype == PAYLOAD_DTYPES[w2.format.name]
    assert w2.scale.dtype == SCALE_DTYPES[w2.format.name]
    assert w2.format.global_divides == (name == "m2-nvfp4-ct")
    # 768 columns over 8 devices are 96 each: FP8 blocks of 128 are cut into blocks of 32; over 4 they are 192: 64.
    cut = {("tensor", 8): 32, ("tensor", 4): 64}
    block = {"fp8": (128, cut.get((experts, mesh[1]), 128)), "mxfp4": (1, 32), "nvfp4": (1, 16)}
    assert w2.format.block == block[w2.format.name]


@pytest.mark.parametrize("experts", PLACEMENTS)
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 4), (1, 8), (1, 16)])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_on_meshes(tmp_path: Path, seed: int, layout: str, mesh: tuple[int, int], experts: str) -> None:
    """Width 768: 96 columns on each of 8 devices, and 48 on 16, which cuts blocks of 32 into blocks of 16."""
    config = tiny_config(
        num_hidden_layers=1,
        intermediate_size=768,
        num_attention_heads=16,
        num_local_experts=16,
        quantization=quantization_of(layout),
    )
    tensors = pack(random_tensors(config, seed), layout, seed)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, mesh, experts)
    weights = load(plan)
    w13, w2 = (weights[f"layers.0.block_sparse_moe.experts.{name}"] for name in ("w13", "w2"))
    assert isinstance(w13, QuantTensor)
    assert isinstance(w2, QuantTensor)
    name = LAYOUTS[layout][0]
    cols = 16 if name == "nvfp4" else 32
    assert w13.format.block == (1, cols)
    assert w2.format.block == (1, 16 if experts == "tensor" and mesh[1] == 16 else cols)
    if name == "nvfp4":
        assert w13.global_scale is not None
        assert w2.global_scale is not None
        assert (w13.global_scale.shape, w2.global_scale.shape) == ((16, 2), (16,))
        assert len(np.unique(np.asarray(w13.global_scale))) == 32
    check(weights, expected_values(config, tensors, plan.parallelism), plan)


@pytest.mark.parametrize("layout", ["mxfp8-vendor", "mxfp4-quark", "nvfp4-ct"])
def test_packed_attention_and_heads(tmp_path: Path, seed: int, layout: str) -> None:
    """Key/value heads are repeated with their own block scales; a matrix's one global scale goes to every device."""
    config = tiny_config(num_hidden_layers=1, head_dim=16, quantization=quantization_of(layout, ("lm_head", "*gate")))
    tensors = pack(pack(random_tensors(config, seed), layout, seed), layout, seed, "_proj.")
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, (1, 4))
    check(load(plan), expected_values(config, tensors, plan.parallelism), plan)


@pytest.mark.parametrize(("model", "block"), [(8, 64), (16, 32)])
def test_width_1536_is_cut_exactly(tmp_path: Path, seed: int, model: int, block: int) -> None:
    """1536 over 8 is 192 rows, over 16 it is 96: device 1 begins in the middle of a block of 128."""
    config = tiny_config(
        num_hidden_layers=1,
        hidden_size=256,
        intermediate_size=1536,
        num_attention_heads=16,
        num_local_experts=2,
        quantization=FP8_BLOCK,
    )
    tensors = random_tensors(config, seed, fp8=True)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, (1, model))
    weights = load(plan)
    w13, w2 = (weights[f"layers.0.block_sparse_moe.experts.{name}"] for name in ("w13", "w2"))
    assert isinstance(w13, QuantTensor)
    assert isinstance(w2, QuantTensor)
    assert w13.format.block == (block, 128)
    assert w2.format.block == (128, block)
    assert w13.scale.shape == (2, 2, 1536 // block, 2)
    assert w2.scale.shape == (2, 2, 1536 // block)
    original = tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight_scale_inv"]
    np.testing.assert_array_equal(w13.scale[1, 1], np.repeat(original, 128 // block, axis=0))
    check(weights, expected_values(config, tensors, plan.parallelism), plan)


@pytest.mark.parametrize("experts", PLACEMENTS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", ["scalar", "one", "per row", "row column", "mixed"])
def test_other_forms_of_scales_on_meshes(
    tmp_path: Path, seed: int, form: str, mesh: tuple[int, int], experts: str
) -> None:
    config = tiny_config(num_hidden_layers=1, quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    rng = np.random.default_rng(seed)
    for number, name in enumerate(name for name in list(tensors) if name.endswith("_scale_inv")):
        rows = tensors[name.removesuffix("_scale_inv")].shape[0]
        shapes = {"scalar": (), "one": (1,), "per row": (rows,), "row column": (rows, 1)}
        shape = list(shapes.values())[number % 4] if form == "mixed" else shapes[form]
        tensors[name] = np.asarray(rng.uniform(0.5, 2.0, shape), np.float32)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, mesh, experts)
    check(load(plan), expected_values(config, tensors, plan.parallelism), plan)


def test_ragged_blocks_on_a_mesh(tmp_path: Path, seed: int) -> None:
    """300 x 200 with 3 x 2 scales: cut over 4 devices, where 75 rows share no block size but one row."""
    config = tiny_config(num_hidden_layers=1, hidden_size=200, intermediate_size=300, quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    assert tensors["model.layers.0.block_sparse_moe.experts.0.w1.weight_scale_inv"].shape == (3, 2)
    directory = write_checkpoint(tmp_path, tensors)
    for model, rows in ((1, 128), (2, 2), (4, 1)):
        plan = plan_of(directory, config, (1, model))
        weights = load(plan)
        w13 = weights["layers.0.block_sparse_moe.experts.w13"]
        assert isinstance(w13, QuantTensor)
        assert w13.format.block == (rows, 128)
        check(weights, expected_values(config, tensors, plan.parallelism), plan)


def test_heads_are_repeated_one_by_one(tmp_path: Path) -> None:
    """Two key/value heads on four devices lie 0, 0, 1, 1, and k_norm and the block scales go with them."""
    config = tiny_config(num_hidden_layers=1, head_dim=128, hidden_size=128, quantization=FP8_BLOCK)
    tensors = random_tensors(config, 0, fp8=True)
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.weight_scale_inv"):
        value = tensors[f"model.layers.0.self_attn.{name}"]
        heads = value.reshape(2, -1)
        heads[0], heads[1] = 1, 2
    weights = load(plan_of(write_checkpoint(tmp_path, tensors), config, (1, 4)))
    k_proj, k_norm = (weights[f"layers.0.self_attn.{name}.weight"] for name in ("k_proj", "k_norm"))
    v_proj = weights["layers.0.self_attn.v_proj.weight"]
    assert isinstance(k_proj, QuantTensor)
    assert isinstance(v_proj, QuantTensor)
    assert isinstance(k_norm, jax.Array)
    assert k_proj.scale.shape == (4, 1)
    for array in (k_proj.payload, k_proj.scale, v_proj.payload, k_norm):
        held = {shard.index[0].start: np.unique(np.asarray(shard.data)) for shard in array.addressable_shards}
        assert [held[start].tolist() for start in sorted(held)] == [[1], [1], [2], [2]]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("experts", PLACEMENTS)
def test_each_slice_holds_its_own_tensor(tmp_path: Path, experts: str, fp8: bool) -> None:
    """Every tensor is full of its own number, so that a swapped, shifted or doubled one shows."""
    config = tiny_config(num_local_experts=4, quantization=FP8_BLOCK if fp8 else None)
    numbers = {name: number for number, name in enumerate(shapes_of(config), 1)}
    tensors = random_tensors(config, 0, fp8=fp8)
    for name, number in numbers.items():
        if fp8 and name + "_scale_inv" in tensors:
            tensors[name][:] = 1
            tensors[name + "_scale_inv"][:] = number
        else:
            tensors[name][:] = number
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, (1, 4), experts)
    weights = load(plan)
    slices: dict[str, np.ndarray] = {}
    for path, weight in weights.items():
        values = decode_weight(weight)
        found = re.match(r"(.*experts)\.(w13|w2)$", path)
        if not found:
            slices["model." + path if path != "lm_head.weight" else path] = values
            continue
        for e in range(4):
            parts = {"w1": values[e, 0], "w3": values[e, 1]} if found[2] == "w13" else {"w2": values[e]}
            slices |= {f"model.{found[1]}.{e}.{name}.weight": part for name, part in parts.items()}
    assert slices.keys() == numbers.keys()
    for name, part in slices.items():
        assert np.unique(part).tolist() == [numbers[name]], name
    used = [name for names in plan.sources.values() for name in names]
    assert sorted(used) == sorted(tensors)


def test_whole_experts_are_spread(tmp_path: Path, seed: int) -> None:
    config = tiny_config()
    weights = load(plan_of(write_checkpoint(tmp_path, random_tensors(config, seed)), config, (1, 4), "expert"))
    for name, shape in {"w13": (2, 2, 32, 48), "w2": (2, 48, 32)}.items():
        array = weights[f"layers.1.block_sparse_moe.experts.{name}"]
        assert isinstance(array, jax.Array)
        held = {shard.index[0].start or 0: shard.data.shape for shard in array.addressable_shards}
        assert held == {0: shape, 2: shape, 4: shape, 6: shape}


@pytest.mark.parametrize("experts", PLACEMENTS)
def test_each_device_reads_only_its_part(tmp_path: Path, seed: int, experts: str) -> None:
    config = tiny_config(intermediate_size=256, hidden_size=256, quantization=FP8_BLOCK)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, random_tensors(config, seed, fp8=True)))
    plan = plan_of(checkpoint, config, (1, 8), experts)
    for path, weight in plan.weights.items():
        axes = plan.specs[path].axes
        arrays = weight.arrays(axes) if isinstance(weight, LazyQuant) else [(weight, axes)]
        for number, (array, axes) in enumerate(arrays):
            sharding = named_sharding(mesh_of(plan), axes, plan.parallelism)
            indices = sharding.addressable_devices_indices_map(array.shape)
            assert len(indices) == 8
            for index in indices.values():
                before = checkpoint.bytes_read
                part = array.read(index)
                read = checkpoint.bytes_read - before
                assert part.nbytes == math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
                assert read == part.nbytes if number == 0 else 0 < read <= part.nbytes, path


def test_each_part_is_read_once(tmp_path: Path, seed: int) -> None:
    """Also where several devices hold it; the scales once more, when they are checked."""
    config = tiny_config(quantization=FP8_BLOCK)
    directory = write_checkpoint(tmp_path, random_tensors(config, seed, fp8=True))
    for mesh in ((1, 1), (1, 2), (4, 2)):  # no head is repeated
        checkpoint = open_checkpoint(directory)
        load(plan_of(checkpoint, config, mesh, "expert"))
        scales = {name: info.nbytes for name, info in checkpoint.tensors.items() if "_scale" in name}
        whole = sum(info.nbytes for info in checkpoint.tensors.values())
        # The one scale of q, k, v and o belongs to both of two devices.
        again = sum(size for name, size in scales.items() if "_proj" in name) * (mesh[1] - 1)
        assert checkpoint.bytes_read == whole + sum(scales.values()) + again


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_bad_scale_stops_before_any_weight(tmp_path: Path, seed: int, wrong: float) -> None:
    config = tiny_config(num_hidden_layers=1, quantization=FP8_BLOCK)
    tensors = random_tensors(config, seed, fp8=True)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors[name][0, 0] = wrong
    plan = plan_of(write_checkpoint(tmp_path, tensors), config)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*\.safetensors"):
        load(plan)
    assert plan.checkpoint.bytes_read <= sum(scale.info.nbytes for scale in plan.scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved", [np.dtype(np.float32), np.dtype(np.float16), BF16])
def test_dtypes_of_plain_weights(tmp_path: Path, seed: int, saved: np.dtype, dtype: str) -> None:
    """One file without an index; the router is float32 whatever the rest is, and bfloat16 is never widened."""
    config = tiny_config(num_hidden_layers=1)
    tensors = {name: value.astype(saved) for name, value in random_tensors(config, seed).items()}
    write_file(tmp_path / "model.safetensors", tensors)
    plan = plan_of(tmp_path, config, (1, 2), dtype=dtype)
    weights = load(plan)
    for path, weight in weights.items():
        assert isinstance(weight, jax.Array)
        router = path.endswith(("gate.weight", "bias"))
        kept = jnp.dtype(jnp.float32 if router else jnp.bfloat16 if saved == BF16 else dtype)
        assert weight.dtype == kept, path
    check(weights, expected_values(config, tensors, plan.parallelism), plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_embedding_and_router_are_decoded(tmp_path: Path, seed: int, dtype: str) -> None:
    """Nothing looks up or routes in FP8: the tensors decide that they are packed, loading unpacks them."""
    config = tiny_config(num_hidden_layers=1, quantization=QuantizationConfig(quant_method="fp8"))
    tensors = random_tensors(config, seed, fp8=True)
    names = ("embed_tokens.weight", "layers.0.block_sparse_moe.gate.weight")
    for name in (*(f"model.{name}" for name in names), "lm_head.weight"):
        tensors[name] = tensors[name].astype(np.dtype(jnp.float8_e4m3fn))
        tensors[name + "_scale_inv"] = np.full((1, 1), 0.37, np.float32)
    plan = plan_of(write_checkpoint(tmp_path, tensors), config, (1, 4), dtype=dtype)
    weights = load(plan)
    embedding, gate = (weights[name] for name in names)
    assert isinstance(embedding, jax.Array)
    assert isinstance(gate, jax.Array)
    assert isinstance(weights["lm_head.weight"], QuantTensor)
    assert embedding.dtype == jnp.dtype(dtype)
    assert gate.dtype == jnp.float32
    check(weights, expected_values(config, tensors, plan.parallelism), plan)


def test_plan_of_another_mesh(tmp_path: Path, seed: int) -> None:
    config = tiny_config(num_hidden_layers=1)
    plan = plan_of(write_checkpoint(tmp_path, random_tensors(config, seed)), config, (1, 2))
    parallelism = Parallelism(model=4)
    with pytest.raises(ValueError, match="another mesh"):
        load_parameters(plan, plan.specs, make_mesh(parallelism), parallelism)


def test_loaded_weights_outlive_the_files(tmp_path: Path, seed: int) -> None:
    config = tiny_config(num_hidden_layers=1)
    tensors = random_tensors(config, seed)
    directory = write_checkpoint(tmp_path, tensors)
    plan = plan_of(directory, config, (1, 2))
    weights = load(plan)
    plan.checkpoint.close()
    for path in directory.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    check(weights, expected_values(config, tensors, plan.parallelism), plan)


def test_progress_in_log_lines(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    plan = plan_of(write_checkpoint(tmp_path, random_tensors(config, seed)), config)
    monkeypatch.setattr(progress, "_INTERVAL", -1.0)
    with caplog.at_level(logging.INFO, logger="minimax_jax"):
        load(plan)
    lines = [record.getMessage() for record in caplog.records if record.name == "minimax_jax"]
    assert len(lines) == len(plan.weights) + 1
    assert all("GB, layers" in line for line in lines)
    assert "layers 1/2" in lines[20]
    assert all(line.endswith("s left") for line in lines[:-1])
    assert re.search(r"loading weights: (\S+) of \1 GB, layers 2/2 in", lines[-1])


def test_progress_bar_on_a_terminal(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    config = tiny_config()
    plan = plan_of(write_checkpoint(tmp_path, random_tensors(config, seed)), config)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(plan)
    shown = capsys.readouterr().err
    assert "loading weights" in shown
    assert "layers 2/2" in shown
    assert "100%" in shown


@pytest.mark.oracle
def test_written_by_transformers(tmp_path: Path, seed: int) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(seed)
        model = transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**sizes)).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        directory = tmp_path / str(dtype)
        model.save_pretrained(directory)
        config = load_config(directory)
        plan = plan_of(directory, config, (1, 4))
        weights = load(plan)
        state = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
        for i in range(2):
            gate_up = state[f"model.layers.{i}.mlp.experts.gate_up_proj"]
            w13 = weights[f"layers.{i}.block_sparse_moe.experts.w13"]
            np.testing.assert_array_equal(np.asarray(w13).astype(np.float32).reshape(gate_up.shape), gate_up)
            w2 = weights[f"layers.{i}.block_sparse_moe.experts.w2"]
            np.testing.assert_array_equal(
                np.asarray(w2).astype(np.float32), state[f"model.layers.{i}.mlp.experts.down_proj"]
            )
            gate = weights[f"layers.{i}.block_sparse_moe.gate.weight"]
            np.testing.assert_array_equal(np.asarray(gate), state[f"model.layers.{i}.mlp.gate.weight"])
        head = weights["lm_head.weight"]
        np.testing.assert_array_equal(np.asarray(head).astype(np.float32), state["lm_head.weight"])
