"""Checkpoints with expected logits, on every mesh, with either placement of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minimax_jax import LLM, SamplingParams
from minimax_jax.modules import norms

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = ["m2-bf16", "m2-fp8-block"]
MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
PLACEMENTS = ["tensor", "expert"]
TOLERANCE = 1e-4  # absolute, float32 compute

# Every pair of format, mesh and placement in half of the runs.
PAIRS = [(format_, mesh, PLACEMENTS[(i + j) % 2]) for i, format_ in enumerate(FORMATS) for j, mesh in enumerate(MESHES)]
ALL = [(format_, mesh, placement) for format_ in FORMATS for mesh in MESHES for placement in PLACEMENTS]


def largest_difference(llm: LLM, expected: dict[str, np.ndarray]) -> float:
    """Over every prompt of the file, at the positions that it keeps."""
    worst = 0.0
    for key in (key for key in expected if key.startswith("prompt") and key.endswith("_ids")):
        want = expected[key.replace("_ids", "_logits")]
        got = llm.logits(expected[key].tolist())[-len(want) :]
        worst = max(worst, float(np.abs(got - want).max()))
    return worst


def check(directory: Path, mesh: tuple[int, int], placement: str) -> None:
    """Logits of every prompt, and every greedy continuation, all prompts in one batch."""
    expected = dict(np.load(directory / "expected.npz"))
    llm = LLM(
        directory,
        dtype="float32",
        data_parallel_size=mesh[0],
        tensor_parallel_size=mesh[1],
        expert_parallel=placement == "expert",
        max_num_seqs=4,
        max_model_len=384,
    )
    assert largest_difference(llm, expected) <= TOLERANCE
    greedy = {key.removeprefix("greedy").removesuffix("_ids"): key for key in expected if key.startswith("greedy")}
    greedy = {n: key for n, key in greedy.items() if key.endswith("_ids")}
    assert greedy
    prompts = [expected[f"prompt{n}_ids"].tolist() for n in greedy]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    for output, key in zip(outputs, greedy.values(), strict=True):
        assert list(output.outputs[0].token_ids) == expected[key].tolist()


@pytest.mark.parametrize(("format_", "mesh", "placement"), PAIRS)
def test_own_fixtures(format_: str, mesh: tuple[int, int], placement: str) -> None:
    check(FIXTURES / format_, mesh, placement)


@pytest.mark.slow
@pytest.mark.parametrize(("format_", "mesh", "placement"), ALL)
def test_shared_checkpoints(shared: Path, format_: str, mesh: tuple[int, int], placement: str) -> None:
    check(shared / "data" / "checkpoints" / format_, mesh, placement)


@pytest.mark.parametrize("format_", FORMATS)
def test_shared_checkpoints_on_one_device(shared: Path, format_: str) -> None:
    check(shared / "data" / "checkpoints" / format_, (1, 1), "tensor")


@pytest.mark.parametrize("devices", [2, 8])
def test_a_norm_of_each_devices_own_part_is_caught(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that cost others most: without the norm's all-reduce these checks must fail."""
    monkeypatch.setattr(norms, "model_psum", lambda sums: sums * devices)
    with pytest.raises(AssertionError):
        check(FIXTURES / "m2-bf16", (1, devices), "tensor")
