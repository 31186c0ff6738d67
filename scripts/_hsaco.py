"""Reads AMD code objects: registers, LDS and spills from the ELF note, matrix instructions from the code.

The code is walked instruction by instruction, by the lengths of the GFX9 encodings, so that no constant counts as a
matrix instruction. Sources: LLVM's AMDGPU usage guide, "Code Object V5 Metadata", and AMD's CDNA3 and CDNA4 ISA guides.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack

NOTE, PROGBITS, EXECUTABLE, AMDGPU_METADATA = 7, 1, 4, 32
MATRIX = 0x1A7  # the nine high bits of a VOP3P-MAI instruction
# Its opcodes from 0x40 on but the two moves to and from accumulators, and some lower ones that gfx950 added; the other
# low ones are packed arithmetic.
MFMA = {0x2D, 0x2E, *range(0x35, 0x80)} - {0x58, 0x59}
SCALED_MFMA = 0xD3AC  # the high half of v_mfma_ld_scale_b32, which makes the next one a scaled MFMA; gfx950


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a code object, sizes in bytes."""

    name: str
    vgprs: int
    agprs: int
    spilled_vgprs: int
    spilled_sgprs: int
    scratch: int
    lds: int
    max_threads: int
    mfma: int  # of the whole code object
    scaled_mfma: int


def read_code_object(file: Path) -> list[Kernel]:
    """The kernels of one .hsaco file.

    Raises:
      ValueError: it is no ELF file.
    """
    elf = file.read_bytes()
    if elf[:4] != b"\x7fELF":
        raise ValueError(f"{file} is no ELF file")
    kernels: list[dict[str, int | str]] = []
    mfma = scaled = 0
    for kind, flags, data in _sections(elf):
        if kind == NOTE:
            kernels += _described(data)
        elif kind == PROGBITS and flags & EXECUTABLE:
            for word in _instructions(data):
                scaled += word >> 16 == SCALED_MFMA
                mfma += word >> 23 == MATRIX and word >> 16 & 0x7F in MFMA
    return [
        Kernel(
            name=str(entry[".name"]),
            vgprs=int(entry[".vgpr_count"]),
            agprs=int(entry.get(".agpr_count", 0)),
            spilled_vgprs=int(entry[".vgpr_spill_count"]),
            spilled_sgprs=int(entry[".sgpr_spill_count"]),
            scratch=int(entry[".private_segment_fixed_size"]),
            lds=int(entry[".group_segment_fixed_size"]),
            max_threads=int(entry[".max_flat_workgroup_size"]),
            mfma=mfma - scaled,
            scaled_mfma=scaled,
        )
        for entry in kernels
    ]


def _instructions(code: bytes) -> Iterator[int]:
    """The first word of each instruction."""
    words = [word for (word,) in struct.iter_unpack("<I", code[: len(code) & ~3])]
    at = 0
    while at < len(words):
        yield words[at]
        at += 2 if _is_long(words[at]) else 1


def _is_long(word: int) -> bool:
    """Whether an instruction has a second word: by its encoding, or for a constant."""
    literal = 255
    low, high = word & 0xFF, word >> 8 & 0xFF
    if word >> 31 == 0:  # VOP1, VOP2, VOPC
        with_constant = word >> 25 in (23, 24, 36, 37)  # v_fmamk, v_fmaak and v_madmk, v_madak of float16
        return with_constant or word & 0x1FF in (249, 250, literal)  # SDWA, DPP
    if word >> 30 == 0b10:
        if word >> 23 == 0x17F:  # SOPP
            return False
        if word >> 23 == 0x17D:  # SOP1
            return low == literal
        if word >> 28 == 0b1011 and word >> 23 != 0x17E:  # SOPK
            return word >> 23 & 0x1F == 20  # s_setreg_imm32_b32
        return literal in (low, high)  # SOP2, SOPC
    return True  # SMEM, VOP3, VOP3P, DS, FLAT, MUBUF


def _sections(elf: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, flags, content) of each section."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, _ = struct.unpack_from("<HHH", elf, 0x3A)
    for i in range(count):
        _, kind, flags, _, start, length = struct.unpack_from("<IIQQQQ", elf, offset + i * size)
        if kind in (NOTE, PROGBITS):
            yield kind, flags, elf[start : start + length]


def _described(notes: bytes) -> Iterator[dict[str, int | str]]:
    """The metadata of each kernel in a note section."""
    at = 0
    while at + 12 <= len(notes):
        name, length, kind = struct.unpack_from("<III", notes, at)
        at += 12 + (name + 3 & ~3)
        if kind == AMDGPU_METADATA:
            yield from msgpack.unpackb(notes[at : at + length], strict_map_key=False)["amdhsa.kernels"]
        at += length + 3 & ~3
