"""The built wheel trains in an empty folder, by a recipe's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(tiny_model: Path, tmp_path: Path) -> None:
    dist, site, empty = (tmp_path / name for name in ("dist", "site", "empty"))
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(dist)], check=True, timeout=300)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300)
    environ = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=empty, env=environ, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for extra in ("reasoning_gym", "math_verify", "datasets"):  # a first run needs none
        (site / f"{extra}.py").write_text("raise ModuleNotFoundError('not in a clean environment')")
    where, tested = run("-c", "import tandem, tandem.clone as c; print(tandem.__file__, len(c.tested()))").split()
    assert where.startswith(str(site))
    assert int(tested) > 50
    options = (
        f"model={tiny_model}",
        "steps=1",
        "group_size=2",
        "groups_per_step=2",
        "evaluate.tasks=2",
        "dtype=float32",
    )
    assert "report.html" in run("-m", "tandem", "train", "quickstart", *options)
