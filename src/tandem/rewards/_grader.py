"""The process that rewards run in: reads jobs from its stdin, answers call by call, dies with its parent.

Everything happens in the main thread, where signals arrive (math-verify sets an alarm); a second thread only
reads, so that the end of the parent is noticed while a grader hangs. Messages are pickles behind their length.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import io
import math
import numbers
import os
import pickle
import pkgutil
import queue
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple

from tandem.errors import RewardError
from tandem.rewards.base import Reward
from tandem.types import Message, Rollout

HEADER = struct.Struct("!I")
"""Length of the message that follows."""


class Failure(NamedTuple):
    """Why there is no reward."""

    reason: Literal["raised", "bad_value", "timeout", "crashed"]
    """Its kind, to count by."""
    text: str
    """What happened, to stand behind the reward's name."""


Verdict = float | None | Failure
"""What one rollout got: a reward, None for "leave this one out", or a failure."""

Verdicts = list[Verdict] | Failure
"""One verdict per rollout of a call, or why the whole call failed."""

_GRACE = 1.0
"""Seconds a grader may still run after the parent is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A reward as it is called."""

    call: Callable[..., Any]
    """The reward or the plain function."""
    accepts: frozenset[str] | None
    """Names a ``f(completions, **columns)`` takes; None if it takes any."""
    is_group: bool
    """True if it takes all completions of a group at once."""


def main() -> None:
    """Serve until stdin ends."""
    # Graders may print and read: the pipes move out of their way first.
    wire_in, wire_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a grader printed must survive its crash
    faulthandler.enable()
    jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(wire_in, jobs), daemon=True, name="wire").start()
    specs = jobs.get()
    if specs is None:
        return
    functions = _load(pickle.loads(specs))
    if isinstance(functions, str):
        _send(wire_out, functions)
        return
    _send(wire_out, {name: function.is_group for name, function in functions.items()})
    with asyncio.Runner() as runner:
        while (job := jobs.get()) is not None:
            _serve(job, functions, wire_out, runner)


def _receive(wire: BinaryIO, jobs: queue.SimpleQueue[bytes | None]) -> None:
    """Queue messages; when the parent is gone, leave the main thread a moment and then take it along."""
    while len(header := wire.read(HEADER.size)) == HEADER.size:
        jobs.put(wire.read(HEADER.unpack(header)[0]))
    jobs.put(None)
    time.sleep(_GRACE)
    os._exit(0)


def _send(wire: BinaryIO, message: object) -> None:
    body = pickle.dumps(message)
    wire.write(HEADER.pack(len(body)) + body)
    wire.flush()


def _load(specs: Sequence[tuple[str, str, str | bytes]]) -> dict[str, _Function] | str:
    """Import every reward and get it ready; a text says which one failed and why."""
    functions = {}
    for name, called, spec in specs:
        try:
            thing = pkgutil.resolve_name(spec) if isinstance(spec, str) else pickle.loads(spec)
        except BaseException as error:  # user code may raise anything while it is imported
            traceback.print_exc()
            return f"{called} cannot be imported: {error if isinstance(error, ImportError) else _said(error)}"
        if not callable(thing) or isinstance(thing, type):
            return (
                f"{called} is a {type(thing).__name__}; expected a function of a rollout, or f(completions, **columns)"
            )
        try:
            if isinstance(thing, Reward):
                thing.prepare()
            functions[name] = _function(thing)
        except BaseException as error:
            traceback.print_exc()
            return str(error) if isinstance(error, RewardError) else f"{called} cannot be used: {_said(error)}"
    return functions


def _function(thing: Callable[..., Any]) -> _Function:
    """How to call it, from the names of its parameters."""
    if isinstance(thing, Reward):
        return _Function(call=thing, accepts=None, is_group=False)
    parameters = inspect.signature(thing).parameters
    by_name = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "completions" in by_name:
        return _Function(call=thing, accepts=None if open_ended else frozenset(by_name), is_group=True)
    required = [
        p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) > 1 or not parameters or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise TypeError(f"it takes ({', '.join(parameters)}); expected f(rollout) or f(completions, **columns)")
    return _Function(call=thing, accepts=None, is_group=False)


def _serve(job: bytes, functions: dict[str, _Function], wire: BinaryIO, runner: asyncio.Runner) -> None:
    """Grade one job: calls in order, an answer after each, so that the parent knows which one hangs."""
    calls, packed = pickle.loads(job)
    try:
        rollouts: Sequence[Rollout] = pickle.loads(packed)
    except Exception as error:  # a task may carry objects of a module that cannot be imported here
        for _ in calls:
            _send(wire, Failure("raised", f"could not be given the rollouts: {_said(error)}"))
        return
    for name, rows in calls:
        function = functions[name]
        chosen = [rollouts[row] for row in rows]
        try:
            _send(wire, _graded(function, chosen, runner))
        except BaseException as error:  # boundary of one call: whatever a grader does costs its rollouts only
            traceback.print_exc()
            _send(wire, Failure("raised", f"raised {_said(error)}"))


def _graded(function: _Function, rollouts: Sequence[Rollout], runner: asyncio.Runner) -> Verdicts:
    if not function.is_group:
        return [_verdict(_awaited(function.call(rollouts[0]), runner))]
    values = _awaited(function.call(**_columns(function, rollouts)), runner)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        return _bad(f"returned {_shown(values)}; expected a list of {len(rollouts)} numbers or None")
    if len(values) != len(rollouts):
        return _bad(f"returned {len(values)} rewards for {len(rollouts)} completions")
    return [_verdict(value) for value in values]


def _columns(function: _Function, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Keyword arguments in TRL's shape: one list per column, one entry per completion."""
    task = rollouts[0].task
    count = len(rollouts)
    columns: dict[str, Any] = {name: [value] * count for name, value in task.meta.items()}
    columns["answer"] = [task.answer] * count
    columns["prompts"] = [_plain(task.prompt)] * count
    columns["completions"] = [_plain(rollout.messages[len(task.prompt) :]) for rollout in rollouts]
    columns["completion_ids"] = [[t for turn in r.turns for t in turn.completion.tokens] for r in rollouts]
    return columns if function.accepts is None else {k: v for k, v in columns.items() if k in function.accepts}


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _awaited(value: Any, runner: asyncio.Runner) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return runner.run(wait())


def _verdict(value: Any) -> Verdict:
    """The value if it is a finite number or None, else what is wrong with it."""
    if value is None:
        return None
    if hasattr(value, "item") and not isinstance(value, numbers.Real):
        value = value.item()  # a tensor or an array of one number
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return _bad(f"returned {_shown(value)}; expected a finite number or None")
    return float(value)


def _bad(text: str) -> Failure:
    return Failure("bad_value", text)


def _shown(value: object) -> str:
    return f"{str(value)[:60]!r} ({type(value).__name__})" if not isinstance(value, float) else str(value)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
