"""Evaluation: pass@k, its intervals, and what counts as wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiers import long_but

from tandem.config.loading import from_options
from tandem.rollout.measure import Solved, interval, measure, pass_at
from tandem.rollout.task_sampler import EnvRunner
from tandem.trainer.evaluate import Evaluator
from tandem.types import Completion, Group, Message, Rollout, Sampling, Task, Turn


def test_pass_at_equals_counting_every_choice() -> None:
    for n in range(1, 7):
        for solved in range(n + 1):
            answers = [True] * solved + [False] * (n - solved)
            for k in range(1, n + 1):
                choices = list(itertools.combinations(answers, k))
                expected = sum(any(choice) for choice in choices) / len(choices)
                assert pass_at(solved, n, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(300):
        # Tasks differ in difficulty, four answers each: the mean over all tasks there are is 0.4.
        per_task = []
        for _ in range(40):
            chance = draw.choice((0.1, 0.3, 0.8))
            per_task.append(sum(draw.random() < chance for _ in range(4)) / 4)
        low, high = interval(per_task, resamples=300)
        assert low <= math.fsum(per_task) / 40 <= high
        covered += low <= 0.4 <= high
    assert 0.90 <= covered / 300 <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("share", long_but([0.005, 0.02, 0.99], 0.005))
def test_interval_covers_a_share_that_is_seldom_seen(share: float) -> None:
    """The bootstrap alone covers 0.5 % of 200 tasks, two answers each, in 87 of 100 evaluations."""
    draw = random.Random(2)
    covered = 0
    for _ in range(300):
        low, high = interval([sum(draw.random() < share for _ in range(2)) / 2 for _ in range(200)], resamples=300)
        covered += low <= share <= high
    assert covered / 300 >= 0.94


def test_nothing_right_is_no_proof_of_nothing() -> None:
    """Wilson's bound: z^2 / (n + z^2) of n answers of which none is right."""
    assert interval([0.0] * 200) == (0.0, pytest.approx(1.96**2 / (200 + 1.96**2)))
    assert interval([1.0] * 49) == (pytest.approx(49 / (49 + 1.96**2)), 1.0)
    seldom = [0.5] * 8 + [0.0] * 192  # GSM8K and a model of 135M: 2 % at one evaluation, none at the next
    assert interval(seldom)[0] < interval([0.0] * 200)[1], "not a fall"
    middle = [1.0] * 30 + [0.0] * 30
    assert interval(middle)[1] - interval(middle)[0] < 0.26, "the bootstrap's where it is enough"


def rollout(task: Task, id: str, kind: str) -> Rollout:
    """right, wrong, cut (right, but cut by the limit), late (failed after an answer) or dead (failed without one)."""
    tokens = {"cut": 8, "dead": 0}.get(kind, 4)
    completion = Completion(
        tokens=(1,) * tokens,
        logprobs=(-1.0,) * tokens,
        versions=(0,) * tokens,
        finish="length" if kind == "cut" else "stop",
    )
    failed = kind in ("late", "dead")
    mark = float(kind in ("right", "cut"))
    return Rollout(
        id=id,
        task=task,
        turns=(Turn(prompt=(0,), completion=completion, temperature=1.0),) if tokens else (),
        messages=(*task.prompt, Message(role="assistant", content=kind)),
        status="error" if failed else "ok",
        error="it broke" if failed else "",
        rewards={} if failed else {"number": mark, "length": 0.5},
        reward=None if failed else mark + 0.5,
    )


class Player:
    """A ``Worker`` whose answers are given."""

    def __init__(self, answers: dict[str, tuple[str, ...]]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, int, Sampling]] = []

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        self.requests.append((id, size, sampling))
        made = tuple(rollout(task, f"{id}/{n}", kind) for n, kind in enumerate(self.answers[task.id]))
        return Group(id=id, index=index, env="sums", rollouts=made)


def runner(name: str, player: Player, label: str = "") -> EnvRunner:
    return EnvRunner(
        name=name,
        label=label,
        group_runner=player,  # type: ignore[arg-type]
        tasks=[
            Task(id=id, env="sums", prompt=(Message(role="user", content=f"{id}?"),), answer="7")
            for id in player.answers
        ],
        solved=Solved(reward="number", full_marks=1.0),
        seed=0,
    )


