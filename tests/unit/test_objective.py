"""Loss, corrections and penalty together; what is told of them; which options of them a recipe may not give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import plain_metrics
from torch import Tensor

from tandem.algorithms.corrections.opsm import Opsm
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses.base import MicroBatch, TokenLoss
from tandem.algorithms.losses.cispo import Cispo
from tandem.algorithms.losses.grpo import Grpo
from tandem.algorithms.losses.reinforce import Reinforce
from tandem.algorithms.references.average import Average
from tandem.algorithms.references.base import Reference
from tandem.algorithms.references.start import Start
from tandem.config import loading as config
from tandem.errors import ConfigError
from tandem.metrics import Share, flatten
from tandem.model.policy import load_config, load_model
from tandem.testing import oracle
from tandem.trainer import memory_plan as memory
from tandem.trainer.step import Objective, OldLogprobs, mismatch
from tandem.types import UNKNOWN_LOGPROB

ESTIMATORS = [
    Start(estimator=e, ratio_corrected=c) for e in ("k1", "k2", "k3") for c in (True, False) if c or e != "k1"
]  # type: ignore[arg-type]


def micro(behavior: list[float], advantages: list[float] | None = None) -> MicroBatch:
    n = len(behavior)
    return MicroBatch(
        behavior_logprobs_N=torch.tensor(behavior),
        advantages_N=torch.tensor(advantages or [1.0] * n),
        sample_N=torch.zeros(n, dtype=torch.int64),
        num_samples=1,
    )


def known(first: list[float], reference: list[float] | None = None) -> OldLogprobs:
    return OldLogprobs(
        recomputed_logprobs_N=torch.tensor(first), ref_logprobs_N=None if reference is None else torch.tensor(reference)
    )


def test_corrections_weigh_the_loss_and_not_the_penalty() -> None:
    """By hand: both weights multiply, and the penalty is added after them."""
    plain = Objective(
        loss=Reinforce(),
        corrections=(TokenCorrection(beyond="truncate", high=1.5), Opsm(threshold=0.1)),
        recomputed=True,
        reference=Start(beta=0.5, estimator="k2", ratio_corrected=False),
    )
    now = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    batch = MicroBatch(
        behavior_logprobs_N=torch.tensor([-2.0, -2.0, -0.5]),
        advantages_N=torch.tensor([2.0, 3.0, -1.0]),
        sample_N=torch.tensor([0, 0, 1]),
        num_samples=2,
    )
    cost, metrics = plain(now, batch, known([-1.0, -2.3, -0.7], [-1.5, -2.0, -1.0]))
    weights = [1.5, math.exp(-0.3), 0.0]  # the third answer is bad and 0.5 nats away
    penalty = [0.5 * 0.25 / 2, 0.0, 0.0]
    assert cost.tolist() == pytest.approx([1.5 * 2.0 + penalty[0], weights[1] * 6.0, 0.0])
    cost.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.5 * 2.0 + 0.5 * 0.5, -weights[1] * 3.0, 0.0])
    values = plain_metrics(metrics)
    assert values["correction/masked"] == values["correction/opsm/masked"] == pytest.approx(1 / 3)
    assert values["correction/token/masked"] == 0.0
    assert values["correction/weight"] == pytest.approx(sum(weights) / 3)
    assert values["correction/ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))
    assert values["kl_reference"] == pytest.approx(0.125 / 3)


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_what_is_dropped_has_no_gradient_however_far_it_is(gap: float) -> None:
    part = Objective(
        loss=Grpo(dual_clip=None), corrections=(TokenCorrection(beyond="mask", low=0.5, high=2.0),), recomputed=True
    )
    now = torch.tensor([gap - 1.0, -1.0], requires_grad=True)
    cost, _ = part(now, micro([-1.0, -1.0], [-1.0, -1.0]), known([gap - 1.0, -1.0]))
    cost.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda loss_N: TokenLoss(loss_N=loss_N.mean()), r"of shape \(\); expected \(3,\): never sum or average"),
        (lambda loss_N: TokenLoss(loss_N=loss_N[:, None]), r"of shape \(3, 1\); expected \(3,\)"),
        (lambda loss_N: TokenLoss(loss_N=loss_N[:-1]), r"of shape \(2,\); expected \(3,\)"),
        (lambda loss_N: TokenLoss(loss_N=loss_N.detach()), "does not depend on logprobs_N, or detaches it"),
        (lambda loss_N: loss_N, r"returned a Tensor; expected tandem\.TokenLoss"),
        (lambda loss_N: TokenLoss(loss_N=loss_N, metrics={"mine": loss_N.sum()}), "metric 'mine' as a Tensor"),
    ],
    ids=["mean", "column", "short", "detached", "tensor", "metric"],
)
def test_a_loss_of_ones_own_is_one_number_per_token(made: Callable[[Tensor], Any], says: str) -> None:
    """Torch would stretch a mean or a column to the tokens, and train on something else."""

    class Own:
        reduction = "token"

        def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> Any:
            return made(-logprobs_N * micro.advantages_N)

    logprobs_N = torch.full((3,), -1.0, requires_grad=True)
    with pytest.raises(ConfigError, match=f"loss .*Own .*{says}"):
        Objective(loss=Own())(logprobs_N, micro([-1.0] * 3), known([-1.0] * 3))  # type: ignore[arg-type]


def test_a_correction_of_ones_own_is_one_weight_per_token() -> None:
    def column(logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        return torch.ones(3, 1)

    objective = Objective(loss=Reinforce(), corrections=(column,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"correction .*column returned a tensor of shape \(3, 1\)"):
        objective(torch.full((3,), -1.0), micro([-1.0] * 3), known([-1.0] * 3))


def test_ratios_are_against_the_sampler_or_the_step_s_start() -> None:
    now, batch, first = torch.tensor([-1.0]), micro([-1.5]), known([-1.2])
    for recomputed, ratio in ((False, math.exp(0.5)), (True, math.exp(0.2))):
        _, metrics = Objective(loss=Cispo(), recomputed=recomputed)(now, batch, first)
        assert plain_metrics(metrics)["ratio"] == pytest.approx(ratio)
        assert plain_metrics(metrics)["logprob_gap/max"] == pytest.approx(0.5), (
            "the mismatch is with the sampler, always"
        )


def test_where_the_sampler_told_nothing_the_policy_of_the_step_s_start_stands_in() -> None:
    """At a batch's later updates too: what was not told does not follow the policy."""
    ours = Objective(loss=Cispo())
    _, metrics = ours(torch.tensor([-1.0, -1.0]), micro([UNKNOWN_LOGPROB, -1.0]), known([-1.7, -1.0]))
    assert plain_metrics(metrics)["ratio/max"] == pytest.approx(math.exp(0.7))


