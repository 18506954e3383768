"""The buffer: slots bound the lag, batches keep the order of admission, and no task is lost or doubled."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buffering import Kind, Mixture, Trainer, always_good, ids, makeup, mixed, rollout, run, tasks, trained
from support.tiers import examples

from tandem.errors import EngineError, EnvError, Starved
from tandem.metrics import flatten
from tandem.rollout.buffer import TRANSITIONS, Entry, EntryState, RolloutBuffer
from tandem.rollout.mixture import REST, SAME, MixtureSchedule
from tandem.rollout.source import Batch, DataState, Draw
from tandem.trainer.state import TrainerState
from tandem.types import Group, PolicyVersion, Task

# Lag


@pytest.mark.slow
@pytest.mark.parametrize("kind", [always_good, mixed])
@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
def test_slots_bound_the_lag_and_use_all_of_it(max_lag: int, kind: Kind) -> None:
    worst = 0
    for seed in range(8):
        trainer = Trainer(kind, seed)
        for step, batch in enumerate(trained(trainer, 12, max_lag=max_lag)):
            lags = [step - group.version_min for group in batch]
            assert max(lags) <= max_lag
            worst = max(worst, *lags)
        assert "stale" not in dict(trainer.dropped), "the slots alone must bound it"
    assert worst == max_lag


@pytest.mark.slow
@pytest.mark.parametrize("kind", [always_good, mixed])
@pytest.mark.parametrize(("max_lag", "behind"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (5, 3)])
def test_an_engine_that_is_behind_uses_up_some_of_the_lag(max_lag: int, behind: int, kind: Kind) -> None:
    """Weights that are published now and then are old when they sample; sampling is ahead by so much less."""
    worst = 0
    for seed in range(8):
        trainer = Trainer(kind, seed, behind=behind)
        for step, batch in enumerate(trained(trainer, 14, max_lag=max_lag)):
            lags = [step - group.version_min for group in batch]
            assert max(lags) <= max_lag
            worst = max(worst, *lags)
        assert "stale" not in dict(trainer.dropped), "the slots alone must bound it"
        assert max(map(len, trainer.company)) <= 3 * (max_lag - behind + 1)
    assert worst == max_lag


def test_sampling_is_ahead_by_what_an_engine_behind_leaves() -> None:
    for behind, ahead in ((0, 3), (1, 2), (3, 0)):
        assert Trainer(behind=behind).buffer(max_lag=3).ahead == ahead


def test_the_engine_is_idle_from_the_last_answer_to_the_next_task() -> None:
    now = 0.0

    async def go() -> None:
        nonlocal now
        trainer = Trainer()
        buffer = trainer.buffer(max_lag=1)
        buffer._metrics.clock = lambda: now
        buffer._metrics.collect()
        async with buffer.open(DataState()):
            for _ in range(3):
                batch = await buffer.take()
                while trainer.playing:
                    now += 1
                    await asyncio.sleep(0)
                now += 0.5
                assert flatten(buffer.metrics())["engine/idle_seconds"] == 0.5
                trainer.step += 1
                batch.free_slots()

    run(go())


def test_with_no_lag_left_tasks_come_in_waves() -> None:
    """max_lag is more than 0, but the engine's own age takes all of it."""
    waves = []
    for seed in range(5):
        trainer = Trainer(mixed, seed, behind=2)
        trained(trainer, 8, max_lag=2)
        waves.append((trainer.started, trainer.waves()))
    assert all(wave == waves[0] for wave in waves)


def test_the_slowest_group_holds_its_batch_but_not_what_comes_after() -> None:
    trainer = Trainer(slowest=200)
    batches = trained(trainer, 6, max_lag=2)
    assert ids(batches) == ids(trained(Trainer(slowest=2), 6, max_lag=2))


@pytest.mark.parametrize("max_lag", [0, 2])
def test_never_more_groups_at_once_than_slots(max_lag: int) -> None:
    trainer = Trainer(mixed)
    trained(trainer, 10, max_lag=max_lag)
    assert max(map(len, trainer.company)) == 3 * (max_lag + 1)


