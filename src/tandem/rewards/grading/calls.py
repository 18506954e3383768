"""Calling conventions of rewards: a part, ``f(rollout)``, TRL's ``f(completions, **columns)``, or verl's."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import numbers
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from tandem.errors import RewardError
from tandem.lazy import asyncio
from tandem.rewards.base import Failure, GroupReward, Outcome, Reward, Verdict
from tandem.types import TEXT, Message, Rollout

_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
"""Parameters that TRL's reward functions have beside columns."""
_VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
"""Parameters of verl's ``compute_score``, of which each has ``solution_str``."""

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that reward functions get in another shape."""

_MOST = 1e18
"""Largest reward, either way: the square of a larger one does not fit into float32, where losses are computed."""


@dataclass(slots=True)
class _Log:
    """What ``log_metric`` and ``log_extra`` are told during one call."""

    rows: list[dict[str, float]]
    """Numbers by name, for each rollout."""

    def metric(self, name: str, value: float) -> None:
        """Keep a number of the whole call."""
        self.extra(name, [value] * len(self.rows))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a column of numbers; one of anything else is printed, which in a grading process is its log."""
        if len(values) != len(self.rows):
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {len(self.rows)} completions")
        verdicts = [_verdict(value) for value in values]
        if all(isinstance(value, float) for value in verdicts):
            for row, value in zip(self.rows, verdicts, strict=True):
                row[column] = value  # type: ignore[assignment]
        else:
            sys.stdout.write(f"{column}: {list(values)!r}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A reward with its calling convention."""

    call: Callable[..., Any]
    """Of a rollout, of rollouts, of columns, or of one answer as verl has it."""
    shape: Literal["rollout", "rollouts", "columns", "verl"]
    """What it is called with."""
    is_async: bool
    """True if its calls wait rather than compute, so that several go on at once."""
    accepts: frozenset[str] | None = None
    """Names of the columns that it takes; None if it takes any."""
    text: bool = False
    """True if its completions and prompts are texts, False if they are lists of messages where the prompt is some."""
    more: Callable[[Sequence[Rollout]], Mapping[str, Any]] | None = None
    """Further columns of the rollouts, in place of the task's by the same names; None: no others."""

    @property
    def takes_groups(self) -> bool:
        """True if one call is for all siblings."""
        return self.shape in ("rollouts", "columns")

    def begin(self, rollouts: Sequence[Rollout], steps: int | None) -> tuple[Any, _Log]:
        """What it returns, perhaps to be awaited first; whatever it changes of its arguments, no other call sees."""
        log = _Log([{} for _ in rollouts])
        if self.shape != "columns":
            rollouts = [_copied(rollout) for rollout in rollouts]
        if self.shape == "verl":
            return self.call(**self._accepted(_verl(rollouts[0]))), log
        if self.shape == "rollout":
            return self.call(rollouts[0]), log
        if self.shape == "rollouts":
            return self.call(rollouts), log
        return self.call(**self._columns(rollouts, steps, log)), log

    def outcome(self, value: Any, log: _Log) -> Outcome:
        """What that comes to, once it was awaited."""
        if isinstance(value, Outcome):
            return value
        if self.shape == "verl" and isinstance(value, Mapping):
            for name in value.keys() - {"score"}:
                log.extra(name, [value[name]])
            return Outcome([_verdict(value["score"])], log.rows if any(log.rows) else ())
        if not self.takes_groups:
            return Outcome([_verdict(value)])
        values, count = value.tolist() if hasattr(value, "tolist") else value, len(log.rows)
        if not isinstance(values, (list, tuple)):
            why = f"returned {_shown(values)}; expected a list: a number or None for each completion"
            return Outcome([Failure("bad_value", why)] * count)
        if len(values) != count:
            return Outcome([Failure("bad_value", f"returned {len(values)} rewards for {count} completions")] * count)
        return Outcome([_verdict(value) for value in values], log.rows if any(log.rows) else ())

    def _columns(self, rollouts: Sequence[Rollout], steps: int | None, log: _Log) -> dict[str, Any]:
        """Keyword arguments in TRL's shape: one list per column, one entry per completion."""
        task, count = rollouts[0].task, len(rollouts)
        columns: dict[str, Any] = {
            name: [copy.deepcopy(value) for _ in rollouts]
            for name, value in task.meta.items()
            if name not in _NOT_COLUMNS and (self.accepts is None or name in self.accepts)
        }
        columns.setdefault("answer", [task.answer] * count)
        replies = [r.messages[len(task.prompt) :] for r in rollouts]
        text = self.text or any(message.role == TEXT for message in task.prompt)
        columns["prompts"] = [task.prompt[-1].content if text else _plain(task.prompt) for _ in rollouts]
        columns["completions"] = [r.text for r in rollouts] if text else [_plain(messages) for messages in replies]
        columns["completion_ids"] = [[t for turn in r.turns for t in turn.completion.tokens] for r in rollouts]
        turns = [turn.completion for r in rollouts for turn in r.turns if turn.completion.tokens]
        newest = max((completion.version_max for completion in turns), default=0)
        known = {"global_step": newest, **({} if steps is None else {"max_steps": steps})}
        columns["trainer_state"] = SimpleNamespace(**known)
        columns["log_metric"], columns["log_extra"] = log.metric, log.extra
        columns |= self.more(rollouts) if self.more else {}
        return self._accepted(columns)

    def _accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments if self.accepts is None else {k: v for k, v in arguments.items() if k in self.accepts}


class FunctionReward(Reward):
    """A reward that calls a plain function."""

    @abstractmethod
    def called(self) -> Called:
        """How the function is called; raises whatever importing it raises."""

    def prepare(self) -> None:
        """Import the function; raises whatever that raises."""
        self.called()

    def __call__(self, rollout: Rollout) -> float | None:
        """One rollout as a group of its own; raises RewardError for a bad value."""
        called = self.called()
        value, log = called.begin([rollout], None)
        (verdict,) = called.outcome(asyncio.run(value) if inspect.iscoroutine(value) else value, log).verdicts
        if isinstance(verdict, Failure):
            raise RewardError(verdict.text)
        return verdict


def called(reward: Reward) -> Called:
    """Calling convention of a reward."""
    if isinstance(reward, FunctionReward):
        return reward.called()
    if isinstance(reward, GroupReward):
        return Called(call=reward.scores, shape="rollouts", is_async=inspect.iscoroutinefunction(reward.scores))
    return Called(call=reward, shape="rollout", is_async=inspect.iscoroutinefunction(reward.__call__))


def plain(function: Callable[..., Any], *, text: bool = False) -> Called:
    """Calling convention of a plain function, from the names of its parameters.

    One that takes any keyword is TRL's, which passes more than most functions name, unless it asks for a rollout.

    Raises:
        TypeError: none fits what it takes.
    """
    is_async = awaits(function)
    by_name, open_ended = keywords(function)
    accepts = None if open_ended else by_name
    if "solution_str" in by_name:
        return Called(call=function, shape="verl", is_async=is_async, accepts=by_name & _VERL)
    if by_name & _TRL or (open_ended and "rollout" not in by_name):
        return Called(call=function, shape="columns", is_async=is_async, accepts=accepts, text=text)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        forms = "f(rollout), f(completions, **columns), or f(data_source, solution_str, ground_truth, extra_info)"
        raise TypeError(f"it takes {inspect.signature(function)}; expected {forms}") from error
    return Called(call=function, shape="rollout", is_async=is_async)


def keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of the parameters that can be given by name, and whether any other name is taken too."""
    parameters = inspect.signature(function).parameters
    names = (name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return frozenset(names), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def awaits(function: Any) -> bool:
    """True for an ``async def``, an object that is called by one, and a part of one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _copied(rollout: Rollout) -> Rollout:
    """The rollout with everything that can be changed copied; siblings share their task."""
    task = replace(rollout.task, meta=copy.deepcopy(rollout.task.meta))
    return replace(rollout, task=task, rewards=dict(rollout.rewards), metrics=dict(rollout.metrics))


def _verl(rollout: Rollout) -> dict[str, Any]:
    """Arguments of verl's ``compute_score``, from rows as verl has them or from any others."""
    meta = rollout.task.meta
    model = meta.get("reward_model")
    gold = model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else rollout.task.answer
    return {
        "data_source": meta.get("data_source", rollout.task.env),
        "solution_str": rollout.text,
        "ground_truth": gold,
        "extra_info": meta.get("extra_info") or {},
    }


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.as_dict() for message in messages]


def _verdict(value: Any) -> Verdict:
    """The value if it is a number, None or a failure, else what is wrong with it."""
    if value is None or isinstance(value, Failure):
        return value
    if hasattr(value, "item") and not isinstance(value, numbers.Real):
        with contextlib.suppress(ValueError, RuntimeError):  # of several numbers
            value = value.item()  # a tensor or an array of one
    number: Any = value if isinstance(value, numbers.Real) else math.nan
    if -_MOST <= number <= _MOST:
        return float(number)
    return Failure("bad_value", f"returned {_shown(value)}; expected a number from -1e18 to 1e18, or None")


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > _MOST:
        return f"a whole number of {value.bit_length()} bits"  # whose digits would take long to write, or are refused
    return f"{str(value)[:60]!r} ({type(value).__name__})" if not isinstance(value, float) else str(value)
