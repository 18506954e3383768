"""The gradient of a whole step against float64: one full forward per sample, the loss by its formula, no packing."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rollouts import make_group, make_rollout
from support.tiny_policy import distributions_of, live_policy, logprobs_of, reference
from support.whole_steps import Keep
from torch import Tensor

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.metrics import flatten
from tandem.model.penalties import Penalties
from tandem.model.policy import Policy
from tandem.optimizers.adamw import AdamW
from tandem.testing import oracle
from tandem.trainable.lora import Lora
from tandem.trainer.pack import Packer
from tandem.trainer.step import LocalWork, Objective, Step, StepStats
from tandem.types import UNKNOWN_LOGPROB, Group, Rollout, Sampling

RATIOS = (0.5, 1.0, 2.0, 0.9, 1.1, 4.0, 1.27, 0.81)
"""Of policy to behaviour, token by token: within the clips and beyond each, the dual clip included."""

ENDS = (3, 250)
"""Tokens that end an answer, as far as penalties know."""
ROUNDING = 2e-6
"""Of a gradient in float32, relative: logprobs around -8 are exact to 5e-7, and ratios with them. By the processor's
kernels 0.9e-6 to 1.2e-6 were seen."""
PENALISED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "min_tokens": 2,
    "stop_token_ids": (7,),
}


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model) as live:
        yield live


@pytest.fixture(scope="module")
def exact(tiny_model: Path) -> Any:
    return reference(tiny_model, torch.float64)


def gradient(
    policy: Policy, groups: Sequence[Group], *, sampling: Sampling, loss: Grpo, budget: int = 1000, mask: bool = False
) -> tuple[dict[str, Tensor], StepStats]:
    """What the trainer computes, by parameter name."""
    pack = Packer(
        advantage=DrGrpo(),
        reduction=loss.reduction,
        max_tokens=sampling.max_tokens,
        budget=budget,
        mask_truncated=mask,
        device=policy.device,
        penalties=Penalties.of(sampling, ENDS),
    )
    keep = Keep()
    objective = Objective(loss=loss)
    work = LocalWork(policy=policy, objective=objective, stepper=keep, sampling=sampling)
    step = Step(work=work, optimizer=AdamW(), steps=1)
    hooks = []
    for parameter in policy.model.parameters():
        register = parameter.register_post_accumulate_grad_hook
        parameter.register_post_accumulate_grad_hook = lambda f, register=register: hooks.append(register(f))  # type: ignore[method-assign]
    try:
        stats = asyncio.run(step.forward_backward(pack(groups, version=0)))
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in policy.model.parameters():
            del parameter.register_post_accumulate_grad_hook
    names = {id(p): name for name, p in policy.model.named_parameters()}
    return {names[key]: grad for key, grad in keep.total.items()}, stats


def by_formula(exact: Any, groups: Sequence[Group], *, sampling: Sampling, loss: Grpo, mask: bool = False) -> Any:
    """Loss, the sum of its terms' sizes, and the gradient, in float64."""
    recipe = {
        "advantage": "dr_grpo",
        "loss": {"kind": "grpo", **dataclasses.asdict(loss)},
        "corrections": [],
        "reference": None,
        "old_logprobs": "sampled",
        "updates_per_batch": 1,
        "sampling": dataclasses.asdict(sampling),
        "truncated": "mask" if mask else "keep",
    }
    known = oracle.Formula(recipe=recipe, ends=(*ENDS, *sampling.stop_token_ids), weights={})
    plain, weights = oracle.PlainModel(exact, ("full", {})), dict(exact.named_parameters())
    sequences, value, size = list(oracle.spoken(groups, known)), 0.0, 0.0
    with torch.no_grad():
        for one in sequences:
            now = oracle.logprobs(plain, one, known)
            cost = oracle.cost(known, one, now, now, None)
            cost = cost * oracle.share(known, sequences, one)
            value, size = value + float(cost.sum()), size + float(cost.abs().sum())
    (gradient,) = oracle.gradients(plain, lambda update: weights, [(1, groups)], known)
    return value, size, gradient


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert a.keys() == b.keys()
    off = math.sqrt(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a))
    return off / math.sqrt(sum(float(g.double().square().sum()) for g in b.values()))


