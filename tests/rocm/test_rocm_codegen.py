"""The steps of the model, compiled for AMD GPUs by XLA itself; nothing is run. `make rocm-env` makes what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_rocm_codegen.py"
TOOLCHAIN = Path(os.environ.get("MINIMAX_ROCM", ROOT / ".venv" / "rocm"))

ATTENTION = 25  # kernels over the cache on eight devices, and the float8 lanes

pytestmark = pytest.mark.rocm


def check(shared: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script as a user runs it: without the simulated devices and the cache of the other tests."""
    command = [sys.executable, str(SCRIPT), "--tools", str(shared / "tools" / "rocm_codegen"), *options]
    dropped = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment["MINIMAX_ROCM"] = str(TOOLCHAIN)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    print(result.stdout, result.stderr)
    return result


@pytest.mark.parametrize(
    ("target", "model_parallel", "weight_format", "experts"),
    [
        ("gfx942", 8, "bfloat16", "tensor"),
        ("gfx942", 8, "fp8", "expert"),
        ("gfx942", 16, "fp8", "tensor"),
        ("gfx942", 1, "fp8", "tensor"),
        ("gfx950", 8, "fp8", "tensor"),
        ("gfx942", 8, "mxfp4", "tensor"),
        ("gfx950", 8, "nvfp4", "expert"),
        ("gfx950", 4, "mxfp8", "tensor"),
    ],
)
def test_steps_compile_and_copy_no_weight(
    shared: Path, target: str, model_parallel: int, weight_format: str, experts: str
) -> None:
    options = ["--target", target, "--model-parallel", str(model_parallel)]
    result = check(shared, *options, "--format", weight_format, "--experts", experts, "--strict-experts")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("ok gfx") == 2  # decode and prefill


@pytest.mark.parametrize(("target", "weight_format"), [("gfx942", "mxfp4"), ("gfx950", "mxfp8")])
def test_m3_steps_compile(shared: Path, target: str, weight_format: str) -> None:
    """Three dense layers and one that has experts and selects blocks, on eight devices, twice as many as kv heads."""
    options = ["--model", "M3", "--target", target, "--format", weight_format, "--layers", "4", "--strict-experts"]
    result = check(shared, *options)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("ok gfx") == 2


@pytest.mark.parametrize("model", ["M2", "M3"])
def test_layers_share_their_temporaries(shared: Path, model: str) -> None:
    """What plain XLA's attention starts from has 25 MB in each layer or more; it must not lie ready for all of them."""
    small = {"hidden_size": 512, "intermediate_size": 256, "num_local_experts": 8, "vocab_size": 1024}
    if model == "M3":
        small |= {"dense_intermediate_size": 256, "shared_intermediate_size": 256}
    options = ["--program", "prefill", "--model", model, "--model-parallel", "1", "--config", json.dumps(small)]
    bytes_of = []
    for layers in (6, 9):
        result = check(shared, *options, "--layers", str(layers), "--implementation", "xla")
        bytes_of.append(int(re.search(r"temporaries ([\d,]+) bytes", result.stdout)[1].replace(",", "")))  # type: ignore[index]
    assert bytes_of[1] - bytes_of[0] < 25e6, bytes_of


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_kernels_compile_without_spills(shared: Path, target: str) -> None:
    """The narrowest shapes, whose last step along K is ragged, one read as words, and each dense format."""
    only = r"(gate_up|down) M2 .* tp8 |gate_up M2 .* tp1 mxfp8|linear M3 (o|down3072) tp8 "
    only += r"|(paged|sparse)_attention .* tp8 |block_scores .* tp8 |fp8_lane "
    result = check(shared, "--kernels", "--target", target, "--only", only)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(f"ok {target} ") == 20 + 2 + 14 + ATTENTION
    assert "FAIL" not in result.stdout


def test_the_check_can_fail(shared: Path) -> None:
    """The plain XLA experts copy one expert's weights at a time: what is a note by default."""
    result = check(shared, "--program", "decode", "--strict-experts", "--implementation", "xla")
    assert result.returncode == 1
    assert (
        "copies a weight or the cache: dynamic-slice of weights['layers.0.block_sparse_moe.experts.w2']"
        in result.stdout
    )


def test_a_missing_toolchain_is_named(shared: Path, tmp_path: Path) -> None:
    result = check(shared, "--program", "decode", "--toolchain", str(tmp_path / "absent"))
    assert result.returncode != 0
    assert "make rocm-env" in result.stdout + result.stderr
