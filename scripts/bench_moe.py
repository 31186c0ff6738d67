"""Times one layer of routed experts against the least that the hardware could take, and against other kernels.

    python scripts/bench_moe.py --humming humming_kernels-0.1.20-cp310-abi3-manylinux_2_28_x86_64.whl

For each model, format and number of tokens: gate-up with the activation, down, the weighted sum, all of them together
("experts"), the routing with its sort, and the public op ("layer", routing included). The floor is the time of the
packed bytes of the experts that were hit and of the activations at the copy bandwidth, or of the operations at the
bfloat16 matrix rate, whichever is longer; both rates are measured in the same run, and the highest seen is used. Every
repetition has inputs and a routing of its own. Writes bench_moe.json, bench_moe.md and bench_moe.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch's process needs memory too
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import jax  # noqa: E402
from moe_bench import ceilings, ours, report  # noqa: E402
from moe_bench.calls import KERNEL_PARTS  # noqa: E402
from moe_bench.cases import FORMATS, LAYERS  # noqa: E402
from moe_bench.torch_worker import TorchWorker  # noqa: E402

PEERS = ("xla", "ragged_dot", "humming")
HUMMING_FORMATS = ("mxfp4", "nvfp4")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when something was measured."""
    args = _parse(argv)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    device = jax.devices()[0]
    result: dict[str, Any] = {
        "gpu": device.device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "command": shlex.join(["python", *sys.argv]) if argv is None else shlex.join(argv),
        "seed": args.seed,
        "implementation": args.implementation,
        "tuning": args.tuning,
        "ceilings": [],
        "cases": [],
        "notes": [],
    }
    say(f"{result['gpu']}, JAX {jax.__version__}, seed {args.seed}")
    with tempfile.TemporaryDirectory() as scratch:
        run = _Run(args, result, Path(scratch), started, say)
        try:
            run.everything()
        finally:
            run.end()
    print(report.markdown(result), flush=True)
    return 0 if result["cases"] else 1


