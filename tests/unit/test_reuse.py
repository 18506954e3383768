"""What the buffer makes of groups without signal: replay, tasks drawn again, a bound on refills, a curriculum."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buffering import Kind, Mixture, Trainer, ids, makeup, mixed, run, saved, tasks, trained
from support.tiers import examples

from tandem.algorithms.curricula.base import RECENT, SolveCount, TaskHistory
from tandem.algorithms.curricula.solve_rate import SolveRate
from tandem.config.sections import Replay, Reroll
from tandem.errors import EnvError
from tandem.metrics import flatten
from tandem.rollout.replay import ReplayBuffer
from tandem.rollout.source import DataState, Draw
from tandem.rollout.task_sampler import TaskSampler
from tandem.types import Group, Task

pytestmark = pytest.mark.slow


def mostly_flat(task: Task) -> str:
    """Four in five groups have no signal, and half of those nobody solved."""
    return {0: "ok", 5: "ok", 1: "hopeless", 3: "hopeless", 6: "hopeless", 8: "hopeless"}.get(
        int(task.id[1:]) % 10, "zero_variance"
    )


def only(*good: str) -> Kind:
    return lambda task: "ok" if task.id in good else "hopeless"


async def fed(trainer: Trainer, steps: int, data_state: DataState, /, **options: Any) -> tuple[list[list[Group]], Any]:
    """Batches and what the buffer counted."""
    async with trainer.buffer(**options).open(data_state) as buffer:
        return await trainer.train(buffer, steps), flatten(buffer.metrics())


def played(trainer: Trainer, steps: int, /, **options: Any) -> tuple[list[list[Group]], dict[str, float]]:
    return run(fed(trainer, steps, DataState(), **options))


def events_of(trainer: Trainer, name: str) -> list[dict[str, Any]]:
    return [what for happened, what in trainer.happened if happened == name]


# Replay


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_groups_with_signal_take_the_place_of_flat_ones(max_lag: int) -> None:
    trainer = Trainer(mostly_flat)
    batches, counts = played(trainer, 12, max_lag=max_lag, replay=Replay(size=30, max_age=9))
    plain = Trainer(mostly_flat)
    trained(plain, 12, max_lag=max_lag)
    assert len(trainer.started) < 0.6 * len(plain.started), "fewer groups are sampled for as many steps"
    assert not any(group.zero_variance for batch in batches for group in batch)
    again = [group for batch in batches for group in batch if group.replayed]
    assert len(again) > 10
    assert counts["groups/replayed"] == len(events_of(trainer, "group_replayed")) >= len(again)
    assert counts["replay/age/max"] == max(
        step - group.version_min for step, batch in enumerate(batches) for group in batch if group.replayed
    )
    flat = {id for reason, id in trainer.dropped if reason == "zero_variance"}
    assert {one["for"] for one in events_of(trainer, "group_replayed")} <= flat


def test_a_replayed_group_is_the_group_that_was_trained_token_for_token() -> None:
    batches, _ = played(Trainer(mostly_flat), 12, replay=Replay(size=30, max_age=9))
    first: dict[str, Group] = {}
    times: Counter[str] = Counter()
    for group in (group for batch in batches for group in batch):
        assert group.replayed == times[group.id]
        times[group.id] += 1
        kept = first.setdefault(group.id, group)
        assert group.rollouts == kept.rollouts, "its sampler's logprobs and versions are its own"
    assert max(times.values()) > 1
    indices = [group.index for batch in batches for group in batch]
    assert indices == sorted(set(indices)), "it has the place of the flat group in the order of admission"


@pytest.mark.parametrize(("max_lag", "behind"), [(0, 0), (1, 0), (3, 0), (2, 1), (2, 2)])
def test_the_age_of_what_is_replayed_is_bounded_by_its_own_bound_and_reaches_it(max_lag: int, behind: int) -> None:
    worst = 0
    for seed in range(6):
        trainer = Trainer(mostly_flat, seed, behind=behind)
        batches, _ = played(trainer, 16, n=2, max_lag=max_lag, replay=Replay(size=99, max_age=5))
        for step, batch in enumerate(batches):
            for group in batch:
                age = step - group.version_min
                assert age <= (5 if group.replayed else max_lag)
                worst = max(worst, age)
        assert "stale" not in dict(trainer.dropped), "it is chosen young enough for its place"
    assert worst == 5


@pytest.mark.parametrize("max_lag", [0, 2])
def test_no_group_is_twice_in_a_batch_nor_in_flight_twice(max_lag: int) -> None:
    for seed in range(5):
        batches, _ = played(Trainer(mostly_flat, seed), 14, n=6, max_lag=max_lag, replay=Replay(size=7, max_age=9))
        assert all(len({group.id for group in batch}) == len(batch) == 6 for batch in batches)


def test_the_store_holds_the_newest_and_gives_each_its_turn() -> None:
    def group(n: int, version: int, name: str = "fake") -> tuple[Draw, Group]:
        trainer = Trainer(step=version)
        (made,), *_ = trained(trainer, 1, n=1, seed=n)
        return Draw(name, n), Group(id=f"g{n}", index=n, env=name, rollouts=made.rollouts)

    store = ReplayBuffer(Replay(size=3, max_age=4))
    for n, version in enumerate((0, 1, 2, 3)):
        store.add(*group(n, version))
    store.add(*group(9, 3, "other"))
    assert [one.group.id for one in store.stored] == ["g2", "g3", "g9"]

    def take(step: int, *taken: str) -> str | None:
        entry = store.take("fake", step=step, taken=taken)
        return entry and entry[1].id

    assert [take(4), take(4), take(4), take(4)] == ["g3", "g2", "g3", "g2"], "least often first, of these the youngest"
    assert take(4, "g3", "g2") is None
    assert take(4, "g3") == "g2"
    assert take(7) == "g3", "g2 would be five steps old"
    assert [one.group.id for one in store.stored] == ["g3", "g9"]
    assert take(8) is None
    assert store.stored == []


def test_flat_groups_failed_ones_and_replayed_ones_are_not_stored() -> None:
    trainer = Trainer(mixed)
    buffer = trainer.buffer(drop_zero_variance=False, replay=Replay(size=50, max_age=1))

    async def go() -> DataState:
        async with buffer.open(DataState()) as opened:
            await trainer.train(opened, 8)
            return opened.data_state()

    stored = run(go()).stored
    assert stored
    assert {mixed(one.group.rollouts[0].task) for one in stored} == {"ok"}
    assert len({one.group.id for one in stored}) == len(stored)
    assert all(one.group.replayed == 0 for one in stored)


# Resume


@dataclass(frozen=True)
class Way:
    """Options under which a resumed run must equal the one that went on."""

    options: dict[str, Any]
    kind: Kind = mostly_flat


WAYS = {
    "replay": Way({"replay": Replay(size=6, max_age=5)}),
    "reroll": Way({"reroll": Reroll(start_fraction=0.2, max_groups=2), "steps": 10, "count": 30}),
    "resample": Way({"max_resample_times": 1, "n": 4}),
    "curriculum": Way({"curriculum": SolveRate(), "count": 30}),
    "all": Way(
        {
            "replay": Replay(size=3, max_age=3),
            "reroll": Reroll(start_fraction=0.0, max_groups=1),
            "steps": 10,
            "max_resample_times": 1,
            "curriculum": SolveRate(sharpness=2.0),
            "count": 40,
            "n": 4,
        }
    ),
}


async def until(trainer: Trainer, steps: int, moment: int, /, **options: Any) -> DataState:
    """The data_state after some steps and a while of the next wave, as a checkpoint holds it."""
    async with trainer.buffer(**options).open(DataState()) as buffer:
        await trainer.train(buffer, steps)
        for _ in range(moment):
            await asyncio.sleep(0)
        return saved(buffer.data_state())


@pytest.mark.parametrize("way", WAYS)
def test_on_policy_a_run_that_is_ended_anywhere_goes_on_as_if_it_had_not_been(way: str) -> None:
    options, kind = WAYS[way].options, WAYS[way].kind
    whole = trained(Trainer(kind), 10, **options)
    for steps in (1, 3, 6):
        for moment in (0, 3, 7, 12, 25, 40):
            data_state = run(until(Trainer(kind), steps, moment, **options))
            rest = trained(Trainer(kind, step=steps), 10 - steps, data_state, **options)
            assert [ids([batch]) for batch in rest] == [ids([batch]) for batch in whole[steps:]], (steps, moment)
            assert [[g.replayed for g in b] for b in rest] == [[g.replayed for g in b] for b in whole[steps:]]


@pytest.mark.parametrize("way", WAYS)
def test_who_is_fast_plays_no_part_on_policy(way: str) -> None:
    options, kind = WAYS[way].options, WAYS[way].kind
    runs = [Trainer(kind, seed) for seed in range(4)]
    orders = [ids(trained(trainer, 8, **options)) for trainer in runs]
    assert orders == [orders[0]] * 4
    assert [trainer.started for trainer in runs] == [runs[0].started] * 4


def test_a_data_state_survives_json_with_all_that_is_in_it() -> None:
    data_state = run(until(Trainer(mostly_flat), 5, 6, **WAYS["all"].options))
    assert data_state.stored
    assert data_state.unsolved
    assert data_state.seen
    assert data_state.rerolled
    assert saved(data_state) == data_state
    old = {"taken": 1, "drawn": {"fake": 3}, "admitted": 3, "again": [["fake", 2]], "ready": []}
    read = msgspec.convert(old, DataState)
    assert read == DataState(taken=1, drawn={"fake": 3}, admitted=3, again=(Draw("fake", 2),))


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 1000), max_lag=st.integers(0, 3), n=st.integers(1, 4), size=st.integers(0, 6),
    times=st.none() | st.integers(0, 2), lives=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=4),
)  # fmt: skip
def test_whatever_happens_ages_are_bounded_and_batches_whole(
    seed: int, max_lag: int, n: int, size: int, times: int | None, lives: list[tuple[int, int]]
) -> None:
    options: dict[str, Any] = {
        "n": n, "max_lag": max_lag, "replay": Replay(size=size, max_age=4), "max_resample_times": times, "steps": 20,
        "reroll": Reroll(start_fraction=0.1), "curriculum": SolveRate() if seed % 2 else None, "patience": 1000,
        "count": 40,
    }  # fmt: skip
    trainer = Trainer(mostly_flat, seed)
    data_state = DataState()

    async def live(steps: int, moment: int) -> tuple[list[list[Group]], DataState]:
        async with trainer.buffer(**options).open(data_state) as buffer:
            batches = await trainer.train(buffer, steps)
            for _ in range(moment):
                await asyncio.sleep(0)
            return batches, buffer.data_state()

    fresh: Counter[str] = Counter()
    for steps, moment in lives:
        first = trainer.step
        batches, data_state = run(live(steps, moment))
        for step, batch in enumerate(batches, first):
            assert len(batch) == n == len({group.id for group in batch})
            assert all(step - g.version_min <= (4 if g.replayed else max_lag) for g in batch)
            fresh.update(group.id for group in batch if not group.replayed)
    assert max(fresh.values(), default=1) == 1, "trained once, but for what is said to be replayed"


# Tasks that nobody solved


def test_tasks_that_nobody_solved_come_again_late_and_so_many_at_a_time() -> None:
    trainer = Trainer(mostly_flat)
    batches, counts = played(trainer, 10, n=2, steps=10, count=200, reroll=Reroll(start_fraction=0.5, max_groups=3))
    again = [id for id in trainer.started if "." in id]
    events = [what["group"] for what in events_of(trainer, "group_rerolled")]
    assert counts["groups/rerolled"] == len(events)
    assert events[: len(again)] == again
    assert len(events) - len(again) <= 2, "those of the step that was not begun"
    assert len(again) > 10
    assert all(mostly_flat(Task(id=id.partition("@")[0], env="", prompt=(), answer="")) == "hopeless" for id in again)
    assert len(set(trainer.started)) == len(trainer.started), "each time with random streams of its own"
    first = trainer.started.index(again[0])
    hopeless = [id for id in trainer.started[:first] if int(id.partition("@")[0][1:]) % 10 in (1, 3, 6, 8)]
    assert [id.partition(".")[0] for id in again] == hopeless[: len(again)], "those that wait longest come first"
    # In which step each was played: at most three in one, none in the first five.
    per_step = Counter(step for id, step in trainer.when if "." in id)
    assert max(per_step.values()) == 3
    assert min(per_step) == 5
    assert len(batches) == 10


def test_so_many_for_one_batch_also_where_several_are_sampled_at_once() -> None:
    trainer = Trainer(mostly_flat)
    played(trainer, 12, n=2, steps=12, count=200, max_lag=3, reroll=Reroll(start_fraction=0.0, max_groups=1))
    assert 8 < len(events_of(trainer, "group_rerolled")) <= 12 + 4, "twelve batches, and those begun at the end"


def test_a_task_that_somebody_solved_since_does_not_come_again() -> None:
    trainer = Trainer(seed=1)
    trainer.kind = lambda task: "hopeless" if trainer.step < 1 and task.id != "t0" else "ok"
    played(trainer, 12, n=1, count=4, steps=12, reroll=Reroll(start_fraction=0.75, max_groups=4))
    assert "zero_variance" in dict(trainer.dropped), "somebody waits"
    assert not [id for id in trainer.started if "." in id], "a later epoch solved them before it was time"


def test_one_that_fails_again_waits_for_its_turn_again() -> None:
    trainer = Trainer(only("t0"))
    played(trainer, 12, n=1, count=3, steps=12, patience=1000, reroll=Reroll(start_fraction=0.0, max_groups=1))
    counts = Counter(id.rpartition(".")[2] for id in trainer.started if "." in id)
    assert max(map(int, counts)) > 1, "a second time, counted as such"


# The bound on refills


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_refills_are_bounded_and_then_a_step_takes_what_there_is(times: int, max_lag: int) -> None:
    trainer = Trainer(lambda task: "zero_variance")
    batches, counts = played(trainer, 70, max_lag=max_lag, max_resample_times=times)
    assert [len(batch) for batch in batches] == [3] * 70, "no step is empty, and nothing starves"
    for moment in range(1, 71):
        began = sum(step < moment for _, step in trainer.when)
        assert began <= 3 * (1 + times) * (moment + max_lag)
    assert counts["groups/kept_zero_variance"] == len(events_of(trainer, "zero_variance_group_kept")) >= 210
    if not max_lag:
        assert len(trainer.started) == 210 * (1 + times)
        assert counts["groups/kept_zero_variance"] == 210


def test_flat_groups_are_kept_only_where_the_bound_is_reached() -> None:
    trainer = Trainer(mostly_flat)
    batches, counts = played(trainer, 30, max_resample_times=1)
    flat = [sum(group.zero_variance for group in batch) for batch in batches]
    assert counts["groups/kept_zero_variance"] == sum(flat)
    assert 0 < sum(flat) < 90
    for step, kept in enumerate(flat):
        began = sum(when == step for _, when in trainer.when)
        assert began == 6 if kept else began <= 6, "a batch with a flat group was refilled as often as allowed"


def test_a_stored_group_is_better_than_a_refill_or_a_flat_one() -> None:
    trainer = Trainer()
    trainer.kind = lambda task: "ok" if trainer.step == 0 else "zero_variance"
    batches, counts = played(trainer, 4, max_resample_times=2, replay=Replay(size=9, max_age=2))
    assert [[group.replayed for group in batch] for batch in batches] == [[0] * 3, [1] * 3, [2] * 3, [0] * 3]
    assert counts["groups/kept_zero_variance"] == 3
    assert len(trainer.started) == 3 * 3 + 3 * 3


# The curriculum


def shares(trainer: Trainer, good: Callable[[str], bool]) -> float:
    return sum(good(id.partition("@")[0]) for id in trainer.started) / len(trainer.started)


def test_tasks_near_one_half_are_drawn_more_often() -> None:
    """Of 50 tasks ten have signal. Once all were tried, they are most of what is played."""

    def useful(id: str) -> bool:
        return int(id[1:]) % 5 == 0

    trainer = Trainer(lambda task: "ok" if useful(task.id) else "zero_variance" if int(task.id[1:]) % 2 else "hopeless")
    plain, guided = Trainer(trainer.kind), trainer
    trained(plain, 120, count=50, patience=1000)
    trained(guided, 120, count=50, curriculum=SolveRate())
    assert shares(plain, useful) == pytest.approx(0.2, abs=0.02)
    assert len({id.partition("@")[0] for id in guided.started}) == 50, "each was tried"
    guided.started = guided.started[120:]
    # Weights are 1 each for ten and 0.05 each for forty: 10 / 12, drawn without those that are in play.
    assert shares(guided, useful) == pytest.approx(10 / 12, abs=0.06)


def test_a_task_in_play_is_not_drawn_unless_there_is_no_other() -> None:
    trainer = Trainer(slowest=30)
    trained(trainer, 30, count=12, n=3, max_lag=2, curriculum=SolveRate())
    assert all(len({id.partition("@")[0] for id in group}) == len(group) for group in trainer.company)
    few = Trainer()
    batches = trained(few, 5, count=2, n=3, curriculum=SolveRate())
    assert [len({group.id for group in batch}) for batch in batches] == [3] * 5


class Named:
    """Weights 0, 1/3, 2/3 and 1 by the task's name."""

    def weight(self, task: Task, seen: TaskHistory) -> float:
        return int(task.id[1:]) % 4 / 3


