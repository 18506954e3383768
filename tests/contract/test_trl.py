"""Values and gradients equal TRL's on the same inputs.

``trl_objective.json`` holds what TRL 1.13 computed in float64; ``tests/contract/trl_objective.py`` wrote it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import plain_metrics

from tandem.algorithms.advantages.base import Advantage, advantages
from tandem.algorithms.advantages.batch_std import BatchStd
from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.advantages.gdpo import Gdpo
from tandem.algorithms.advantages.grpo import GroupStandardised as GroupStd
from tandem.algorithms.advantages.rloo import Rloo
from tandem.algorithms.corrections.base import Correction
from tandem.algorithms.corrections.opsm import Opsm
from tandem.algorithms.corrections.sequence import Sequence
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses.base import Loss, MicroBatch
from tandem.algorithms.losses.cispo import Cispo
from tandem.algorithms.losses.grpo import Grpo
from tandem.algorithms.losses.gspo import Gspo
from tandem.algorithms.losses.sapo import Sapo
from tandem.algorithms.references.average import Average
from tandem.algorithms.references.base import Reference
from tandem.algorithms.references.start import Start
from tandem.config import registry
from tandem.testing import oracle
from tandem.trainer.step import Objective, OldLogprobs
from tandem.types import Completion, Group, Rollout, Task, Turn

TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl_objective.json").read_text(encoding="utf-8"))
LENGTHS = [len(row) for row in TRL["logprobs"]["policy"]]


def flat(name: str) -> torch.Tensor:
    return torch.tensor([x for row in TRL["logprobs"][name] for x in row])


def named(entry: dict[str, Any]) -> str:
    usual = TRL["losses"][0]["options"]
    changed = {k: v for k, v in entry["options"].items() if v != usual.get(k, ...) or k in ("loss_type", "mode")}
    return "-".join(f"{k}={v}" for k, v in changed.items())


def batch() -> MicroBatch:
    sample_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return MicroBatch(
        behavior_logprobs_N=flat("sampler"),
        advantages_N=torch.tensor(TRL["advantages"])[sample_N],
        sample_N=sample_N,
        num_samples=len(LENGTHS),
    )


def objective(options: dict[str, Any]) -> Objective:
    """Tandem's name of what TRL was given."""
    low, high, kind = options["epsilon"], options["epsilon_high"], options["loss_type"]
    reduction: Any = {"grpo": "sequence", "sapo": "sequence", "dr_grpo": "constant"}.get(kind, "token")
    level = options["importance_sampling_level"]
    loss: Loss
    if kind == "cispo":
        loss = Cispo(cap=high, reduction=reduction)
    elif kind == "sapo":
        positive, negative = options["sapo_temperature_pos"], options["sapo_temperature_neg"]
        loss = Sapo(temperature_positive=positive, temperature_negative=negative, reduction=reduction)
    elif level == "token":
        loss = Grpo(clip_low=low, clip_high=high, dual_clip=options["delta"], reduction=reduction)
    else:
        loss = Gspo(clip_low=low, clip_high=high, reduction=reduction)
    threshold, beta = options["off_policy_mask_threshold"], options["beta"]
    corrections: tuple[Correction, ...] = () if threshold is None else (Opsm(threshold=threshold),)
    penalty: Reference | None = None
    if beta:
        penalty = Start(beta=beta, ratio_corrected=options["use_bias_correction_kl"])
    return Objective(loss=loss, corrections=corrections, recomputed=True, reference=penalty)


def weights(reduction: str) -> torch.Tensor:
    """What each token counts."""
    each = {
        "token": [1 / sum(LENGTHS)] * len(LENGTHS),
        "sequence": [1 / (len(LENGTHS) * n) for n in LENGTHS],
        "constant": [1 / (len(LENGTHS) * TRL["max_tokens"])] * len(LENGTHS),
    }[reduction]
    return torch.tensor(each).repeat_interleave(torch.tensor(LENGTHS))


@pytest.mark.parametrize("entry", TRL["losses"], ids=named)
def test_loss_gradient_and_metrics(entry: dict[str, Any]) -> None:
    ours = objective(entry["options"])
    logprobs = flat("policy").requires_grad_()
    known = OldLogprobs(recomputed_logprobs_N=flat("old"), ref_logprobs_N=flat("reference") if ours.reference else None)
    loss_N, metrics = ours(logprobs, batch(), known)
    loss = (loss_N * weights(ours.loss.reduction)).sum()
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(entry["loss"], rel=1e-5, abs=1e-6)
    want = np.concatenate(entry["grad"])
    np.testing.assert_allclose(logprobs.grad.numpy(), want, rtol=1e-5, atol=1e-7)
    assert ((logprobs.grad.numpy() == 0) == (want == 0)).all()
    values = plain_metrics(metrics)
    if entry["options"]["importance_sampling_level"] == "token" and entry["options"]["delta"] is None:
        for theirs, mine in (("low", "low"), ("high", "high")):
            if f"clip_ratio/{theirs}_mean" in entry["metrics"]:
                assert values[f"clip_fraction/{mine}"] == pytest.approx(entry["metrics"][f"clip_ratio/{theirs}_mean"])
    if "kl" in entry["metrics"] and not entry["options"]["use_bias_correction_kl"]:
        assert values["kl_reference"] == pytest.approx(entry["metrics"]["kl"], rel=1e-5)


