"""Whole steps with every loss, with corrections, a reference and several updates, on a tiny model."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rollouts import make_group, make_rollout
from support.tiny_policy import live_policy, logprobs_of, reference
from torch import Tensor

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.corrections.geometric import Geometric
from tandem.algorithms.corrections.opsm import Opsm
from tandem.algorithms.corrections.sequence import Sequence as SequenceWeight
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses.cispo import Cispo
from tandem.algorithms.losses.grpo import Grpo
from tandem.algorithms.losses.gspo import Gspo
from tandem.algorithms.losses.reinforce import Reinforce
from tandem.algorithms.losses.sapo import Sapo
from tandem.algorithms.references.average import Average
from tandem.algorithms.references.base import ReferenceWeights
from tandem.algorithms.references.start import Start
from tandem.metrics import flatten
from tandem.model.policy import Policy
from tandem.optimizers.adamw import AdamW
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.ranks.work import LeadWork, RankWork, handlers
from tandem.trainer.step import LocalWork, Objective, OldLogprobs, Step, StepStats
from tandem.types import Group, Sampling

SAMPLING = Sampling(temperature=0.8, max_tokens=16)
TOKENS: Objective = Objective(loss=Grpo())
OBJECTIVES = {
    "gspo": Objective(loss=Gspo(clip_low=0.1, clip_high=0.1)),
    "gspo-token": Objective(loss=Gspo(clip_low=0.2, clip_high=0.2, reduction="token")),
    "cispo": Objective(loss=Cispo(cap=1.5)),
    "sapo": Objective(loss=Sapo()),
    "reinforce": Objective(loss=Reinforce(reduction="constant")),
    "decoupled": Objective(
        loss=Grpo(),
        recomputed=True,
        corrections=(TokenCorrection(high=1.3), SequenceWeight(low=0.2, high=4.0), Geometric(low=0.7, high=1.4)),
    ),
    "direct": Objective(
        loss=Grpo(), corrections=(TokenCorrection(beyond="mask", low=0.6, high=1.6), Opsm(threshold=0.05))
    ),
    "reference": Objective(loss=Grpo(), reference=Start(beta=0.3)),
    "everything": Objective(
        loss=Gspo(clip_low=0.05, clip_high=0.05),
        recomputed=True,
        corrections=(TokenCorrection(high=1.2), Opsm(threshold=0.1)),
        reference=Start(beta=0.5, estimator="k1"),
    ),
}


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[Group]:
    """Two groups with answers of many lengths, one of two turns; sampled by a policy a little different."""
    exact, draw = reference(tiny_model, torch.float64), np.random.default_rng(0)

    def exchange(prompt: list[int], length: int) -> tuple[list[int], list[int], list[float]]:
        tokens = draw.integers(0, 256, length).tolist()
        with torch.no_grad():
            now = logprobs_of(exact, prompt, tokens, SAMPLING).numpy()
        return prompt, tokens, (now + 0.4 * draw.normal(size=length)).tolist()

    made = []
    for g, (prompt_len, lengths) in enumerate(((9, (8, 3, 12, 1)), (17, (5, 16, 1)))):
        prompt = draw.integers(0, 256, prompt_len).tolist()
        rollouts = []
        for s, length in enumerate(lengths):
            turns = [exchange(prompt, length)]
            if (g, s) == (0, 1):
                turns.append(exchange([*prompt, *turns[0][1], 7, 8, 9], 6))
            rollouts.append(make_rollout(f"t{g}@0/{s}", turns, float(s % 3), temperature=SAMPLING.temperature))
        made.append(make_group(f"t{g}@0", rollouts, index=g))
    return made


def changing(policy: Policy, trainable: Trainable) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, policy.model.get_parameter(name)) for name, _ in trainable.source(policy.model)]


def packed(groups: Sequence[Group], objective: Objective, budget: int = 1000) -> StepBatch:
    pack = Packer(
        advantage=DrGrpo(),
        reduction=objective.loss.reduction,
        max_tokens=SAMPLING.max_tokens,
        budget=budget,
        mask_truncated=False,
        device=torch.device("cpu"),
    )
    return pack(groups, version=0)


class Live:
    """A tiny policy with a step."""

    def __init__(self, policy: Policy, objective: Objective, *, trainable: Trainable | None = None, **step: Any):
        self.policy, self.trainable = policy, trainable or Full()
        self.held: ReferenceWeights | None = None
        if objective.reference is not None:
            self.held = objective.reference.hold(changing(policy, self.trainable))
        optimizer = AdamW(lr=3e-3)
        work = LocalWork(
            policy=policy,
            objective=objective,
            stepper=optimizer.bind(self.trainable.parameters(policy.model)),
            sampling=SAMPLING,
            reference=self.held,
            fold=lambda: self.trainable.fold(policy.model),
        )
        self.step = Step(work=work, optimizer=optimizer, steps=10, **step)

    def backward(self, batch: StepBatch) -> tuple[StepStats, dict[str, Tensor]]:
        """The step's numbers and its gradient, which is forgotten."""
        gradient: dict[str, Tensor] = {}
        named = dict(self.policy.model.named_parameters())
        hooks = [
            p.register_hook(lambda g, n=n: gradient.__setitem__(n, gradient.get(n, 0) + g.double()))
            for n, p in named.items()
            if p.requires_grad
        ]
        stats = asyncio.run(self.step.forward_backward(batch))
        for hook in hooks:
            hook.remove()
        self.step.work.stepper.zero_grad()
        return stats, gradient

    def whole(self, batch: StepBatch, number: int = 1) -> tuple[StepStats, dict[str, float]]:
        async def main() -> tuple[StepStats, dict[str, float]]:
            stats = await self.step.forward_backward(batch)
            return stats, flatten(await self.step.apply(number, batch, stats))

        return asyncio.run(main())

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.policy.model.named_parameters() if p.requires_grad}


