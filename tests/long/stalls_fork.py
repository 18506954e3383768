"""Starts programs from one process that has loaded torch already: of fifty runs, forty would be spent on importing it.

Each is a process of its own all the same, with a session, environment and exit code of its own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Nursery:
    """The process that forks; ask it from any thread."""

    def __init__(self, environment: Mapping[str, str]):
        command = [sys.executable, str(Path(__file__))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(environment))
        self._lock = threading.Lock()

    def start(
        self, words: Sequence[str], *, out: Path, environment: Mapping[str, str], cwd: Path, limit: int = 0
    ) -> int:
        """Start ``tandem`` with these words, or the server ``stalls_server`` where the first is serve; its pid.

        Args:
            words: the command line.
            out: what it prints is appended here.
            environment: laid over the common one.
            cwd: where it runs.
            limit: most bytes of a file that it may write; 0: any number.
        """
        said = {"words": list(words), "out": str(out), "env": dict(environment), "cwd": str(cwd), "limit": limit}
        return int(self._ask(said))

    def code(self, pid: int) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        found = self._ask({"pid": pid})
        return None if found is None else int(found)

    def close(self) -> None:
        """End the process that forks."""
        with self._process:  # closes its pipes, and waits
            pass

    def _ask(self, said: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(said) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


def _serve() -> None:
    """Fork what is asked for, and tell what became of it."""
    import peft  # noqa: F401 - loaded once for all
    import transformers  # noqa: F401

    import tandem.trainer.assemble  # noqa: F401

    for line in sys.stdin:
        said = json.loads(line)
        if "pid" in said:
            pid, status = os.waitpid(said["pid"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _become(said)
        print(json.dumps(pid), flush=True)
    os._exit(0)  # torch takes its time to be taken down, and there is nothing to save


def _become(said: Mapping[str, Any]) -> None:
    """In the child: be that program."""
    os.setsid()
    os.chdir(said["cwd"])
    os.environ.update(said["env"])
    out = os.open(said["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for place, handle in ((0, null), (1, out), (2, out)):
        os.dup2(handle, place)
    if said["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (said["limit"], said["limit"]))
    if said["words"][0] == "serve":
        import stalls_server

        sys.argv = said["words"]
        stalls_server.main()
    else:
        from tandem.cli.app import main

        main(said["words"])


if __name__ == "__main__":
    _serve()
