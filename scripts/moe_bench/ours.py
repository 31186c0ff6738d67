"""Times this package's implementation and the JAX peers on one layer and format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moe_bench import calls
from moe_bench.cases import Layer, Routing, default_repeats, routings
from moe_bench.timing import compile_all, kernel_seconds, repeated, time_program
from moe_bench.weights import random_experts

Say = Callable[[str], None]
Made = dict[str, Sequence[Any]]  # what each part returned, one for each repetition (its shape, before it has run)
PEER_REPEATS = 2
NEEDS = {"routing": (), "gate_up": ("routing",), "down": ("gate_up",), "sum": ("down",), "experts": ("routing",)}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time and how."""

    seed: int = 0
    parts: tuple[str, ...] = (*calls.KERNEL_PARTS, "layer")
    repeats: int | None = None
    implementation: str | None = None
    tuning: calls.Tuning = None
    profile: bool = False
    workers: int = 1
    limit_s: float = 2.0


@dataclasses.dataclass(frozen=True)
class Program:
    """fn(*shared, *item) for each item; the items may be what other parts made."""

    name: str
    fn: Callable[..., Any]
    shared: tuple[Any, ...]
    items: Callable[[Made], Sequence[tuple[Any, ...]]]

    def arguments(self, made: Made) -> tuple[Any, Any]:
        """What the repeated program takes."""
        return self.shared, tuple(self.items(made))


def measure(
    layer: Layer, format: str, tokens: Sequence[int], options: Options, with_xla: bool, say: Say
) -> dict[int, dict[str, Any]]:
    """For each number of tokens {"parts": {name: result}, "xla": result, "relative_error": float}."""
    weights = jax.block_until_ready(random_experts(layer, format, options.seed))
    programs: dict[tuple[int, str], Program] = {}
    broken: dict[tuple[int, str], Exception] = {}
    shapes: dict[int, Made] = {}
    inputs = {}
    for N in tokens:
        inputs[N] = _inputs(layer, N, options)
        shapes[N] = {}
        for program in _programs(layer, weights, inputs[N], options, with_xla):
            programs[N, program.name] = program
            try:
                item = program.items(shapes[N])[0]
                shape = jax.eval_shape(program.fn, *program.shared, *item)
            except Exception as error:
                broken[N, program.name] = error
            else:
                shapes[N][program.name] = [shape] * len(inputs[N])
    say(f"  compiling {len(programs)} programs")
    runnable = {key: (repeated(p.fn), p.arguments(shapes[key[0]])) for key, p in programs.items() if key not in broken}
    compiled = compile_all(runnable, options.workers) | broken

    results: dict[int, dict[str, Any]] = {N: {"parts": {}} for N in tokens}
    for N in tokens:
        made: Made = {}
        for program in [p for (n, _), p in programs.items() if n == N]:
            name = program.name
            result, outputs = _time(program, compiled[N, name], made, options)
            made[name] = outputs
            if name == "xla":
                results[N]["xla"] = result
            elif name in options.parts or name == "layer":
                results[N]["parts"][name] = result
            say(f"  {N:5d} tokens  {name:8s} {describe(result)}")
            for kernel, seconds in list(result.get("kernels", {}).items())[:6]:
                say(f"{'':24}{seconds * 1e6:10.1f} us  {kernel[:80]}")
        whole = made.get("experts") or made.get("layer")
        if whole:
            off = calls.relative_error(layer, whole[0], *weights, *inputs[N][0])
            results[N]["relative_error"] = off
            say(f"  {N:5d} tokens  relative error of a token {off:.1e}{'' if off < 0.02 else '  TOO LARGE'}")
    return results


def measure_ragged(layer: Layer, tokens: Sequence[int], options: Options, say: Say) -> dict[int, dict[str, Any]]:
    """`lax.ragged_dot` on bfloat16 weights, the same whatever the packed format."""
    key13, key2 = jax.random.split(jax.random.key(options.seed))
    w13 = jax.random.normal(key13, (layer.E, layer.D, 2 * layer.F), jnp.bfloat16) * layer.D**-0.5
    w2 = jax.random.normal(key2, (layer.E, layer.F, layer.D), jnp.bfloat16) * layer.F**-0.5
    programs = {}
    for N in tokens:
        inputs = _inputs(layer, N, options)[: PEER_REPEATS if N <= 256 else 1]
        programs[N] = Program("ragged", calls.ragged_op(layer), (w13, w2), _given(inputs))
    compiled = compile_all({N: (repeated(p.fn), p.arguments({})) for N, p in programs.items()}, options.workers)
    results = {}
    for N in tokens:
        results[N], _ = _time(programs[N], compiled[N], {}, options)
        say(f"  {N:5d} tokens  ragged   {describe(results[N])}")
    return results