def test_on_policy_waves_do_not_depend_on_who_is_fast() -> None:
    """What is sampled together decides float rounding, so it must be a matter of the state alone."""
    waves = []
    for seed in range(5):
        trainer = Trainer(mixed, seed)
        trained(trainer, 8)
        waves.append((trainer.started, trainer.waves()))
    assert all(wave == waves[0] for wave in waves)


@pytest.mark.slow
def test_a_wave_that_was_interrupted_is_played_again_whole() -> None:
    whole = Trainer(mixed)
    trained(whole, 4)
    for moment in range(40):
        trainer = Trainer(mixed)

        async def stopped(trainer: Trainer = trainer, moment: int = moment) -> DataState:
            async with trainer.buffer().open(DataState()) as buffer:
                for _ in range(moment):
                    await asyncio.sleep(0)
                return buffer.data_state()

        data_state = run(stopped())
        trainer = Trainer(mixed)
        trained(trainer, 4, data_state)
        played = trainer.waves()
        assert played == {id: wave for id, wave in whole.waves().items() if id in played}


# Order


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_batches_are_formed_in_order_of_admission(max_lag: int) -> None:
    orders = set()
    for seed in range(5):
        indices = [group.index for batch in trained(Trainer(seed=seed), 6, max_lag=max_lag) for group in batch]
        assert indices == list(range(18))
        trainer = Trainer(mixed, seed)
        batches = trained(trainer, 6, max_lag=max_lag)
        indices = [group.index for batch in batches for group in batch]
        assert indices == sorted(set(indices))
        assert {len(batch) for batch in batches} == {3}
        orders.add(tuple(ids(batches)))
    assert len(orders) == 1 or max_lag, "with max_lag 0 the order is fixed"


def test_every_epoch_holds_every_task_once_in_its_own_order() -> None:
    order = ids(trained(Trainer(), 14, count=7, n=2, max_lag=1))
    first, second = order[:7], order[7:14]
    assert sorted(first) == [f"t{n}@0" for n in range(7)]
    assert sorted(second) == [f"t{n}@1" for n in range(7)]
    assert [id[:-2] for id in first] != [id[:-2] for id in second]
    assert first != sorted(first)


