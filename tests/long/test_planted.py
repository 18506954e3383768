"""Every planted defect is killed by the tests that are to notice it, in the default tier."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from long.defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
PACKAGES = sorted({str(Path(defect.file).parent) for defect in DEFECTS})


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    """Who changes the line that it is about changes the table too."""
    assert (ROOT / defect.file).read_text(encoding="utf-8").count(defect.before) == 1
    assert defect.after != defect.before
    chosen = [word for word in shlex.split(defect.tests) if ".py" in word]
    assert chosen
    assert all((ROOT / word.partition("::")[0]).is_file() for word in chosen)


@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
def test_planted_defects_are_killed(package: str) -> None:
    names = [defect.name for defect in DEFECTS if str(Path(defect.file).parent) == package]
    command = [sys.executable, str(Path(__file__).with_name("planted.py")), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
