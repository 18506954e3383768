"""Plants each defect of ``defects.py`` in a copy of the sources, and runs the tests that are to notice it.

    python tests/long/planted.py                   # all of them; prints killed or SURVIVED, and exits with 1 if one did
    python tests/long/planted.py losses/ checksum  # those whose name or file has one of these words
    python tests/long/planted.py -n 2              # two at a time

Each runs in a fork of a process that has torch loaded, which takes most of the time of a test's start.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
PRELOADED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
KILLED = {1: "killed", 2: "killed (nothing can be imported)"}
"""What pytest's exit status says; every other but 0 is a mistake in the table."""


class Trial(NamedTuple):
    """A defect whose tests are running."""

    defect: Defect
    place: Path
    began: float


def plant(defect: Defect, place: Path) -> None:
    """Copy the sources to a folder, with the defect in them.

    Raises:
        ValueError: the text that it replaces does not stand there once.
    """
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = place / defect.file
    text = file.read_text(encoding="utf-8")
    if (count := text.count(defect.before)) != 1:
        raise ValueError(f"{defect.name}: {defect.before!r} stands {count} times in {defect.file}; expected once")
    file.write_text(text.replace(defect.before, defect.after), encoding="utf-8")


def run_tests(defect: Defect, place: Path) -> int:
    """Run the tests of a defect in this process, on the sources in a folder; pytest's exit status."""
    import pytest

    out = os.open(place / "out.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sources = str(place / "src")
    sys.path.insert(0, sources)
    os.environ["PYTHONPATH"] = sources  # of the processes that tests start
    import tandem

    if not str(tandem.__file__).startswith(sources):
        raise RuntimeError(f"tandem was imported from {tandem.__file__}, not from {sources}")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", PRELOADED, f"--basetemp={place / 'tmp'}"]
    return int(pytest.main([*options, *shlex.split(defect.tests)]))


def start(defect: Defect, place: Path) -> int:
    """Fork a process that plants a defect and runs its tests; its pid."""
    plant(defect, place)
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 3
    try:
        status = run_tests(defect, place)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def trials(defects: Sequence[Defect], jobs: int, folder: Path) -> dict[str, int]:
    """Exit status of the tests of each defect, which are told as they end."""
    import torch  # noqa: F401 - before the forks
    import transformers  # noqa: F401

    left, running, statuses = list(enumerate(defects)), dict[int, Trial](), dict[str, int]()
    while left or running:
        while left and len(running) < jobs:
            number, defect = left.pop(0)
            place = folder / str(number)
            running[start(defect, place)] = Trial(defect, place, time.monotonic())
        pid, code = os.waitpid(-1, 0)
        defect, place, began = running.pop(pid)
        status = statuses[defect.name] = os.waitstatus_to_exitcode(code)
        verdict = "SURVIVED" if status == 0 else KILLED.get(status, f"not tested (status {status})")
        sys.stdout.write(f"{verdict:10} {time.monotonic() - began:5.0f} s  {defect.name}  [{defect.file}]\n")
        if status not in (0, *KILLED):
            sys.stdout.write((place / "out.txt").read_text(encoding="utf-8", errors="replace")[-2000:])
        shutil.rmtree(place)
    return statuses


def main() -> int:
    """Command line; 0 if every defect was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the name or the file of those to plant; none: all")
    parser.add_argument("-n", type=int, default=1, help="how many at a time")
    options = parser.parse_args()
    chosen = [d for d in DEFECTS if not options.words or any(word in f"{d.name} {d.file}" for word in options.words)]
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        statuses = trials(chosen, options.n, Path(folder))
    killed = sum(status in KILLED for status in statuses.values())
    sys.stdout.write(f"{killed} of {len(chosen)} killed\n")
    return 0 if chosen and killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
