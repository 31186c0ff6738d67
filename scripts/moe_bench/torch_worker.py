"""PyTorch in a process of its own, so that it and JAX share no libraries; answers JSON lines on what was its stdout."""

from __future__ import annotations

import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]


class TorchWorker:
    """The other side's handle. `ask` never raises: a failure is {"error": one line}."""

    def __init__(self, humming: Path | None, scratch: Path):
        """`humming`: a wheel or an unpacked one."""
        paths = [str(SCRIPTS)]
        self.problem = None
        if humming is not None:
            try:
                paths.append(str(unpack(humming, scratch / "humming")))
            except (OSError, zipfile.BadZipFile) as error:
                self.problem = f"{humming}: {error}"
        paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HUMMING_CACHE_DIR": str(scratch / "cubins")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moe_bench.torch_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, timeout_s: float, say: Callable[[str], None], **request: Any) -> dict[str, Any]:
        """The answer to one request; notes on the way go to `say`. After a timeout the process is ended."""
        if request["do"] == "humming" and self.problem:
            return {"error": self.problem}
        if not self.alive:
            return {"error": f"the PyTorch process has ended with {self._process.returncode}"}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            while True:
                line = self._lines.get(timeout=timeout_s)
                if line is None:
                    return {"error": f"the PyTorch process ended with {self._process.wait(10)}; see its messages above"}
                answer: dict[str, Any] = json.loads(line)
                if "note" not in answer:
                    return answer
                say(answer["note"])
        except queue.Empty:
            self.close()
            return {"error": f"no answer within {timeout_s:.0f} s"}
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def unpack(wheel: Path, folder: Path) -> Path:
    """A folder to import from: the wheel's contents with its programs executable, or the folder that was given."""
    if wheel.is_dir():
        wheels = sorted(wheel.glob("humming_kernels-*.whl"))
        if not wheels:
            return wheel
        wheel = wheels[-1]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for file in folder.glob("humming/_native/*/*"):
        file.chmod(0o755)
    return folder


def torch_ceilings() -> dict[str, float]:
    """As `ceilings.jax_ceilings`, timed on the device."""
    import torch

    result = {"copy": _copy_rate(), "matmul": _matmul_rate()}
    torch.cuda.empty_cache()
    return result


def cuda_seconds(fn: Callable[[], Any], runs: int, warm_up: int = 3) -> float:
    """Median device time of one call."""
    import torch

    for _ in range(warm_up):
        fn()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        fn()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e-3


def _copy_rate() -> float:
    import torch

    source = torch.randint(0, 2**31 - 1, (2**30,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / cuda_seconds(lambda: target.copy_(source), 10)


def _matmul_rate() -> float:
    import torch

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / cuda_seconds(lambda: torch.mm(a, b, out=out), 30)


def main() -> None:
    """Requests on stdin, answers on the old stdout; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    for line in sys.stdin:
        try:
            answer(_serve(json.loads(line), lambda note: answer({"note": note})))
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            answer({"error": f"{type(error).__name__}: {first}"[:300]})


def _serve(request: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device")
    if request["do"] == "versions":
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
    if request["do"] == "ceilings":
        return torch_ceilings()
    from moe_bench import humming_peer

    return humming_peer.measure(**{name: value for name, value in request.items() if name != "do"}, say=say)


if __name__ == "__main__":
    main()
