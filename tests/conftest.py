"""What every test shares: sixteen simulated devices, the folder `../shared`, a seed that is printed."""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

from minimax_jax.compilation_cache import cpu_instructions

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
PLATFORM = os.environ.get("MINIMAX_TEST_PLATFORM", "cpu")  # "gpu" leaves the choice of devices to JAX
REQUIRE_SHARED = os.environ.get("MINIMAX_REQUIRE_SHARED") == "1"
BASE_SEED = int(os.environ.get("MINIMAX_TEST_SEED", "0"))

# Before JAX is imported: it reads these once. Sixteen simulated devices on two cores wait for each other longer than
# XLA's default patience, hence the two time limits.
if PLATFORM == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=16",
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
            "--xla_cpu_collective_timeout_seconds=600",
        ]
    ).strip()

# Compiled programs are kept between runs (make test, then make test-full): half of a cold run is compiling. Programs
# for another CPU are kept apart; all are in the virtual environment, so that `make clean` removes them.
_CACHE = (
    Path(sys.prefix if sys.prefix != sys.base_prefix else tempfile.gettempdir())
    / "cache"
    / f"minimax-jax-{cpu_instructions()}"
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


def pytest_report_header() -> str:
    return f"platform {PLATFORM}, base seed {BASE_SEED}, shared {'present' if SHARED.is_dir() else 'absent'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without `../shared`, each test that asks for it is skipped under its own name."""
    if SHARED.is_dir() or REQUIRE_SHARED:
        return
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=f"needs ../shared: {item.name}"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the checkout; a test that needs it is skipped where it is absent.

    With MINIMAX_REQUIRE_SHARED=1 its absence is a failure.
    """
    if not SHARED.is_dir():
        message = "needs ../shared, the folder of checkpoints and tools beside the checkout"
        if REQUIRE_SHARED:
            pytest.fail(f"{message} (MINIMAX_REQUIRE_SHARED=1)")
        pytest.skip(message)
    return SHARED


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed fixed by the test's name, printed with a failure. MINIMAX_TEST_SEED=n moves all of them."""
    value = (zlib.crc32(request.node.name.encode()) + BASE_SEED) % 2**31
    print(f"seed {value} ({request.node.name}, base {BASE_SEED})")
    return value
