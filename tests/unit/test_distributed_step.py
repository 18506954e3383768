"""A step on several ranks: the gradient and the metrics of one process, for every objective."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.rank_threads import on_ranks
from support.tiny_policy import live_policy
from support.whole_steps import OBJECTIVES, TRAINABLE, groups
from torch import Tensor

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.distributed import gradient_sums, sharding
from tandem.distributed.context_parallel import ContextPart
from tandem.distributed.group import DataGroup
from tandem.distributed.sharding import ShardedStepper
from tandem.metrics import flatten, merge
from tandem.optimizers.adamw import AdamW
from tandem.trainer.balance import rounds_of
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.ranks.work import LeadWork, RankWork, micro_of, of_plain, to_plain
from tandem.trainer.step import LocalWork, Objective
from tandem.types import Sampling

REDUCTIONS = {f"grpo {kind}": Objective(loss=Grpo(reduction=kind)) for kind in ("token", "sequence", "constant")}  # type: ignore[arg-type]

_loading = threading.Lock()
"""transformers loads one model at a time."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a tiny model is divided."""
    monkeypatch.setattr(sharding, "SMALL", 2048)
    monkeypatch.setattr(gradient_sums, "BUCKET", 1 << 14)


def packed(objective: Objective, ranks: int, penalties: Any = None) -> StepBatch:
    pack = Packer(
        advantage=DrGrpo(), reduction=objective.loss.reduction, max_tokens=16, budget=30, mask_truncated=False,
        device=torch.device("cpu"), ranks=ranks, penalties=penalties,
    )  # fmt: skip
    return pack(groups(), version=0)


def trained(
    folder: Path, objective: Objective, kind: str, batch: StepBatch, group: DataGroup | None, updates: int
) -> tuple[dict[str, Tensor], list[float], list[Any]]:
    """Weights after the updates, norms of the gradients, metrics of the last pass, all of this rank."""
    trainable = TRAINABLE[kind]
    with contextlib.ExitStack() as stack:
        with _loading:
            policy = stack.enter_context(live_policy(folder, trainable=trainable))
        changing = [(name, policy.model.get_parameter(name)) for name, _ in trainable.source(policy.model)]
        named, optimizer = trainable.parameters(policy.model), AdamW(lr=1e-3)
        options: dict[str, Any] = {
            "policy": policy,
            "objective": objective,
            "sampling": Sampling(),
            "reference": None if objective.reference is None else objective.reference.hold(changing),
            "fold": lambda: trainable.fold(policy.model),
        }

        async def alone() -> tuple[list[float], Any]:
            work, norms = LocalWork(stepper=optimizer.bind(named), **options), list[float]()
            old: Sequence[Any] = ()
            for _ in range(updates):
                await policy.compute(work.fold)
                metrics, _, old = await work.passed(batch, old, lambda: None)
                norms.append(float(await work.every("apply", 1e-3, 0.5)))
            return norms, metrics

        async def among(group: DataGroup) -> tuple[list[float], Any]:
            stepper = ShardedStepper(optimizer, named, group, replicate=kind != "full")
            work, norms = RankWork(stepper=stepper, **options), list[float]()
            indices = [of_ranks[group.rank] for of_ranks in batch.rounds]
            work.take([None if i is None else to_plain(batch.micro[i]) for i in indices])
            for _ in range(updates):
                await policy.compute(work.fold)
                metrics, _ = await work.rounds()
                norms.append(float(await work.every("apply", 1e-3, 0.5)))
            return norms, metrics

        norms, metrics = asyncio.run(alone() if group is None else among(group))
        weights = {name: parameter.detach().clone() for name, parameter in named}
        return weights, norms, metrics


