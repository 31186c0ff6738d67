"""That tests/fixtures is what its script makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.checkpoints import FIXTURES
from tests.oracle.make_fixtures import make_fixtures

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


def test_fixtures_can_be_made_again(tmp_path: Path) -> None:
    make_fixtures(tmp_path)
    made = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    kept = {file.relative_to(FIXTURES) for file in FIXTURES.rglob("*") if file.is_file()}
    assert set(made) == kept - {Path("README.md")}
    for file in made:
        if file.name != "expected.npz":
            assert (tmp_path / file).read_bytes() == (FIXTURES / file).read_bytes(), file
            continue
        with np.load(tmp_path / file) as new, np.load(FIXTURES / file) as old:
            assert sorted(new) == sorted(old)
            for name in new:
                np.testing.assert_allclose(new[name], old[name], atol=2e-5, rtol=0, err_msg=f"{file} {name}")