def test_kl_of_nearly_equal_policies_keeps_its_digits() -> None:
    """At a gap of 1e-4 the estimate is 5e-9: exp(x) - 1 - x in float32 would be noise."""
    gap = 1e-4
    kl = plain_metrics(mismatch(torch.tensor([gap]), micro([0.0])))["kl_behavior"]
    assert kl == pytest.approx(math.expm1(gap) - gap, rel=1e-3)


def test_kl_estimates_the_divergence_of_behavior_from_policy() -> None:
    torch.manual_seed(0)
    behavior, policy = torch.randn(5).log_softmax(-1), torch.randn(5).log_softmax(-1)
    tokens = torch.multinomial(behavior.exp(), 200_000, replacement=True)
    got = plain_metrics(mismatch(policy[tokens], micro(behavior[tokens].tolist())))["kl_behavior"]
    assert got == pytest.approx(float((behavior.exp() * (behavior - policy)).sum()), rel=0.02)


def test_effective_sample_size() -> None:
    gaps = np.array([0.0, 1.0, -0.5, 2.0])
    ratio = np.exp(gaps)
    values = plain_metrics(mismatch(torch.from_numpy(gaps).float(), micro([0.0] * 4)))
    assert values["ess"] == pytest.approx(ratio.sum() ** 2 / (4 * (ratio**2).sum()), rel=1e-6)
    assert values["logprob_gap/max"] == 2.0
    assert plain_metrics(mismatch(torch.full((3,), 0.7), micro([0.0] * 3)))["ess"] == pytest.approx(1.0)
    halves = [mismatch(torch.tensor(gaps[s]).float(), micro([0.0] * 2)) for s in (slice(2), slice(2, 4))]
    assert plain_metrics(*halves) == pytest.approx(values)
    assert flatten({"ess": Share(0.0, 0.0, 3)}) == {"ess": 0.0}
    assert flatten({"ess": Share(0.0, 0.0, 0)}) == {}


def test_logprobs_of_better_and_worse_answers_are_told_apart() -> None:
    now = torch.tensor([-1.0, -2.0, -4.0, -8.0])
    values = plain_metrics(mismatch(now, micro([0.0] * 4, [0.5, 0.0, -0.1, 3.0])))
    assert values["logprob/positive"] == -4.5
    assert values["logprob/negative"] == -4.0
    better = plain_metrics(mismatch(now[:1], micro([0.0], [1.0])))
    assert better["logprob/positive"] == -1.0
    assert "logprob/negative" not in better


@pytest.mark.parametrize("gap", [-1e4, 90.0, 1e4])
def test_metrics_of_extreme_gaps_are_finite(gap: float) -> None:
    for part in ESTIMATORS:
        for reference in (-gap, gap / 2, gap):
            ours = Objective(loss=Grpo(), reference=part)
            now = torch.tensor([gap], requires_grad=True)
            cost, metrics = ours(now, micro([0.0]), known([gap], [reference]))
            cost.sum().backward()
            assert now.grad is not None
            assert all(math.isfinite(v) for v in [*plain_metrics(metrics).values(), *cost.tolist(), *now.grad.tolist()])


def test_no_tokens() -> None:
    ours = Objective(loss=Grpo(), corrections=(Opsm(),), recomputed=True, reference=Start())
    cost, metrics = ours(torch.zeros(0), micro([]), known([], []))
    assert cost.shape == (0,)
    assert all(math.isfinite(v) for v in plain_metrics(metrics).values())


