"""Ranks are killed and stopped at every boundary of a run: each ends it by name, and nothing is trained twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUSY_SECONDS = "35"
"""For an end, beside other tests; alone all come within 20."""


@pytest.mark.long
@pytest.mark.timeout(5500)
def test_sixty_ranks_lost_at_every_boundary_end_the_run_by_name() -> None:
    command = [sys.executable, "tests/long/rank_kills.py", "--trials", "60", "--seconds", BUSY_SECONDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "60 trials" in done.stdout