def played(exact: Any, sampling: Sampling) -> list[Group]:
    """Two groups with answers of many lengths, one of two turns, one cut; behaviour off policy by ``RATIOS``."""
    draw = np.random.default_rng(0)

    def exchange(prompt: list[int], length: int) -> tuple[list[int], list[int], list[float]]:
        tokens = draw.integers(0, 256, length).tolist()
        with torch.no_grad():
            now = logprobs_of(exact, prompt, tokens, sampling, ENDS).tolist()
        return prompt, tokens, [lp - math.log(RATIOS[i % len(RATIOS)]) for i, lp in enumerate(now)]

    groups = []
    for g, (prompt_len, lengths) in enumerate(((9, (8, 3, 12, 1)), (17, (5, 16)))):
        prompt = draw.integers(0, 256, prompt_len).tolist()
        rollouts: list[Rollout] = []
        for s, length in enumerate(lengths):
            turns = [exchange(prompt, length)]
            if (g, s) == (0, 1):
                turns.append(exchange([*prompt, *turns[0][1], 7, 8, 9], 6))
            finish = "length" if (g, s) == (0, 2) else "stop"
            rollouts.append(
                make_rollout(f"t{g}@0/{s}", turns, float(s % 3), temperature=sampling.temperature, finish=finish)
            )
        groups.append(make_group(f"t{g}@0", rollouts, index=g))
    return groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "sampling"),
    [
        (Grpo(), Sampling(max_tokens=16)),
        (Grpo(reduction="sequence"), Sampling(temperature=0.7, max_tokens=16)),
        (Grpo(reduction="constant", dual_clip=None), Sampling(temperature=1.3, max_tokens=16)),
        (Grpo(clip_low=0.4), Sampling(top_p=0.8, top_k=60, min_p=0.01, max_tokens=16)),
        (Grpo(), Sampling(**PENALISED, max_tokens=16)),
        (Grpo(), Sampling(**PENALISED, temperature=0.7, top_p=0.8, min_p=0.01, max_tokens=16)),
    ],
    ids=["token", "sequence", "constant", "support", "penalties", "penalties and support"],
)
def test_a_step_is_the_float64_formula(policy: Policy, exact: Any, loss: Grpo, sampling: Sampling) -> None:
    groups = played(exact, sampling)
    advantages = {r.reward - 1.0 for r in groups[0].rollouts if r.reward is not None}
    assert min(advantages) < 0 < max(advantages)
    value, size, expected = by_formula(exact, groups, sampling=sampling, loss=loss)
    computed, stats = gradient(policy, groups, sampling=sampling, loss=loss)
    assert distance(computed, expected) <= ROUNDING
    assert flatten(stats.metrics)["loss"] == pytest.approx(value, abs=1e-6 * size)
    for rollout in (r for group in groups for r in group.rollouts):
        with torch.no_grad():
            each = [logprobs_of(exact, t.prompt, t.completion.tokens, sampling, ENDS) for t in rollout.turns]
        assert stats.logprobs[rollout.id] == pytest.approx(torch.cat(each).tolist(), abs=1e-5)
    turns = [t for group in groups for rollout in group.rollouts for t in rollout.turns]
    with torch.no_grad():
        whole = [distributions_of(exact, t.prompt, t.completion.tokens, sampling, ENDS).exp() for t in turns]
    entropies = torch.special.entr(torch.cat(whole)).sum(-1)
    assert flatten(stats.metrics)["entropy"] == pytest.approx(float(entropies.mean()), rel=1e-5)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("better", [True, False], ids=["positive", "negative"])
def test_each_sign_at_each_ratio(policy: Policy, exact: Any, ratio: float, better: bool) -> None:
    """One answer that was drawn with this ratio throughout; its sibling has the other sign and ratio 1."""
    sampling, loss = Sampling(max_tokens=16), Grpo(reduction="sequence")
    rollouts = []
    for s, at in enumerate((ratio, 1.0)):
        tokens = list(range(40 * s + 3, 40 * s + 12))
        with torch.no_grad():
            logprobs = (logprobs_of(exact, [1, 2, 3], tokens, sampling) - math.log(at)).tolist()
        rollouts.append(make_rollout(f"t@0/{s}", [([1, 2, 3], tokens, logprobs)], float(better == (s == 0))))
    groups = [make_group("t@0", rollouts)]
    value, size, expected = by_formula(exact, groups, sampling=sampling, loss=loss)
    computed, stats = gradient(policy, groups, sampling=sampling, loss=loss)
    assert distance(computed, expected) <= ROUNDING
    assert flatten(stats.metrics)["loss"] == pytest.approx(value, abs=1e-6 * size)