def evaluator(player: Player, samples: int) -> tuple[Evaluator, list[Any]]:
    """Of every fifth step."""
    records: list[Any] = []
    evaluate = {"samples": samples, "temperature": 0.5, "every": 5}
    options = {"model": "m", "steps": 100, "env": "arithmetic", "evaluate": evaluate}
    telemetry: Any = SimpleNamespace(
        evaluation=records.append,
        evaluated=lambda step: False,
    )
    runners = [runner("sums", player)] if player.answers else []
    return Evaluator(from_options(options, [], Path("r.yaml")).config, runners, telemetry), records


ANSWERS = {
    "a": ("right", "right", "right", "right"),
    "b": ("wrong", "cut", "wrong", "wrong"),
    "c": ("late", "dead", "right", "wrong"),
    "d": ("dead", "dead", "dead", "dead"),
}


def test_summary_counts_failed_answers_as_wrong() -> None:
    player = Player(ANSWERS)
    record = asyncio.run(evaluator(player, 4)[0](12))
    assert record["step"] == 12
    assert record["env"] == "sums"
    assert record["tasks"] == 4
    assert record["samples"] == 4
    assert record["mean"] == pytest.approx((4 + 1 + 1 + 0) / 16)
    assert record["pass_at"] == {
        "1": pytest.approx(6 / 16),
        "2": pytest.approx((1 + 0.5 + 0.5 + 0) / 4),
        "4": pytest.approx(3 / 4),
    }
    assert record["failed"] == 6
    answered = [kind for kinds in ANSWERS.values() for kind in kinds if kind != "dead"]
    assert record["truncated"] == pytest.approx(1 / len(answered))
    assert record["tokens"] == pytest.approx((4 * (len(answered) - 1) + 8) / len(answered))
    assert record["mean_ci"] == list(interval([1.0, 0.25, 0.25, 0.0]))
    assert record["pass_ci"] == list(interval([1.0, 1.0, 1.0, 0.0]))
    row = {"task": "b", "prompt": "b?", "answer": "7", "text": "wrong", "reward": 0.5}
    assert record["rollouts"][1] == row | {"truncated": False, "error": ""}
    assert record["rollouts"][2]["error"] == "it broke"


def test_several_environments_are_told_together_and_each_by_itself() -> None:
    easy, hard = Player({"a": ("right",) * 4}), Player({name: ANSWERS[name] for name in ("a", "b", "d")})
    made, _ = evaluator(easy, 4)
    one, other = runner("easy", easy, "easy/"), runner("hard", hard, "hard/")
    other.solved = Solved(reward="length", full_marks=0.5)
    record = asyncio.run(dataclasses.replace(made, runners=[one, other])(3))
    assert (record["env"], record["tasks"]) == ("easy+hard", 4)
    assert {name: of["tasks"] for name, of in record["envs"].items()} == {"easy": 1, "hard": 3}
    assert record["envs"]["easy"]["mean"] == 1.0
    assert record["envs"]["hard"]["mean"] == pytest.approx((4 + 4 + 0) / 12), "by its own first reward"
    assert record["mean"] == pytest.approx((4 + 4 + 4 + 0) / 16), "over all tasks"
    assert record["envs"]["hard"]["mean_ci"] == list(interval([1.0, 1.0, 0.0]))
    assert [id for id, *_ in hard.requests] == ["hard/a@eval", "hard/b@eval", "hard/d@eval"]
    assert [row["task"] for row in record["rollouts"]] == ["easy/a", "hard/a", "hard/b", "hard/d"]


def test_every_evaluation_asks_the_same() -> None:
    """The same names of groups draw the same random streams, whatever was trained in between."""
    player = Player(ANSWERS)
    made, _ = evaluator(player, 4)
    asyncio.run(made(0))
    first, player.requests = player.requests, []
    asyncio.run(made(9))
    assert player.requests == first
    assert [id for id, *_ in first] == [f"{id}@eval" for id in ANSWERS]
    assert {(size, sampling.temperature) for _, size, sampling in first} == {(4, 0.5)}


