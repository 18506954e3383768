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
from dataclasses import dataclass
from typing import Literal

from tandem.metrics import Mean, Metrics, Sum, Value, flatten
from tandem.types import Json

WINDOW = 4
"""Steps that a decision looks at, after those that had groups of the setting before."""
HOLD = 8
"""Windows for which nothing is tried after a change that did not help, or was too stale."""
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
    held: int = 0
    """Windows to come in which nothing is tried."""


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
        # What is in flight when it shrinks is as old as before for some steps; to halve it again would be too much.
        calmed = state.settling and state.why == "ess"
        if seen.ess is not None and seen.ess < self.ess_floor and state.ahead > 0 and not calmed:
            return self._changed(state, state.ahead // 2, "ess", held=HOLD)
        if state.settling:
            return dataclasses.replace(state, settling=state.settling - 1)
        sums = {name: getattr(state, name) + getattr(seen, name) for name in ("seconds", "waited", "idle")}
        state = dataclasses.replace(state, steps=state.steps + 1, **sums)
        return state if state.steps < WINDOW else self._decided(state)

    def _decided(self, state: RateState) -> RateState:
        """At the end of a window."""
        waits, idle = state.waited > WAITS * state.seconds, state.idle > IDLE * state.seconds
        if state.why == "waits" and state.seconds > (1 - GAIN) * state.before * state.steps:
            return self._changed(state, state.was, "no faster", held=HOLD)
        if state.why == "idle" and waits:
            return self._changed(state, state.was, "too few", held=HOLD)
        if waits and not state.held and state.ahead < self.most:
            return self._changed(state, state.ahead + -(-self.groups_per_step // 2), "waits")
        if state.waited < FED * state.seconds and idle and not state.held and state.ahead > 1:
            return self._changed(state, max(1, state.ahead - -(-self.groups_per_step // 4)), "idle")
        return RateState(ahead=state.ahead, held=max(0, state.held - 1))

    def _changed(self, state: RateState, ahead: int, why: Reason, *, held: int = 0) -> RateState:
        return RateState(
            ahead=min(ahead, self.most),
            settling=-(-max(state.ahead, ahead) // self.groups_per_step) + 1,
            why=why,
            was=state.ahead,
            before=state.seconds / state.steps if state.steps else 0.0,
            held=held,
        )


@dataclass(slots=True, kw_only=True)
class LagControl:
    """How far sampling may be ahead in a run: fixed, or what a controller makes of the waits that this measures."""

    groups_per_step: int
    """Groups in a batch."""
    ahead: int
    """Groups that may be admitted beyond the batch that is trained on."""
    budget: LagController | None = None
    """What decides; None: ``ahead`` stays as it is."""
    state: RateState | None = None
    """The controller's."""
    changed: Callable[[Mapping[str, Json]], None] = lambda fields: None
    """Told of every change."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds."""
    _begun: float = 0.0
    _waited: float = 0.0
    _idle: float = 0.0
    _idle_since: float | None = None
    _playing: int = 0

    @classmethod
    def fixed(cls, groups_per_step: int, steps: int) -> LagControl:
        """Always as many steps ahead."""
        return cls(groups_per_step=groups_per_step, ahead=steps * groups_per_step)

    @classmethod
    def auto(
        cls, budget: LagController, state: RateState | None, changed: Callable[[Mapping[str, Json]], None]
    ) -> LagControl:
        """By measured waits, from where ``state`` stands."""
        state = budget.first() if state is None else dataclasses.replace(state, ahead=min(state.ahead, budget.most))
        size = budget.groups_per_step
        return cls(groups_per_step=size, ahead=state.ahead, budget=budget, state=state, changed=changed)

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
        if self._idle_since is not None:
            self._idle += self.clock() - self._idle_since
        self._playing, self._idle_since = self._playing + 1, None
        try:
            yield
        finally:
            self._playing -= 1
            self._idle_since = None if self._playing else self.clock()

    def step(self, step: int, metrics: Metrics) -> Mapping[str, Value]:
        """End a step: decide on the lag, and add its metrics.

        Args:
            step: its number.
            metrics: of the step; of these ``ess`` is read.
        """
        now = self.clock()
        idle = self._idle + (0.0 if self._idle_since is None else now - self._idle_since)
        has_played = self._playing or self._idle_since is not None
        values: dict[str, Value] = {"engine/idle_seconds": Sum(idle)} if has_played else {}
        if self.budget is None or self.state is None:
            return values
        values |= {"lag_control/groups_ahead": Mean(self.ahead, 1), "lag_control/lag": Mean(self.lag, 1)}
        ess = flatten({name: value for name, value in metrics.items() if name == "ess"}).get("ess")
        seen = StepTiming(seconds=now - self._begun, waited=self._waited, idle=idle, ess=ess)
        old, self.state = self.state, self.budget.after(self.state, seen)
        self.ahead = self.state.ahead
        if self.ahead != old.ahead:
            seconds = (old.seconds + seen.seconds) or 1.0  # of the window that decided, this step included
            parts = ("waited", "idle")
            shares = {name: round((getattr(old, name) + getattr(seen, name)) / seconds, 4) for name in parts}
            change = {"step": step, "reason": self.state.why, "was": old.ahead, "ahead": self.ahead, "lag": self.lag}
            self.changed({**change, **shares, "ess": None if ess is None else round(ess, 4)})
        return values
