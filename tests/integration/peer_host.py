"""Forks processes of Atropos' from one that has imported everything. It runs inside ``.venv-atropos``.

Imports take each of them several seconds of a core; a test needs five. Each line of the standard input is JSON with a
``role``, its arguments ``argv`` and a file ``log``; the answer is the process' id. When a process ends, its status is
written to ``log`` with ``.exit`` added. All end when the standard input does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

# Imported here, so that it costs the processes nothing.
import atroposlib.api.server
import atroposlib.envs.base  # noqa: F401
import example_trainer.data  # noqa: F401
import uvicorn  # noqa: F401

logs: dict[int, str] = {}


def reap(*_: Any) -> None:
    """Write down what ended."""
    while logs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        Path(f"{logs.pop(pid)}.exit").write_text(str(os.waitstatus_to_exitcode(status)))


def play(role: str, argv: list[str], log: str) -> None:
    """Become a process of Atropos'."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.chdir(Path(log).parent)
    if role == "run-api":
        sys.argv = ["run-api", *argv]
        runpy.run_module("atroposlib.cli.run_api", run_name="__main__")
    else:
        script = Path(__file__).with_name(f"{role}.py")
        sys.argv = [str(script), *argv]
        runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until the child is in the books
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                play(**request)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        logs[pid] = request["log"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for pid in list(logs):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
