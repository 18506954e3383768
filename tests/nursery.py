"""Starts ``python -m`` programs by forking a process that has imported them already.

A run of the tiny model takes a second, its imports take six. What is forked is a process of its own all the same: with
arguments, environment, working directory, files, session and exit code of its own. Its children are forked as well if
it was started so: its ``sys.executable`` is then ``forked-python``, which is this file again as a program that asks for
a fork, waits for its end and ends alike.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

_MESSAGE_BYTES = 1 << 20
"""The longest message: an environment and a command line."""
_FILES = 3
"""stdin, stdout and stderr travel with a request."""
FORKED_PYTHON = Path(__file__).with_name("forked-python")
"""An interpreter for children of what was forked: as sys.executable, but for ``-m`` programs, which are forked too."""
_DOOR, _PYTHON = "TANDEM_NURSERY_DOOR", "TANDEM_NURSERY_PYTHON"
"""Where ``forked-python`` asks, and the interpreter that it stands for."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
"""Signals of ``forked-python`` that are for what was forked."""


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
        python: its interpreter.
        loads: what it imports before it forks: ``tandem``, or ``vllm`` for engines.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        python: str = sys.executable,
        loads: str = "tandem",
    ):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.TemporaryDirectory(prefix="nursery-")
        self.door = str(Path(self._folder.name) / "door")
        """Where programs ask for a fork."""
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(self.door)
            door.listen()
            files = (theirs.fileno(), door.fileno())
            self._process = subprocess.Popen(
                [python, str(Path(__file__)), loads, *map(str, files)],
                pass_fds=files, stdin=subprocess.DEVNULL,
                env={**environment, "OMP_NUM_THREADS": "1"},
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
        children: bool = False,
    ) -> Forked:
        """Start ``python -m MODULE WORDS``, the leader of a session.

        Args:
            words: the command line.
            cwd: where it runs.
            out: the file to which stdout and stderr are appended, or ``subprocess.PIPE``.
            environment: all of it.
            module: what is run.
            limit: most bytes of a file that it may write; 0: any number.
            children: fork the ``python -m`` programs too that it starts. The process that it started then only stands
                for the one that computes, of which ``forked_for`` tells.
        """
        request = {
            "module": module, "words": list(words), "cwd": str(cwd), "environment": dict(environment),
            "limit": limit,
        }  # fmt: skip
        if children:
            request["environment"] = {**environment, _DOOR: self.door, _PYTHON: sys.executable}
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

    @contextlib.contextmanager
    def children(self) -> Iterator[None]:
        """In the block, the ``python -m`` programs that this very process starts are forked too."""
        before = sys.executable
        os.environ.update({_DOOR: self.door, _PYTHON: before})
        sys.executable = str(FORKED_PYTHON)
        try:
            yield
        finally:
            sys.executable = before
            del os.environ[_DOOR], os.environ[_PYTHON]

    def forked_for(self, pid: int) -> int:
        """The process that computes, of one that stands for it; 0 until it has been forked."""
        return self._ask({"forked for": pid}, [])

    def reap(self, pid: int) -> int:
        """Exit code of one that has ended or is about to, negative for a signal."""
        return self._ask({"reap": pid}, [])

    def close(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self._process.wait()
        self._folder.cleanup()

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


class _Server:
    """Forks what is asked for, by tests and by those who stand for what they had forked, and says how it ended."""

    def __init__(self, requests: socket.socket, door: socket.socket):
        self._requests, self._door = requests, door
        self._path = [
            folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        ]
        self._running: set[int] = set()
        self._askers: dict[int, tuple[socket.socket, int]] = {}
        """By the file of each end, where to say it and whose it is."""
        self._ready = select.poll()
        for place in (requests, door):
            self._ready.register(place, select.POLLIN)

    def serve(self) -> None:
        """Until the tests are over; returns in what was forked, once that has ended."""
        while True:
            for file, _ in self._ready.poll():
                if file == self._requests.fileno():
                    if self._answer():
                        return
                elif file == self._door.fileno():
                    if self._admit():
                        return
                else:
                    self._see_off(file)

    def _answer(self) -> bool:
        """A test's request; true in what it had forked."""
        raw, files, _, _ = socket.recv_fds(self._requests, _MESSAGE_BYTES, _FILES)
        if not raw:
            for pid in (*self._running, *(pid for _, pid in self._askers.values())):
                os.kill(pid, signal.SIGKILL)
            os._exit(0)  # torch takes its time to be taken down, and there is nothing to save
        request = json.loads(raw)
        if "reap" in request:
            answer = _code_of(request["reap"])
            self._running.remove(request["reap"])
        elif "forked for" in request:
            answer = next((pid for asker, pid in self._askers.values() if _peer(asker) == request["forked for"]), 0)
        elif not (answer := self._fork(request, files)):
            return True
        else:
            self._running.add(answer)
        self._requests.send(json.dumps(answer).encode())
        return False

    def _admit(self) -> bool:
        """A request of ``forked-python``; true in what it had forked."""
        asker, _ = self._door.accept()
        raw, files, _, _ = socket.recv_fds(asker, _MESSAGE_BYTES, _FILES)
        if not raw:  # killed before it could ask
            asker.close()
            return False
        if not (pid := self._fork(json.loads(raw), files)):
            return True
        asker.send(json.dumps(pid).encode())
        end = os.pidfd_open(pid)
        for file in (end, asker.fileno()):
            self._askers[file] = asker, pid
            self._ready.register(file, select.POLLIN)
        return False

    def _see_off(self, file: int) -> None:
        """What was forked has ended, or who stands for it has: then the other is not to outlive it."""
        if file not in self._askers:
            return
        asker, pid = self._askers[file]
        if file == asker.fileno():
            os.kill(pid, signal.SIGKILL)
        code = _code_of(pid)
        with contextlib.suppress(OSError):  # nobody asks any more
            asker.send(json.dumps(code).encode())
        for one in [one for one, (whose, _) in self._askers.items() if whose is asker]:
            del self._askers[one]
            self._ready.unregister(one)
            if one != asker.fileno():
                os.close(one)
        asker.close()

    def _fork(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """The pid of a new process; in that process 0, once it has ended as a program."""
        if not (pid := os.fork()):
            self._requests.close()
            self._door.close()
            for file in self._askers:
                os.close(file)
            _become(request, files, self._path)
            return 0
        for file in files:
            os.close(file)
        return pid


def _code_of(pid: int) -> int:
    """Exit code of a child that has ended or is about to, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _peer(asker: socket.socket) -> int:
    """The pid of who has connected."""
    pid, _, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


def _serve(loads: str, requests: socket.socket, door: socket.socket) -> None:
    {"tandem": _load, "vllm": _load_vllm}[loads]()
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{threads} threads, of which a fork would keep one")
    _Server(requests, door).serve()


def _stand_for(module: str, words: Sequence[str]) -> int:
    """Have a program forked that has this process' surroundings, and end as it does."""
    request = {
        "module": module, "words": list(words), "cwd": os.getcwd(), "environment": dict(os.environ), "limit": 0,
        "network": f"/proc/{os.getpid()}/ns/net",
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[_DOOR])
        socket.send_fds(server, [json.dumps(request).encode()], range(_FILES))
        pid = int(server.recv(_MESSAGE_BYTES))
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(server.recv(_MESSAGE_BYTES))
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _load() -> None:
    """Import what runs import, and what takes them a third of a second to make as they load a model."""
    from tandem import machine

    with machine.importing():  # collections in what is forked leave these pages shared
        import peft  # noqa: F401
        import transformers.models.auto.modeling_auto
        import transformers.models.auto.tokenization_auto
        import transformers.models.llama.modeling_llama  # noqa: F401
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        import tandem.cli.app
        import tandem.trainer.assemble  # noqa: F401

        get_checkpoint_conversion_mapping("llama")


def _load_vllm() -> None:
    """Import what engines import; in what is forked a server forks its engine, and that its workers."""
    gc.disable()  # as above; Tandem is not in their environment
    for name in ("entrypoints.openai.api_server", "model_executor.models.llama", "v1.executor.uniproc_executor"):
        importlib.import_module(f"vllm.{name}")
    for name in ("v1.engine.utils", "v1.executor.multiproc_executor"):
        module: Any = importlib.import_module(f"vllm.{name}")
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.freeze()
    gc.enable()


def _become(request: Mapping[str, Any], files: Sequence[int], path: Sequence[str]) -> None:
    """Be the program that was asked for, to its end."""
    if (network := request.get("network")) and not os.path.samefile(network, "/proc/self/ns/net"):
        _enter(network)
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
    if _PYTHON in os.environ:
        sys.executable = str(FORKED_PYTHON)
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _end(ended.code or 0)
        raise
    _end(0)


def _end(code: int) -> NoReturn:
    """End as Python does, but for taking down all that was imported, whose pages would be copied for it first."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as it must before what was registered
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _enter(network: str) -> None:
    """Have the network of another process, as the tests of two hosts give them."""
    with open(network) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"{network} cannot be entered")


if __name__ == "__main__":
    if sys.argv[1] == "-m":
        sys.exit(_stand_for(sys.argv[2], sys.argv[3:]))
    _serve(sys.argv[1], *(socket.socket(fileno=int(file)) for file in sys.argv[2:]))
