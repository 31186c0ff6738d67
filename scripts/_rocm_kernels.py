"""The kernel part of check_rocm_codegen.py: every kernel at every shape of M2 and M3, compiled for AMD and read back.

`run` spreads the cases over a few processes. A case that ends its process is tried once more alone, and is a failure if
it ends that one too; the others go on in a new process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
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

import _rocm_attention as attention
from _rocm_cases import Case, all_cases, program

SCRIPT = Path(__file__).with_name("check_rocm_codegen.py")
LDS_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
MAX_THREADS = 1024
SCALED_MFMA_TARGETS = ("gfx950",)
SCALED_DOT_JAX = (0, 12)  # 0.10.2 fails in its Triton; 0.11 was not tried
CASES_PER_PROCESS = 24
OURS = ("moe_", "linear_", *attention.OPS)  # first letters of our kernels' names


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
        print(
            f"\n{target}: {len(lines)} kernels in {time.monotonic() - started:.0f} s\n\n{_summary(lines)}\n", flush=True
        )
    return 1 if failed else 0


def describe(case: Case) -> dict[str, Any]:
    """What the summary groups by."""
    return {"op": case.op, "format": case.format, "rows": case.rows}


def _summary(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: what the shapes of each kernel need at most, and the least matrix instructions."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["op"], line["format"], line["rows"]), []).extend(line["kernels"])
    table = [
        "| kernel | format | rows | shapes | VGPRs | spilled | LDS, bytes | MFMA |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group, kernels in sorted(groups.items()):
        if kernels:
            most = [max(kernel[field] for kernel in kernels) for field in ("vgprs", "spilled_vgprs", "lds")]
            least = min(kernel["mfma"] + kernel["scaled_mfma"] for kernel in kernels)
            cells = (*group, len(kernels), most[0], most[1], f"{most[2]:,}", f">= {least}")
            table.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(table)


def _in_process(args: Any, target: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Results of some cases, compiled in processes of their own as long as they survive."""
    todo, results, retried = list(cases), [], set()
    while todo:
        alone = todo[0] in retried
        batch = todo[:1] if alone else todo
        done, status = _one_process(args, target, batch)
        for case, result in zip(batch, done, strict=False):
            _print(target, case, result)
            results.append(describe(case) | result)
        todo = todo[len(done) :]
        if len(done) == len(batch):
            continue
        crashed = todo[0]
        if status == 1:  # an error of Python's, which the other cases would meet too
            return results + [describe(case) | {"problems": ["not compiled"], "kernels": []} for case in todo]
        if crashed in retried:
            result = {"problems": [f"the compiler ended with status {status}"], "kernels": []}
            _print(target, crashed, result)
            results.append(describe(crashed) | result)
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
    import jax

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
            if case.op in (*attention.OPS, attention.LANE):
                reason = None
            elif case.op != "scaled_dot":
                reason = why_not(arguments[1])
            else:
                old = jax.__version_info__ < SCALED_DOT_JAX
                reason = f"JAX {jax.__version__}, whose compiler fails on lax.scaled_dot" if old else None
            if reason is not None:
                print(json.dumps({"problems": [], "kernels": [], "no_kernel": reason}), flush=True)
                continue
            with known_gpu(target):
                compiled = compile_for_rocm(fn, arguments)
            files = {file for file in directory.rglob("*") if file.is_file()} - seen
            seen |= files
            kernels, problems = check(case.op, target, files)
            if case.op == attention.LANE:
                problems += attention.float8_conversions(compiled.as_text())
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
        print(json.dumps({"problems": problems, "kernels": kernels, "seconds": time.monotonic() - started}), flush=True)


def known_gpu(target: str) -> Any:
    """From 0.11 on JAX wants to know the GPU while it lowers a kernel; there is none, so it is told."""
    import jax

    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind=target, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


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
    elif op != attention.LANE:
        kernels = [kernel for kernel in kernels if kernel.name.startswith(OURS)]
    if op != attention.LANE:
        kernels = [dataclasses.replace(kernel, lds=kernel.lds + lds[kernel.name]) for kernel in kernels]
    problems = [] if kernels else ["no code object of the kernel was found"]
    for kernel in kernels:
        if kernel.spilled_vgprs or kernel.scratch:
            problems.append(f"{kernel.spilled_vgprs} spilled VGPRs, {kernel.scratch} bytes of scratch")
        if not kernel.mfma + kernel.scaled_mfma and op != attention.LANE:
            problems.append("no matrix instruction")
        if kernel.lds > LDS_LIMIT[target]:
            problems.append(f"{kernel.lds:,} bytes of LDS, the limit is {LDS_LIMIT[target]:,}")
        if kernel.max_threads > MAX_THREADS:
            problems.append(f"{kernel.max_threads} threads, the limit is {MAX_THREADS}")
    return [dataclasses.asdict(kernel) for kernel in kernels], problems


def _print(target: str, case: Case, result: dict[str, Any]) -> None:
    if "no_kernel" in result:
        print(f"-- {target} {case.name}: none, because of {result['no_kernel']}", flush=True)
        return
    line = f"{'FAIL' if result['problems'] else 'ok'} {target} {case.name}"
    for kernel in result["kernels"]:
        line += (
            f": {kernel['vgprs']} VGPRs, {kernel['agprs']} AGPRs, {kernel['spilled_vgprs']} spilled, "
            f"{kernel['lds']:,} LDS, {kernel['mfma']} MFMA, {kernel['max_threads']} threads"
        )
        line += f", {kernel['scaled_mfma']} scaled MFMA" * (kernel["scaled_mfma"] > 0)
    print("; ".join([f"{line} ({result.get('seconds', 0):.1f} s)", *result["problems"]]), flush=True)
