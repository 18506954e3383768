"""Lag control: how far sampling runs ahead of training, fixed by ``max_lag`` or measured (``auto``).

The unit is groups: those that may be admitted beyond the batch that is trained on. ``ahead`` groups make the oldest
token ``ceil(ahead / groups_per_step)`` steps old and are all that the engine is given to do at once, so this one
number is lag and concurrency. It changes between two steps alone, and every decision is a function of what was
measured and of ``RateState``, which checkpoints hold.

    the trainer waits for rollouts           -> more, and less again where that made steps no faster
    the engine has nothing to do, no waits   -> less: the answers lie ready and only grow old
    the effective sample size is below floor -> half, at once, whatever else is measured
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.metrics import Mean, Metrics, Sum, Value, flatten
from tandem.types import Json

WINDOW = 4
"""Steps that a decision looks at, after those that had groups of the setting before."""
HOLD = 8
"""Windows for which a setting that was found too far, or too near, is not tried again."""
WAITS, FED, IDLE = 0.05, 0.01, 0.05
"""Shares of a step: a trainer that waits so long is short of rollouts, one that waits less than FED has enough, and an
engine without work for longer than IDLE does too much."""
GAIN = 0.02
"""By how much more groups must shorten a step to be kept."""

Reason = Literal["waits", "idle", "ess", "no faster", "too few"]
"""Why it changed: more since the trainer waited; less since the engine was idle, since the effective sample size fell
below its floor, or since more had not helped; as before since less made the trainer wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """State of the lag controller: all of it that a resume needs."""

    ahead: int
    """Groups that may be admitted beyond the batch that is trained on."""
    settling: int = 0
    """Steps to come that still have groups of an older setting."""
    steps: int = 0
    """Steps measured in this window."""
    seconds: float = 0.0
    waited: float = 0.0
    """Of these the trainer waited for rollouts."""
    idle: float = 0.0
    """Of these no group was being played."""
    why: Reason | None = None
    """Of the last change, while it is on trial."""
    was: int = 0
    """``ahead`` before it."""
    before: float = 0.0
    """Seconds of a step before it."""
    least: int = 0
    """It does not shrink below this for now, since the trainer waited there."""
    most: int | None = None
    """It does not grow beyond this for now, since that was no faster or too stale."""
    held: int = 0
    """Windows until ``least`` and ``most`` are forgotten."""

    def to_json(self) -> dict[str, Json]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RateState:
        """Inverse of ``to_json``; raises TypeError where something is missing."""
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Timing and effective sample size of one step."""

    seconds: float
    """From asking for its batch to the end of its update."""
    waited: float
    """Of these the trainer waited for rollouts."""
    idle: float
    """Of these no group was being played."""
    ess: float | None = None
    """Effective sample size of the ratios to the sampler, as a share of the tokens; None if the step has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagController:
    """Decides how far sampling may be ahead, from measured waits and the effective sample size."""

    groups_per_step: int
    """Groups in a batch."""
    most: int
    """Groups that it never goes beyond."""
    ess_floor: float
    """Least effective sample size."""

    def first(self) -> RateState:
        """To begin with: one batch is sampled while another is trained on."""
        return RateState(ahead=min(self.groups_per_step, self.most))

    def after(self, state: RateState, seen: StepTiming) -> RateState:
        """What a step that was seen makes of it."""
        new = self._after(state, seen)
        return new if new.ahead <= self.most else dataclasses.replace(new, ahead=self.most)

    def _after(self, state: RateState, seen: StepTiming) -> RateState:
        # What is in flight when it shrinks is as old as before for some steps; to halve it again would be too much.
        calmed = state.settling and state.why == "ess"
        if seen.ess is not None and seen.ess < self.ess_floor and state.ahead > 0 and not calmed:
            half = state.ahead // 2
            return self._changed(state, half, "ess", most=half, held=HOLD)
        if state.settling:
            return dataclasses.replace(state, settling=state.settling - 1)
        state = dataclasses.replace(
            state,
            steps=state.steps + 1,
            seconds=state.seconds + seen.seconds,
            waited=state.waited + seen.waited,
            idle=state.idle + seen.idle,
        )
        return state if state.steps < WINDOW else self._decided(state)

    def _decided(self, state: RateState) -> RateState:
        """At the end of a window."""
        each = state.seconds / state.steps
        waits, idle = state.waited > WAITS * state.seconds, state.idle > IDLE * state.seconds
        most = self.most if state.most is None else min(state.most, self.most)
        if state.why == "waits" and each > (1 - GAIN) * state.before:
            return self._changed(state, state.was, "no faster", most=state.was, held=HOLD)
        if state.why == "idle" and waits:
            return self._changed(state, state.was, "too few", least=state.was, held=HOLD)
        if waits and state.ahead < most:
            return self._changed(state, min(most, state.ahead + -(-self.groups_per_step // 2)), "waits")
        if state.waited < FED * state.seconds and idle and state.ahead > max(1, state.least):
            less = state.ahead - -(-self.groups_per_step // 4)
            return self._changed(state, max(1, state.least, less), "idle")
        return self._kept(state)

    def _changed(self, state: RateState, ahead: int, why: Reason, **held: Any) -> RateState:
        oldest = -(-max(state.ahead, ahead) // self.groups_per_step)
        return RateState(
            ahead=ahead,
            settling=oldest + 1,
            why=why,
            was=state.ahead,
            before=state.seconds / state.steps if state.steps else 0.0,
            **{"least": state.least, "most": state.most, "held": state.held, **held},
        )

    def _kept(self, state: RateState) -> RateState:
        """On with the same; what was found out is forgotten after some time, for lengths and rewards change."""
        held = max(0, state.held - 1)
        known = {"least": state.least, "most": state.most} if held else {}
        return RateState(ahead=state.ahead, held=held, **known)  # type: ignore[arg-type]


Changed = Callable[[Mapping[str, Json]], None]
"""Told of every change: what an event says of it."""


@dataclass(slots=True, kw_only=True)
class LagControl:
    """Controller of max_lag: auto: how far sampling may be ahead, by the waits of trainer and engine."""

    groups_per_step: int
    """Groups in a batch."""
    ahead: int
    """Groups that may be admitted beyond the batch that is trained on."""
    budget: LagController | None = None
    """What a controller may do; None: ``ahead`` stays as it is."""
    state: RateState | None = None
    changed: Changed = lambda fields: None
    """Told of every change."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds."""
    _begun: float = 0.0
    _waited: float = 0.0
    _idle: float = 0.0
    _idle_since: float | None = None
    _playing: int = 0
    _ever: bool = field(default=False, init=False)

    @classmethod
    def fixed(cls, groups_per_step: int, steps: int) -> LagControl:
        """Always as many steps ahead."""
        return cls(groups_per_step=groups_per_step, ahead=steps * groups_per_step)

    @classmethod
    def auto(cls, budget: LagController, state: RateState | None, changed: Changed) -> LagControl:
        """By measured waits, from where ``state`` stands."""
        state = budget.first() if state is None else state
        state = dataclasses.replace(state, ahead=min(state.ahead, budget.most))
        return cls(
            groups_per_step=budget.groups_per_step, ahead=state.ahead, budget=budget, state=state, changed=changed
        )

    @property
    def lag(self) -> int:
        """Steps that the oldest of these groups may wait for their own."""
        return -(-self.ahead // self.groups_per_step)

    @property
    def on_policy(self) -> bool:
        """Nothing is ever sampled while a step is trained."""
        return not self.ahead and self.budget is None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A step begins with this: the trainer waits for its groups."""
        self._begun = begun = self.clock()
        if self._idle_since is not None:
            self._idle_since = begun
        self._idle = self._waited = 0.0
        try:
            yield
        finally:
            self._waited = self.clock() - begun

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Around the playing of each group."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        now = self.clock()
        if self._idle_since is not None:
            self._idle += now - self._idle_since
        self._playing += more
        self._ever = True
        self._idle_since = None if self._playing else now

    def step(self, step: int, metrics: Metrics) -> Mapping[str, Value]:
        """End a step: decide on the lag, and add its metrics.

        Args:
            step: its number.
            metrics: of the step; of these ``ess`` is read.
        """
        now = self.clock()
        idle = self._idle + (0.0 if self._idle_since is None else now - self._idle_since)
        values: dict[str, Value] = {"engine/idle_seconds": Sum(idle)} if self._ever else {}
        if self.budget is None or self.state is None:
            return values
        values |= {"lag_control/groups_ahead": Mean(self.ahead, 1), "lag_control/lag": Mean(self.lag, 1)}
        seconds = now - self._begun
        ess = {name: value for name, value in metrics.items() if name == "ess"}
        seen = StepTiming(seconds=seconds, waited=self._waited, idle=idle, ess=flatten(ess).get("ess"))
        old, self.state = self.state, self.budget.after(self.state, seen)
        self.ahead = self.state.ahead
        if self.ahead != old.ahead:
            self._tell(step, old, seen)
        return values

    def _tell(self, step: int, old: RateState, seen: StepTiming) -> None:
        """Of the window that decided, the step that was seen included."""
        assert self.state is not None
        seconds = old.seconds + seen.seconds
        self.changed(
            {
                "step": step,
                "reason": self.state.why,
                "was": old.ahead,
                "ahead": self.ahead,
                "lag": self.lag,
                "waited": round((old.waited + seen.waited) / seconds, 4) if seconds else 0.0,
                "idle": round((old.idle + seen.idle) / seconds, 4) if seconds else 0.0,
                "ess": None if seen.ess is None else round(seen.ess, 4),
            }
        )
