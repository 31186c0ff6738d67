"""Asks pip to resolve extras of this checkout from nothing, without installing, and checks the versions of JAX's parts.

python .ci/resolve_extras.py --jax 0.10.2 rocm cuda
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

PLUGINS = {"rocm": "jax-rocm7-plugin", "cuda": "jax-cuda12-plugin"}


def main() -> int:
    """0 when every extra resolves to the expected version of JAX."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jax", required=True, metavar="VERSION")
    parser.add_argument("extras", nargs="+")
    args = parser.parse_args()
    failed = 0
    for extra in args.extras:
        versions = _resolve(extra)
        if versions is None:
            failed += 1
            continue
        names = ["jax", "jaxlib", *([PLUGINS[extra]] if extra in PLUGINS else [])]
        expected = dict.fromkeys(names, args.jax)
        wrong = {name: versions.get(name) for name, version in expected.items() if versions.get(name) != version}
        failed += bool(wrong)
        shown = {name: version for name, version in versions.items() if name.startswith(("jax", "flax"))}
        print(f"{'FAIL' if wrong else 'ok'} [{extra}] {len(versions)} packages: {shown}")
        if wrong:
            print(f"  expected {expected}, found {wrong}")
    return 1 if failed else 0


def _resolve(extra: str) -> dict[str, str] | None:
    """Package -> version as pip would install them, None when it finds no solution."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--dry-run", "--ignore-installed", "--report", "-", f".[{extra}]"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(f"FAIL [{extra}] pip: {result.stderr.strip()[-2000:]}")
        return None
    packages = json.loads(result.stdout)["install"]
    return {package["metadata"]["name"]: package["metadata"]["version"] for package in packages}


if __name__ == "__main__":
    sys.exit(main())
