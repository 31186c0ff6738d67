"""A first run that never ends is reported; later runs are not waited for."""

from __future__ import annotations

import logging
import time
from typing import Any

import jax.numpy as jnp
import pytest

from minimax_jax.errors import ConfigError
from minimax_jax.generation import patience
from minimax_jax.generation.patience import FirstRuns


class Never:
    """An array of a device that hangs."""

    def is_ready(self) -> bool:
        return False

    def devices(self) -> set[Any]:
        return {"gfx942"}


def test_a_hang_is_reported_with_the_program_the_limit_and_the_way_out() -> None:
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"first decode step .* startup_timeout 0.2 s on gfx942.*implementation='xla'"
    ):
        FirstRuns(0.2).wait("decode", [Never()])
    assert time.monotonic() - started < 5


def test_only_the_first_run_of_a_program_is_waited_for() -> None:
    runs = FirstRuns(0.2)
    runs.wait("decode", jnp.ones(3) + 1)
    runs.wait("decode", [Never()])
    with pytest.raises(ConfigError):
        runs.wait("prefill", [Never()])


def test_a_long_wait_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "_SAY", 0.05)
    with caplog.at_level(logging.INFO, "minimax_jax"), pytest.raises(ConfigError):
        FirstRuns(0.3).wait("prefill", [Never()])
    assert "waiting for the first prefill step" in caplog.text
