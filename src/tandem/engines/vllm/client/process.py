"""One engine as a child process: started, watched, found again by a later trainer, and ended with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import tandem
from tandem.errors import ConfigError, Deadline, EngineError
from tandem.lazy import aiohttp
from tandem.processes import Identity, alive_after, family, gone, identity, kill
from tandem.transport.bridge import write_json
from tandem.transport.sharing import remove_orphans

_POLL_SECONDS = 0.1
"""Between two looks at a process that is starting or ending."""

_ANSWER_SECONDS = 5.0
"""How long one look at ``/health`` may take."""

_LOOK_SECONDS = 60.0
"""How long an interpreter may take to say whether it has vLLM; off a slow disk that is seconds."""

GRACE_SECONDS = 15.0
"""Between asking an engine to end and killing it."""

_STRAGGLER_SECONDS = 2.0
"""What the engine's own children get to end by themselves once the engine is gone."""

_KILLED_SECONDS = 30.0
"""Longest time from SIGKILL until the system has taken a process down; gigabytes of memory take a moment."""

_TAIL_BYTES = 1024 * 1024
_TAIL_LINES = 20

_ERROR = re.compile(r"^(?!.*\b(?:DEBUG|INFO|WARNING) ).*\b\w*(?:Error|Exception): \S")
"""A line that names an exception, but not a warning about one that might come."""

_DROPPED = frozenset({
    # They belong to the trainer's interpreter; the engine's may be another.
    "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV",
    # A trainer started by torchrun has a place among trainers, which the engine would take for its own.
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    # Its routes would let anybody who reaches the port pause the engine or overwrite its weights.
    "VLLM_SERVER_DEV_MODE",
})  # fmt: skip
_DROPPED_PREFIXES = ("OMP_", "MKL_", "KMP_", "TORCHELASTIC_")
"""How the trainer spreads its threads, and its launcher's; vLLM binds its own."""

_SET = {
    "VLLM_NO_USAGE_STATS": "1",  # no reports about what we run
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",  # else the last lines of an engine that is killed never reach its log
    "NO_COLOR": "1",  # its output is a file
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # what is forked holds the socket of a server that is dead
}


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record by which a later trainer finds a running engine; it holds the key, so its file is the owner's alone."""

    pid: int
    started: str
    """When that process started, as ``Identity`` has it."""
    url: str
    key: str
    log: str
    family: tuple[Identity, ...] = ()
    """The processes it had started by then."""

    def write(self, path: Path) -> None:
        """Write it atomically, mode 0600."""
        write_json(path, msgspec.to_builtins(self))

    @classmethod
    def read(cls, path: Path) -> EngineRecord | None:
        """Read it back; None if there is none, or one of another release, whose engine ends by itself after a while."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


class EngineProcess:
    """An engine's process and, while it runs, whatever that started."""

    def __init__(self, engine: Identity, log: Path, child: subprocess.Popen[bytes] | None = None, log_start: int = 0):
        self._identity = engine
        self._log = log
        self._log_start = log_start
        self._child = child
        self._known = {engine}
        self._stopped = False
        self.killed = False
        """A signal from elsewhere ended it before it was told to end."""

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str], log: Path) -> EngineProcess:
        """Start a command in a session of its own, so that Ctrl-C reaches the trainer alone.

        Args:
            command: Program and arguments; no secret belongs here, as anybody on the machine can read it.
            env: The whole environment, see ``environment``.
            log: What it prints is appended here.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
            log_start = out.tell()
            child = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        engine = identity(child.pid)
        assert engine is not None  # it stays there, dead or alive, until it is waited for
        return cls(engine, log=log, child=child, log_start=log_start)

    @classmethod
    def reattach(cls, record: EngineRecord) -> EngineProcess | None:
        """Take over an engine that an earlier trainer started; None if it is gone.

        Processes that a dead engine left behind are ended here: they may hold the memory that the next one needs.
        """
        if alive_after(record.pid, record.started):
            engine = cls(Identity(record.pid, record.started), log=Path(record.log))
            engine._known.update(record.family)
            return engine
        kill(record.family)
        return None

    @property
    def pid(self) -> int:
        """The engine's own process, leader of its session."""
        return self._identity.pid

    def record(self, url: str, key: str) -> EngineRecord:
        """How to find it again; taken once it is healthy, it knows the processes that the engine started."""
        others = tuple(sorted(self._family() - {self._identity}))
        log = str(self._log.absolute())
        return EngineRecord(pid=self.pid, started=self._identity.started, url=url, key=key, log=log, family=others)

    def alive(self) -> bool:
        """False once the engine's process ended, whatever became of those it started."""
        return alive_after(*self._identity) if self._child is None else self._child.poll() is None

    async def wait_healthy(self, url: str, seconds: float) -> None:
        """Return once ``GET url/health`` answers 200. A late engine is left running; its owner stops it.

        Raises:
            EngineError: the process ended first; the message has the end of its log.
            Deadline: ``seconds`` passed.
        """
        deadline, timeout = time.monotonic() + seconds, aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    async with session.get(f"{url}/health") as response:
                        answer = str(response.status)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    answer = f"{type(error).__name__}: {error}"
                if not self.alive():  # looked at after the question: a stranger on the same port does not count
                    raise EngineError(f"the engine {self.exit_reason()} before it was healthy{self.log_summary()}")
                if answer == "200":
                    return
                if time.monotonic() >= deadline:
                    raise Deadline(
                        f"the engine (pid {self.pid}) was not healthy after {seconds:g} s: {url}/health: {answer}; a "
                        "large model or a first compilation takes minutes: allow more, or look into its log"
                        f"{self.log_summary()}"
                    )
                await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """Ask the engine to end, then kill what is left of it and of all it started; safe to call twice.

        Raises:
            EngineError: a process outlives even SIGKILL, so its memory is not free.
        """
        if self._stopped:
            return
        self.killed = self._child is not None and (self._child.poll() or 0) < 0
        started = self._family()  # now: what loses its parent later can no longer be found by it
        try:
            if self.alive():
                os.kill(self.pid, signal.SIGTERM)
                await gone({self._identity}, GRACE_SECONDS)
            if not self.alive():
                await gone(started := started | self._family(), _STRAGGLER_SECONDS)
        finally:  # also if the wait was cancelled
            kill(started := started | self._family())
        left = await gone(started, _KILLED_SECONDS)
        if left:
            raise EngineError(
                f"the engine's process {', '.join(str(member.pid) for member in sorted(left))} is still there "
                f"{_KILLED_SECONDS:g} s after SIGKILL, and with it its memory; a driver may be stuck: look at it with "
                "ps before another engine is started"
            )
        if self._child is not None:
            self._child.wait(_KILLED_SECONDS)
        remove_orphans()  # vLLM kills its workers as it ends, so what they lent on a host still has its name
        self._stopped = True

    def exit_reason(self) -> str:
        """How the process ended, as a predicate: ``ended with exit code 1``."""
        if self._child is None:
            return "is running" if self.alive() else "ended (how is unknown: another process started it)"
        code = self._child.poll()
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        hint = "; if nobody did that, the machine ran out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def log_summary(self) -> str:
        """What the log says, for the end of a message.

        vLLM's processes each print a traceback as they fall, so the cause stands far above the last lines.
        """
        text = b""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read()
        lines = text.decode(errors="replace").rstrip().splitlines()
        if not lines:
            return f"; it printed nothing to {self._log}"
        first = next((line for line in lines if _ERROR.search(line)), None)
        cause = "" if first is None else f"\nits first error was:\n  {first.strip()}"
        return f"{cause}\nthe last lines of {self._log}:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

    def _family(self) -> set[Identity]:
        """The process and all that it started, as far as they are alive and were ever seen or can be found."""
        self._known = family(self._identity, self._known)
        return self._known


