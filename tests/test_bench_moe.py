"""The expert benchmark on a CPU: what it counts, what it draws, and one run at a tiny size."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant import QuantTensor, dequantize

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_moe  # noqa: E402
from moe_bench import calls, humming_peer, ours, report, timing, torch_worker  # noqa: E402
from moe_bench.cases import FORMATS, LAYERS, Floor, Layer, Routing, floors, matrix_bytes, routings  # noqa: E402
from moe_bench.weights import random_experts  # noqa: E402

TINY = LAYERS["tiny"]


def test_floor_of_one_token() -> None:
    """M2.1 in MXFP4: eight experts are 60 MB, and every count is the sum of its parts."""
    layer = LAYERS["M2.1"]
    least = floors(layer, "mxfp4", routings(layer, 1, 3, 0))
    expert = 3 * 3072 * 1536 * 17 // 32  # 4 bits a value and 8 bits for 32 of them
    activations = 3072 * 2 + 2 * 8 * 1536 * 2 + 3072 * 2
    assert least["experts"].bytes == 8 * expert + activations
    assert least["experts"].flops == 2 * 8 * 3 * 3072 * 1536
    assert least["gate_up"].flops + least["down"].flops == least["experts"].flops
    assert 60.0e6 < least["experts"].bytes < 60.3e6


def test_floor_counts_experts_once() -> None:
    twice = Routing(np.array([[0, 1], [1, 0]], np.int32), np.full((2, 2), 0.5, np.float32))
    apart = Routing(np.array([[0, 1], [2, 3]], np.int32), np.full((2, 2), 0.5, np.float32))
    one, two = (floors(TINY, "bf16", [case])["experts"] for case in (twice, apart))
    assert two.bytes - one.bytes == 2 * 3 * TINY.D * TINY.F * 2
    assert one.flops == two.flops
    assert Floor(10, 10).bound(1, 2) == "bytes"
    assert Floor(10, 10).seconds(2, 1) == 10


@pytest.mark.parametrize("format", FORMATS)
def test_packed_bytes_are_those_in_memory(format: str, seed: int) -> None:
    w13, w2 = random_experts(TINY, format, seed)
    counted = TINY.E * (2 * matrix_bytes(format, TINY.F, TINY.D) + matrix_bytes(format, TINY.D, TINY.F))
    assert counted == sum(leaf.nbytes for leaf in jax.tree.leaves((w13, w2)))


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_random_and_of_a_sane_size(format: str, seed: int) -> None:
    for weight, cols in zip(random_experts(TINY, format, seed), (TINY.D, TINY.F), strict=True):
        values = np.asarray(dequantize(weight, jnp.float32))
        assert np.isfinite(values).all()
        assert 0.5 < values.std() * cols**0.5 < 2
        flat = values.reshape(TINY.E, -1)
        assert len({row.tobytes() for row in flat}) == TINY.E  # no expert twice
        if isinstance(weight, QuantTensor):
            assert len(np.unique(np.asarray(weight.payload).view(np.uint8))) > 250
            assert len(np.unique(np.asarray(weight.scale).astype(np.float32))) > 3


@pytest.mark.parametrize("tokens", [1, 16])
def test_routings(tokens: int, seed: int) -> None:
    layer = LAYERS["M2.1"]
    cases = routings(layer, tokens, 20, seed)
    for case in cases:
        assert all(len(set(row)) == layer.k for row in case.expert_ids.tolist())
        assert ((case.expert_ids >= 0) & (case.expert_ids < layer.E)).all()
        assert np.allclose(case.weights.sum(1), 1)
    assert all((a.expert_ids != b.expert_ids).any() for a, b in itertools.pairwise(cases))
    if tokens == 1:  # no expert twice before all were dealt
        assert len(np.unique([case.expert_ids for case in cases])) == 20 * layer.k


def test_humming_blocks(seed: int) -> None:
    """Every row once, in blocks of its own expert, the rest filled up with the number of rows."""
    ids = routings(TINY, 7, 1, seed)[0].expert_ids
    rows, experts = humming_peer.align(ids, TINY.E, 4)
    assert len(rows) == 4 * len(experts)
    assert sorted(rows[rows < ids.size].tolist()) == list(range(ids.size))
    for block, expert in zip(rows.reshape(-1, 4), experts, strict=True):
        own = block[block < ids.size]
        assert len(own) > 0
        assert (ids.reshape(-1)[own] == expert).all()
    assert "fminf(a, 7.0f)" in humming_peer.activation_code(LAYERS["M3"])


def test_trace_reading() -> None:
    """Kernels on device streams count; the host, and the device's lines that repeat them, do not."""
    names = [(1, "process_name", "/device:GPU:0"), (2, "process_name", "/host:CPU")]
    events: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": n, "args": {"name": v}} for pid, n, v in names]
    for tid, name in ((1, "Stream #7(Compute)"), (2, "XLA Ops")):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
    for pid, tid in ((1, 1), (1, 1), (1, 2), (2, 1)):
        events.append({"ph": "X", "pid": pid, "tid": tid, "name": "gate_up", "ts": 0, "dur": 3.0})
    assert timing.read_chrome_trace({"traceEvents": events}) == pytest.approx({"gate_up": 6e-6})