def moved(live: Live, scale: float = 0.02) -> None:
    """Training changed the weights."""
    torch.manual_seed(5)
    with torch.no_grad():
        for _, parameter in live.trainable.parameters(live.policy.model):
            parameter += scale * torch.randn_like(parameter)
    live.trainable.fold(live.policy.model)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    off = math.sqrt(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a))
    return off / math.sqrt(sum(float(g.double().square().sum()) for g in b.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_how_a_step_is_cut_changes_nothing(tiny_model: Path, groups: list[Group], name: str) -> None:
    objective = OBJECTIVES[name]
    with live_policy(tiny_model) as policy:
        live = Live(policy, objective)
        moved(live)
        stats, whole = live.backward(packed(groups, objective))
        metrics = flatten(stats.metrics)
        turned = [replace(g, rollouts=g.rollouts[::-1]) for g in groups[::-1]]
        for other, budget in ((groups, 1), (groups, 40), (turned, 25)):
            again, gradients = live.backward(packed(other, objective, budget))
            assert distance(gradients, whole) <= 2e-6
            assert flatten(again.metrics) == pytest.approx(metrics, rel=2e-5, abs=1e-6)
        if objective.corrections:
            assert 0 < metrics["correction/ess"] < 1
        plain, _ = live.backward(packed(groups, objective))
        assert flatten(plain.metrics) == metrics, "the same step twice is the same to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [Full(), Lora(rank=3), Lora(rank=3, merged=True)], ids=["full", "lora", "merged"])
def test_the_reference_is_the_model_as_it_was_loaded(
    tiny_model: Path, groups: list[Group], trainable: Trainable
) -> None:
    """By the packed pass, after training has moved the weights; nothing of theirs is touched."""
    objective = Objective(loss=Grpo(), reference=Start(beta=0.1))
    start = reference(tiny_model)
    with live_policy(tiny_model, trainable=trainable) as policy:
        live = Live(policy, objective, trainable=trainable)
        moved(live, 0.1)
        places = {n: (p.data_ptr(), p.detach().clone()) for n, p in policy.model.named_parameters()}
        stats, gradient = live.backward(packed(groups, objective, 40))
        for name, parameter in policy.model.named_parameters():
            assert parameter.data_ptr() == places[name][0]
            assert torch.equal(parameter, places[name][1])
        assert gradient
        by_rollout: dict[str, list[float]] = {}
        for micro, old in zip(packed(groups, objective, 40).micro, stats.old_logprobs, strict=True):
            assert old.ref_logprobs_N is not None
            values = iter(old.ref_logprobs_N.tolist())
            for rollout, num in micro.places:
                by_rollout.setdefault(rollout, []).extend(next(values) for _ in range(num))
        for rollout in (r for g in groups for r in g.rollouts):
            with torch.no_grad():
                turns = [logprobs_of(start, t.prompt, t.completion.tokens, SAMPLING) for t in rollout.turns]
            np.testing.assert_allclose(by_rollout[rollout.id], torch.cat(turns).numpy(), rtol=1e-4, atol=1e-4)
            assert np.abs(np.array(by_rollout[rollout.id]) - stats.logprobs[rollout.id]).max() > 1e-3
        assert flatten(stats.metrics)["kl_reference"] > 1e-3


class Pair:
    """The ranks of a run as the lead sees them: itself, and one follower in the same process."""

    world = 2

    def __init__(self, follower: RankWork):
        self.follower = handlers(follower)

    async def execute(self, command: str, body: Any, local: Any) -> tuple[Any, list[Any]]:
        return await local, [await self.follower[command](body(1))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rewards_pay_for_the_kl_to_the_reference(tiny_model: Path, groups: list[Group], ranks: int) -> None:
    """Before the advantage: each answer by the sum over its tokens, as they were sampled."""
    start, beta = reference(tiny_model), 0.3
    with live_policy(tiny_model) as policy:
        live = Live(policy, Objective(loss=Grpo()), beta=beta)
        held = Start(beta=beta, in_reward=True).hold(changing(policy, live.trainable))
        parts: dict[str, Any] = {
            "policy": policy, "objective": Objective(loss=Grpo()), "stepper": None, "sampling": SAMPLING,
            "reference": held,
        }  # fmt: skip
        lead = LeadWork(**parts, ranks=Pair(RankWork(**parts)))  # type: ignore[arg-type]
        live.step.work = LocalWork(**parts) if ranks == 1 else lead
        moved(live, 0.1)  # which changes nothing: it is of the sampler and the reference
        pack = Packer(
            advantage=DrGrpo(), reduction="token", max_tokens=SAMPLING.max_tokens, budget=20, mask_truncated=False,
            device=torch.device("cpu"), ranks=ranks,
        )  # fmt: skip
        batch = asyncio.run(live.step.packed(pack, groups, 0))
    gaps: dict[str, list[float]] = {}
    for rollout in (r for g in groups for r in g.rollouts):
        for turn in rollout.turns:
            with torch.no_grad():
                then = logprobs_of(start, turn.prompt, turn.completion.tokens, SAMPLING).tolist()
            apart = [a - b for a, b in zip(turn.completion.logprobs, then, strict=True)]
            gaps[rollout.id] = [*gaps.get(rollout.id, []), *apart]
    for group in groups:
        paid = [(r.reward or 0.0) - beta * sum(gaps[r.id]) for r in group.rollouts]
        for rollout, reward in zip(group.rollouts, paid, strict=True):
            assert batch.advantages[rollout.id] == pytest.approx(reward - sum(paid) / len(paid), abs=1e-3)
            assert rollout.reward in (0.0, 1.0, 2.0), "what was earned stays as it is"
    every = [gap for values in gaps.values() for gap in values]
    assert flatten(batch.metrics)["kl_reference"] == pytest.approx(sum(every) / len(every), abs=1e-4)


@pytest.mark.parametrize("trainable", [Full(), Lora(rank=3, merged=True)], ids=["full", "merged"])
def test_the_average_follows_every_so_many_steps(tiny_model: Path, groups: list[Group], trainable: Trainable) -> None:
    objective = Objective(loss=Grpo(), reference=Average(beta=0.1, mixup=0.25, every=2))
    with live_policy(tiny_model, trainable=trainable) as policy:
        live = Live(policy, objective, trainable=trainable)
        assert live.held is not None
        batch = packed(groups, objective)
        first = copy.deepcopy(live.held.state_dict())
        live.whole(batch, 1)
        for name, value in live.held.state_dict().items():
            assert torch.equal(value, first[name])
        live.whole(batch, 2)
        for name, parameter in changing(policy, trainable):
            want = 0.75 * first[name] + 0.25 * parameter.detach()
            torch.testing.assert_close(live.held.state_dict()[name], want, rtol=1e-6, atol=1e-7)
            assert not torch.equal(parameter, first[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gspo", "direct", "reference"])
def test_two_updates_are_two_steps_on_the_same_batch(tiny_model: Path, groups: list[Group], name: str) -> None:
    """Bit for bit, against the sampler's logprobs."""
    objective = OBJECTIVES[name]
    batch = packed(groups, objective, 40)
    with live_policy(tiny_model) as policy:
        live = Live(policy, objective, updates_per_batch=2)
        stats, metrics = live.whole(batch)
        twice = live.weights()
    with live_policy(tiny_model) as policy:
        live = Live(policy, objective)
        first, _ = live.whole(batch)
        again, _ = live.whole(batch)
        for key, weight in live.weights().items():
            assert torch.equal(weight, twice[key])
    assert flatten(stats.metrics) == flatten(first.metrics)
    later = flatten(again.metrics)
    assert {key.removeprefix("reused/") for key in metrics if key.startswith("reused/")} == {*later, "grad_norm"}
    assert {key: metrics[f"reused/{key}"] for key in later} == later


def test_later_updates_compare_with_the_start_of_the_step(tiny_model: Path, groups: list[Group]) -> None:
    """Decoupled: the second update is one against a sampler that told the first pass's logprobs."""
    decoupled = Objective(loss=Grpo(clip_low=0.02, clip_high=0.02), recomputed=True)
    batch = packed(groups, decoupled, 40)
    with live_policy(tiny_model) as policy:
        live = Live(policy, decoupled, updates_per_batch=2)
        stats, metrics = live.whole(batch)
        twice = live.weights()
    assert flatten(stats.metrics)["ratio/max"] == flatten(stats.metrics)["ratio"] == 1.0
    assert metrics["reused/ratio/max"] > 1.001
    assert metrics["reused/clip_fraction"] > flatten(stats.metrics)["clip_fraction"] == 0.0
    as_told = [
        replace(micro, batch=replace(micro.batch, behavior_logprobs_N=old.recomputed_logprobs_N))
        for micro, old in zip(batch.micro, stats.old_logprobs, strict=True)
    ]
    with live_policy(tiny_model) as policy:
        live = Live(policy, replace(decoupled, recomputed=False))
        for _ in range(2):
            live.whole(replace(batch, micro=tuple(as_told)))
        for key, weight in live.weights().items():
            assert torch.equal(weight, twice[key])


def test_weights_of_the_decoupled_kind_stay_while_the_policy_moves(tiny_model: Path, groups: list[Group]) -> None:
    objective = Objective(loss=Grpo(), recomputed=True, corrections=(TokenCorrection(high=1.3),))
    with live_policy(tiny_model) as policy:
        stats, metrics = Live(policy, objective, updates_per_batch=3).whole(packed(groups, objective))
    assert metrics["reused/correction/weight"] == pytest.approx(flatten(stats.metrics)["correction/weight"], rel=1e-12)
    assert metrics["reused/ratio"] != 1.0


def test_between_updates_a_merged_adapter_is_folded(tiny_model: Path, groups: list[Group]) -> None:
    """Merged or not, three updates end at the same adapter."""
    ended = []
    for merged in (False, True):
        trainable = Lora(rank=3, merged=merged)
        with live_policy(tiny_model, trainable=trainable) as policy:
            live = Live(policy, TOKENS, trainable=trainable, updates_per_batch=3)
            live.whole(packed(groups, TOKENS))
            ended.append([p.detach().clone() for _, p in trainable.parameters(policy.model)])
    for plain, merged_one in zip(*ended, strict=True):
        torch.testing.assert_close(merged_one, plain, rtol=1e-3, atol=2e-4)


def test_a_reference_on_another_device_comes_along() -> None:
    """The live weights may have moved since they were copied: the copy is brought to where they are."""
    weight = torch.nn.Parameter(torch.ones(2))
    held = Start().hold([("w", weight)])
    storage = torch.zeros(2)
    weight.data = storage
    with held.in_place():
        assert weight.tolist() == [1.0, 1.0]
    assert weight.data_ptr() == storage.data_ptr()
    with pytest.raises(RuntimeError, match="within"), held.in_place():
        raise RuntimeError("within")
    assert weight.data_ptr() == storage.data_ptr(), "also where the pass failed"


def test_a_reference_of_other_weights_is_not_restored() -> None:
    from tandem.errors import CheckpointError

    held = Average(every=1).hold([("w", torch.nn.Parameter(torch.ones(2)))])
    with pytest.raises(CheckpointError, match="of other weights"):
        held.load_state_dict({"w": torch.ones(3)})


def test_without_a_reference_none_is_known(tiny_model: Path, groups: list[Group]) -> None:
    with live_policy(tiny_model) as policy:
        stats, _ = Live(policy, TOKENS).backward(packed(groups, TOKENS))
    assert all(isinstance(old, OldLogprobs) and old.ref_logprobs_N is None for old in stats.old_logprobs)
