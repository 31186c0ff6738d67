"""How the kernel check reads code objects and goes on after a crash; needs no AMD compiler."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgpack
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import _hsaco
import _rocm_cases
import _rocm_kernels

MFMA = (0xD3E0_0000, 0x0402_0501)  # v_mfma_f32_32x32x8_bf16
PACKED_MULTIPLY = (0xD3B1_0000, 0x1802_0501)  # v_pk_mul_f32, of the same encoding
ACCUMULATOR_READ = (0xD3D8_0000, 0x1800_0101)
SCALED = (0xD3AC_0000, 0x0002_0501, 0xD3AD_0000, 0x0402_0501)
MOVE_OF_A_CONSTANT = (0x7E00_02FF, MFMA[0])  # v_mov_b32 v0, literal
ADD = (0x6800_0501,)  # v_add_u32 v0, v1, v2
END = (0xBF81_0000,)  # s_endpgm


def code_object(code: tuple[int, ...], **metadata: int) -> bytes:
    """An ELF file with one kernel: a note section and the code."""
    entry: dict[str, Any] = {".name": "moe_down_mxfp4", ".vgpr_count": 8, ".vgpr_spill_count": 0}
    entry |= {".sgpr_spill_count": 0, ".private_segment_fixed_size": 0, ".group_segment_fixed_size": 0}
    entry |= {".max_flat_workgroup_size": 256} | {f".{name}": value for name, value in metadata.items()}
    description = msgpack.packb({"amdhsa.kernels": [entry]})
    padded = description + bytes(-len(description) % 4)
    note = struct.pack("<III", 7, len(description), 32) + b"AMDGPU\0\0" + padded
    text = struct.pack(f"<{len(code)}I", *code)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, 64 + len(note) + len(text))
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 0)
    sections = b"".join(
        struct.pack("<IIQQQQ", 0, kind, flags, 0, start, size) + bytes(24)
        for kind, flags, start, size in ((7, 0, 64, len(note)), (1, 6, 64 + len(note), len(text)))
    )
    return bytes(header) + note + text + sections


@pytest.mark.parametrize(
    ("code", "mfma", "scaled"),
    [
        (MFMA + END, 1, 0),
        (ADD + MFMA + ADD + MFMA + END, 2, 0),
        (PACKED_MULTIPLY + ACCUMULATOR_READ + END, 0, 0),
        (MOVE_OF_A_CONSTANT + END, 0, 0),
        (SCALED + END, 0, 1),
    ],
    ids=["one", "two", "none", "constant", "scaled"],
)
def test_matrix_instructions_are_counted(code: tuple[int, ...], mfma: int, scaled: int, tmp_path: Path) -> None:
    (tmp_path / "k.hsaco").write_bytes(code_object(code))
    (kernel,) = _hsaco.read_code_object(tmp_path / "k.hsaco")
    assert (kernel.name, kernel.mfma, kernel.scaled_mfma) == ("moe_down_mxfp4", mfma, scaled)


@pytest.mark.parametrize(
    ("target", "code", "metadata", "shared", "problem"),
    [
        ("gfx942", MFMA + END, {}, 65536, None),
        ("gfx942", MFMA + END, {}, 65537, "65,537 bytes of LDS"),
        ("gfx950", MFMA + END, {}, 65537, None),
        ("gfx950", MFMA + END, {}, 163841, "163,841 bytes of LDS"),
        ("gfx942", END, {}, 0, "no matrix instruction"),
        ("gfx942", MFMA + END, {"vgpr_spill_count": 3}, 0, "3 spilled VGPRs"),
        ("gfx942", MFMA + END, {"max_flat_workgroup_size": 2048}, 0, "2048 threads"),
    ],
)
def test_limits(
    target: str, code: tuple[int, ...], metadata: dict[str, int], shared: int, problem: str | None, tmp_path: Path
) -> None:
    files = [tmp_path / "k.hsaco", tmp_path / "m.thunk_sequence.txt"]
    files[0].write_bytes(code_object(code, **metadata))
    files[1].write_text(
        f"002: kCustomKernel moe_down_mxfp4 grid: [4, 1, 1] threads: [256, 1, 1]  shared_memory: {shared} bytes"
    )
    kernels, problems = _rocm_kernels.check("down", target, set(files))
    assert kernels[0]["lds"] == shared
    assert (problems == []) if problem is None else problems[0].startswith(problem)


def test_a_kernel_that_was_not_found_is_a_problem() -> None:
    assert _rocm_kernels.check("down", "gfx942", set())[1] == ["no code object of the kernel was found"]


def test_a_crash_ends_only_its_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = _rocm_cases.all_cases()[:5]
    calls = []

    def one_process(args: object, target: str, batch: list[Any]) -> tuple[list[dict[str, Any]], int]:
        calls.append(len(batch))
        done = batch[: batch.index(cases[2])] if cases[2] in batch else batch
        return [{"problems": [], "kernels": []} for _ in done], -11 if cases[2] in batch else 0

    monkeypatch.setattr(_rocm_kernels, "_one_process", one_process)
    results = _rocm_kernels._in_process(SimpleNamespace(), "gfx942", cases)
    assert calls == [5, 1, 2]  # all of them; the one that crashed, alone; the rest
    assert [bool(result["problems"]) for result in results] == [False, False, True, False, False]
    assert "FAIL gfx942 " + cases[2].name in capsys.readouterr().out


def test_every_shape_is_there() -> None:
    cases = _rocm_cases.all_cases()
    assert {(case.model, case.tp) for case in cases} == {(m, tp) for m in ("M2", "M3") for tp in (1, 2, 4, 8)}
    assert isinstance(_rocm_cases, ModuleType)
    narrow = {case.format: case for case in cases if case.op == "down" and case.model == "M2" and case.tp == 8}
    assert narrow["mxfp4"].shape == (256, 3072, 192)
    assert narrow["fp8"].block == (128, 64)  # what 192 columns leave of 128
