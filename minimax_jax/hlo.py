"""Reads compiled HLO text: which collectives a program runs, and which weights it copies before it uses them.

Works on what `jax.stages.Compiled.as_text()` gives for CPU, CUDA and ROCm. Nothing here imports JAX.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# What gives the same bytes, or some of them, at another address (a convert: the same values in another type).
MOVES = ("copy", "slice", "dynamic-slice", "concatenate", "transpose", "pad", "reverse", "gather", "convert")


@dataclasses.dataclass(frozen=True)
class Move:
    """A buffer that is written only to hold a part of a program's argument again.

    Attributes:
      kind: one of MOVES.
      name: the instruction, or the fusion whose result it is.
      computation: where the instruction stands; "ENTRY" for the entry computation.
      bytes: size of the result on one device.
      source: the argument that is copied, as JAX names it, such as "weights['lm_head.weight']".
    """

    kind: str
    name: str
    computation: str
    bytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.source}, {self.bytes:,} bytes ({self.name} in {self.computation})"


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in the program's text by kind; an asynchronous pair counts once, one among one device does not.

    One that stands in a loop's body counts once, however often the loop runs: of a decode loop this gives what a step
    runs plus what stands before and after the loop.
    """
    found: collections.Counter[str] = collections.Counter()
    for computation in parse(text).computations.values():
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES and not _among_one(instruction):
                found[kind] += 1
    return dict(found)


def weight_sized_moves(text: str, min_bytes: int) -> list[Move]:
    """Results of at least `min_bytes` that only hold a part of one of the program's arguments.

    A slice or a gather inside a fusion that computes with it makes no buffer and is left out; so are activations,
    which come from computing, whatever their size. A gather counts when one of its slices has `min_bytes`: expert
    weights do, rows of an embedding do not. What a loop carries unchanged is followed into its body.
    """
    module = parse(text)
    moves = []
    for computation in module.running():
        for instruction in computation.instructions.values():
            for kind, size, path in module.moved(computation, instruction):
                if size < min_bytes:
                    continue
                source = module.source(computation, instruction, path)
                if source is not None:
                    place = "ENTRY" if computation.is_entry else computation.name
                    moves.append(Move(kind, instruction.name, place, size, source))
    return moves


Path = tuple[int, ...]  # which element of a (nested) tuple; () is the value itself


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array's size."""

    elements: int
    bits: int  # of one element

    @property
    def bytes(self) -> int:
        return self.elements * self.bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    leaves: tuple[Leaf, ...]  # the arrays of its type, in order
    operands: tuple[str, ...]
    rest: str  # the operands' text and the attributes

    @property
    def bytes(self) -> int:
        """Size of its result."""
        return sum(leaf.bytes for leaf in self.leaves)

    def attribute(self, pattern: str) -> str | None:
        """The first group of `pattern` in the attributes."""
        match = re.search(pattern, self.rest)
        return match.group(1) if match else None


@dataclasses.dataclass
class Computation:
    """A computation by name."""

    name: str
    is_entry: bool
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""


