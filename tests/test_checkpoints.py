"""Checkpoints with expected logits, on every mesh, with either placement of experts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax import LLM, SamplingParams
from minimax_jax.errors import ConfigError
from minimax_jax.modules import norms
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.quant import Weight
from tests.checkpoint.tiny_checkpoint import (
    BF16,
    Tensors,
    decode,
    pack,
    random_tensors,
    tiny_config,
    write_checkpoint,
)
from tests.checkpoints import FIXTURE_NAMES, FIXTURES, NAMES, read_expected

MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
PLACEMENTS = ["tensor", "expert"]
TOLERANCE = 1e-4  # absolute, float32 compute

IMPLEMENTATIONS = ["xla", "pallas", "reference"]

# Every pair of format, mesh, placement and implementation in a sixth of the runs.
PAIRS = [
    (name, mesh, PLACEMENTS[(i + j) % 2], IMPLEMENTATIONS[(i + 2 * j) % 3])
    for i, name in enumerate(FIXTURE_NAMES)
    for j, mesh in enumerate(MESHES)
]
# Two data shards, which are blind to each other, are for the default alone.
ALL = [
    (name, mesh, placement, implementation)
    for name in NAMES
    for mesh in MESHES
    for placement in PLACEMENTS
    for implementation in IMPLEMENTATIONS
    if implementation == "xla" or mesh[0] == 1
]


def check(
    directory: Path, mesh: tuple[int, int], placement: str, implementation: str | None = None, generate: bool = True
) -> None:
    """Logits of every prompt at the positions that the file keeps, and its greedy continuations.

    With `generate` the continuations are generated, all in one batch; without, each token must be the likeliest after
    those before it, which needs no other compiled program.
    """
    expected = read_expected(directory)
    llm = LLM(
        directory,
        dtype="float32",
        data_parallel_size=mesh[0],
        tensor_parallel_size=mesh[1],
        expert_parallel=placement == "expert",
        max_num_seqs=4,
        max_model_len=384,
        implementation=implementation,
    )
    for prompt in expected:
        got = llm.logits(prompt.ids)[-len(prompt.logits) :]
        assert np.abs(got - prompt.logits).max() <= TOLERANCE, f"prompt of {len(prompt.ids)} tokens"
    continued = [prompt for prompt in expected if prompt.greedy is not None]
    assert continued
    if not generate:
        for prompt in continued:
            assert prompt.greedy is not None
            logits = llm.logits([*prompt.ids, *prompt.greedy[:-1]])
            assert logits[len(prompt.ids) - 1 :].argmax(axis=-1).tolist() == prompt.greedy
        return
    outputs = llm.generate([prompt.ids for prompt in continued], SamplingParams(temperature=0, max_tokens=16))
    for output, prompt in zip(outputs, continued, strict=True):
        assert list(output.outputs[0].token_ids) == prompt.greedy
        assert output.outputs[0].text is None  # no tokenizer in these: ids in, ids out


@pytest.mark.parametrize(("name", "mesh", "placement", "implementation"), PAIRS)
def test_own_fixtures(name: str, mesh: tuple[int, int], placement: str, implementation: str) -> None:
    check(FIXTURES / f"tiny-{name}", mesh, placement, implementation)


def test_the_pairs_are_all_there() -> None:
    choices = [FIXTURE_NAMES, MESHES, PLACEMENTS, IMPLEMENTATIONS]
    for (a, first), (b, second) in itertools.combinations(enumerate(choices), 2):
        assert {(pair[a], pair[b]) for pair in PAIRS} == set(itertools.product(first, second))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "placement", "implementation"), ALL)
def test_shared_checkpoints(
    shared: Path, name: str, mesh: tuple[int, int], placement: str, implementation: str
) -> None:
    generate = implementation == "xla" or mesh == (1, 1)  # interpreted kernels take long to compile
    check(shared / "data" / "checkpoints" / name, mesh, placement, implementation, generate)


@pytest.mark.parametrize("name", NAMES)
def test_shared_checkpoints_on_one_device(shared: Path, name: str) -> None:
    check(shared / "data" / "checkpoints" / name, (1, 1), "tensor")


@pytest.mark.parametrize("devices", [2, 8])
def test_a_norm_of_each_devices_own_part_is_caught(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that cost others most: without the norm's all-reduce these checks must fail."""
    monkeypatch.setattr(norms, "model_psum", lambda sums: sums * devices)
    with pytest.raises(AssertionError):
        check(FIXTURES / "tiny-m2-bf16", (1, devices), "tensor")


