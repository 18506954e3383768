"""The tree of errors. Each message says what happened, what was expected and what to do.

TandemError                 exit code
├── ConfigError (ValueError)        2   a recipe or an option is wrong
│   └── UnsupportedPair             2   two parts that cannot work together
├── EnvError                        3   an environment or its data set
├── RewardError                     4   a reward function
├── EngineError                     5   the inference engine
├── SyncError                       6   weights did not travel
│   ├── StaleWeights                6     the engine holds another version
│   ├── TornWeights                 6     the engine holds a mixture
│   └── TransportError              6     the way between them broke
├── BrokerError                     7   the rollout broker
├── CheckpointError                 8   a checkpoint cannot be read or written
├── Starved                         9   nothing to train on
├── Deadline                       10   a wait passed its deadline
├── DoesNotFit                     11   the memory plan exceeds the machine
├── Alarmed                        12   an alarm was raised and the recipe asks for a stop
└── Interrupted                   130   Ctrl-C, after saving

Raise at the source; catch at four boundaries only: one rollout, one
HTTP request, one child process, the command line.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import shlex
import sysconfig
import traceback
from pathlib import Path
from typing import Any


class TandemError(Exception):
    """Any failure that Tandem understands; its text says what happened, what was expected and what to do.

    Example:
        >>> import tandem
        >>> try:
        ...     tandem.Recipe.load({"model": "m", "env": "arithmetic", "steps": 1, "group_sise": 4})
        ... except tandem.TandemError as error:
        ...     print(error)
        recipe: unknown option 'group_sise'; did you mean 'group_size'?
    """

    exit_code = 1

    def __str__(self) -> str:
        return redacted(super().__str__())


class ConfigError(TandemError, ValueError):
    """A recipe, an override or a part's option is wrong."""

    exit_code = 2


class UnsupportedPair(ConfigError):
    """Two parts that cannot work together; the message names the ones that can."""


class EnvError(TandemError):
    """An environment cannot be built or its data set cannot be read."""

    exit_code = 3


class RewardError(TandemError):
    """A reward function cannot be found or failed."""

    exit_code = 4


class EngineError(TandemError):
    """The inference engine failed."""

    exit_code = 5


class SyncError(TandemError):
    """A publish of weights failed."""

    exit_code = 6


class StaleWeights(SyncError):
    """The engine does not hold the weights that were published."""


class TornWeights(SyncError):
    """The engine holds part of one version and part of another."""


class TransportError(SyncError):
    """The way from trainer to engine broke."""


class BrokerError(TandemError):
    """The rollout broker failed or refused."""

    exit_code = 7


class CheckpointError(TandemError):
    """A checkpoint cannot be written or read."""

    exit_code = 8


class Starved(TandemError):
    """Rollouts arrive but none can be trained on."""

    exit_code = 9


class Deadline(TandemError):
    """A registered wait passed its deadline; the message names the part that did not deliver."""

    exit_code = 10

    def __init__(self, message: str, *, on: str = "") -> None:
        """``on`` is what was waited for."""
        super().__init__(message)
        self.on = on


class DoesNotFit(TandemError):
    """The memory plan exceeds what the machine has."""

    exit_code = 11


class Alarmed(TandemError):
    """An alarm ended the run (``alarms: stop``); everything is saved, and the message says how to go on."""

    exit_code = 12


class RankError(TandemError):
    """One of several ranks died, failed or fell silent; the message names it, and how to go on."""

    exit_code = 13


class Interrupted(TandemError):
    """Ctrl-C, or a notebook's stop button; the message says what was saved and how to go on."""

    exit_code = 130


REDACTED = "***"
"""Stands for a password."""
_PASSWORD = re.compile(r"""(://[^\s/:@"'<>]*):[^\s/"'<>]+@""")


