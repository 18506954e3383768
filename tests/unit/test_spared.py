"""What a step does not compute: samples without an advantage, and the same answer twice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rollouts import make_group, make_rollout
from support.tiny_policy import live_policy
from support.whole_steps import Keep
from torch import Tensor

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.base import Loss, MicroBatch
from tandem.algorithms.losses.grpo import Grpo
from tandem.config.loading import from_options, only_by_advantage
from tandem.config.registry import find, names
from tandem.metrics import flatten
from tandem.model.policy import Policy
from tandem.optimizers.adamw import AdamW
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.step import LocalWork, Objective, Step, StepStats
from tandem.types import Group, Sampling


@pytest.fixture(scope="module")
def step(tiny_model: Path) -> Iterator[Step]:
    with live_policy(tiny_model) as policy:
        work = LocalWork(policy=policy, objective=Objective(loss=Grpo()), stepper=Keep(), sampling=Sampling())
        yield Step(work=work, optimizer=AdamW(), steps=1)


def packed(policy: Policy, groups: Sequence[Group], **options: Any) -> StepBatch:
    arguments = {"reduction": "token", "max_tokens": 16, "budget": 10_000, "mask_truncated": False, **options}
    return Packer(advantage=DrGrpo(), device=policy.device, **arguments)(groups, version=0)


def gradient(step: Step, batch: StepBatch) -> tuple[Tensor, StepStats]:
    """All of it, in float64."""
    keep = step.work.stepper
    assert isinstance(keep, Keep)
    keep.total.clear()
    stats = asyncio.run(step.forward_backward(batch))
    assert len(keep.total) == len(list(step.work.policy.model.parameters()))
    gradients = [keep.total[id(p)].flatten() for p in step.work.policy.model.parameters()]
    return torch.cat(gradients), stats


def group(name: str, *answers: tuple[Sequence[int], float], prompt: int = 24) -> Group:
    opening = [(7 * i) % 50 for i in range(prompt)]
    rollouts = [
        make_rollout(
            f"{name}@0/{i}", [(opening, tokens, [-1.0 - 0.3 * i - 0.1 * n for n in range(len(tokens))])], reward
        )
        for i, (tokens, reward) in enumerate(answers)
    ]
    return make_group(f"{name}@0", rollouts)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


LONG, SHORT = [11, 12, 13, 14, 15] * 6, [21, 22, 23]


@pytest.mark.parametrize("answer", [LONG, SHORT, [4]], ids=["long", "short", "one token"])
def test_the_same_answer_twice_is_computed_once_and_counts_twice(step: Step, answer: list[int]) -> None:
    """However short: the sum of what each would give by itself, whatever its sampler's logprobs and its reward are."""
    twice = group("a", (answer, 1.0), ([31, 32], 0.0), (answer, 1.0), (answer, 0.4))
    once = group("a", (answer, 1.0), ([31, 32], 0.0))
    together = packed(step.work.policy, [twice])
    (micro,) = together.micro
    assert len(micro.tokens_T) == len(packed(step.work.policy, [once]).micro[0].tokens_T), "nothing more in any layer"
    assert micro.plan == packed(step.work.policy, [once]).micro[0].plan, "nor another segment for attention"
    assert flatten(together.metrics)["samples/duplicate"] == 2
    apart = packed(step.work.policy, [twice], budget=1)
    assert len(apart.micro) == 4
    whole, stats = gradient(step, together)
    pieces, other = gradient(step, apart)
    assert distance(whole, pieces) <= 1e-6
    assert distance(whole, gradient(step, packed(step.work.policy, [once]))[0]) > 0.01, "each of them counts"
    assert stats.logprobs.keys() == other.logprobs.keys()
    assert stats.logprobs["a@0/0"] == stats.logprobs["a@0/2"] == stats.logprobs["a@0/3"]


def test_answers_alike_up_to_their_last_token_are_computed_once_and_are_no_duplicates(step: Step) -> None:
    batch = packed(step.work.policy, [group("a", ([1, 2, 3], 1.0), ([1, 2, 4], 0.0))])
    assert len(batch.micro[0].tokens_T) == 24 + 2
    assert flatten(batch.metrics)["samples/duplicate"] == 0


def test_the_same_answer_to_another_task_is_another() -> None:
    batch = packed_on_cpu([group("a", (SHORT, 1.0), (LONG, 0.0)), group("b", (SHORT, 1.0), (LONG, 0.0))])
    assert flatten(batch.metrics)["samples/duplicate"] == 0
    assert len(batch.micro[0].tokens_T) == 2 * (24 + len(SHORT) + len(LONG) - 2)


def packed_on_cpu(groups: Sequence[Group], **options: Any) -> StepBatch:
    arguments = {"reduction": "token", "max_tokens": 16, "budget": 10_000, "mask_truncated": False, **options}
    return Packer(advantage=DrGrpo(), device=torch.device("cpu"), **arguments)(groups, version=0)


