"""Oversampling: waves fill the batch, no answer is preferred for its length, and a resumed run goes on as it was."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support.buffering import Kind, Mixture, Trainer, always_good, ids, rollout, run, saved, trained

from tandem.config.loading import load
from tandem.config.sections import Replay
from tandem.metrics import flatten
from tandem.rollout.oversampling import MOST, SignalForecast
from tandem.rollout.source import DataState
from tandem.types import Group, Sampling, Task


def half(task: Task) -> str:
    return "ok" if int(task.id[1:]) % 2 else "zero_variance"


def chance(share: float) -> Kind:
    return lambda task: "ok" if random.Random(task.id).random() < share else "zero_variance"


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("places", [4, 16, 64])
def test_nine_waves_of_ten_fill_the_batch_and_are_no_larger_than_that_takes(share: float, places: int) -> None:
    lots, forecast = random.Random(f"{share} {places}"), SignalForecast("auto")
    filled, sizes = [], []
    for _ in range(800):
        sizes.append(forecast.groups("e", places, most=MOST * places, on_policy=True))
        signal = [lots.random() < share for _ in range(sizes[-1])]
        filled.append(sum(signal) >= places)
        for each in signal:
            forecast.note("e", each)
    # Of 780 waves the share that is filled has a standard error of a hundredth.
    assert 0.87 <= mean(filled[20:]) <= 0.98
    deviation = (places * (1 - share)) ** 0.5 / share
    assert mean(sizes[20:]) <= places / share + 2.5 * deviation + 1


@pytest.mark.parametrize("places", [4, 16, 64])
def test_ahead_of_training_one_in_ten_is_too_many(places: int) -> None:
    lots, forecast = random.Random(places), SignalForecast("auto")
    for _ in range(1000):
        forecast.note("e", lots.random() < 0.6)
    groups = forecast.groups("e", places, most=MOST * places, on_policy=False)
    assert places <= groups <= places / 0.6
    over = mean(sum(lots.random() < 0.6 for _ in range(groups)) > places for _ in range(2000))
    assert over <= 0.13


def test_at_first_and_without_it_a_wave_is_a_batch() -> None:
    assert SignalForecast("auto").groups("e", 8, most=32, on_policy=True) == 8
    off, factor = SignalForecast("off"), SignalForecast(1.5)
    for forecast in (off, factor):
        for _ in range(99):
            forecast.note("e", False)
    assert off.groups("e", 8, most=32, on_policy=True) == 8
    assert factor.groups("e", 7, most=32, on_policy=False) == 11


def test_batches_fill_in_fewer_waves() -> None:
    def waves(**options: Any) -> float:
        trainer = Trainer(half)
        assert len(trained(trainer, 30, n=8, **options)) == 30
        return len({frozenset(wave) for wave in trainer.waves().values()}) / 30

    assert waves(oversample="off") > 2.5
    assert waves(oversample="auto") < 1.5


@pytest.mark.parametrize("options", [{}, {"on_policy_tail": "abort"}, {"oversample": 1.7}], ids=str)
def test_on_policy_the_groups_admitted_first_are_trained_whoever_is_fast(options: dict[str, Any]) -> None:
    options = {"n": 4, "oversample": "auto", **options}
    trainers = [Trainer(half, seed, slowest=40) for seed in range(4)]
    orders = [ids(trained(trainer, 12, **options)) for trainer in trainers]
    assert orders == [orders[0]] * 4
    assert len(set(orders[0])) == 48
    assert [trainer.started for trainer in trainers] == [trainers[0].started] * 4, "and so are those played again"


@dataclass
class Lengthy(Trainer):
    """Half of the tasks have long answers, which take as long; a long one has signal as often as a short one."""

    lengths: dict[str, int] = field(default_factory=dict)

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        self.started.append(id)
        number = int(task.id[1:])
        length = 60 if number % 4 < 2 else 2
        self.lengths[id] = length
        for _ in range(length):
            await asyncio.sleep(0)
        # The reward is the length, but for one answer of the groups that have signal.
        rewards = (float(length), float(length - number % 2))
        made = [rollout(task, f"{id}/{n}", reward, (self.step,) * length) for n, reward in enumerate(rewards)]
        return Group(id=id, index=index, env="fake", rollouts=tuple(made))


@pytest.mark.parametrize("tail", ["wait", "abort"])
@pytest.mark.parametrize("oversample", ["auto", "keep", 2.0])
def test_trained_answers_are_as_long_as_those_that_are_sampled(tail: str, oversample: Any) -> None:
    trainer = Lengthy()
    batches = trained(trainer, 60, n=4, oversample=oversample, on_policy_tail=tail, count=2000)
    long = mean(group.rollouts[0].num_tokens == 60 for batch in batches for group in batch)
    expected = [group for batch in batches for group in batch]
    # 240 groups or more, of which half are long: a standard error of three hundredths.
    assert len(expected) >= 240
    assert abs(long - 0.5) < 0.1
    trainer = Lengthy()
    off = trained(trainer, 60, n=4, count=2000)
    first = [group.id for batch in off for group in batch]
    if oversample != "keep":
        assert Counter(group.id for group in expected) == Counter(first), "the tasks that a run without it trains"


WAYS: dict[str, dict[str, Any]] = {
    "auto": {"oversample": "auto"},
    "abort": {"oversample": "auto", "on_policy_tail": "abort"},
    "keep": {"oversample": "keep"},
    "factor": {"oversample": 2.0},
    "bounded": {"oversample": "auto", "max_resample_times": 2},
    "replay": {"oversample": "auto", "replay": Replay(size=4, max_age=3)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Trainer, Mixture])
def test_a_run_that_is_ended_anywhere_goes_on_as_if_it_had_not_been(way: str, kind: type[Trainer]) -> None:
    options = {"n": 4, "count": 60, **WAYS[way]}
    signal = chance(0.5) if kind is Trainer else always_good
    whole = trained(kind(signal), 9, **options)

    async def until(steps: int, moment: int) -> DataState:
        trainer = kind(signal, seed=moment)
        async with trainer.buffer(**options).open(DataState()) as buffer:
            await trainer.train(buffer, steps)
            for _ in range(moment):
                await asyncio.sleep(0)
            return saved(buffer.data_state())

    for steps in (1, 4, 7):
        for moment in (0, 3, 9, 15, 40):
            rest = trained(kind(signal, step=steps), 9 - steps, run(until(steps, moment)), **options)
            assert [ids([batch]) for batch in rest] == [ids([batch]) for batch in whole[steps:]], (steps, moment)
            assert [[g.index for g in b] for b in rest] == [[g.index for g in b] for b in whole[steps:]]


def test_keep_trains_what_is_over() -> None:
    trainer = Trainer(chance(0.7))
    batches = trained(trainer, 20, n=4, oversample="keep")
    assert {len(batch) for batch in batches} > {4}
    sampled = Counter(id for id, step in trainer.when if step < 20)
    assert sampled == Counter(ids(batches)) + Counter(id for _, id in trainer.dropped)


@pytest.mark.parametrize("tail", ["wait", "abort"])
def test_the_cost_is_counted(tail: str) -> None:
    trainer = Trainer(half, slowest=30)

    async def go() -> tuple[list[list[Group]], dict[str, float]]:
        async with trainer.buffer(n=4, oversample=2.0, on_policy_tail=tail).open(DataState()) as buffer:
            batches = []
            for _ in range(10):
                batch = await buffer.take()
                batches.append(list(batch.groups))
                metrics.append(flatten(buffer.metrics()))
                trainer.step += 1
                batch.free_slots()
            return batches, metrics[-1]

    metrics: list[dict[str, float]] = []
    batches, _ = run(go())
    surplus = sum(each["groups/dropped_surplus"] for each in metrics)
    flat = sum(each["groups/dropped_zero_variance"] for each in metrics)
    assert surplus > 0
    assert len(trainer.started) == surplus + flat + sum(map(len, batches)) + len(trainer.playing)
    generated, dropped = (sum(each[name] for each in metrics) for name in ("tokens/generated", "tokens/dropped"))
    assert generated - dropped == sum(r.num_tokens for batch in batches for group in batch for r in group.rollouts)
    assert dropped > 4 * flat - 1
    assert "surplus" not in dict(trainer.dropped), "which is nothing to be told of"


def test_ahead_of_training_more_groups_are_in_flight_and_none_is_too_old() -> None:
    def company(oversample: Any) -> float:
        trainer = Trainer(chance(0.5), slowest=30)
        batches = trained(trainer, 40, n=8, max_lag=1, oversample=oversample, count=4000)
        assert all(step - group.version_min <= 1 for step, batch in enumerate(batches) for group in batch)
        stale = sum(reason == "stale" for reason, _ in trainer.dropped)
        assert stale <= 0.05 * len(trainer.started)
        return mean(map(len, trainer.company[100:]))

    assert company("auto") > 1.3 * company("off")


def test_off_is_a_word_though_it_is_a_truth_to_yaml(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 1\nenv: arithmetic\noversample: off\n")
    config = load(recipe, []).config
    assert config.oversample == "off"