class _Run:
    """The order of things: ceilings, then each model's formats, with ceilings again after each."""

    def __init__(self, args: argparse.Namespace, result: dict[str, Any], scratch: Path, started: float, say: ours.Say):
        self.args, self.result, self.scratch, self.started, self.say = args, result, scratch, started, say
        self.worker: TorchWorker | None = None
        self.options = ours.Options(
            seed=args.seed,
            parts=tuple(args.parts),
            repeats=args.repeats,
            implementation=args.implementation,
            tuning=args.tuning,
            profile=args.profile,
            workers=args.workers,
            limit_s=args.limit,
        )

    def everything(self) -> None:
        """Measures and writes after each format, so that a run that is cut short leaves what it has."""
        if self.args.torch and jax.devices()[0].platform == "gpu":
            self._start_worker()
        self._ceilings("before")
        for model in self.args.model:
            ragged = self._ragged(model)
            for format in self.args.format:
                if self._late(f"{model} {format}"):
                    continue
                self.say(f"{model} {format}")
                cases = self._ours(model, format)
                for tokens, one in ragged.items():
                    cases[tokens]["ragged_dot"] = dict(one)
                self._humming(model, format, cases)
                self.result["cases"] += list(cases.values())
                self._ceilings(f"after {model} {format}")
                self._write()

    def end(self) -> None:
        """Also after a failure."""
        if self.worker is not None:
            self.worker.close()

    def _ours(self, model: str, format: str) -> dict[int, dict[str, Any]]:
        cases = {N: {"model": model, "format": format, "tokens": N} for N in self.args.tokens}
        try:
            with_xla = "xla" in self.args.peers
            measured = ours.measure(LAYERS[model], format, self.args.tokens, self.options, with_xla, self.say)
        except Exception as error:  # out of memory for the weights, say: the other formats go on
            self._note(f"{model} {format}: {ours.failure(error)['error']}")
            return cases
        for N, one in measured.items():
            cases[N] |= one
            for name, part in [*one["parts"].items(), ("xla", one.get("xla", {}))]:
                if "error" in part:
                    self._note(f"{model} {format} {N} tokens, {name}: {part['error']}", quiet=True)
        return cases

    def _ragged(self, model: str) -> dict[int, dict[str, Any]]:
        if "ragged_dot" not in self.args.peers or self._late(f"{model} ragged_dot"):
            return {}
        self.say(f"{model} ragged_dot, bfloat16")
        try:
            return ours.measure_ragged(LAYERS[model], self.args.tokens, self.options, self.say)
        except Exception as error:
            self._note(f"{model} ragged_dot: {ours.failure(error)['error']}")
            return {}

    def _humming(self, model: str, format: str, cases: dict[int, dict[str, Any]]) -> None:
        if "humming" not in self.args.peers or self.worker is None or self.args.humming is None:
            return
        if format not in HUMMING_FORMATS or self._late(f"{model} {format} humming"):
            return
        request = {"layer": dataclasses.asdict(LAYERS[model]), "format": format, "tokens": self.args.tokens}
        request |= {"seed": self.args.seed, "repeats": self.args.repeats}
        answer = self.worker.ask(180, self.say, do="humming", **request)
        if "error" in answer:
            self._note(f"{model} {format} humming: {answer['error']}")
        if "version" in answer:
            self.result["versions"]["humming"] = answer["version"]
        for N, layouts in answer.get("cases", {}).items():
            cases[int(N)]["humming"] = layouts
        if not self.worker.alive or "CUDA" in json.dumps(answer):  # an error after which CUDA does nothing more
            self.worker.close()
            self._start_worker()

    def _ceilings(self, when: str) -> None:
        for where, measure in (("JAX", self._jax_ceilings), ("PyTorch", self._torch_ceilings)):
            one = measure()
            if one:
                self.result["ceilings"].append({"where": f"{where} {when}"} | one)
                self.say(f"ceilings, {where}: {report.describe_rates(one)}")

    def _jax_ceilings(self) -> dict[str, Any]:
        try:
            return ceilings.jax_ceilings()
        except Exception as error:
            return ours.failure(error)

    def _torch_ceilings(self) -> dict[str, Any]:
        return {} if self.worker is None else self.worker.ask(60, self.say, do="ceilings")

    def _start_worker(self) -> None:
        self.worker = TorchWorker(self.args.humming, self.scratch)
        answer = self.worker.ask(120, self.say, do="versions")
        if "error" in answer:
            self._note(f"PyTorch: {answer['error']}")
            self.worker.close()
            self.worker = None
        else:
            self.result["versions"] |= {"torch": answer["torch"], "cuda": answer["cuda"]}
            self.result["gpu"] = answer["gpu"]

    def _write(self) -> None:
        """Floors and ratios by the highest rates seen until now, for all cases anew."""
        self.result["rates"] = ceilings.best(self.result["ceilings"])
        self.result["cases"] = [
            report.complete(case, self.args.seed, self.args.repeats, self.result["rates"])
            for case in self.result["cases"]
        ]
        report.write(self.result, self.args.out)
        problem = report.plot(self.result, self.args.out / "bench_moe.png")
        if problem:
            self.say(problem)

    def _late(self, what: str) -> bool:
        if time.monotonic() - self.started < self.args.deadline:
            return False
        self._note(f"{what}: the {self.args.deadline:.0f} s of --deadline were over")
        return True

    def _note(self, text: str, quiet: bool = False) -> None:
        self.result["notes"].append(text)
        if not quiet:
            self.say(f"not measured: {text}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["M2.1", "M3"], choices=list(LAYERS))
    parser.add_argument("--format", nargs="+", default=["mxfp4", "nvfp4"], choices=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 64, 256, 4096])
    parser.add_argument("--parts", nargs="+", default=[*KERNEL_PARTS, "layer"], choices=[*KERNEL_PARTS, "layer"])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--implementation", choices=["pallas", "xla", "reference"], help="default: the best there is")
    parser.add_argument("--tuning", type=json.loads, help="block sizes as JSON, handed to the kernels as `tuning`")
    parser.add_argument("--repeats", type=int, help="repetitions in one program (default: 40 at 1 token to 4 at 4096)")
    parser.add_argument("--profile", action="store_true", help="also sum kernel times by name with JAX's profiler")
    parser.add_argument("--humming", type=Path, help="wheel of humming-kernels, or a folder that holds it")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="start no PyTorch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="parallel compilations")
    parser.add_argument("--limit", type=float, default=2.0, help="a program of more seconds is timed only once")
    parser.add_argument("--deadline", type=float, default=480, help="seconds after which nothing new is begun")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
