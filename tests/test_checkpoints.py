"""Checkpoints with expected logits, on every mesh, with either placement of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minimax_jax import LLM, SamplingParams
from minimax_jax.modules import norms
from tests.checkpoints import FIXTURES, NAMES, read_expected

MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
PLACEMENTS = ["tensor", "expert"]
TOLERANCE = 1e-4  # absolute, float32 compute

# Every pair of format, mesh and placement in half of the runs.
PAIRS = [(name, mesh, PLACEMENTS[(i + j) % 2]) for i, name in enumerate(NAMES) for j, mesh in enumerate(MESHES)]
ALL = [(name, mesh, placement) for name in NAMES for mesh in MESHES for placement in PLACEMENTS]


def check(directory: Path, mesh: tuple[int, int], placement: str) -> None:
    """Logits of every prompt at the positions that the file keeps, and its greedy continuations, all in one batch."""
    expected = read_expected(directory)
    llm = LLM(
        directory,
        dtype="float32",
        data_parallel_size=mesh[0],
        tensor_parallel_size=mesh[1],
        expert_parallel=placement == "expert",
        max_num_seqs=4,
        max_model_len=384,
    )
    for prompt in expected:
        got = llm.logits(prompt.ids)[-len(prompt.logits) :]
        assert np.abs(got - prompt.logits).max() <= TOLERANCE, f"prompt of {len(prompt.ids)} tokens"
    continued = [prompt for prompt in expected if prompt.greedy is not None]
    assert continued
    outputs = llm.generate([prompt.ids for prompt in continued], SamplingParams(temperature=0, max_tokens=16))
    for output, prompt in zip(outputs, continued, strict=True):
        assert list(output.outputs[0].token_ids) == prompt.greedy
        assert output.outputs[0].text is None  # no tokenizer in these: ids in, ids out


@pytest.mark.parametrize(("name", "mesh", "placement"), PAIRS)
def test_own_fixtures(name: str, mesh: tuple[int, int], placement: str) -> None:
    check(FIXTURES / f"tiny-{name}", mesh, placement)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "placement"), ALL)
def test_shared_checkpoints(shared: Path, name: str, mesh: tuple[int, int], placement: str) -> None:
    check(shared / "data" / "checkpoints" / name, mesh, placement)


@pytest.mark.parametrize("name", NAMES)
def test_shared_checkpoints_on_one_device(shared: Path, name: str) -> None:
    check(shared / "data" / "checkpoints" / name, (1, 1), "tensor")


@pytest.mark.parametrize("devices", [2, 8])
def test_a_norm_of_each_devices_own_part_is_caught(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that cost others most: without the norm's all-reduce these checks must fail."""
    monkeypatch.setattr(norms, "model_psum", lambda sums: sums * devices)
    with pytest.raises(AssertionError):
        check(FIXTURES / "tiny-m2-bf16", (1, devices), "tensor")
