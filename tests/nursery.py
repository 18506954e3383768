"""Starts ``python -m`` programs by forking a process that has imported them already.

A run of the tiny model takes a second, its imports take six. What is forked is a process of its own all the same: with
arguments, environment, working directory, files, session and exit code of its own, and children that are not forked.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_MESSAGE_BYTES = 1 << 20
"""The longest message: an environment and a command line."""
_FILES = 3
"""stdin, stdout and stderr travel with a request."""


class Forked:
    """A process that a nursery has forked: what tests use of ``subprocess.Popen``, by the same names.

    Its pid stays its own until its exit code is asked for, as with Popen.
    """

    def __init__(self, nursery: Nursery, pid: int, stdout: IO[str] | None):
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._nursery, self._end = nursery, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended in ``timeout`` seconds.
        """
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._end, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            self.returncode = self._nursery.reap(self.pid)
            os.close(self._end)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it still writes to its pipe, and nothing for stderr, which goes there too; it has ended then.

        Raises:
            subprocess.TimeoutExpired: it has not ended in ``timeout`` seconds.
        """
        assert self.stdout is not None, "start it with out=subprocess.PIPE"
        deadline = None if timeout is None else time.monotonic() + timeout
        ready, parts = select.poll(), []
        ready.register(self.stdout, select.POLLIN)
        while ready.poll(None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))):
            part = os.read(self.stdout.fileno(), 1 << 16)
            if not part:
                self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                return b"".join(parts).decode(), None
            parts.append(part)
        raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0, b"".join(parts))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless its exit code is known."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """``SIGKILL``."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


class Nursery:
    """The process that forks, and kills what it forked as it ends; ask it from any thread.

    Args:
        environment: of that process. What is read by the interpreter as it starts, such as ``PYTHONHASHSEED``, is the
            same for all that it forks.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env={**environment, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._socket, self._lock = ours, threading.Lock()

    def start(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        out: Path | int,
        environment: Mapping[str, str] = os.environ,
        module: str = "tandem",
        limit: int = 0,
    ) -> Forked:
        """Start ``python -m MODULE WORDS``, the leader of a session.

        Args:
            words: the command line.
            cwd: where it runs.
            out: the file to which stdout and stderr are appended, or ``subprocess.PIPE``.
            environment: all of it.
            module: what is run.
            limit: most bytes of a file that it may write; 0: any number.
        """
        request = {
            "module": module, "words": list(words), "cwd": str(cwd), "environment": dict(environment),
            "limit": limit,
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            stdout = None
            if isinstance(out, int):
                read, write = os.pipe()
                stdout = os.fdopen(read)
            else:
                write = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            stack.callback(os.close, write)
            null = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, null)
            return Forked(self, self._ask(request, [null, write, write]), stdout)

    def reap(self, pid: int) -> int:
        """Exit code of one that has ended or is about to, negative for a signal."""
        return self._ask({"reap": pid}, [])

    def close(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            reply = self._socket.recv(_MESSAGE_BYTES)
        assert reply, "the process that forks has ended; its stderr says why"
        return int(json.loads(reply))


def _serve(requests: socket.socket) -> None:
    """Fork what is asked for, and say how it ended; returns in what was forked, once that has ended."""
    _load()
    path = [folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    gc.freeze()  # collections in what is forked leave these pages shared
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{threads} threads, of which a fork would keep one")
    running: set[int] = set()
    while True:
        raw, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _FILES)
        if not raw:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)  # torch takes its time to be taken down, and there is nothing to save
        request = json.loads(raw)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = os.waitstatus_to_exitcode(status)
            running.remove(request["reap"])
        else:
            answer = os.fork()
            if not answer:
                requests.close()
                return _become(request, files, path)
            running.add(answer)
        for file in files:
            os.close(file)
        requests.send(json.dumps(answer).encode())


def _load() -> None:
    """Import what runs import."""
    import peft  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tandem.cli.app
    import tandem.trainer.assemble  # noqa: F401


def _become(request: Mapping[str, Any], files: Sequence[int], path: Sequence[str]) -> None:
    """Be the program that was asked for, to its end."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    own = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [request["cwd"], *own, *path]
    sys.argv = [request["module"], *request["words"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
