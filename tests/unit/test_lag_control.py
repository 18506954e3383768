"""How far sampling runs ahead: what measured waits make of it, within the budget and across a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from tandem.config.loading import RunConfig, from_options
from tandem.errors import ConfigError, UnsupportedPair
from tandem.metrics import Metrics, Share, Sum, flatten
from tandem.rollout.lag_control import HOLD, WINDOW, LagControl, LagController, RateState, StepTiming
from tandem.trainer import environments
from tandem.trainer.pairs import check_pairs

GROUPS = 8


def budget(most: int = 4 * GROUPS, ess_floor: float = 0.8) -> LagController:
    return LagController(groups_per_step=GROUPS, most=most, ess_floor=ess_floor)


@dataclass
class Machine:
    """An engine and a trainer, as far as a step tells of them."""

    training: float
    """Seconds of a step's training."""
    speed: Callable[[int], float]
    """Groups a second, by how many it is given at once."""
    ess: Callable[[int], float] = lambda ahead: 1.0
    """By groups ahead."""
    tried: list[int] = field(default_factory=list)

    def step(self, ahead: int) -> StepTiming:
        self.tried.append(ahead)
        generation = GROUPS / self.speed(GROUPS + ahead)
        if ahead == 0:
            seconds = self.training + generation
        elif ahead < GROUPS:  # the rest of the batch is begun when the trainer asks for it
            seconds = max(self.training, generation * ahead / GROUPS) + generation * (1 - ahead / GROUPS)
        else:
            seconds = max(self.training, generation)
        return StepTiming(
            seconds=seconds, waited=seconds - self.training, idle=seconds - generation, ess=self.ess(ahead)
        )

    def run(self, budget: LagController, steps: int, state: RateState | None = None) -> RateState:
        state = state or budget.first()
        for _ in range(steps):
            state = budget.after(state, self.step(state.ahead))
        return state


def test_on_policy_is_what_is_never_ahead() -> None:
    assert LagControl.fixed(4, 0).on_policy
    assert not LagControl.fixed(4, 1).on_policy
    budget = LagController(groups_per_step=4, most=4, ess_floor=0.5)
    paced = LagControl.auto(budget, RateState(ahead=0), lambda event: None)
    assert paced.ahead == 0
    assert not paced.on_policy, "it may be ahead by the end of the step"


def test_it_begins_with_one_batch_ahead_or_what_the_budget_has() -> None:
    assert budget().first().ahead == GROUPS
    assert budget(most=3).first().ahead == 3
    assert budget(most=0).first().ahead == 0


def test_a_trainer_that_waits_gets_more_until_it_waits_no_more() -> None:
    machine = Machine(training=1.0, speed=lambda groups: groups / 3)  # of 24 in flight, 8 a second
    state = machine.run(budget(), 60)
    assert max(machine.tried) == 2 * GROUPS, "not one group more than stops the waits"
    assert machine.tried[-20:] == [2 * GROUPS] * 20
    assert state.ahead == 2 * GROUPS


