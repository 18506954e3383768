"""Processes of a system that is to be killed: forked from one that has loaded the libraries, so a start takes no time.

Whoever forks is the parent of all that they leave behind too (``PR_SET_CHILD_SUBREAPER``), so that what outlives a run
is found by looking at its own children.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.processes import alive_after

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0):
        raise OSError("prctl is Linux's; these trials need it")


def adopt_orphans() -> None:
    """From now on processes that lose their parent become our children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def load() -> None:
    """Import what every process of a system needs. No thread may have begun by then: a fork would leave it out."""
    import transformers.models.llama.modeling_llama
    import transformers.models.llama.tokenization_llama  # noqa: F401

    import tandem.cli.app
    import tandem.engines.vllm.server.routes
    import tandem.engines.vllm.worker.extension
    import tandem.trainer.assemble  # noqa: F401

    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("importing Tandem began a thread, so it cannot be forked; set OMP_NUM_THREADS=1")


def tandem(words: Sequence[str]) -> Callable[[], None]:
    """The command line, in a process of its own."""

    def run() -> None:
        from tandem.cli.app import main

        sys.argv[:] = ["tandem", *words]
        main(words)

    return run


@dataclass
class Child:
    """A process that is started again and again."""

    name: str
    """For people."""
    place: Path
    """Where it runs; its log is there too."""
    work: Callable[[], Callable[[], None]]
    """What its next start does."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in it."""
    pid: int = 0
    starts: int = 0
    code: int | None = None
    """How its last process ended, negative for a signal; None while it runs."""

    @property
    def log(self) -> Path:
        """What it says."""
        return self.place / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        if self.pid and self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return bool(self.pid) and self.code is None

    def start(self) -> None:
        """Fork, and do the work in the child."""
        work, parent = self.work(), os.getpid()
        self.starts += 1
        self.code = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        atexit._clear()  # what the parent does at its end, such as removing temporary folders, is its own affair
        try:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            code = self._in_child(work)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _in_child(self, work: Callable[[], None]) -> int:
        os.setsid()
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.chdir(self.place)
        os.environ.update(self.environment)
        sys.path[:0] = [str(self.place), *self.environment.get("PYTHONPATH", "").split(os.pathsep)]
        try:
            work()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    def kill(self, stopped: float = 0.0) -> None:
        """SIGKILL; ``stopped`` seconds after SIGSTOP, if any."""
        if stopped:
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(stopped)
        os.kill(self.pid, signal.SIGKILL)
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)

    def log_tail(self, size: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""


@dataclass(frozen=True)
class Stranger:
    """A process that one of ours started, known by its record."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        """Whether it runs, and is still the same."""
        return alive_after(self.pid, self.started)

    def kill(self, stopped: float = 0.0) -> None:
        """As ``Child.kill``; who started it reaps it."""
        with contextlib.suppress(ProcessLookupError):
            if stopped:
                os.kill(self.pid, signal.SIGSTOP)
                time.sleep(stopped)
            os.kill(self.pid, signal.SIGKILL)


def children() -> dict[int, str]:
    """Our living children by pid, those of processes that died included; the dead are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    commands = {}
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                commands[int(child)] = line[:200]
    return commands


def end(pids: Sequence[int]) -> None:
    """Kill our own children and theirs that became ours; returns when none is left."""
    left = set(pids)
    while left:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = set(children())
