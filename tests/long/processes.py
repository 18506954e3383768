"""Processes of a system that is to be killed, started again and again, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.processes import Identity, alive_after, identity

MARK = "TANDEM_TRIAL"
"""Variable that all processes of a trial have, also those that its processes start."""


class Broken(Exception):
    """Something that no kill explains."""


def until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"{what} did not come in {seconds:g} s")
        time.sleep(0.02)


@dataclass
class Child:
    """A Python program that is started again and again."""

    name: str
    """For people."""
    place: Path
    """Where it runs; its log is there too."""
    words: Callable[[], Sequence[str]]
    """Command line of its next start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in it."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The file that has its output."""
        return self.place / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of its last process."""
        assert self.process is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        """How its last process ended, negative for a signal; None while it runs."""
        return self.process.poll() if self.process else None

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        return self.process is not None and self.code is None

    def start(self) -> None:
        """Start it, as the leader of a session."""
        if self.process is not None:
            self.process.wait()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.words()], cwd=self.place, env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def identity(self) -> Identity | None:
        """Of its last process, while it runs."""
        return identity(self.pid) if self.alive else None

    def kill(self) -> None:
        """SIGKILL; it has ended then."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait(self, seconds: float) -> int:
        """Its exit code, once it has ended."""
        until(lambda: not self.alive, f"the end of the {self.name}", seconds)
        assert self.code is not None
        return self.code

    def log_tail(self, size: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""


def kill(process: Identity, stopped: float = 0.0) -> None:
    """SIGKILL, unless it has ended; ``stopped`` seconds after SIGSTOP, if any."""
    if alive_after(*process):
        with contextlib.suppress(ProcessLookupError):
            if stopped:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(stopped)
            os.kill(process.pid, signal.SIGKILL)


def marked(mark: str | Path) -> dict[Identity, dict[str, str]]:
    """Living processes of a trial, with their environments and, as ``""``, their command lines."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            process = identity(int(folder.name))
            if f"{MARK}={mark}" in entries and process is not None and alive_after(*process):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                processes[process] = {**variables, "": line[:200]}
    return processes


def tiny_model(folder: Path, **options: Any) -> Path:
    """A tiny random model, as all tests have it."""
    sys.path.append(str(Path(__file__).parents[1]))
    from conftest import build_tiny_model  # type: ignore[import-not-found]

    return folder if folder.exists() else Path(build_tiny_model(folder, **options))