def test_more_that_makes_no_step_faster_is_taken_back_and_tried_again_later() -> None:
    machine = Machine(training=1.0, speed=lambda groups: 4.0)  # generation alone takes two seconds
    machine.run(budget(), 200)
    assert set(machine.tried) == {GROUPS, GROUPS + GROUPS // 2}
    changes = [i for i in range(1, 200) if machine.tried[i] != machine.tried[i - 1]]
    assert machine.tried.count(GROUPS) > 3 * machine.tried.count(GROUPS + GROUPS // 2)
    assert len(changes) > 3, "it must look again: answers grow longer, and engines are added"


def test_an_engine_that_has_nothing_to_do_is_given_less_until_the_trainer_would_wait() -> None:
    machine = Machine(training=4.0, speed=lambda groups: 8.0)
    machine.run(budget(), 200, RateState(ahead=3 * GROUPS))
    assert machine.tried[0] == 3 * GROUPS
    late = machine.tried[-WINDOW * HOLD :]
    assert max(late) == GROUPS, "lag 1 is enough"
    waits = [machine.step(ahead) for ahead in late]
    assert sum(seen.waited for seen in waits) < 0.05 * sum(seen.seconds for seen in waits)


def test_where_training_takes_nearly_all_the_time_most_of_a_batch_is_sampled_on_demand() -> None:
    machine = Machine(training=100.0, speed=lambda groups: 8.0)
    assert machine.run(budget(), 100).ahead == 1


def test_below_the_floor_it_is_halved_at_once_and_not_again_before_that_can_show() -> None:
    machine = Machine(training=1.0, speed=lambda groups: groups / 100, ess=lambda ahead: 0.99 - 0.02 * ahead)
    machine.run(budget(ess_floor=0.7), 400)
    first = next(i for i, ahead in enumerate(machine.tried) if machine.ess(ahead) < 0.7)
    assert machine.tried[first + 1] == machine.tried[first] // 2
    assert machine.tried[first + 2] == machine.tried[first + 1]
    stale = [ahead for ahead in machine.tried if machine.ess(ahead) < 0.7]
    assert len(stale) <= 0.05 * len(machine.tried)
    assert len(set(machine.tried)) > 2, "the trainer waits, so it must be tried again at times"


def test_an_old_step_right_after_the_halving_does_not_halve_again() -> None:
    rules = budget()
    low, fine = StepTiming(seconds=1, waited=0, idle=0, ess=0.5), StepTiming(seconds=1, waited=0, idle=0, ess=0.9)
    state = rules.after(rules.first(), low)
    assert state.ahead == GROUPS // 2
    for _ in range(2):  # steps whose groups were sampled before
        state = rules.after(state, low)
        assert state.ahead == GROUPS // 2
    again = rules.after(state, low)
    assert again.ahead == GROUPS // 4
    assert rules.after(state, fine).ahead == GROUPS // 2


def test_it_goes_down_to_on_policy_where_nothing_less_holds_the_floor() -> None:
    machine = Machine(training=1.0, speed=lambda groups: 1.0, ess=lambda ahead: 0.5 if ahead else 1.0)
    assert machine.run(budget(), 30).ahead == 0


seen = st.builds(
    lambda seconds, waited, idle, ess: StepTiming(
        seconds=seconds, waited=seconds * waited, idle=seconds * idle, ess=ess
    ),
    st.floats(1e-3, 1e3),
    st.floats(0, 1),
    st.floats(0, 1),
    st.none() | st.floats(0, 1),
)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(st.lists(seen, max_size=80), st.integers(0, 40), st.integers(0, 79))
def test_it_never_leaves_its_budget_and_a_state_that_was_saved_goes_on_alike(
    steps: list[StepTiming], most: int, at: int
) -> None:
    rules = budget(most=most)
    state = saved = rules.first()
    for i, step in enumerate(steps):
        state = rules.after(state, step)
        saved = rules.after(saved, step)
        assert 0 <= state.ahead <= most
        if i == at:
            saved = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(saved))), RateState)
        assert saved == state


# The stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_and_idleness_are_of_the_step_alone() -> None:
    clock, events = Clock(), list[Mapping[str, Any]]()
    lag_control = LagControl.auto(budget(), None, events.append)
    lag_control.clock = clock

    def step(metrics: Metrics) -> dict[str, float]:
        return flatten(lag_control.step(1, metrics))

    with lag_control.waiting():
        with lag_control.playing():
            clock.now = 3.0
            with lag_control.playing():
                clock.now = 4.0
        clock.now = 5.0
    clock.now = 10.0
    assert step({})["engine/idle_seconds"] == 6.0
    clock.now = 100.0  # an evaluation, a checkpoint: nobody's step
    with lag_control.waiting():
        clock.now = 101.0
    with lag_control.playing():
        clock.now = 102.0
    clock.now = 104.0
    assert step({})["engine/idle_seconds"] == 3.0
    playing = lag_control.playing()
    playing.__enter__()
    with lag_control.waiting():
        clock.now = 107.0
    assert step({})["engine/idle_seconds"] == 0.0
    assert not events


