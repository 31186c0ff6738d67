"""What was measured as JSON, as a Markdown table and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_bench.cases import LAYERS, Floor, default_repeats, floors, routings

COLUMNS = (
    *("tokens", "experts hit", "floor us", "bound", "ours us", "ratio", "in kernels us", "ratio in kernels"),
    *("gate-up us", "down us", "sum us", "routing us", "whole op us", "humming us", "its ratio"),
    *("xla us", "ragged_dot us", "error"),
)


def complete(case: dict[str, Any], seed: int, repeats: int | None, rates: tuple[float, float]) -> dict[str, Any]:
    """The case with its floors, and the ratio floor / measured of everything that was measured."""
    layer = LAYERS[case["model"]]
    routing = routings(layer, case["tokens"], repeats or default_repeats(case["tokens"]), seed)
    least = floors(layer, case["format"], routing)
    whole = least["experts"]
    done = case | {
        "experts_hit": sum(one.experts_hit for one in routing) / len(routing),
        "floors": {name: _floor(floor, rates) for name, floor in least.items()},
    }
    parts = case.get("parts", {})
    for name, result in parts.items():
        floor = least.get("experts" if name == "layer" else name)
        if floor and "seconds" in result:
            result["ratio"] = floor.seconds(*rates) / result["seconds"]
        if floor and result.get("kernels"):
            result["kernel_seconds"] = sum(result["kernels"].values())
            result["kernel_ratio"] = floor.seconds(*rates) / result["kernel_seconds"]
    for result in case.get("humming", {}).values():
        if "experts" in result:
            result["ratio"] = whole.seconds(*rates) / result["experts"]
    bf16 = floors(layer, "bf16", routing)["experts"].seconds(*rates)
    for name, floor_s in (("xla", whole.seconds(*rates)), ("ragged_dot", bf16)):
        if "seconds" in case.get(name, {}):
            case[name]["ratio"] = floor_s / case[name]["seconds"]
    return done


def best_humming(case: Mapping[str, Any]) -> dict[str, Any]:
    """The quicker of its layouts, {} where it was not measured."""
    done = [one | {"layout": name} for name, one in case.get("humming", {}).items() if "experts" in one]
    return min(done, key=lambda one: one["experts"], default={})


def ours(case: Mapping[str, Any]) -> dict[str, Any]:
    """The result that the ratio is about: without the routing where that can be taken apart."""
    parts = case.get("parts", {})
    result: dict[str, Any] = parts.get("experts", {})
    return result if "seconds" in result else parts.get("layer", {})


def write(report: dict[str, Any], folder: Path) -> str:
    """bench_moe.json, bench_moe.md and, where matplotlib is there, bench_moe.png. Returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench_moe.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    (folder / "bench_moe.md").write_text(text)
    return text


def markdown(report: dict[str, Any]) -> str:
    """A heading, the ceilings, and a table for each model and format."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['gpu']}, {report['date']}, {versions}, seed {report['seed']}", "", f"`{report['command']}`", ""]
    if report.get("rates"):
        copy, matmul = report["rates"]
        lines += [f"Ceilings: {copy / 1e12:.2f} TB/s, {matmul / 1e12:.0f} TFLOP/s, the highest of", ""]
        lines += [f"* {one['where']}: {describe_rates(one)}" for one in report["ceilings"]]
    for model, format in dict.fromkeys((case["model"], case["format"]) for case in report["cases"]):
        cases = [case for case in report["cases"] if (case["model"], case["format"]) == (model, format)]
        lines += ["", f"**{model} {format}**", "", _row(COLUMNS), _row("---:" for _ in COLUMNS)]
        lines += [_row(_cells(case)) for case in cases]
    if report["notes"]:
        lines += ["", "Not measured:", "", *(f"* {note}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> str | None:
    """Ratio against tokens, a panel for each model and format. Returns why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((case["model"], case["format"]) for case in report["cases"]))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        cases = [case for case in report["cases"] if (case["model"], case["format"]) == panel]
        lines = {
            "ours": [(case["tokens"], ours(case).get("ratio")) for case in cases],
            "ours, in kernels": [(case["tokens"], ours(case).get("kernel_ratio")) for case in cases],
            "humming": [(case["tokens"], best_humming(case).get("ratio")) for case in cases],
        }
        for (label, points), style in zip(lines.items(), ("o-", "o:", "s--"), strict=True):
            points = [point for point in points if point[1] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label)
        axis.set_xscale("log", base=2)
        axis.set(title=" ".join(panel), xlabel="tokens", ylim=(0, 1))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    axes[0, 0].set_ylabel("floor / measured")
    figure.suptitle(f"Routed experts of one layer, {report['gpu']}, {report['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def describe_rates(one: Mapping[str, Any]) -> str:
    """One measurement of the ceilings on a line."""
    shown = [f"{name} {one[name] / 1e12:.2f} TB/s" for name in ("copy", "add_one") if name in one]
    shown += [f"matmul {one['matmul'] / 1e12:.0f} TFLOP/s"] if "matmul" in one else []
    return ", ".join(shown) or one.get("error", "nothing")


def _floor(floor: Floor, rates: tuple[float, float]) -> dict[str, Any]:
    values = {"bytes": floor.bytes, "flops": floor.flops}
    return values | {"seconds": floor.seconds(*rates), "bound": floor.bound(*rates)}


def _cells(case: Mapping[str, Any]) -> Iterable[str]:
    parts, floor, result, peer = case.get("parts", {}), case["floors"]["experts"], ours(case), best_humming(case)
    yield str(case["tokens"])
    yield f"{case['experts_hit']:.0f}"
    yield _us(floor["seconds"])
    yield floor["bound"]
    yield _us(result.get("seconds"))
    yield _ratio(result.get("ratio"))
    yield _us(result.get("kernel_seconds"))
    yield _ratio(result.get("kernel_ratio"))
    for part in ("gate_up", "down", "sum", "routing", "layer"):
        yield _us(parts.get(part, {}).get("seconds"))
    yield _us(peer.get("experts"))
    yield _ratio(peer.get("ratio"))
    yield _us(case.get("xla", {}).get("seconds"))
    yield _us(case.get("ragged_dot", {}).get("seconds"))
    yield f"{case['relative_error']:.0e}" if "relative_error" in case else "-"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