@pytest.mark.slow
@pytest.mark.parametrize("penalties", [{}, PENALISED], ids=["plain", "penalised"])
@pytest.mark.parametrize("mask", [False, True])
def test_micro_batches_packing_and_order_change_nothing(
    policy: Policy, exact: Any, mask: bool, penalties: dict[str, Any]
) -> None:
    sampling, loss = Sampling(temperature=0.9, max_tokens=16, **penalties), Grpo()
    groups = played(exact, sampling)
    whole, stats = gradient(policy, groups, sampling=sampling, loss=loss, mask=mask)
    turned = [replace(g, rollouts=g.rollouts[::-1]) for g in groups[::-1]]
    loss_of = flatten(stats.metrics)["loss"]
    for other, budget in ((groups, 1), (groups, 40), (turned, 1000), (turned, 25)):
        computed, again = gradient(policy, other, sampling=sampling, loss=loss, budget=budget, mask=mask)
        assert distance(computed, whole) <= 1e-6
        assert flatten(again.metrics)["loss"] == pytest.approx(loss_of, rel=1e-5)
        for name in ("kl_behavior", "entropy"):
            assert flatten(again.metrics)[name] == pytest.approx(flatten(stats.metrics)[name], rel=1e-5)
        assert again.logprobs.keys() == stats.logprobs.keys()


def test_masked_truncated_answers_leave_the_gradient(policy: Policy, exact: Any) -> None:
    sampling, loss = Sampling(max_tokens=16), Grpo()
    groups = played(exact, sampling)
    *_, expected = by_formula(exact, groups, sampling=sampling, loss=loss, mask=True)
    computed, stats = gradient(policy, groups, sampling=sampling, loss=loss, mask=True)
    assert distance(computed, expected) <= ROUNDING
    assert "t0@0/2" not in stats.logprobs
    kept, _ = gradient(policy, groups, sampling=sampling, loss=loss)
    assert distance(kept, expected) > 0.01


def test_only_what_is_trained_gets_a_gradient(tiny_model: Path, exact: Any) -> None:
    sampling = Sampling(max_tokens=16)
    with live_policy(tiny_model, trainable=Lora(rank=2)) as policy:
        gradients, _ = gradient(policy, played(exact, sampling), sampling=sampling, loss=Grpo())
    assert gradients
    assert all("lora_" in name for name in gradients)


def test_apply_moves_the_weights_by_the_clipped_gradient(tiny_model: Path, exact: Any) -> None:
    """The norm it reports is the whole step's, and what it wrote is AdamW's first step: lr times the sign."""
    sampling, loss = Sampling(max_tokens=16), Grpo()
    groups = played(exact, sampling)
    *_, expected = by_formula(exact, groups, sampling=sampling, loss=loss)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    with live_policy(tiny_model) as policy:
        optimizer = AdamW(lr=1e-3, eps=0.0, max_grad_norm=norm / 2)
        stepper = optimizer.bind([(n, p) for n, p in policy.model.named_parameters()])
        objective = Objective(loss=loss)
        work = LocalWork(policy=policy, objective=objective, stepper=stepper, sampling=sampling)
        step = Step(work=work, optimizer=optimizer, steps=1)
        pack = Packer(
            advantage=DrGrpo(), reduction="token", max_tokens=16, budget=30, mask_truncated=False, device=policy.device
        )
        before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}

        async def main() -> dict[str, float]:
            batch = pack(groups, version=0)
            stats = await step.forward_backward(batch)
            assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters()), "not before apply"
            return flatten(await step.apply(1, batch, stats))

        applied = asyncio.run(main())
        assert applied["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert applied["lr"] == 1e-3
        for name, parameter in policy.model.named_parameters():
            sure = expected[name].abs() > 1e-4 * norm
            moved = (parameter.detach() - before[name])[sure]
            torch.testing.assert_close(moved, -1e-3 * expected[name][sure].sign().float(), rtol=1e-3, atol=1e-6)


def test_where_the_sampler_told_no_logprobs_the_policys_own_stand_in(policy: Policy) -> None:
    def group(*logprobs: Sequence[float]) -> Group:
        answers = ((5, 6), (7,))
        rollouts = [
            make_rollout(f"t@0/{n}", [((1, 2), tokens, recorded)], float(n))
            for n, (tokens, recorded) in enumerate(zip(answers, logprobs, strict=True))
        ]
        return make_group("t@0", rollouts)

    options: dict[str, Any] = {"sampling": Sampling(), "loss": Grpo()}
    unknown, stats = gradient(policy, [group((UNKNOWN_LOGPROB, UNKNOWN_LOGPROB), (-2.0,))], **options)
    own = stats.logprobs["t@0/0"]
    expected, same = gradient(policy, [group(own, (-2.0,))], **options)
    for name, grad in expected.items():
        torch.testing.assert_close(unknown[name], grad, rtol=1e-5, atol=1e-8)
    assert flatten(stats.metrics)["ratio"] == pytest.approx(flatten(same.metrics)["ratio"])
    assert math.isfinite(flatten(stats.metrics)["loss"])
