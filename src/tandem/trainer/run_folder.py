"""Run folder: how it is made, the user's code that it keeps, its lock for one trainer at a time, and how a run ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import inspect
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import Any

from tandem.config import loading as recipes
from tandem.config import registry
from tandem.config.build import RewardSpec
from tandem.config.loading import RunConfig
from tandem.errors import Alarmed, ConfigError, TandemError, command, redacted
from tandem.observability import json_lines, vitals, waits
from tandem.observability import log as logs
from tandem.observability.alarms import Notice
from tandem.observability.report import page

log = logging.getLogger(__name__)

ECHO_SECONDS = 1.0
"""A signal that comes again so soon is the same one: ``timeout`` and others send it to the process and to its group."""


def new_folder(config: RunConfig) -> Path:
    """Make the run's folder, its recipe in it.

    Raises:
        ConfigError: it exists, or cannot be made.
    """
    folder = Path(config.runs) / (config.name or _default_name(config))
    if not config.name:  # or with a number behind its name: runs may begin in the same second
        numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
        folder = next(each for each in chain([folder], numbered) if not each.exists())
    try:
        if folder.exists():
            again = f"go on with it by: {command('train', folder)}"
            anew = "it has no checkpoint: if no process trains in it, remove it to start anew"
            saved = any((folder / "checkpoints").glob("*"))
            raise ConfigError(f"{folder} exists already; {again if saved else anew}, or choose another name=")
        folder.mkdir(parents=True)
        write_recipe(config, folder)
        registry.remember(folder)
        keep_code(config, folder)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be made: {error}; set runs= and name=") from error
    return folder


def _default_name(config: RunConfig) -> str:
    """<env>-<model>-<UTC time>; the first of many environments, and how many others there are."""
    names = list(config.sources) or ["broker" if config.broker else "sft"]
    others = f"+{len(names) - 1}" if len(names) > 1 else ""
    return f"{names[0]}{others}-{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def write_recipe(config: RunConfig, folder: Path) -> None:
    """The run's whole recipe, replaced at once."""
    aside = folder / ".config.yaml.tmp"
    aside.write_text(recipes.dump(config), encoding="utf-8")
    aside.replace(folder / "config.yaml")


def keep_code(config: RunConfig, folder: Path) -> None:
    """Keep the source of every module that the recipe names, as the run was begun with."""
    for copy, source in _code_files(config, folder).items():
        if not copy.is_file():
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(source.read_bytes())


def code_changes(config: RunConfig, folder: Path) -> list[str]:
    """Modules of the recipe whose source is not the one that the run was made with, in words."""
    copies = [(copy, source) for copy, source in _code_files(config, folder).items() if copy.is_file()]
    changed = [(copy, source) for copy, source in copies if copy.read_bytes() != source.read_bytes()]
    return [f"{source} is not what this run was trained with (see {copy})" for copy, source in changed]


def _code_files(config: RunConfig, folder: Path) -> dict[Path, Path]:
    """Source of each module, by where it is kept; a module without one, as in a notebook, has none."""
    files = {}
    for name in sorted(set(_modules(config))):
        source = inspect.getsourcefile(sys.modules[name]) if name in sys.modules else None
        if source is not None and Path(source).is_file():
            files[folder / registry.SOURCES / f"{name}.py"] = Path(source)
    return files