GROUPS = (
    group("mixed", ([1, 2], 1.0), ([3, 4, 5], 0.5), ([6], 0.0), ([7, 8], 0.5)),
    group("flat", ([1, 2, 3], 1.0), ([4], 1.0)),
)


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_a_sample_without_advantage_is_not_computed_and_all_else_stays(step: Step, reduction: str) -> None:
    every = packed(step.work.policy, GROUPS, reduction=reduction)
    some = packed(step.work.policy, GROUPS, reduction=reduction, skip_zero=True)
    assert flatten(some.metrics)["samples/without_advantage"] == 4
    assert flatten(every.metrics)["samples/without_advantage"] == 0
    assert sorted(rollout for micro in some.micro for rollout, _ in micro.places) == ["mixed@0/0", "mixed@0/2"]
    assert flatten(some.metrics)["tokens/computed"] < flatten(every.metrics)["tokens/computed"]
    assert some.num_loss_tokens == every.num_loss_tokens
    assert some.advantages == every.advantages
    computed, stats = gradient(step, some)
    expected, _ = gradient(step, every)
    assert float(expected.norm()) > 0
    assert distance(computed, expected) <= 1e-6
    assert stats.logprobs.keys() == {"mixed@0/0", "mixed@0/2"}


def test_clip_fractions_are_of_all_trained_tokens(step: Step) -> None:
    """As numpy counts them, from every token's ratio, sign and bounds; the same whether all samples are computed."""
    every = packed(step.work.policy, GROUPS)
    _, stats = gradient(step, every)
    (low, high), rollouts = (0.8, 1.28), {r.id: r for one in GROUPS for r in one.rollouts}
    ratios, advantages = [], []
    for name, logprobs in stats.logprobs.items():
        (turn,) = rollouts[name].turns
        ratios.append(np.exp(np.array(logprobs) - np.array(turn.completion.logprobs)))
        advantages.append(np.full(len(logprobs), every.advantages[name]))
    r, a = np.concatenate(ratios), np.concatenate(advantages)
    assert (len(r), int((a == 0).sum())) == (12, 9)
    below, above = (r < low) & (a < 0), (r > high) & (a > 0) | (r > 3.0) & (a < 0)
    assert below.sum() + above.sum() > 0, "something is clipped"
    wanted = {"": (below | above).mean(), "/low": below.mean(), "/high": above.mean()}
    for batch in (every, packed(step.work.policy, GROUPS, skip_zero=True), packed(step.work.policy, GROUPS, budget=1)):
        metrics = flatten(gradient(step, batch)[1].metrics)
        assert {end: metrics[f"clip_fraction{end}"] for end in wanted} == pytest.approx(wanted)


def test_a_step_without_any_advantage_has_a_gradient_of_zeros(step: Step) -> None:
    """No gradient at all would leave the optimizer's averages where they are."""
    batch = packed(step.work.policy, [GROUPS[1], group("other", (LONG, 0.0), (SHORT, 0.0))], skip_zero=True)
    assert [micro.places for micro in batch.micro] == [(("flat@0/1", 1),)], "the shortest sample"
    computed, _ = gradient(step, batch)
    assert bool((computed == 0).all())


def test_an_advantage_that_the_environment_gave_one_token_is_one(step: Step) -> None:
    rewarded = replace(GROUPS[1].rollouts[0], advantages=(0.0, 0.0, 0.5))
    mixed = replace(GROUPS[1], rollouts=(rewarded, GROUPS[1].rollouts[1]))
    batch = packed(step.work.policy, [mixed], skip_zero=True)
    assert [micro.places for micro in batch.micro] == [(("flat@0/0", 3),)]


@pytest.mark.parametrize("kind", names("losses"))
def test_a_loss_that_says_so_has_no_gradient_without_advantage(kind: str) -> None:
    """Whatever the ratio, and beside a sample that has one."""
    loss: Loss = find("losses", kind)()
    assert getattr(loss, "by_advantage", False), "each of the tree's is of this kind"
    logprobs = torch.linspace(-6.0, -0.1, 12).requires_grad_()
    micro = MicroBatch(
        behavior_logprobs_N=torch.linspace(-0.1, -6.0, 12),
        advantages_N=torch.tensor([0.0] * 6 + [1.0, -1.0] * 3),
        sample_N=torch.tensor([0] * 4 + [1] * 2 + [2] * 6),
        num_samples=3,
    )
    losses = loss(logprobs, micro).loss_N
    assert bool((losses[:6] == 0).all())
    losses.sum().backward()
    assert logprobs.grad is not None
    assert bool((logprobs.grad[:6] == 0).all())
    assert math.isfinite(float(logprobs.grad.sum()))


@pytest.mark.parametrize(
    ("options", "skips"),
    [
        ({}, True),
        ({"loss": "gspo"}, True),
        ({"reference": {"kind": "start"}}, False),
        ({"loss": "test_spared_parts:Bonus"}, False),
    ],
    ids=["grpo", "gspo", "a penalty", "a loss that does not say so"],
)
def test_samples_are_skipped_only_where_nothing_is_added_to_the_loss(
    options: dict[str, Any], skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_spared_parts.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Bonus:\n    reduction: str = 'token'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = {"model": "m", "steps": 1, "env": "arithmetic", **options}
    assert only_by_advantage(from_options(recipe, (), Path("x")).config) is skips
