"""The kernel part of check_rocm_codegen.py: every kernel at every shape of M2 and M3, compiled for AMD and read back.

`run` spreads the cases over a few processes. A case that ends its process is tried once more alone, and is a failure if
it ends that one too; the others go on in a new process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("check_rocm_codegen.py")
LDS_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
MAX_THREADS = 1024
SCALED_MFMA_TARGETS = ("gfx950",)
FORMATS = ("bfloat16", "fp8", "mxfp8", "mxfp4", "nvfp4")
BLOCKS = {"fp8": (128, 128), "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}
TENSOR_PARALLEL = (1, 2, 4, 8)
ROWS = {"few": 16, "many": 64}  # rows of x in a tile: least and most of `grouped_moe.kernel.block_rows`
CASES_PER_PROCESS = 24
OURS = ("moe_", "linear_")  # first letters of our kernels' names


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of one family's published models."""

    name: str
    D: int
    F: int
    E: int
    k: int
    heads: int
    kv_heads: int
    dense: tuple[int, ...] = ()  # widths of SwiGLU layers that are no routed experts
    head: int = 128


MODELS = (
    Model("M2", D=3072, F=1536, E=256, k=8, heads=48, kv_heads=8),
    Model("M3", D=6144, F=3072, E=128, k=4, heads=64, kv_heads=4, dense=(3072, 12288)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape on one device of `tp`.

    Attributes:
      op: "gate_up", "down", "linear", or "scaled_dot", which is XLA's own and no path of the model.
      what: the weight's name.
      shape: of the weight, this device's part.
      block: of its scales, None for bfloat16.
      rows: "few" or "many".
      k: experts a token; 0 for linear.
    """

    op: str
    model: str
    what: str
    tp: int
    format: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    rows: str
    k: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.model} {self.what} tp{self.tp} {self.format} {self.rows}"


def all_cases() -> list[Case]:
    """Every kernel at every shape; equal shapes of one op and format are listed once."""
    scaled = Case("scaled_dot", "M3", "up3072", 1, "mxfp4", (3072, 6144), (1, 32), "many", 0)
    cases: dict[tuple[Any, ...], Case] = {("scaled_dot",): scaled}
    for model, tp, format, rows in itertools.product(MODELS, TENSOR_PARALLEL, FORMATS, ROWS):
        F, D = model.F // tp, model.D
        whole = [("gate_up", "w13", (model.E, 2, F, D), -2), ("down", "w2", (model.E, D, F), -1)]
        if format in ("fp8", "mxfp8"):
            q, kv = model.heads * model.head // tp, max(1, model.kv_heads // tp) * model.head
            whole += [("linear", "q", (q, D), -2), ("linear", "kv", (kv, D), -2), ("linear", "o", (D, q), -1)]
        if format != "bfloat16":
            for width in model.dense:
                whole += [
                    ("linear", f"up{width}", (width // tp, D), -2),
                    ("linear", f"down{width}", (D, width // tp), -1),
                ]
        for op, what, shape, split in whole:
            block = BLOCKS.get(format)
            if block is not None and tp > 1:  # what the loader makes of a block that a device's part cuts
                sizes = list(block)
                sizes[split] = math.gcd(sizes[split], shape[split])
                block = (sizes[0], sizes[1])
            k = 0 if op == "linear" else model.k
            case = Case(op, model.name, what, tp, format, shape, block, rows, k)
            cases.setdefault((op, format, shape, block, rows), case)
    return list(cases.values())


def run(args: Any) -> int:
    """All cases on all targets; a line each, and 1 when one of them does not hold."""
    failed = 0
    for target in args.target:
        started = time.monotonic()
        cases = [case for case in all_cases() if re.search(args.only, case.name)]
        if target not in SCALED_MFMA_TARGETS:
            cases = [case for case in cases if case.op != "scaled_dot"]
        # Neighbours in the list take about equally long, so that every process gets some of each kind.
        groups = max(1, -(-len(cases) // CASES_PER_PROCESS))
        parts = [cases[i::groups] for i in range(groups)]
        compile_ = functools.partial(_in_process, args, target)
        with ThreadPoolExecutor(args.jobs) as pool:
            lines = [line for part in pool.map(compile_, parts) for line in part]
        failed += sum(line["problems"] != [] for line in lines)
        print(f"{target}: {len(lines)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0


def _in_process(args: Any, target: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Results of some cases, compiled in processes of their own as long as they survive."""
    todo, results, retried = list(cases), [], set()
    while todo:
        alone = todo[0] in retried
        batch = todo[:1] if alone else todo
        done, status = _one_process(args, target, batch)
        for case, result in zip(batch, done, strict=False):
            _print(target, case, result)
            results.append(result)
        todo = todo[len(done) :]
        if len(done) == len(batch):
            continue
        crashed = todo[0]
        if crashed in retried:
            result = {"problems": [f"the compiler ended with status {status}"], "kernels": []}
            _print(target, crashed, result)
            results.append(result)
            todo = todo[1:]
        retried.add(crashed)
    return results


def _one_process(args: Any, target: str, cases: Sequence[Case]) -> tuple[list[dict[str, Any]], int]:
    command = [sys.executable, str(SCRIPT), "--kernel-cases", "-", "--target", target]
    command += ["--tools", str(args.tools), "--toolchain", str(args.toolchain)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as directory:
        # XLA reads these at its first compilation: it keeps the code objects, and lists each program's launches.
        environment |= {"TF_XLA_HSACO_CACHE_DIR": directory, "TF_XLA_HSACO_BITCODE_SIZE_THRESHOLD": "0"}
        environment["XLA_FLAGS"] = f"--xla_dump_to={directory}/dump"
        payload = json.dumps([dataclasses.asdict(case) for case in cases])
        result = subprocess.run(command, input=payload, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return lines, result.returncode


def compile_cases(args: Any, cases_json: str) -> None:
    """In a process of its own: a JSON line for each case as it is done."""
    from minimax_jax.rocm_aot import compile_for_rocm, compile_only_devices
    from pallas_kernels.product import why_not

    (target,) = args.target
    config = args.tools / "target_config" / {"gfx942": "mi300x.txtpb", "gfx950": "mi355x.txtpb"}[target]
    device = compile_only_devices(args.toolchain, config, 1)[0]
    directory = Path(os.environ["TF_XLA_HSACO_CACHE_DIR"])
    seen: set[Path] = set()
    for entry in json.loads(cases_json):
        entry = entry | {"shape": tuple(entry["shape"]), "block": entry["block"] and tuple(entry["block"])}
        case = Case(**entry)
        started = time.monotonic()
        problems, kernels = [], []
        try:
            fn, arguments = program(case, device)
            reason = None if case.op == "scaled_dot" else why_not(arguments[1])
            if reason is not None:
                print(json.dumps({"problems": [], "kernels": [], "no_kernel": reason}), flush=True)
                continue
            compile_for_rocm(fn, arguments)
            files = {file for file in directory.rglob("*") if file.is_file()} - seen
            seen |= files
            kernels, problems = check(case.op, target, files)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
        print(json.dumps({"problems": problems, "kernels": kernels, "seconds": time.monotonic() - started}), flush=True)


def program(case: Case, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted call of the case's kernel and its abstract arguments on `device`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.activation import SwiGLU
    from pallas_kernels.grouped_moe.kernel import down, gate_up
    from pallas_kernels.grouped_moe.routing import BlockPlan, max_blocks
    from pallas_kernels.linear.kernel import linear_pallas
    from pallas_kernels.quant import PAYLOAD_DTYPES, SCALE_DTYPES, Format, QuantTensor, codes_per_element

    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    *lead, rows, cols = case.shape
    weight: Any = array(case.shape, jnp.bfloat16)
    if case.block is not None:
        payload = jnp.dtype(PAYLOAD_DTYPES[case.format])
        weight = QuantTensor(
            payload=array((*lead, rows, cols // codes_per_element(payload)), payload),
            scale=array((*lead, -(-rows // case.block[0]), -(-cols // case.block[1])), SCALE_DTYPES[case.format]),
            format=Format(case.format, case.block),
            global_scale=array(tuple(lead), jnp.float32) if case.format == "nvfp4" else None,
        )
    M = ROWS[case.rows]
    if case.op == "scaled_dot":
        fp4, e8m0, contract = jnp.float4_e2m1fn, jnp.float8_e8m0fnu, (((1,), (1,)), ((), ()))

        def product(x: Any, w: Any, x_scale: Any, w_scale: Any) -> Any:
            return jax.lax.scaled_dot(
                x,
                w,
                lhs_scale=x_scale,
                rhs_scale=w_scale,
                dimension_numbers=contract,
                preferred_element_type=jnp.bfloat16,
            )

        operands = [array((size, cols), fp4) for size in (4096, rows)]
        return jax.jit(product), (*operands, *(array((size, cols // 32), e8m0) for size in (4096, rows)))
    if case.op == "linear":
        return jax.jit(linear_pallas), (array((M if case.rows == "few" else 4096, cols), jnp.bfloat16), weight)
    E, k = case.shape[0], case.k
    N = 8 if case.rows == "few" else 4096
    blocks = array((max_blocks(N * k, E, M),), jnp.int32)
    plan = BlockPlan(array((N * k,), jnp.int32), blocks, blocks, blocks, M)
    if case.op == "gate_up":
        activation = SwiGLU() if case.model == "M2" else SwiGLU(1.702, 1.0, 7.0)
        fn = jax.jit(lambda x, w13, plan: gate_up(x, w13, plan, k, activation))
        return fn, (array((N, cols), jnp.bfloat16), weight, plan)
    fn = jax.jit(lambda hidden, w2, plan, weights: down(hidden, w2, plan, weights))
    return fn, (array((N * k, cols), jnp.bfloat16), weight, plan, array((N, k), jnp.float32))


def check(op: str, target: str, files: set[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """(the op's kernels in what the compiler wrote, what does not hold of them)."""
    from _hsaco import read_code_object

    # LDS is asked for at launch: the code object itself says 0.
    launches = "".join(file.read_text() for file in files if file.name.endswith("thunk_sequence.txt"))
    lds = {name: int(size) for name, size in re.findall(r"(\w+) grid: .* shared_memory: (\d+) bytes", launches)}
    objects = [file for file in files if file.suffix == ".hsaco"]
    kernels = [kernel for file in objects for kernel in read_code_object(file)]
    if op == "scaled_dot":
        kernels = [kernel for kernel in kernels if kernel.scaled_mfma]
    else:
        kernels = [kernel for kernel in kernels if kernel.name.startswith(OURS)]
    kernels = [dataclasses.replace(kernel, lds=kernel.lds + lds[kernel.name]) for kernel in kernels]
    problems = [] if kernels else ["no code object of the kernel was found"]
    for kernel in kernels:
        if kernel.spilled_vgprs or kernel.scratch:
            problems.append(f"{kernel.spilled_vgprs} spilled VGPRs, {kernel.scratch} bytes of scratch")
        if not kernel.mfma + kernel.scaled_mfma:
            problems.append("no matrix instruction")
        if kernel.lds > LDS_LIMIT[target]:
            problems.append(f"{kernel.lds:,} bytes of LDS, the limit is {LDS_LIMIT[target]:,}")
        if kernel.max_threads > MAX_THREADS:
            problems.append(f"{kernel.max_threads} threads, the limit is {MAX_THREADS}")
    return [dataclasses.asdict(kernel) for kernel in kernels], problems


def _print(target: str, case: Case, result: dict[str, Any]) -> None:
    if "no_kernel" in result:
        print(f"none {target} {case.name}: plain XLA, because of {result['no_kernel']}", flush=True)
        return
    line = f"{'FAIL' if result['problems'] else 'ok'} {target} {case.name}"
    for kernel in result["kernels"]:
        line += (
            f": {kernel['vgprs']} VGPRs, {kernel['agprs']} AGPRs, {kernel['spilled_vgprs']} spilled, "
            f"{kernel['lds']:,} LDS, {kernel['mfma']} MFMA, {kernel['max_threads']} threads"
        )
        line += f", {kernel['scaled_mfma']} scaled MFMA" * (kernel["scaled_mfma"] > 0)
    print("; ".join([f"{line} ({result.get('seconds', 0):.1f} s)", *result["problems"]]), flush=True)