@pytest.mark.parametrize("part", ESTIMATORS, ids=repr)
def test_penalty_and_gradient_by_formula(part: Reference) -> None:
    draw = np.random.default_rng(0)
    old, ref, now = (-torch.from_numpy(np.abs(draw.normal(size=9))) for _ in range(3))
    logprobs, exact = now.float().requires_grad_(), now.clone().requires_grad_()
    informed = Objective(loss=Grpo(), reference=part).informed(micro(old.tolist()), known(now.tolist(), ref.tolist()))
    penalty, bare = part.divergence(logprobs, informed)
    wanted = oracle.divergence(exact - ref, (exact - old).exp(), dataclasses.asdict(part))
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(penalty.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(penalty.sum(), logprobs)[0].double(), slope, rtol=1e-5, atol=1e-5)
    plain = oracle.divergence(now - ref, torch.ones(9), {"estimator": part.estimator, "ratio_corrected": False})
    torch.testing.assert_close(bare.double(), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("estimator", "corrected"), [("k1", True), ("k2", False), ("k3", True), ("k3", False)])
@pytest.mark.parametrize("stale", [False, True])
def test_which_estimators_have_the_gradient_of_the_divergence(estimator: Any, corrected: bool, stale: bool) -> None:
    """The expectation over every token, exactly: with the ratio also where an older policy sampled."""
    torch.manual_seed(3)
    logits, old, ref = (torch.randn(6, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    policy = logits.log_softmax(-1)
    sampler = old.log_softmax(-1) if stale else policy.detach()
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref.log_softmax(-1))).sum(), logits, retain_graph=True)
    batch = MicroBatch(
        behavior_logprobs_N=sampler,
        advantages_N=torch.zeros(6),
        sample_N=torch.zeros(6, dtype=torch.int64),
        num_samples=1,
        ref_logprobs_N=ref.log_softmax(-1),
    )
    penalty, _ = Start(estimator=estimator, ratio_corrected=corrected).divergence(policy, batch)
    (gradient,) = torch.autograd.grad((sampler.exp() * penalty).sum(), logits)
    is_right = corrected or (estimator == "k2" and not stale)
    assert torch.allclose(gradient, exact, atol=1e-9) == is_right


def test_wrong_penalties_are_refused() -> None:
    with pytest.raises(ValueError, match="beta"):
        Start(beta=0.0)
    with pytest.raises(ValueError, match="estimator k1"):
        Start(estimator="k1", ratio_corrected=False)
    with pytest.raises(ValueError, match="mixup"):
        Average(mixup=0.0)
    with pytest.raises(ValueError, match="every"):
        Average(every=0)


def recipe(**options: Any) -> config.RunConfig:
    plain = {"model": "m", "steps": 20, "env": "arithmetic"}
    return config.from_options({**plain, **options}, [], Path("test")).config


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"corrections": [{"kind": "token"}]}, "old_logprobs must be recomputed with beyond: truncate"),
        ({"old_logprobs": "recomputed", "loss": {"kind": "grpo", "clip_low": 0.1}}, "loss.clip_low changes nothing"),
        ({"old_logprobs": "recomputed", "loss": {"kind": "sapo", "temperature_positive": 2.0}}, "changes nothing"),
        ({"old_logprobs": "recomputed", "loss": "reinforce"}, "old_logprobs changes nothing"),
        ({"reference": {"kind": "average", "every": 20}}, "reference.every must be below steps"),
        ({"reference": "average"}, "reference.every must be below steps"),
        ({"reference": {"kind": "start", "estimator": "k1", "ratio_corrected": False}}, "estimator k1"),
        ({"updates_per_batch": 0}, "updates_per_batch must be at least 1"),
        ({"advantage": {"kind": "gdpo", "_weights": {}}}, "unknown option '_weights'"),
    ],
)
def test_what_changes_nothing_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        recipe(**options)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["full", "lora", {"kind": "lora", "merged": True}], ids=str)
def test_the_memory_plan_counts_what_is_held(tiny_model: Path, trainable: Any) -> None:
    """To the byte: a copy of what training changes; and of it what a checkpoint holds."""
    shape = load_config(str(tiny_model))
    plain = {"model": str(tiny_model), "trainable": trainable, "dtype": "float32"}
    own = recipe(**plain, reference={"kind": "average", "every": 3})
    (line,) = [line for line in memory.Planner(own, shape).plan(own).lines if line.name == "reference"]
    model = own.trainable.prepare(load_model(str(tiny_model), dtype=torch.float32, device=torch.device("cpu")))
    assert line.bytes == sum(tensor.nbytes for _, tensor in own.trainable.source(model))
    alone, start = (recipe(**plain, **more) for more in ({}, {"reference": "start"}))
    planner = memory.Planner(alone, shape)
    assert planner.checkpoint_bytes(own) - planner.checkpoint_bytes(alone) == line.bytes
    assert planner.checkpoint_bytes(start) == planner.checkpoint_bytes(alone)
    assert not [line for line in planner.plan(alone).lines if line.name == "reference"]