def drawn(curriculum: Any, draws: int, *, seed: int = 7) -> list[int]:
    """Tasks of 40, each over before the next one is drawn."""
    runner = Trainer().runner("fake", 40, seed=seed)
    sampler = TaskSampler([runner], 1, Reroll(), curriculum, on_reroll=lambda _: None)
    order = []
    for _ in range(draws):
        draw = sampler.next("fake", 0)
        sampler.over(draw)
        order.append(runner.place(draw))
    return order


def test_draws_follow_the_weights_and_the_seed() -> None:
    order = drawn(Named(), 2000, seed=3)
    assert order == drawn(Named(), 2000, seed=3) != drawn(Named(), 2000, seed=4)
    shares = [sum(place % 4 == rest for place in order) / len(order) for rest in range(4)]
    assert shares == pytest.approx([0, 1 / 6, 1 / 3, 1 / 2], abs=0.04)


def test_with_equal_weights_epochs_are_epochs_and_each_in_another_order() -> None:
    class Equal:
        def weight(self, task: Task, seen: TaskHistory) -> float:
            return 1.0

    order = drawn(Equal(), 40 * 8)
    epochs = [order[at : at + 40] for at in range(0, 40 * 8, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 8
    assert len({tuple(epoch) for epoch in epochs}) == 8


def test_tasks_that_all_have_no_weight_are_drawn_all_the_same() -> None:
    class Never:
        def weight(self, task: Task, seen: TaskHistory) -> float:
            return 0.0

    assert len(set(drawn(Never(), 20))) > 1


@pytest.mark.parametrize("wrong", [math.nan, -1.0, 1.5, None], ids=str)
def test_a_weight_that_is_none_is_refused_by_name(wrong: Any) -> None:
    class Wrong:
        def weight(self, task: Task, seen: TaskHistory) -> float:
            return wrong if task.id == "t2" else 1.0

    with pytest.raises(EnvError, match=f"the curriculum gave task t2 the weight {wrong}; it must be"):
        trained(Trainer(), 1, count=5, curriculum=Wrong())


def test_a_curriculum_that_fails_on_what_was_played_reaches_whoever_takes() -> None:
    """A group that is dropped asks for its task's next weight in a task of the buffer, which nobody awaits."""

    class Fragile:
        def weight(self, task: Task, seen: TaskHistory) -> float:
            return 1.0 if not seen.played else float("nan")

    with pytest.raises(EnvError, match="the weight nan; it must be"):
        trained(Trainer(lambda task: "zero_variance"), 1, count=5, curriculum=Fragile())


@pytest.mark.parametrize(
    ("plays", "weight"),
    [
        ((), 1.0),
        ((SolveCount(0, 0),), 1.0),
        ((SolveCount(0, 8),), 0.1),
        ((SolveCount(8, 8),), 0.1),
        ((SolveCount(4, 8),), 1.0),
        ((SolveCount(0, 8), SolveCount(2, 8)), (4 * 0.125 * 0.875) ** 2),
    ],
)
def test_solve_rate_weighs_by_the_spread_of_answers(plays: Sequence[SolveCount], weight: float) -> None:
    part = SolveRate(sharpness=2.0, floor=0.1)
    seen = TaskHistory(len(plays), tuple(plays))
    assert part.weight(tasks(1)[0], seen) == pytest.approx(weight)


def test_only_recent_plays_count() -> None:
    seen = TaskHistory()
    for _ in range(RECENT):
        seen = seen.after(SolveCount(8, 8))
    for _ in range(RECENT):
        seen = seen.after(SolveCount(0, 8))
    assert (seen.rate, seen.played) == (0.0, 2 * RECENT)


def test_reused_groups_keep_the_mixture_of_streams() -> None:
    """A stored group takes the place of one of its own stream alone."""
    trainer = Mixture(lambda task: "ok" if task.id in ("t1", "t09") else "zero_variance")
    batches, _ = run(fed(trainer, 12, DataState(), replay=Replay(size=20, max_age=6)))
    assert any(group.replayed for batch in batches for group in batch)
    assert makeup(batches) == [{"easy": 1, "hard": 2}] * 12