def _modules(value: object) -> Iterator[str]:
    """Modules outside this package that a value's parts come from, in depth."""
    if isinstance(value, RewardSpec) and isinstance(value.reward, str):
        yield value.reward.partition(":")[0]
    elif dataclasses.is_dataclass(value):
        if not type(value).__module__.startswith("tandem."):
            yield type(value).__module__
        for field in dataclasses.fields(value):
            yield from _modules(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _modules(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _modules(inner)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raise errors of the disk as one message without a traceback. Checkpoints and telemetry have their own.

    Raises:
        TandemError: the run's folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES):
            raise
        remedy = f"free disk space or mend the folder, then go on with: {command('train', folder)}"
        raise TandemError(f"the run's folder {folder} cannot be written: {error}; {remedy}") from error


def stopped(step: int, alarm: Notice | None, folder: Path, saved: str = "all") -> BaseException:
    """Why a run ended before its last step, and how to go on: an alarm, or else a signal.

    Args:
        step: the last that was taken.
        alarm: what ended it; None: a signal did.
        folder: the run's.
        saved: what its checkpoints hold.
    """
    saved_text = {
        "all": "everything is saved",
        "weights": "its weights are saved, and nothing else (checkpoint: weights), so it cannot go on",
        "none": "nothing is saved (checkpoint: none), so it cannot go on",
    }[saved]
    if alarm is None:
        again = f"; go on with: {command('train', folder)}" if saved == "all" else ""
        return KeyboardInterrupt(f"stopped at step {step}, {saved_text}{again}")
    again = f" To go on all the same: {command('train', folder, 'alarms=warn')}" if saved == "all" else ""
    seen = f"alarm {alarm.alarm} stopped the run at step {step}, {saved_text}: {alarm.seen}"
    return Alarmed(f"{seen}. {alarm.means} What to change: {alarm.change}{again}")


@contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Around a run: its log, its report, and what ended it, in run.log and events.jsonl, where show and why find it.

    Of a run that is cancelled, as by a second Ctrl-C, the error says how to go on.

    Raises:
        TandemError: the run's folder cannot be written.
    """
    with writable(folder), logs.to_folder(folder):
        try:
            yield
        except asyncio.CancelledError as error:
            how = f"ended at once; go on from its last checkpoint with: {command('train', folder)}"
            raise asyncio.CancelledError(how) from error
        except Exception as error:
            message = str(error) if isinstance(error, TandemError) else redacted(f"{type(error).__name__}: {error}")
            log.error("the run failed: %s", message, exc_info=True, extra=logs.FILE_ONLY)
            row = {"time": time.time(), "event": "run_failed", "error": type(error).__name__, "message": message}
            events = folder / "events.jsonl"
            # Of a full disk the error itself tells.
            with contextlib.suppress(OSError), contextlib.closing(json_lines.JsonLinesFile(events)) as lines:
                lines.append(row)
            raise
        finally:
            try:
                with waits.blocking("trainer", "the report to be written", on=f"the disk of {folder}"):
                    page.build(folder)
            except Exception as error:
                # The run's own error, if any, is the one to tell.
                log.error("the report could not be written: %s: %s", type(error).__name__, error, exc_info=True)


@contextmanager
def signals(stop: asyncio.Event, folder: Path) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM, SIGHUP or SIGQUIT ends the run in order; a second one ends it at once.

    A SIGHUP that is ignored (``nohup``) stays ignored, and none ends at once: a terminal that goes sends several.
    SIGQUIT first has the stacks written. The same signal within ``ECHO_SECONDS`` is no second one.
    """
    events = asyncio.get_running_loop()
    defaults: dict[int, Any] = {}

    def first(number: int) -> None:
        stop.set()
        if number == signal.SIGQUIT:
            with contextlib.suppress(OSError), vitals.stacks(folder).open("a", encoding="utf-8") as out:
                vitals.write_stacks(out, events)
        log.warning("stopping: what is under way is finished and saved; once more to end at once")
        events.remove_signal_handler(number)
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
            return
        defaults[number] = signal.getsignal(number)
        since = time.monotonic()

        def again(number: int, frame: FrameType | None) -> None:
            if time.monotonic() - since >= ECHO_SECONDS:
                signal.signal(number, defaults[number])
                signal.raise_signal(number)

        signal.signal(number, again)
        events.call_later(ECHO_SECONDS, signal.signal, number, defaults[number])

    hung_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *hung_up)
    with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: what runs us handles signals
        for number in numbers:
            events.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        for number in numbers:
            events.remove_signal_handler(number)
        for number, default in defaults.items():
            signal.signal(number, default)


_descriptors: set[int] = set()
"""Descriptors of this process's locks. A forked child inherits them, and must not keep a dead trainer's lock."""


def _close_inherited() -> None:
    """In a forked child: a lock is over when every copy of its descriptor is closed."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_inherited)


class RunLock:
    """An exclusive lock on a run's folder. The kernel ends it with its process, however that ends.

    Its file, run.lock, holds the pid of its present or last owner.
    """

    def __init__(self) -> None:
        self.folder = Path()
        """The folder that is locked, while there is one."""
        self._handle: int | None = None

    def take(self, folder: Path) -> None:
        """Lock a folder, which must be there; nothing where this lock has it already.

        Raises:
            ConfigError: another process has it; names its pid.
        """
        if self._handle is not None:
            return
        try:
            handle = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the run's folder {folder} cannot be locked: {error}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(handle, 200).decode(errors="replace").strip() or "a process that did not say its pid"
            os.close(handle)
            seen = f"see what it does with: {command('why', folder)}"
            raise ConfigError(f"{other} is at work in {folder}; {seen}, or start a run with another name=") from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): see to it yourself that no other trainer uses it", folder, error)
        _descriptors.add(handle)
        os.ftruncate(handle, 0)
        os.write(handle, f"pid {os.getpid()} on {platform.node()}\n".encode())
        self.folder, self._handle = folder, handle

    def check(self) -> None:
        """Look whether the folder that was locked is still there.

        Raises:
            TandemError: it was deleted or moved.
        """
        assert self._handle is not None
        try:
            there = os.path.samestat(os.stat(self.folder / "run.lock"), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if not there:
            again = f"put it back and go on with: {command('train', self.folder)}, or start anew from the recipe"
            raise TandemError(f"the run's folder {self.folder} was deleted or moved, so nothing can be saved; {again}")

    def close(self) -> None:
        """Let the folder go."""
        if self._handle is not None:
            _descriptors.discard(self._handle)
            os.close(self._handle)
            self._handle = None