TRAINING = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.25, "min_tokens": 4, "max_tokens": 99, "stop": ["x"], "stop_token_ids": [7],
    "regex": "[a-z]+",
}  # fmt: skip


@pytest.mark.parametrize("overrides", [{}, {"temperature": 0}, {"top_p": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_answers_are_sampled_as_those_that_are_trained_on_but_for_what_is_said(overrides: dict[str, float]) -> None:
    assert set(TRAINING) == {f.name for f in dataclasses.fields(Sampling)}, "an option of sampling is not looked at"
    options = {"model": "m", "steps": 1, "env": "arithmetic", "sampling": TRAINING, "evaluate": overrides}
    options |= {"engine": "vllm", "old_logprobs": "recomputed"}  # which a regex needs
    config = from_options(options, [], Path("r.yaml")).config
    assert all(getattr(config.sampling, f.name) != f.default for f in dataclasses.fields(Sampling))
    made = Evaluator(config, [])
    assert made.sampling == dataclasses.replace(config.sampling, **overrides)


def test_nothing_is_done_unless_due() -> None:
    player = Player(ANSWERS)
    made, records = evaluator(player, 4)
    asyncio.run(made.maybe(4))
    assert records == []
    assert player.requests == []
    asyncio.run(made.maybe(5))
    assert [record["step"] for record in records] == [5]
    empty, records = evaluator(Player({}), 4)
    asyncio.run(empty.maybe(5))
    assert records == []


def test_measure_tells_scored_from_failed() -> None:
    player = Player(ANSWERS)
    groups = [
        asyncio.run(player.run(Task(id=id, env="e", prompt=(), answer=""), id=id, index=0, size=4, sampling=Sampling()))
        for id in ANSWERS
    ]
    scalars = {
        name: number
        for metric, value in measure(groups, Solved(reward="number", full_marks=1.0)).items()
        for name, number in value.scalars(metric).items()
    }
    assert scalars["rollouts/failed"] == 6
    assert scalars["accuracy"] == pytest.approx(6 / 10), "of those that could be scored"
    assert scalars["reward/number"] == pytest.approx(6 / 10)
    assert scalars["reward/length"] == pytest.approx(0.5)
    assert scalars["reward"] == pytest.approx(1.1)
    assert scalars["tokens/generated"] == 4 * 10 + 8
    assert scalars["rollouts/truncated"] == pytest.approx(1 / 10)
    spreads = [stdev(rewards) for group in groups if len(rewards := [r.reward or 0.0 for r in group.scored]) >= 2]
    assert scalars["reward/group_std"] == pytest.approx(fmean(spreads))
    assert scalars["groups/zero_variance"] == pytest.approx(sum(spread == 0 for spread in spreads) / len(spreads))
    assert scalars["length/ended/max"] <= scalars["length/max"]


def test_measure_tells_environments_apart() -> None:
    def group(env: str, kinds: tuple[str, ...], **metrics: float) -> Group:
        task = Task(id="t", env="e", prompt=(), answer="")
        made = [dataclasses.replace(rollout(task, f"t/{n}", kind), metrics=metrics) for n, kind in enumerate(kinds)]
        return Group(id="t@0", index=0, env=env, rollouts=tuple(made))

    groups = [
        group("a", ("right", "wrong"), calls=2.0),
        group("a", ("wrong", "wrong"), calls=4.0),
        group("a", ("dead", "right")),
        group("b", ("right", "right"), calls=9.0),
    ]
    values = measure(groups, Solved(reward="number", full_marks=1.0))
    scalars = {name: number for metric, value in values.items() for name, number in value.scalars(metric).items()}
    per_env = {name: number for name, number in scalars.items() if name.startswith("env/")}
    assert per_env == {
        "env/a/reward": pytest.approx((1.5 + 0.5 + 0.5 + 0.5 + 1.5) / 5),
        "env/a/accuracy": pytest.approx(2 / 5),
        "env/a/groups": 3.0,
        "env/a/zero_variance": pytest.approx(1 / 2),
        "env/a/calls": 3.0,
        "env/b/reward": 1.5,
        "env/b/accuracy": 1.0,
        "env/b/groups": 1.0,
        "env/b/zero_variance": 1.0,
        "env/b/calls": 9.0,
    }
