"""Every planted defect is killed by the tests that are to notice it, in the default tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from long.defects import DEFECTS

pytestmark = pytest.mark.long
PACKAGES = sorted({str(Path(defect.file).parent) for defect in DEFECTS})


@pytest.mark.parametrize("package", PACKAGES)
def test_planted_defects_are_killed(package: str) -> None:
    names = [defect.name for defect in DEFECTS if str(Path(defect.file).parent) == package]
    command = [sys.executable, str(Path(__file__).with_name("planted.py")), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