def test_profile_of_a_machine_without_streams(seed: int) -> None:
    program = jax.jit(timing.repeated(lambda x: x @ x))
    items = [(jax.random.normal(jax.random.key(seed + i), (8, 8)),) for i in range(2)]
    assert timing.kernel_seconds(program, ((), items), 2) == {}
    results = program((), items)
    assert all(np.allclose(result, x @ x, atol=1e-4) for result, (x,) in zip(results, items, strict=True))


def test_parts_take_what_earlier_parts_made(seed: int) -> None:
    """The kernels, interpreted: each part's input is the output of the one before, in the same repetition."""
    options = ours.Options(seed=seed, parts=("sum", "experts"), repeats=2)
    lines: list[str] = []
    result = ours.measure(TINY, "nvfp4", [3], options, False, lines.append)[3]
    assert set(result["parts"]) == {"sum", "experts"}  # the others ran, for their outputs
    assert all("seconds" in part for part in result["parts"].values()), lines
    assert result["relative_error"] < 0.02
    assert any("gate_up" in line for line in lines)


def test_a_part_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def failing(layer: Layer, implementation: str | None) -> Callable[..., Any]:
        def op(*arguments: Any) -> Any:
            raise NotImplementedError("no such kernel\nand a long story")

        return op

    monkeypatch.setattr(calls, "layer_op", failing)
    monkeypatch.setattr(calls, "has_kernels", lambda implementation: False)
    result = ours.measure(TINY, "mxfp4", [1], ours.Options(seed=seed, repeats=2), False, print)[1]
    assert result["parts"]["layer"] == {"error": "NotImplementedError: no such kernel"}
    assert "relative_error" not in result


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    options = [
        "--model",
        "tiny",
        "--format",
        "mxfp4",
        "--tokens",
        "1",
        "8",
        "--repeats",
        "2",
        "--implementation",
        "xla",
    ]
    assert bench_moe.main([*options, "--seed", str(seed), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "bench_moe.json").read_text())
    assert result["seed"] == seed
    assert result["versions"]["jax"] == jax.__version__
    assert [case["tokens"] for case in result["cases"]] == [1, 8]
    for case in result["cases"]:
        layer = case["parts"]["layer"]
        assert layer["ratio"] == pytest.approx(case["floors"]["experts"]["seconds"] / layer["seconds"])
        assert case["relative_error"] < 0.02
        assert case["ragged_dot"]["seconds"] > 0
    table = (tmp_path / "bench_moe.md").read_text()
    assert table.strip() in printed
    assert "**tiny mxfp4**" in table


def test_deadline(tmp_path: Path) -> None:
    """Nothing new is begun after it, and what was left out is named."""
    options = ["--model", "tiny", "--tokens", "1", "--peers", "--deadline", "0", "--out", str(tmp_path)]
    assert bench_moe.main(options) == 1


def test_plot(tmp_path: Path) -> None:
    case: dict[str, Any] = {"model": "tiny", "format": "mxfp4", "tokens": 1, "parts": {"layer": {"seconds": 1e-3}}}
    case["humming"] = {"indexed": {"experts": 2e-3}, "grouped_contiguous": {"error": "none"}}
    done = report.complete(case, 0, 2, (1e12, 1e14))
    assert report.best_humming(done)["layout"] == "indexed"
    problem = report.plot({"cases": [done], "gpu": "none", "date": "2026-01-01"}, tmp_path / "plot.png")
    if importlib.util.find_spec("matplotlib") is None:
        assert problem == "no plot: matplotlib is not installed"
    else:
        assert problem is None
        assert (tmp_path / "plot.png").stat().st_size > 1000


def test_pytorch_is_a_line_where_it_cannot_run(tmp_path: Path) -> None:
    """Neither a missing GPU nor a broken wheel ends the benchmark."""
    wheel = tmp_path / "humming_kernels-0-py3-none-any.whl"
    wheel.write_bytes(b"no archive")
    worker = torch_worker.TorchWorker(wheel, tmp_path)
    try:
        answer = worker.ask(120, print, do="versions")
        assert "error" in answer or "torch" in answer
        assert "no archive" not in worker.ask(5, print, do="humming")["error"]
        assert str(wheel) in worker.ask(5, print, do="humming")["error"]
    finally:
        worker.close()
    assert "has ended" in worker.ask(5, print, do="versions")["error"]