def test_order_is_the_seeds() -> None:
    one, same, other = (ids(trained(Trainer(), 4, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_fewer_tasks_than_slots_are_visited_again() -> None:
    order = ids(trained(Trainer(), 3, count=2, n=3))
    assert [int(id.rpartition("@")[2]) for id in order] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert len(set(order)) == 9


# Drops


def test_flat_and_failed_groups_are_dropped_counted_told_and_replaced() -> None:
    trainer = Trainer(mixed)

    async def go() -> tuple[list[list[Group]], dict[str, float], dict[str, float]]:
        async with trainer.buffer().open(DataState()) as buffer:
            batches = await trainer.train(buffer, 10)
            return batches, flatten(buffer.metrics()), flatten(buffer.metrics())

    batches, counts, again = run(go())
    assert all(mixed(group.rollouts[0].task) == "ok" for batch in batches for group in batch)
    reasons = Counter(reason for reason, _ in trainer.dropped)
    assert reasons["zero_variance"] > 3
    assert reasons["failed"] > 1
    assert counts["groups/dropped_zero_variance"] == reasons["zero_variance"]
    assert counts["groups/dropped_failed"] == reasons["failed"]
    assert counts["groups/dropped_stale"] == 0
    assert again["groups/dropped_zero_variance"] == 0, "counted once"
    assert not set(ids(batches)) & {id for _, id in trainer.dropped}


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_numbers_of_a_step_are_of_its_batch_and_of_what_was_dropped_on_the_way(max_lag: int) -> None:
    """However far ahead sampling is, and over a resume in the midst: no step is without a reward, no group in two."""
    trainer = Trainer(mixed, slowest=3)

    async def life(data_state: DataState, steps: int) -> DataState:
        buffer = trainer.buffer(max_lag=max_lag)
        async with buffer.open(data_state):
            for _ in range(steps):
                batch = await buffer.take()
                for _ in range(200):  # all that may be ahead is there
                    await asyncio.sleep(0)
                dropped = Counter(reason for reason, _ in trainer.dropped)
                trainer.dropped.clear()
                metrics = flatten(buffer.metrics())
                assert metrics["env/fake/groups"] == len(batch.groups) + dropped.total()
                assert metrics["reward/max"] == 1.0
                assert metrics["env/fake/trained"] == len(batch.groups)
                failed = dropped["failed"]
                kept, flat = len(batch.groups), dropped["zero_variance"]
                scored = 2 * (kept + flat) + failed
                assert metrics["reward"] == pytest.approx((kept + 2 * flat + failed) / scored)
                trainer.step += 1
                batch.free_slots()
            return buffer.data_state()

    data_state = run(life(DataState(), 6))
    trainer.dropped.clear()  # by the last release: the life that takes the next batch is a new one
    assert bool(data_state.ready) == (max_lag > 0)
    run(life(data_state, 6))


def test_flat_groups_are_kept_if_asked_but_failed_ones_are_not() -> None:
    trainer = Trainer(mixed)
    batches = trained(trainer, 10, drop_zero_variance=False)
    assert {mixed(group.rollouts[0].task) for batch in batches for group in batch} == {"ok", "zero_variance"}
    assert {reason for reason, _ in trainer.dropped} == {"failed"}


def test_stale_groups_are_dropped_and_played_again() -> None:
    old = group_of("t5@0", index=0, version=2)  # one step too old
    trainer = Trainer(step=4)
    buffer = trainer.buffer(n=2, max_lag=1)
    draw = draw_of(buffer, "t5")
    young = group_of("t6@0", index=1, version=3)

    async def go() -> list[list[Group]]:
        data_state = DataState(drawn={"fake": 50}, admitted=2, ready=((draw, old), (draw_of(buffer, "t6"), young)))
        async with buffer.open(data_state) as opened:
            return await trainer.train(opened, 3)

    batches = run(go())
    assert trainer.dropped == [("stale", "t5@0")]
    assert batches[0][0] == young
    again = [group for batch in batches for group in batch if group.id == "t5@0"]
    assert len(again) == 1
    assert again[0].version_min >= 4


def group_of(id: str, *, index: int, version: int) -> Group:
    task = next(t for t in tasks(1000) if t.id == id[:-2])
    made = tuple(rollout(task, f"{id}/{n}", reward, (version, version)) for n, reward in enumerate((0.0, 1.0)))
    return Group(id=id, index=index, env="fake", rollouts=made)


def draw_of(buffer: RolloutBuffer, task: str) -> Draw:
    (runner,) = buffer.runners
    numbers = (number for number in range(len(runner.tasks)) if runner.of(Draw(runner.name, number))[0].id == task)
    return Draw(runner.name, next(numbers))


@pytest.mark.parametrize(
    ("kind", "says", "advice"),
    [("zero_variance", "rewards [1.0, 1.0]", "more answers (group_size)"), ("failed", "it broke", "Mend what fails")],
)
@pytest.mark.parametrize("max_lag", [0, 2])
def test_starved_says_what_was_seen_and_what_to_do(kind: str, says: str, advice: str, max_lag: int) -> None:
    trainer = Trainer(lambda task: kind)
    with pytest.raises(Starved, match="groups in a row could not be trained on") as caught:
        trained(trainer, 1, patience=4, max_lag=max_lag)
    assert says in str(caught.value)
    assert kind in str(caught.value)
    assert advice in str(caught.value)
    assert 4 * 3 < len(trainer.dropped) <= 4 * 3 + 3 * (max_lag + 1)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_groups_in_flight_at_a_stop_are_counted_once(max_lag: int) -> None:
    trainer, states = Trainer(), list[DataState]()

    async def go(state: DataState, steps: int) -> None:
        async with trainer.buffer(max_lag=max_lag).open(state) as buffer:
            await trainer.train(buffer, steps)
            states.append(TrainerState.from_json(saved(buffer.data_state())).data_state)

    def saved(state: DataState) -> dict[str, Any]:
        version = PolicyVersion(step=trainer.step, digest="")
        return TrainerState(step=0, version=version, tokens_seen=0, data_state=state, config_digest="").to_json()

    run(go(DataState(), 2))
    assert states[0].again
    run(go(states[0], 0))
    assert states[1] == states[0]
    run(go(states[1], 2))
    stopped, trainer = states[-1], Trainer()
    run(go(DataState(), 4))
    assert stopped.admitted == states[-1].admitted


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("groups", [1, 6])
def test_a_failure_of_every_group_ends_the_run_after_one_batch(groups: int, max_lag: int) -> None:
    trainer = Trainer(lambda task: "broken")
    with pytest.raises(Starved, match=r"first failure: it broke in .*Mend what fails"):
        trained(trainer, 1, n=groups, patience=50, max_lag=max_lag)
    enough = max(groups, SAME)
    assert enough <= len(trainer.dropped) <= enough + groups * (max_lag + 1)


@pytest.mark.parametrize("first", ["zero_variance", "ok", "failed"])
def test_a_failure_that_not_every_group_has_is_played_on(first: str) -> None:
    kinds = chain([first], repeat("broken"))
    trainer = Trainer(lambda task: next(kinds))
    with pytest.raises(Starved):
        trained(trainer, 1, n=2, patience=20)
    assert len(trainer.dropped) > 40


@pytest.mark.slow
def test_a_good_group_in_between_is_enough() -> None:
    def rarely(task: Task) -> str:
        return "ok" if int(task.id[1:]) % 5 == 0 else "zero_variance"

    trainer = Trainer(rarely)
    assert len(trained(trainer, 5, n=2, patience=20)) == 5
    assert len(trainer.dropped) > 20


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_failed_engine_reaches_whoever_takes(max_lag: int) -> None:
    def breaks(task: Task) -> str:
        return "engine" if task.id == "t3" else "ok"

    with pytest.raises(EngineError, match="the engine is gone"):
        trained(Trainer(breaks), 20, count=10, max_lag=max_lag)


def test_a_task_that_cannot_be_made_reaches_whoever_takes() -> None:
    class Lazy(Sequence[Task]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise KeyError("row 3 has no question")
            return tasks(10)[index]

    async def go(buffer: RolloutBuffer) -> None:
        buffer.runners[0].tasks = Lazy()
        async with buffer.open(DataState()):
            await trainer.train(buffer, 20)

    trainer = Trainer()
    with pytest.raises(EnvError, match="task 3 of its sequence raised KeyError: 'row 3 has no question'"):
        run(go(trainer.buffer(count=10)))


def test_what_is_in_flight_is_cancelled_at_the_end() -> None:
    trainer = Trainer(slowest=10_000)

    async def go() -> None:
        async with trainer.buffer(max_lag=1).open(DataState()):
            await asyncio.sleep(0)
            assert len(trainer.playing) == 6
        assert trainer.playing == set()
        assert len(asyncio.all_tasks()) <= 2

    run(go())


# Several streams


def mostly_flat(task: Task) -> str:
    return "ok" if task.id in ("t1", "t9", "t09") else "zero_variance"


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_every_batch_is_mixed_as_the_timetable_says_whatever_is_dropped(max_lag: int) -> None:
    for seed in range(5):
        trainer = Mixture(mostly_flat, seed)
        batches = trained(trainer, 9, n=3, max_lag=max_lag)
        assert makeup(batches) == [{"easy": 1, "hard": 2}] * 9
        assert {id.partition("/")[0] for _, id in trainer.dropped} == {"hard"}, "a drop is made up for by its own"
        for step, batch in enumerate(batches):
            assert max(step - group.version_min for group in batch) <= max_lag
        for name in ("easy", "hard"):
            indices = [group.index for batch in batches for group in batch if group.env == name]
            assert indices == sorted(indices), "each stream in order of admission"


def test_a_least_share_is_in_every_batch() -> None:
    batches = trained(Mixture(mostly_flat, least=0.6), 8, n=5, max_lag=1)
    assert makeup(batches) == [{"easy": 3, "hard": 2}] * 8


def test_mixed_waves_do_not_depend_on_who_is_fast() -> None:
    waves = []
    for seed in range(5):
        trainer = Mixture(mostly_flat, seed)
        trained(trainer, 8)
        waves.append((trainer.started, trainer.waves()))
    assert all(wave == waves[0] for wave in waves)


def test_a_mixture_is_told_environment_by_environment() -> None:
    trainer = Mixture(mostly_flat)

    async def go() -> dict[str, float]:
        async with trainer.buffer().open(DataState()) as buffer:
            await trainer.train(buffer, 4)
            return flatten(buffer.metrics())

    metrics = run(go())
    assert (metrics["env/easy/trained"], metrics["env/hard/trained"]) == (4, 8)
    assert metrics["env/easy/zero_variance"] == 0.0
    hard = metrics["env/hard/groups"]
    assert metrics["env/hard/zero_variance"] == pytest.approx(metrics["groups/dropped_zero_variance"] / hard)
    assert metrics["env/hard/reward"] == pytest.approx(((hard - metrics["groups/dropped_zero_variance"]) * 0.5
                                                        + metrics["groups/dropped_zero_variance"]) / hard)  # fmt: skip


@pytest.mark.slow
def test_a_mixture_goes_on_where_it_stood_in_the_middle_of_a_cycle_of_shares() -> None:
    """Batches of four in shares of 1 to 2 differ from each other: 1 and 3, 2 and 2, 1 and 3."""
    whole = trained(Mixture(mostly_flat), 7, n=4)
    assert len({tuple(sorted(one.items())) for one in makeup(whole)}) == 2
    trainer = Mixture(mostly_flat)

    async def first(steps: int) -> DataState:
        async with trainer.buffer(n=4).open(DataState()) as buffer:
            await trainer.train(buffer, steps)
            return buffer.data_state()

    for steps in (1, 2, 3):
        trainer = Mixture(mostly_flat)
        data_state = run(first(steps))
        assert data_state.taken == steps
        again = trained(Mixture(mostly_flat, step=steps), 7 - steps, data_state, n=4)
        assert [[group.id for group in batch] for batch in again] == [[g.id for g in batch] for batch in whole[steps:]]


def test_a_draw_that_is_played_again_takes_a_place_of_its_own_stream() -> None:
    trainer = Mixture()
    easy = trainer.buffer().runners[0]
    data_state = DataState(drawn={"easy": 4}, admitted=4, again=(Draw("easy", 3),))
    (batch,) = trained(trainer, 1, data_state, n=3)
    assert len(trainer.started) == 3, "nothing is played that has no place"
    assert makeup([batch]) == [{"easy": 1, "hard": 2}]
    assert [group.id for group in batch if group.env == "easy"] == [easy.of(Draw("easy", 3))[1]]


# A mixture of which some give nothing to train on


def from_step(step: int, trainer: Mixture, *, easy: str = "ok", hard: str = "zero_variance") -> Callable[[Task], Any]:
    """What groups are until a step: easy ones ok and hard ones flat; then as told."""

    def kind(task: Task) -> str:
        is_easy = task.id == "t1"
        if trainer.step < step:
            return "ok" if is_easy else "zero_variance"
        return easy if is_easy else hard

    return kind


def test_an_environment_without_a_use_is_left_out_and_tried_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Mixture(lambda task: "ok" if task.id == "t1" else "zero_variance")
    batches = trained(trainer, 2 * REST + 5, n=3, patience=4)
    assert makeup(batches) == [{"easy": 3}] * (2 * REST + 5)
    # Four batches' worth of its two places and one more, then one batch's worth each time.
    assert len(trainer.dropped) == 4 * 2 + 2 + 2 * 2
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().startswith(
        "hard: 9 groups in a row could not be trained on (zero_variance); the last group, hard/"
    )
    assert "the others have its share for 20 steps. Make hard easier" in warning.getMessage()


@pytest.mark.parametrize("max_lag", [0, 2])
def test_an_environment_that_becomes_useful_is_back_in_its_share(
    max_lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Mixture()
    trainer.kind = from_step(4, trainer, hard="ok")
    batches = makeup(trained(trainer, 2 * REST, n=3, patience=4, max_lag=max_lag))
    first = next(number for number, batch in enumerate(batches) if "hard" in batch)
    assert REST - 1 <= first <= REST
    assert batches[first + 1 :] == [{"easy": 1, "hard": 2}] * (2 * REST - first - 1)
    assert all(sum(batch.values()) == 3 for batch in batches)
    assert caplog.text.count("hard gives groups that can be trained on again; it has its share as before") == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_lag_is_bounded_whoever_is_left_out(max_lag: int) -> None:
    for seed in range(4):
        trainer = Mixture(seed=seed)
        trainer.kind = from_step(4, trainer, hard="ok")
        batches = trained(trainer, REST + 8, n=3, patience=3, max_lag=max_lag)
        for step, batch in enumerate(batches):
            assert max(step - group.version_min for group in batch) <= max_lag
        assert len(set(ids(batches))) == 3 * len(batches)


def test_one_that_is_left_out_is_tried_at_once_if_the_last_fails() -> None:
    """The easy ones are too easy from step 3 on, where the hard ones have become good."""
    trainer = Mixture()
    trainer.kind = from_step(3, trainer, easy="zero_variance", hard="ok")
    assert makeup(trained(trainer, 6, n=3, patience=4)) == [{"easy": 3}] * 3 + [{"hard": 3}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_run_ends_when_all_give_nothing(max_lag: int) -> None:
    trainer = Mixture()
    trainer.kind = from_step(3, trainer, easy="failed")
    with pytest.raises(Starved, match=r"nor those of the other environments\. Make (hard|easy) easier or harder"):
        trained(trainer, 9, n=3, patience=4, max_lag=max_lag)
    assert 3 <= trainer.step <= 3 + max_lag


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_what_is_being_played_when_it_is_left_out_counts_no_more(max_lag: int) -> None:
    """Else a stream with many groups in flight would be sent away anew before it was tried."""
    trainer = Mixture(lambda task: "ok" if task.id == "t1" else "zero_variance")

    async def go() -> DataState:
        async with trainer.buffer(n=3, patience=1, max_lag=max_lag).open(DataState()) as buffer:
            await trainer.train(buffer, 8)
            return buffer.data_state()

    data_state = run(go())
    assert data_state.resting == {"hard": REST}


def test_a_drop_is_made_up_for_while_a_batch_is_trained() -> None:
    (runner,) = Trainer().buffer().runners
    second, gate = runner.of(Draw("fake", 1)), asyncio.Event()

    class Gated(Trainer):
        async def run(self, task: Task, **options: Any) -> Group:
            if task.id == second[0].id:
                await gate.wait()
            return await super().run(task, **options)

    trainer = Gated(lambda task: "zero_variance" if task.id == second[0].id else "ok")

    async def go() -> None:
        async with trainer.buffer(n=1, max_lag=1).open(DataState()) as buffer:
            batch = await buffer.take()
            gate.set()
            while len(trainer.started) < 3:
                await asyncio.sleep(0)
            assert trainer.dropped == [("zero_variance", second[1])]
            batch.free_slots()

    run(go())


@pytest.mark.slow
def test_who_is_left_out_survives_a_resume() -> None:
    def kind(trainer: Mixture) -> Mixture:
        trainer.kind = from_step(REST - 3, trainer, hard="ok")
        return trainer

    steps = REST + 6
    whole = trained(kind(Mixture()), steps, n=3, patience=4)
    assert {"easy": 3} in makeup(whole)
    assert {"easy": 1, "hard": 2} in makeup(whole)

    async def first(trainer: Mixture, steps: int) -> DataState:
        async with trainer.buffer(n=3, patience=4).open(DataState()) as buffer:
            await trainer.train(buffer, steps)
            return buffer.data_state()

    for done in (1, 5, REST - 1, REST + 2):
        data_state = run(first(kind(Mixture()), done))
        version = PolicyVersion(step=done, digest="")
        state = TrainerState(step=done, version=version, tokens_seen=0, config_digest="", rng=(), data_state=data_state)
        assert TrainerState.from_json(json.loads(json.dumps(state.to_json()))) == state
        again = trained(kind(Mixture(step=done)), steps - done, data_state, n=3, patience=4)
        assert [ids([batch]) for batch in again] == [ids([batch]) for batch in whole[done:]]


# Resume


def test_on_policy_resume_between_steps_goes_on_as_if_nothing_had_been() -> None:
    whole = trained(Trainer(mixed), 6)
    trainer = Trainer(mixed)

    async def first() -> DataState:
        async with trainer.buffer().open(DataState()) as buffer:
            await trainer.train(buffer, 2)
            batch = await buffer.take()
            trainer.step += 1
            batch.free_slots()
            for _ in range(5):
                await asyncio.sleep(0)
            return batch.data_state  # as the loop saves it: the batch is trained, its slots are not free yet

    data_state = run(first())
    assert data_state.again == ()
    assert data_state.ready == ()
    assert trained(Trainer(mixed, step=3), 3, data_state) == whole[3:]


@dataclass
class Story:
    """A run that crashes and resumes at will, and what survived of it."""

    trainer: Trainer
    options: dict[str, Any]
    done: list[str] = field(default_factory=list)
    saved: tuple[DataState, int, int] = (DataState(), 0, 0)

    async def live(self, moves: Sequence[tuple[str, int]]) -> DataState:
        """One process: from what was saved until a crash or the end of the moves."""
        data_state, self.trainer.step, kept = self.saved
        del self.done[kept:]
        async with self.trainer.buffer(**self.options).open(data_state) as buffer:
            held: Batch | None = None
            for move, amount in moves:
                if move == "wait":
                    for _ in range(amount):
                        await asyncio.sleep(0)
                elif move == "take" and held is None:
                    held = await buffer.take()
                    self.done.extend(group.id for group in held.groups)
                    self.trainer.step += 1
                elif move == "release" and held is not None:
                    held.free_slots()
                    held = None
                elif move == "save":
                    self.saved = (buffer.data_state(), self.trainer.step, len(self.done))
            return buffer.data_state()


MOVES = st.lists(
    st.tuples(st.sampled_from(["wait", "take", "release", "save", "crash", "stop"]), st.integers(0, 25)), max_size=40
)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(moves=MOVES, seed=st.integers(0, 1000), max_lag=st.integers(0, 3), n=st.integers(1, 5))
def test_no_interleaving_unmixes_a_mixture(moves: list[tuple[str, int]], seed: int, max_lag: int, n: int) -> None:
    """Crash, stop and go on at will: every batch is what the timetable says of its number, and no group comes twice."""
    trainer = Mixture(mostly_flat, seed, least=0.2)
    story = Story(trainer, {"count": 60, "n": n, "max_lag": max_lag, "patience": 1000})

    async def go() -> None:
        life: list[tuple[str, int]] = []
        for move in moves:
            if move[0] in ("crash", "stop"):
                await story.live([*life, ("save", 0)] if move[0] == "stop" else life)
                life = []
            else:
                life.append(move)
        await story.live(life)

    run(go())
    timetable = MixtureSchedule(trainer.buffer().runners, n)
    assert len(set(story.done)) == len(story.done)
    for number in range(len(story.done) // n):
        batch = Counter(id.partition("/")[0] for id in story.done[number * n : (number + 1) * n])
        assert batch == Counter(dict(timetable.counts(number)))


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(moves=MOVES, seed=st.integers(0, 1000), max_lag=st.integers(0, 3), behind=st.integers(0, 2), n=st.integers(1, 3))
def test_no_interleaving_loses_or_doubles_a_task(
    moves: list[tuple[str, int]], seed: int, max_lag: int, behind: int, n: int
) -> None:
    trainer = Trainer(mixed, seed, behind=min(behind, max_lag))
    story = Story(trainer, {"count": 40, "n": n, "max_lag": max_lag, "patience": 1000})

    async def go() -> DataState:
        life: list[tuple[str, int]] = []
        for move in moves:
            if move[0] == "crash":  # back to what was saved last
                await story.live(life)
                life = []
            elif move[0] == "stop":  # saved at the very end, whatever is in flight
                await story.live([*life, ("save", 0)])
                life = []
            else:
                life.append(move)
        return await story.live(life)

    end = run(go())
    (runner,) = trainer.buffer(**story.options).runners
    order = {draw: runner.of(draw) for draw in (Draw("fake", n) for n in range(end.drawn.get("fake", 0)))}
    good = Counter(id for task, id in order.values() if mixed(task) == "ok")
    name = {draw: id for draw, (_, id) in order.items()}
    held = Counter(name[draw] for draw in (*end.again, *(draw for draw, _ in end.ready)))
    assert max(held.values(), default=0) <= 1
    kept = Counter({id: count for id, count in held.items() if id in good})
    assert Counter(story.done) + kept == good, "trained or still to come: each drawn task once"
    assert all(name[draw] == group.id for draw, group in end.ready)


# Entries and batches


DRAW = Draw("fake", 0)


@pytest.mark.parametrize(("before", "after"), [*product(EntryState, EntryState)], ids=lambda state: state.value)
def test_an_entry_takes_the_transitions_of_the_table_and_no_other(before: EntryState, after: EntryState) -> None:
    entry = Entry(3, DRAW, before)
    if after in TRANSITIONS[before]:
        entry.become(after)
        assert entry.state is after
    else:
        with pytest.raises(RuntimeError, match=f"entry 3 is {before.value} and cannot become {after.value}"):
            entry.become(after)
        assert entry.state is before


def test_runs_walk_every_transition_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the table is unused: trained, dropped as they are scored or aborted, and as stale after a resume."""
    walked: set[tuple[EntryState, EntryState]] = set()
    become = Entry.become

    def noted(entry: Entry, state: EntryState) -> None:
        before = entry.state
        become(entry, state)
        walked.add((before, state))

    monkeypatch.setattr(Entry, "become", noted)

    async def go() -> None:
        trainer = Trainer(mixed)
        async with trainer.buffer(max_lag=1).open(DataState()) as buffer:
            await trainer.train(buffer, 6)
            for _ in range(50):
                await asyncio.sleep(0)
            left = buffer.data_state()
        assert left.ready
        late = Trainer(mixed, step=trainer.step + 9)
        async with late.buffer(max_lag=1).open(left) as buffer:
            await buffer.take()
        assert "stale" in dict(late.dropped)
        aborting = Trainer(mixed)
        async with aborting.buffer(oversample=2.0, on_policy_tail="abort").open(DataState()) as buffer:
            await aborting.train(buffer, 3)

    run(go())
    assert walked == {(before, after) for before, all in TRANSITIONS.items() for after in all}


def test_a_batch_frees_its_slots_once_and_keeps_the_data_state_of_that_moment() -> None:
    async def go() -> None:
        trainer = Trainer()
        async with trainer.buffer().open(DataState()) as buffer:
            batch = await buffer.take()
            assert len(trainer.started) == 3
            assert batch.data_state == buffer.data_state()
            before = buffer.data_state()
            batch.free_slots()
            await asyncio.sleep(0)
            assert len(trainer.started) == 6, "the next wave has begun"
            assert batch.data_state == before != buffer.data_state()
            second: list[Group] = list((await buffer.take()).groups)
            batch.free_slots()
            await asyncio.sleep(0)
            assert len(trainer.started) == 6, "the slots of the second batch are its own"
            assert [group.index for group in second] == [3, 4, 5]

    run(go())