def parse(text: str) -> Module:
    """HLO text -> its computations."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    for line in text.splitlines():
        if not line.startswith(" "):
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if header:
                current = Computation(header.group(2), header.group(1) is not None)
                computations[current.name] = current
        elif current is not None and " = " in line:
            instruction, is_root = _instruction(line)
            current.instructions[instruction.name] = instruction
            if is_root:
                current.root = instruction.name
    return Module(computations)


class Module:
    """Computations and what follows from them."""

    def __init__(self, computations: dict[str, Computation]) -> None:
        self.computations = computations
        self.callers: dict[str, list[tuple[Computation, Instruction]]] = collections.defaultdict(list)
        for computation in computations.values():
            for instruction in computation.instructions.values():
                for called in _called(instruction):
                    self.callers[called].append((computation, instruction))
        self._resolve = functools.cache(self._resolve_uncached)

    def running(self) -> list[Computation]:
        """Computations whose instructions each write a buffer: not the insides of fusions, nor reducers."""
        writes = {"while", "call", "conditional", "async-start"}
        return [
            computation
            for computation in self.computations.values()
            if computation.is_entry or any(caller.opcode in writes for _, caller in self.callers[computation.name])
        ]

    def moved(self, computation: Computation, instruction: Instruction) -> list[tuple[str, int, Path]]:
        """(kind, bytes, which element of the result) for the results that are moves and nothing else."""
        kind = _move_kind(instruction)
        if kind is not None:
            return [(kind, _moved_bytes(instruction), ())]
        fused = self._callee(instruction) if instruction.opcode == "fusion" else None
        if fused is None:
            return []
        root = fused.instructions[fused.root]
        results = root.operands if root.opcode == "tuple" else (root.name,)
        found: list[tuple[str, int, Path]] = []
        for index, name in enumerate(results):
            result = fused.instructions[name]
            inner = _below_views(fused, result)
            kind = _move_kind(inner)
            if kind is not None:
                size = _moved_bytes(inner) if kind == "gather" else result.bytes
                found.append((kind, size, (index,) if root.opcode == "tuple" else ()))
        return found

    def source(self, computation: Computation, instruction: Instruction, path: Path) -> str | None:
        """The argument of the program whose bytes this value holds, None when it was computed."""
        place = self._resolve(computation.name, instruction.name, path)
        if place is None:
            return None
        number, path = place
        if computation.is_entry:
            parameter = _parameter(computation, number)
            return (parameter.attribute(r'op_name="([^"]*)"') or parameter.name).replace("\\'", "'")
        for outer, caller in self.callers[computation.name]:
            if caller.opcode == "while":
                if not self._carried(caller, path):
                    continue
                operand = caller.operands[0]
            elif caller.opcode == "conditional":
                operand = caller.operands[1 + _called(caller).index(computation.name)]
            else:
                operand = caller.operands[number]
            label = self.source(outer, outer.instructions[operand], path)
            if label is not None:
                return label
        return None

    def _resolve_uncached(self, in_computation: str, name: str, path: Path) -> tuple[int, Path] | None:
        """The parameter (number, element) of its computation that a value is a view or a copy of."""
        computation = self.computations[in_computation]
        instruction = computation.instructions[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return int(instruction.rest[: instruction.rest.index(")")]), path
        if opcode == "tuple":
            return self._resolve(in_computation, operands[path[0]], path[1:]) if path else None
        if opcode == "get-tuple-element":
            index = instruction.attribute(r"index=(\d+)")
            return self._resolve(in_computation, operands[0], (int(index or 0), *path))
        if opcode == "while":
            return self._resolve(in_computation, operands[0], path) if self._carried(instruction, path) else None
        if opcode in ("fusion", "call", "async-start"):
            callee = self._callee(instruction)
            inner = None if callee is None else self._resolve(callee.name, callee.root, path)
            return None if inner is None else self._resolve(in_computation, operands[inner[0]], inner[1])
        if opcode in ("concatenate", "opt-barrier", *_VIEWS, *_IN_PLACE) or _move_kind(instruction) is not None:
            tried = operands if opcode == "concatenate" else operands[:1]
            for operand in tried:
                found = self._resolve(in_computation, operand, path if opcode == "opt-barrier" else ())
                if found is not None:
                    return found
        if opcode.endswith("-done"):
            return self._resolve(in_computation, operands[0], ())
        return None

    def _carried(self, loop: Instruction, path: Path) -> bool:
        """Whether a loop hands an element of its state on, unchanged or updated in place."""
        body = self.computations[loop.attribute(r"body=%?([\w.\-]+)") or ""]
        return self._resolve(body.name, body.root, path) == (0, path)

    def _callee(self, instruction: Instruction) -> Computation | None:
        called = _called(instruction)
        return self.computations.get(called[0]) if called else None


def _among_one(collective: Instruction) -> bool:
    """Whether each of its groups is a single device: {{0},{1}}, or [2,1]<=[2]."""
    groups = collective.attribute(r"replica_groups=(\{\{.*?\}\}|\[\d+,\d+\])")
    return groups is not None and bool(re.fullmatch(r"\{(\{\d+\},?)+\}|\[\d+,1\]", groups))


_VIEWS = ("bitcast", "reshape")
_IN_PLACE = ("dynamic-update-slice", "scatter")


def _move_kind(instruction: Instruction) -> str | None:
    """Its kind when the instruction is a move; of an asynchronous pair only the start is one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in MOVES else None


def _moved_bytes(instruction: Instruction) -> int:
    """Bytes of the result; of a gather those of one slice, of an asynchronous copy those of its target."""
    first = instruction.leaves[0]
    if instruction.opcode == "gather":
        slices = instruction.attribute(r"slice_sizes=\{([\d,]*)\}") or ""
        return math.prod(int(size) for size in slices.split(",") if size) * first.bits // 8
    return first.bytes if instruction.opcode.endswith("-start") else instruction.bytes


def _below_views(computation: Computation, instruction: Instruction) -> Instruction:
    """The instruction under bitcasts, reshapes and converts; a convert of anything but a move or an argument stays."""
    below = instruction
    while below.opcode in (*_VIEWS, "convert"):
        operand = computation.instructions[below.operands[0]]
        if below.opcode == "convert" and _move_kind(_below_views(computation, operand)) is None:
            break
        below = operand
    return below


def _parameter(computation: Computation, number: int) -> Instruction:
    for instruction in computation.instructions.values():
        if instruction.opcode == "parameter" and instruction.rest.startswith(f"{number})"):
            return instruction
    raise KeyError(f"{computation.name} has no parameter {number}")


def _called(instruction: Instruction) -> list[str]:
    """Names of the computations that an instruction runs, in its order."""
    names = re.findall(
        r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", instruction.rest
    )
    branches = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    return names + ([branch.strip().lstrip("%") for branch in branches.split(",")] if branches else [])


def _instruction(line: str) -> tuple[Instruction, bool]:
    """`  ROOT %name = type opcode(operands), attributes` -> the instruction, and whether it is the root."""
    left, right = line.strip().split(" = ", 1)
    is_root = left.startswith("ROOT ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, right = right[:end], right[end:].lstrip()
    opcode, rest = right.split("(", 1)
    operands = re.findall(r"%([\w.\-]+)", rest[: _closing("(" + rest, 0)])
    name = left.removeprefix("ROOT ").lstrip("%")
    leaves = tuple(_leaf(dtype, dims) for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape))
    return Instruction(name, opcode, leaves, tuple(operands), rest), is_root


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text) - 1


def _leaf(dtype: str, dims: str) -> Leaf:
    width = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, f8e4m3fn, s4; token and opaque have no width
    bits = 8 if dtype == "pred" else int(width.group(1)) if width else 0
    return Leaf(math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim), bits)