def check(folder: Path, objective: Objective, kind: str, world: int, updates: int) -> None:
    batch = packed(objective, world)
    want, norms, alone = trained(folder, objective, kind, batch, None, updates)
    results = on_ranks(world, lambda group: trained(folder, objective, kind, batch, group, updates))
    for weights, its_norms, _ in results:
        assert its_norms == pytest.approx(norms, rel=2e-6)
        for name, tensor in want.items():
            assert torch.equal(weights[name], results[0][0][name]), "all ranks hold the same bits"
            # Adam's first steps are by the sign, which noise decides where a gradient is nothing but noise.
            far = (weights[name] - tensor).abs() > 1e-5
            assert float(far.float().mean()) < 0.002, name
    of_ranks: Sequence[Any] = [m for _, _, metrics in results for m in metrics]
    combined, expected = flatten(merge(of_ranks)), flatten(merge(alone))
    assert combined.keys() == expected.keys()
    for name, value in expected.items():
        assert combined[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradient_is_that_of_one_process_for_every_reduction(tiny_model: Path, name: str, world: int) -> None:
    check(tiny_model, REDUCTIONS[name], "full", world, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_updates_on_a_batch_are_those_of_one_process_for_every_objective(tiny_model: Path, name: str) -> None:
    """Prefix trees, corrections, a reference, and a second update on the same batch."""
    check(tiny_model, OBJECTIVES[name], "full", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "merged"])
def test_adapters_are_trained_as_by_one_process(tiny_model: Path, kind: str) -> None:
    check(tiny_model, OBJECTIVES["grpo"], kind, 3, 2)


def test_rounds_are_alike_in_cost_and_a_missing_micro_batch_is_none() -> None:
    assert rounds_of([1.0, 8.0, 7.0, 2.0, 6.0], 2) == [(1, 2), (4, 3), (0, None)]


def test_every_micro_batch_is_dealt_once_and_ranks_have_equally_many() -> None:
    for world in (2, 3, 4):
        batch = packed(REDUCTIONS["grpo token"], world)
        dealt = [i for one in batch.rounds for i in one if i is not None]
        assert sorted(dealt) == list(range(len(batch.micro)))
        assert all(len(one) == world for one in batch.rounds)
        assert flatten(batch.metrics)["ranks/imbalance"] >= 1
    assert packed(REDUCTIONS["grpo token"], 1).rounds == ()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_each_rank_gets_its_micro_batches_with_the_weights_of_the_whole_step(name: str) -> None:
    """A rank that weighed its tokens by its own count would give a mean of the ranks' means."""
    batch, received = packed(REDUCTIONS[name], 2), dict[int, Sequence[Any]]()

    class Lead(LeadWork):
        def take(self, plains: Sequence[Any]) -> None:
            received[0] = plains

        async def rounds(self, queued: Any = None) -> tuple[list[dict[str, Any]], list[list[float]]]:
            return results(received[0])

    class Ranks:
        world = 2

        async def execute(self, command: str, body: Any, lead: Any) -> tuple[Any, list[Any]]:
            received[1] = body(1)
            metrics, logprobs = results(received[1])
            return await lead, [[to_plain(metrics), logprobs]]

    def results(plains: Sequence[Any]) -> tuple[list[dict[str, Any]], list[list[float]]]:
        count = sum(plain is not None for plain in plains)
        return [{}] * count, [[]] * count

    nothing: Any = None
    ranks: Any = Ranks()
    work = Lead(policy=nothing, objective=nothing, stepper=nothing, sampling=nothing, ranks=ranks)
    asyncio.run(work.passed(batch, (), lambda: None))
    for rank, plains in received.items():
        indices = [dealt[rank] for dealt in batch.rounds]
        assert plains == [None if i is None else to_plain(batch.micro[i]) for i in indices]


def test_micro_batches_and_metrics_survive_the_wire() -> None:
    from tandem.model.penalties import Penalties

    batch = packed(REDUCTIONS["grpo token"], 2, Penalties(repetition=1.2, min_tokens=2, ends=(3, 4)))
    for micro in batch.micro:
        plain = to_plain(micro)
        again = micro_of(plain, torch.device("cpu"))
        assert to_plain(again) == plain
        assert again.history is not None
        assert micro.history is not None
        assert again.history.penalties == micro.history.penalties
        assert (again.plan.lengths, again.plan.parents, again.places) == (
            micro.plan.lengths,
            micro.plan.parents,
            micro.places,
        )
    assert of_plain(to_plain(batch.metrics)) == batch.metrics


def test_a_shared_micro_batch_is_divided_without_asking_the_device() -> None:
    """Tensors on ``meta`` have nothing to ask for: which trained tokens are a rank's is known on the host."""
    batch, device = packed(REDUCTIONS["grpo token"], 2), torch.device("meta")

    class Group:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    group: Any = Group()
    nothing: Any = None
    policy: Any = SimpleNamespace(device=device)
    mine = RankWork(policy=policy, objective=nothing, stepper=nothing, sampling=nothing, context=group)
    mine.take([to_plain(micro) for micro in batch.micro])
    for micro, theirs in zip(batch.micro, mine._micros, strict=True):
        assert theirs is not None
        part = mine.part(theirs)
        assert isinstance(part, ContextPart)
        first = part.plan.first
        assert part.num == sum(first <= place < first + part.plan.each for place in micro.predict_N.tolist())
        assert {part.at_M.device, part.predict_N.device, part.tokens_T.device, theirs.targets_N.device} == {device}
        assert len(part.own(theirs.targets_N)) == max(part.num, 1)
