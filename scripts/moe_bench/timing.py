"""Device time of JAX programs: many repetitions in one program, several programs in flight, medians; a profile."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax import lax

MAX_BYTES_IN_FLIGHT = 8 * 2**30
DEVICE_PLANE, STREAM_LINE = "/device:", "Stream"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a repetition: the median over `runs`, and the quickest and slowest of them."""

    seconds: float
    low: float
    high: float
    runs: int


def repeated(fn: Callable[..., Any]) -> Callable[[tuple[Any, ...], Sequence[tuple[Any, ...]]], tuple[Any, ...]]:
    """(shared, items) -> the results of fn(*shared, *item) for each item, each after the one before.

    The barrier keeps XLA from merging the kernels of different repetitions; every output is returned, so that none is
    left out.
    """
    inner = jax.jit(fn)  # traced and lowered once

    def program(shared: tuple[Any, ...], items: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        outputs: list[Any] = []
        for item in items:
            if outputs:
                item, outputs[-1] = lax.optimization_barrier((item, outputs[-1]))
            outputs.append(inner(*shared, *item))
        return tuple(outputs)

    return program


def compile_all(programs: Mapping[Any, tuple[Callable[..., Any], tuple[Any, ...]]], workers: int) -> dict[Any, Any]:
    """Traces in turn, compiles in parallel. The value of a program that failed is its exception."""

    def compile_one(lowered: Any) -> Any:
        try:
            return lowered if isinstance(lowered, Exception) else lowered.compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = {}
        for name, (program, arguments) in programs.items():
            try:
                lowered: Any = jax.jit(program).lower(*arguments)
            except Exception as error:
                lowered = error
            futures[name] = pool.submit(compile_one, lowered)
        return {name: future.result() for name, future in futures.items()}


def time_program(program: Callable[..., Any], arguments: tuple[Any, ...], repeats: int, limit_s: float) -> Timing:
    """Seconds of one of the program's `repeats` repetitions. A program of more than `limit_s` is timed only once."""
    outputs = jax.block_until_ready(program(*arguments))
    bytes_out = sum(leaf.nbytes for leaf in jax.tree.leaves(outputs))
    once = _seconds(program, arguments, 1)
    if once > limit_s:
        return Timing(once / repeats, once / repeats, once / repeats, 1)
    in_flight = max(1, min(math.ceil(0.01 / once), 8, MAX_BYTES_IN_FLIGHT // max(1, bytes_out)))
    runs = int(max(5, min(15, 0.3 / (once * in_flight))))
    taken = [_seconds(program, arguments, in_flight) / (in_flight * repeats) for _ in range(runs)]
    return Timing(statistics.median(taken), min(taken), max(taken), runs)


def kernel_seconds(program: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> dict[str, float]:
    """Device seconds a repetition by kernel name, longest first, out of JAX's profiler; {} where it sees no device."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, **_quiet_profiler())
        try:
            jax.block_until_ready(program(*arguments))
        finally:
            jax.profiler.stop_trace()
        total = read_trace(Path(folder))
    return {name: seconds / repeats for name, seconds in sorted(total.items(), key=lambda pair: -pair[1])}


def read_trace(folder: Path) -> dict[str, float]:
    """Seconds by kernel name in a folder that the profiler wrote."""
    for path in folder.rglob("*.xplane.pb"):
        found = _read_xplane(path)
        if found:
            return found
    for path in folder.rglob("*.trace.json.gz"):
        found = read_chrome_trace(json.loads(gzip.decompress(path.read_bytes())))
        if found:
            return found
    return {}


def read_chrome_trace(trace: dict[str, Any]) -> dict[str, float]:
    """Seconds by kernel name on the streams of the devices of a Chrome trace."""
    processes, threads = {}, {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    total: collections.Counter[str] = collections.Counter()  # in nanoseconds
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or not processes.get(event["pid"], "").startswith(DEVICE_PLANE):
            continue
        if threads.get((event["pid"], event["tid"]), "").startswith(STREAM_LINE):
            total[event["name"]] += round(event["dur"] * 1e3)
    return {name: nanoseconds * 1e-9 for name, nanoseconds in total.items()}


def _read_xplane(path: Path) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(os.fspath(path)).planes:
        if plane.name.startswith(DEVICE_PLANE):
            for line in plane.lines:
                if line.name.startswith(STREAM_LINE):
                    for event in line.events:
                        total[event.name] += round(event.duration_ns)
    return {name: nanoseconds * 1e-9 for name, nanoseconds in total.items()}


def _quiet_profiler() -> dict[str, Any]:
    """Options that leave Python's own calls out of the trace."""
    try:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 0
    except AttributeError:
        return {}
    return {"profiler_options": options}


def _seconds(program: Callable[..., Any], arguments: tuple[Any, ...], in_flight: int) -> float:
    started = time.perf_counter()
    for _ in range(in_flight):
        outputs = program(*arguments)
    jax.block_until_ready(outputs)
    return time.perf_counter() - started