@pytest.mark.parametrize("entry", TRL["losses"], ids=named)
def test_the_oracle_agrees_too(entry: dict[str, Any]) -> None:
    """What the losses are held against elsewhere has a peer of its own here."""
    ours = objective(entry["options"])
    kind, reference = registry.kind_of("losses", ours.loss), ours.reference
    recipe = {
        "loss": {"kind": kind, **dataclasses.asdict(ours.loss)},
        "corrections": [{"kind": "opsm", **dataclasses.asdict(one)} for one in ours.corrections],
        "reference": None if reference is None else {"kind": "start", **dataclasses.asdict(reference)},
        "old_logprobs": "recomputed",
        "sampling": {"max_tokens": TRL["max_tokens"]},
    }
    known = oracle.Formula(recipe=recipe, ends=(), weights={})
    logprobs = {name: map(torch.tensor, rows) for name, rows in TRL["logprobs"].items()}
    for sampler, now, old, reference, advantage, slope, weight in zip(
        TRL["logprobs"]["sampler"],
        *(logprobs[name] for name in ("policy", "old", "reference")),
        TRL["advantages"],
        entry["grad"],
        weights(ours.loss.reduction).split(LENGTHS),
        strict=True,
    ):
        one = oracle.SampledSequence(
            ids=(), at=(), begins=(), temperature=1.0,
            sampler_logprobs=tuple(sampler), advantages=(advantage,) * len(sampler),
        )  # fmt: skip
        leaf = now.double().requires_grad_()
        cost = oracle.cost(known, one, leaf, old.double(), reference.double())
        (cost * weight).sum().backward()
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad.numpy(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("entry", TRL["weights"], ids=named)
def test_importance_weights(entry: dict[str, Any]) -> None:
    level, _, beyond = entry["options"]["mode"].partition("_")
    part: Any = TokenCorrection if level == "token" else Sequence
    correction = part(beyond=beyond, low=entry["options"]["min"], high=entry["options"]["max"])
    ours = Objective(loss=Grpo(), corrections=(correction,), recomputed=True)
    micro = ours.informed(batch(), OldLogprobs(recomputed_logprobs_N=flat("old"), ref_logprobs_N=None))
    computed, _ = ours.weights(flat("policy"), micro)
    np.testing.assert_allclose(computed.numpy(), np.concatenate(entry["weights"]), rtol=1e-5, atol=0)


def scored_groups() -> list[Group]:
    """The rewards that TRL was given, as groups."""
    task = Task(id="t", env="e", prompt=(), answer="")
    completion = Completion(tokens=(1,), logprobs=(-1.0,), versions=(0,), finish="stop")
    turn = Turn(prompt=(0,), completion=completion, temperature=1.0)
    weigh = TRL["rewards"]["weights"]
    groups = []
    for g, rewards in enumerate(TRL["rewards"]["groups"]):
        rollouts = [
            Rollout(
                id=f"g{g}/{i}",
                task=task,
                turns=(turn,),
                messages=(),
                status="ok",
                rewards=dict(zip("ab", each, strict=True)),
                reward=sum(w * r for w, r in zip(weigh, each, strict=True)),
            )
            for i, each in enumerate(rewards)
        ]
        groups.append(Group(id=f"g{g}", index=g, env="e", rollouts=tuple(rollouts)))
    return groups


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("none", DrGrpo()),
        ("group", GroupStd()),
        ("batch", BatchStd()),
        ("rloo", Rloo()),
        ("gdpo", Gdpo().weighed({"e": dict(zip("ab", TRL["rewards"]["weights"], strict=True))})),
    ],
)
def test_advantages(theirs: str, ours: Advantage) -> None:
    computed = [value for mine in advantages(ours, scored_groups()) for value in mine]
    # TRL's factor n / (n - 1) is float32 whatever the rewards are.
    np.testing.assert_allclose(computed, TRL["group_advantages"][theirs], rtol=1e-7, atol=1e-9)


def test_moving_reference() -> None:
    """One update of TRL's callback."""
    entry = TRL["moving_reference"]
    weight = torch.nn.Parameter(torch.tensor(entry["before"]))
    held = Average(mixup=entry["alpha"], every=1).hold([("w", weight)])
    weight.data = torch.tensor(entry["policy"])
    held.move()
    np.testing.assert_allclose(held.state_dict()["w"].numpy(), entry["after"], rtol=1e-6)
    assert weight.tolist() == torch.tensor(entry["policy"]).tolist(), "the policy stays"