def test_a_change_is_told_with_what_it_was_for() -> None:
    clock, events = Clock(), list[Mapping[str, Any]]()
    lag_control = LagControl.auto(budget(), None, events.append)
    lag_control.clock = clock
    for step in range(1, 20):
        with lag_control.waiting(), lag_control.playing():
            clock.now += 3.0
        with lag_control.playing():
            clock.now += 1.0
        lag_control.step(step, {"ess": Share(9.0, 9.0, 10.0)})
        if events:
            break
    assert events == [
        {"step": WINDOW, "reason": "waits", "was": 8, "ahead": 12, "lag": 2, "waited": 0.75, "idle": 0.0, "ess": 0.9}
    ]
    assert lag_control.state is not None
    assert (lag_control.ahead, lag_control.lag) == (12, 2) == (lag_control.state.ahead, 2)


def test_the_effective_sample_size_is_read_from_the_steps_own_metric() -> None:
    events = list[Mapping[str, Any]]()
    lag_control = LagControl.auto(budget(), None, events.append)
    with lag_control.waiting():
        pass
    lag_control.step(7, {"ess": Share(5.0, 10.0, 5.0), "correction/ess": Share(1.0, 1.0, 1.0)})
    assert [(t["step"], t["reason"], t["ahead"], t["ess"]) for t in events] == [(7, "ess", 4, 0.5)]


def test_a_fixed_lag_stays_and_says_nothing_of_a_rate() -> None:
    lag_control = LagControl.fixed(GROUPS, 2)
    for step in range(40):
        with lag_control.waiting():
            pass
        with lag_control.playing():
            pass
        metrics = lag_control.step(step, {"ess": Share(1.0, 9.0, 9.0)})
        assert set(metrics) == {"engine/idle_seconds"}
        assert isinstance(metrics["engine/idle_seconds"], Sum)
    assert (lag_control.ahead, lag_control.lag, lag_control.state) == (16, 2, None)


def test_a_state_of_an_earlier_version_is_read() -> None:
    earlier = {"ahead": 12, "why": "no faster", "was": 16, "least": 4, "most": 12, "held": 3}
    assert msgspec.convert(earlier, RateState) == RateState(ahead=12, why="no faster", was=16, held=3)


def test_a_state_of_a_larger_budget_is_cut() -> None:
    assert LagControl.auto(budget(most=5), RateState(ahead=20), lambda event: None).ahead == 5


# Recipes

RECIPE = {"model": "m", "steps": 9, "env": "arithmetic", "max_lag": "auto"}


def recipe(**changes: Any) -> RunConfig:
    return from_options({**RECIPE, **changes}, (), Path("r.yaml")).config


def test_auto_counts_as_its_budget_wherever_a_lag_counts() -> None:
    assert recipe().most_lag == 4
    assert recipe(lag_control={"max_lag": 2}).most_lag == 2
    assert recipe(max_lag=3).most_lag == 3
    hotswap = {"engine": "vllm", "trainable": "lora"}
    check_pairs(recipe(**hotswap, sync={"kind": "hotswap", "every": 5}))
    with pytest.raises(UnsupportedPair, match=r"set lag_control\.max_lag to 5"):
        check_pairs(recipe(**hotswap, sync={"kind": "hotswap", "every": 6}))


@pytest.mark.parametrize(("regex", "floor"), [("", 0.8), ("[0-9]+", 0.0)])
def test_what_a_grammar_does_to_ess_lowers_no_lag(regex: str, floor: float) -> None:
    config = recipe(engine="vllm", sampling={"regex": regex})
    control = environments.lag_control(config, None, telemetry=Mock())
    assert control.budget is not None
    assert control.budget.ess_floor == floor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lag": "often"}, "max_lag"),
        ({"max_lag": 1, "lag_control": {"ess_floor": 0.5}}, "read by max_lag: auto alone"),
        ({"lag_control": {"ess_floor": 1.0}}, "ess_floor must be at least 0 and below 1"),
        ({"lag_control": {"max_lag": 0}}, "max_lag must be at least 1"),
        ({"broker": "http://h:1", "env": None}, "at least 1 with broker, and not auto"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(**changes)
    assert message in str(refused.value)
