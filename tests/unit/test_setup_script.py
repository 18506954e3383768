"""scripts/setup with a Python that only pretends to install: what it makes, says, and shows of a failure."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
# Makes environments that hold itself, and installs nothing.
case "$1 $2" in
    "-m venv")
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$3/bin/python" >"$3/bin/pip" ;;
    "-m pip")
        for n in 1 2 3 4 5 6 7 8; do
            echo "WARNING: Location 'file:///nowhere/$n/' is ignored: it is neither a file nor a directory." >&2
            echo "Collecting package-$n"
        done
        sleep "${SLOW:-0}"
        [ -z "$FAILS" ] || { echo "ERROR: No matching distribution found for torch" >&2; exit 1; } ;;
    *) exec REAL "$@" ;;
esac
"""


PARTS = (
    "setup: there is no part trainr; parts: trainer engine atropos verifiers verifiers-04 packages docs "
    "(default: all but docs)\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What setup reads, and the pretended Python."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "constraints-engine.txt", "constraints-atropos.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python3"
    python.write_text(PYTHON.replace("REAL", sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def setup(project: Path, *parts: str, fails: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/setup", *parts],
        cwd=project,
        env={**os.environ, "PYTHON": str(project / "python3"), "FAILS": fails},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_only_what_is_asked_for_is_made_in_few_lines_and_again_nothing_is(project: Path) -> None:
    done = setup(project, "trainer")
    assert done.returncode == 0, done.stderr
    assert (project / ".venv").is_dir()
    assert not (project / ".venv-engine").exists()
    assert not (project / ".venv-atropos").exists()
    lines = done.stdout.splitlines()
    assert len(lines) <= 12
    assert lines[-1] == "setup: the command is .venv/bin/tandem"
    assert done.stderr == ""
    assert "is ignored" in (project / ".venv" / "tandem-setup.log").read_text()
    assert setup(project, "trainer").stdout.splitlines() == ["setup: .venv is up to date"]


def test_a_terminal_shows_how_far_it_is_and_foretells_no_time(project: Path) -> None:
    env = {**os.environ, "PYTHON": str(project / "python3"), "FAILS": "", "SLOW": "1.5"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(["bash", "scripts/setup", "trainer"], cwd=project, env=env, stdout=theirs) as running:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # what a terminal whose other end is closed answers
            while some := os.read(ours, 4096):
                shown += some
        assert running.wait(60) == 0
    os.close(ours)
    assert re.search(rb"setup: \.venv \d+ %, 0:0\d gone\r", shown), shown
    assert b"left" not in shown


def test_what_failed_is_shown_without_what_means_nothing(project: Path) -> None:
    done = setup(project, "trainer", fails="yes")
    assert done.returncode != 0
    assert "ERROR: No matching distribution found for torch" in done.stderr
    assert "is ignored" not in done.stderr + done.stdout
    assert "tandem-setup.log" in done.stderr
    assert setup(project, "trainer").stdout.startswith("setup: making .venv anew: an earlier setup was interrupted")


def test_a_part_that_is_none_is_refused(project: Path) -> None:
    done = setup(project, "trainr")
    assert done.returncode == 1
    assert done.stderr == PARTS
    assert not (project / ".venv").exists()


def test_the_quickstart_makes_the_trainers_environment_alone() -> None:
    assert "\nbash scripts/setup trainer\n" in (ROOT / "scripts" / "quickstart").read_text()