def redacted(text: str) -> str:
    """Text without the passwords of its URLs.

    Example:
        >>> redacted("no answer from http://me:secret@host:8000")
        'no answer from http://me:***@host:8000'
    """
    return _PASSWORD.sub(rf"\1:{REDACTED}@", text) if "@" in text else text


SHOWN_TEXT = 10_000
"""Most characters of an exception's text that are kept."""

_SHOWN_FRAMES = 2
"""Innermost places in the user's code that a message names."""
_TANDEM = tuple(f"{Path(__file__).parent}{rest}{os.sep}" for rest in ("", "_broker", "_compat"))
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


DOCS = "https://tandem-rl.github.io/tandem"
"""Address of the documentation, as pyproject.toml and mkdocs.yml have it; a page is ``{DOCS}/guide/NAME/``."""


def command(*words: object) -> str:
    """A command of Tandem's as a shell takes it.

    Example:
        >>> command("train", "runs/a b", "steps=4")
        "tandem train 'runs/a b' steps=4"
    """
    return shlex.join(("tandem", *map(str, words)))


def raised(error: BaseException) -> str:
    """An exception in words, with the last places in the user's own code that it came through."""
    return f"raised {message_of(error)}{place_of(error)}"


def message_of(error: BaseException) -> str:
    """An exception's type and message."""
    text = redacted(str(error))
    shown = text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}... ({len(text)} characters)"
    return f"{type(error).__name__}: {shown}" if text else type(error).__name__


def is_theirs(error: BaseException) -> bool:
    """True if it was raised in the user's own code, or by a library that this called."""
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    innermost = [file for file in files if not file.startswith(("<", *_LIBRARIES)) or file.startswith(_TANDEM)]
    return bool(innermost) and not innermost[-1].startswith(_TANDEM)


def place_of(error: BaseException) -> str:
    """Place in the user's own code that an exception came through, `` (file.py:12 in name)``; empty if it did not."""
    frames = traceback.extract_tb(error.__traceback__)
    # Neither Tandem's nor a library's.
    outside = [f for f in frames if not f.filename.startswith((*_TANDEM, "<", *_LIBRARIES))][-_SHOWN_FRAMES:]
    places = [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in reversed(outside)]
    return f" ({', from '.join(places)})" if places else ""


def defined_at(function: object) -> str:
    """Place of a function's source, `` (file.py:12)``; empty where it is not known."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    least: float = 0,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> Any:
    """Declare a dataclass field whose number, unless it is None, is within these bounds; see ``check_bounds``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Loader:
        ...     workers: int = bounded(4, least=1)
        ...
        ...     def __post_init__(self) -> None:
        ...         check_bounds(self)
        >>> Loader(workers=0)
        Traceback (most recent call last):
        tandem.errors.ConfigError: workers must be at least 1, got 0
    """
    text = f"above {above:g}" if above >= least else f"at least {least:g}"
    text += "" if most == math.inf else f" and at most {most:g}"
    text += "" if below == math.inf else f" and below {below:g}"
    fits = (lambda value: value is None or (value >= least and value <= most and above < value < below), text)
    return dataclasses.field(default=default, metadata={"fits": fits})


def check_bounds(part: Any) -> None:
    """Check the fields of a dataclass that ``bounded`` declared.

    Raises:
        ConfigError: with one line for each that is out of range.
    """
    wrong = []
    for field in dataclasses.fields(part):
        fits, text = field.metadata.get("fits", (lambda value: True, ""))
        if not fits(value := getattr(part, field.name)):
            wrong.append(f"{field.name} must be {text}, got {value}")
    if wrong:
        raise ConfigError("\n".join(wrong))


class Bounded:
    """A dataclass whose fields' bounds are checked when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_bounds(self)


def require(**checks: tuple[bool, str]) -> None:
    """Check options of a dataclass when it is made.

    Raises:
        ValueError: with one line for each that is out of range.
    """
    if wrong := [f"{name} must be {expected}" for name, (fine, expected) in checks.items() if not fine]:
        raise ValueError("\n".join(wrong))