def describe(result: dict[str, Any]) -> str:
    """One result on a line."""
    if "error" in result:
        return f"not measured: {result['error']}"
    text = f"{result['seconds'] * 1e6:10.1f} us ({result['low'] * 1e6:.1f} to {result['high'] * 1e6:.1f})"
    if result.get("kernels"):
        text += f", in kernels {sum(result['kernels'].values()) * 1e6:.1f} us"
    if "profile_error" in result:
        text += f", no profile: {result['profile_error']}"
    return text


def failure(error: Exception) -> dict[str, Any]:
    """The result of something that could not be timed: the error's first line."""
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0]}"[:300]}


def _inputs(layer: Layer, N: int, options: Options) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """(x, expert_ids, expert_weights) of each repetition."""
    cases: Sequence[Routing] = routings(layer, N, options.repeats or default_repeats(N), options.seed)
    xs = jax.random.normal(jax.random.key(options.seed + N), (len(cases), N, layer.D), jnp.bfloat16)
    return [(xs[i], jnp.asarray(one.expert_ids), jnp.asarray(one.weights)) for i, one in enumerate(cases)]


def _programs(layer: Layer, weights: Any, inputs: Any, options: Options, with_xla: bool) -> list[Program]:
    """In an order in which each finds what it takes made."""
    w13, w2 = weights
    xs, ids, gates = zip(*inputs, strict=True)
    programs = []
    if calls.has_kernels(options.implementation):
        fns = calls.kernel_parts(layer, w13, options.tuning)
        shared = {"gate_up": (w13,), "down": (w2,), "experts": (w13, w2)}
        items: dict[str, Callable[[Made], Any]] = {
            "routing": lambda made: list(zip(ids, strict=True)),
            "gate_up": lambda made: list(zip(xs, made["routing"], strict=True)),
            "down": lambda made: list(zip(made["gate_up"], made["routing"], gates, strict=True)),
            "sum": lambda made: list(zip(made["down"], strict=True)),
            "experts": lambda made: list(zip(xs, made["routing"], gates, strict=True)),
        }
        wanted = _with_needs(options.parts)
        programs = [Program(name, fn, shared.get(name, ()), items[name]) for name, fn in fns.items() if name in wanted]
    if "layer" in options.parts or not programs:
        programs.append(Program("layer", calls.layer_op(layer, options.implementation), weights, _given(inputs)))
    if with_xla and options.implementation != "xla":
        programs.append(Program("xla", calls.layer_op(layer, "xla"), weights, _given(inputs[:PEER_REPEATS])))
    return programs


def _with_needs(parts: Sequence[str]) -> set[str]:
    wanted: set[str] = set()
    waiting = [part for part in parts if part in NEEDS]
    while waiting:
        part = waiting.pop()
        wanted.add(part)
        waiting.extend(NEEDS[part])
    return wanted


def _given(inputs: Any) -> Callable[[Made], Any]:
    return lambda made: inputs


def _time(program: Program, compiled: Any, made: Made, options: Options) -> tuple[dict[str, Any], Sequence[Any]]:
    """(result, what each repetition returned)."""
    if isinstance(compiled, Exception):
        return failure(compiled), ()
    try:
        arguments = program.arguments(made)
        outputs = jax.block_until_ready(compiled(*arguments))
        repeats = len(arguments[1])
        result = dataclasses.asdict(time_program(compiled, arguments, repeats, options.limit_s))
        result["repeats"] = repeats
    except Exception as error:  # out of memory, or an input that could not be made: the other cases go on
        return failure(error), ()
    if options.profile and program.name in ("experts", "layer"):
        try:
            result["kernels"] = kernel_seconds(compiled, arguments, repeats)
            if not result["kernels"]:
                result["profile_error"] = "the trace shows no kernels"
        except Exception as error:
            result["profile_error"] = failure(error)["error"]
    return result, outputs