@pytest.mark.parametrize("layout", ["mxfp4-quark", "nvfp4-ct"])
def test_width_1536_over_every_mesh(tmp_path: Path, seed: int, layout: str) -> None:
    """Experts as wide as MiniMax-M2's, 192 columns on each of eight devices; equal to their decoded weights."""
    config = tiny_config(num_hidden_layers=1, hidden_size=32, intermediate_size=1536, num_local_experts=4)
    tensors = pack(random_tensors(config, seed), layout, seed)
    for name, value in tensors.items():
        if "_proj" in name or name == "model.embed_tokens.weight":
            tensors[name] = (value.astype(np.float32) * 0.3).astype(BF16)
        if name.endswith(".weight_scale") and value.dtype == np.uint8:
            tensors[name] = value - 2
        if "weight_global_scale" in name:
            tensors[name] = value * 4  # a divisor
    modules = {name.rpartition(".")[0] for name in tensors if ".experts." in name}
    rest = {name: value for name, value in tensors.items() if ".experts." not in name}
    decoded = {f"{module}.weight": decode(tensors, f"{module}.weight").astype(np.float32) for module in modules}
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, 24).tolist()

    def logits(contents: Tensors, devices: int) -> np.ndarray:
        directory = write_checkpoint(tmp_path, contents)
        (directory / "config.json").write_text(json.dumps(config.to_dict()))
        sizes: dict[str, Any] = {
            "tensor_parallel_size": devices,
            "max_num_seqs": 1,
            "max_model_len": 128,
            "prefill_chunk_size": 32,
        }
        return LLM(directory, dtype="float32", **sizes).logits(ids)

    expected = logits(rest | decoded, 1)
    assert np.abs(logits(rest | {name: value * 0 for name, value in decoded.items()}, 1) - expected).max() > 0.5
    for devices in (1, 2, 4, 8):
        difference = np.abs(logits(tensors, devices) - expected).max()
        print(f"{layout} on {devices} devices: {difference:.1e}")
        assert difference <= TOLERANCE


def test_kv_scales_are_loaded(shared: Path) -> None:
    """ModelOpt's, one for each layer, in the model's tree; a bfloat16 or float32 cache takes no notice."""
    llm = LLM(shared / "data" / "checkpoints" / "m2-nvfp4-modelopt", max_num_seqs=1, max_model_len=128)
    scales = {path: value for path, value in llm.runner.weights.items() if path.endswith(("k_scale", "v_scale"))}
    assert sorted(scales) == sorted(f"layers.{i}.self_attn.{part}_scale" for i in range(3) for part in "kv")
    for value in scales.values():
        assert isinstance(value, jax.Array)
        assert (value.shape, value.dtype) == ((), np.float32)
        assert float(value) > 0


def test_emulation_that_is_refused(shared: Path) -> None:
    """Before a weight is read."""
    checkpoints = shared / "data" / "checkpoints"
    options: dict[str, Any] = {"emulate_activation_quant": True, "max_num_seqs": 1, "max_model_len": 128}
    with pytest.raises(ConfigError, match="declares no quantised activations"):
        LLM(checkpoints / "m2-bf16", **options)
    with pytest.raises(ConfigError, match="emulate_activation_quant is 1; expected True or False"):
        LLM(checkpoints / "m2-mxfp4-quark", emulate_activation_quant=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_experts_in_bfloat16(shared: Path, name: str, seed: int) -> None:
    """Each layer's experts on the same inputs: bfloat16 products within 1 % of float32. Whole models may differ by a
    router's choice."""
    llm = LLM(shared / "data" / "checkpoints" / name, dtype="float32", max_num_seqs=1, max_model_len=128)
    rng = np.random.default_rng(seed)
    E, D, N, k = llm.config.num_local_experts, llm.config.hidden_size, 24, llm.config.num_experts_per_tok
    x = jnp.asarray(rng.normal(size=(N, D)), jnp.bfloat16)
    ids = jnp.asarray(np.argsort(rng.random((N, E)), axis=1)[:, :k], jnp.int32)
    gates = jnp.asarray(rng.random((N, k)), jnp.float32)
    for layer in range(llm.config.num_hidden_layers):
        path = f"layers.{layer}.block_sparse_moe.experts."
        w13, w2 = llm.runner.weights[path + "w13"], llm.runner.weights[path + "w2"]

        def run(x: jax.Array, implementation: str, w13: Weight = w13, w2: Weight = w2) -> np.ndarray:
            out = grouped_moe(x, w13, w2, ids, gates, activation=SwiGLU(), implementation=implementation)
            return np.asarray(out)

        want = run(x.astype(jnp.float32), "reference")
        for implementation in ("xla", "pallas"):
            error = np.linalg.norm(run(x, implementation) - want) / np.linalg.norm(want)
            assert error <= 1e-2, f"layer {layer}, {implementation}: {error}"