def environment(base: Mapping[str, str], *, python: str | None = None, **extra: str | None) -> dict[str, str]:
    """The engine's environment: the trainer's, less what belongs to the trainer, and with ``extra``.

    Args:
        base: The trainer's environment, ``os.environ``.
        python: The engine's interpreter; the programs beside it (ninja, say) are found first, as in an activated
            virtual environment.
        extra: Variables to set, or to remove where the value is None. They win over everything else.
    """
    env = {name: value for name, value in base.items() if name not in _DROPPED}
    env = {name: value for name, value in env.items() if not name.startswith(_DROPPED_PREFIXES)}
    env |= _SET
    if python is not None and os.path.dirname(python):
        env["PATH"] = os.pathsep.join(filter(None, [os.path.dirname(os.path.abspath(python)), env.get("PATH")]))
    return {name: value for name, value in {**env, **extra}.items() if value is not None}


def import_path(folder: Path) -> Path:
    """Make a folder that holds this package and a vLLM plugin of its, for the engine's ``PYTHONPATH``.

    The trainer's own ``site-packages`` there would give the engine the trainer's torch instead of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    package, link = Path(tandem.__file__).resolve().parent, folder.absolute() / "tandem"
    if not link.is_symlink() or link.readlink() != package:
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank of the run made it in this moment
            link.symlink_to(package, target_is_directory=True)
    plugin = folder / "tandem_engine-0.dist-info"
    plugin.mkdir(exist_ok=True)
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntandem = tandem.engines.vllm.speedups:fork_workers\n"
    )
    return folder.absolute()


def has_vllm(python: str | None) -> None:
    """See, without importing it, that an interpreter (None: this one) has vLLM.

    Raises:
        ConfigError: it has none, or is no interpreter.
    """
    fix = "let engine.python name one that has it; tandem doctor looks for one"
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"engine.python is not set, and {sys.executable} has no vLLM; {fix}")
        return
    code = "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"
    env = environment(os.environ, python=python)
    try:
        done = subprocess.run(
            [python, "-c", code], env=env, capture_output=True, text=True, timeout=_LOOK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: {python} cannot be run: {error}; {fix}") from error
    if done.stdout.split()[-1:] != ["True"]:
        why = (done.stderr.strip().splitlines() or ["there is none in it"])[-1]
        raise ConfigError(f"engine.python: {python} cannot run vLLM: {why}; {fix}")
