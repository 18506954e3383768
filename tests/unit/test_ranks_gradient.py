"""The gradient of several ranks is one rank's, element by element, for a model of transformers and whole objectives.

In float64 one rank's micro-batches are larger: prompts are shared there that ranks compute twice.
Groups are a certificate's: turns, a conversation that answers leave at three places, masks, two temperatures.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.rank_records import Recording, of_updates
from support.rank_states import shares_of, whole_states
from support.rank_threads import rank_threads
from support.tiers import long_but
from support.tiny_policy import logprobs_of, reference
from support.whole_steps import OBJECTIVES, TRAINABLE
from torch import Tensor, nn
from torch.nn import Parameter

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.algorithms.references.average import Average
from tandem.algorithms.references.start import Start
from tandem.distributed import gradient_sums, sharding
from tandem.distributed.group import DataGroup
from tandem.distributed.sharding import ShardedStepper
from tandem.model.policy import Compute, Policy, load_model
from tandem.optimizers.adamw import AdamW
from tandem.tools.certify.made_up import GroupMaker
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.ranks.work import RankWork, to_plain
from tandem.trainer.step import LocalWork, Objective, OldLogprobs
from tandem.types import Group, Sampling

CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest distance of an element, as a share of its tensor's largest."""
Run = Callable[[Callable[[DataGroup], Any]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained on the groups, how often."""

    objective: Objective
    trainable: str = "full"
    updates: int = 1
    """On each step's batch."""
    steps: int = 1
    local: bool = False
    """Each rank adds up its own micro-batches."""


CASES = {
    **{
        f"reduction {kind}": Case(objective=Objective(loss=Grpo(reduction=kind)))
        for kind in ("token", "sequence", "constant")
    },  # type: ignore[arg-type]
    **{name: Case(objective=objective) for name, objective in OBJECTIVES.items() if name not in ("grpo", "reference")},
    **{
        f"reference {estimator}": Case(objective=Objective(loss=Grpo(), reference=Start(beta=0.1, estimator=estimator)))  # type: ignore[arg-type]
        for estimator in ("k1", "k2", "k3")
    },
    "reference that follows": Case(objective=Objective(loss=Grpo(), reference=Average(mixup=0.5, every=1)), steps=3),
    "repeated updates": Case(objective=OBJECTIVES["corrections"], updates=3),
    "repeated updates with a reference": Case(objective=OBJECTIVES["reference"], updates=2, steps=2),
    "local sums": Case(objective=Objective(loss=Grpo()), steps=2, local=True),
    "local sums, repeated updates": Case(objective=OBJECTIVES["reference"], updates=2, local=True),
    "adapter": Case(objective=OBJECTIVES["reference"], trainable="lora", updates=2),
    "merged adapter": Case(objective=OBJECTIVES["reference"], trainable="merged", updates=2),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Run]:
    with rank_threads(2) as run:
        yield run


@pytest.fixture(scope="module")
def four() -> Iterator[Run]:
    with rank_threads(4) as run:
        yield run


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[Group]:
    """Sampled by the model itself, some tokens a little off and some far."""
    plain, sampling = reference(tiny_model), Sampling()
    config: Any = SimpleNamespace(sampling=sampling, broker=SimpleNamespace(env_advantages=False))
    known: Any = SimpleNamespace(ends=(257,), weights={})
    maker = GroupMaker(config=config, known=known, vocabulary=256)

    def own(prompt: Any, tokens: Any, temperature: float) -> list[float]:
        with torch.no_grad():
            options = replace(sampling, temperature=temperature)
            return logprobs_of(plain, prompt, tokens, options).tolist() if tokens else []

    return maker.groups(own)


@pytest.fixture(scope="module")
def models(tiny_model: Path) -> dict[str, nn.Module]:
    """A prepared model of each way to train."""
    made = {}
    for kind, trainable in TRAINABLE.items():
        torch.manual_seed(0)
        model = load_model(str(tiny_model), dtype=torch.float32, device=torch.device("cpu"))
        made[kind] = trainable.prepare(model).eval()
    return made


def packed(objective: Objective, groups: list[Group], ranks: int, budget: int = 40) -> StepBatch:
    pack = Packer(
        advantage=DrGrpo(), reduction=objective.loss.reduction, max_tokens=16, budget=budget, mask_truncated=False,
        device=torch.device("cpu"), width=64, ranks=ranks,
    )  # fmt: skip
    return pack(groups, version=0)


def placed(named: list[tuple[str, Parameter]]) -> Callable[[int], Mapping[str, Tensor]]:
    """Weights after so many updates: the same whatever an optimizer would have made of a last digit."""
    start = {name: parameter.detach().clone() for name, parameter in named}

    def after(updates: int) -> Mapping[str, Tensor]:
        random = torch.Generator().manual_seed(updates)
        return {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=random).to(tensor.dtype)
            for name, tensor in start.items()
        }

    return after


@dataclass
class Alone:
    """One process's gradient of each update, summed without any of what divides it."""

    named: list[tuple[str, Parameter]]
    placed: Callable[[int], Mapping[str, Tensor]]
    updates: list[dict[str, Tensor]] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def accumulate(self, parameter: Parameter) -> None:
        (name,) = (name for name, other in self.named if other is parameter)
        assert parameter.grad is not None
        self.sums[name] = self.sums.get(name, 0.0) + parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        self.updates.append({name: self.sums.get(name, torch.zeros_like(p)) for name, p in self.named})
        self.sums = {}
        after = self.placed(len(self.updates))
        for name, parameter in self.named:
            parameter.copy_(after[name])
        return torch.zeros((), dtype=torch.float64)


def whole_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """The model in a type; norms of transformers are float32 whatever comes in, so that of float64 is done here."""

    def norm(self: Any, hidden: Tensor) -> Tensor:
        scaled: Tensor = self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return scaled

    for module in model.modules():
        if dtype == torch.float64 and hasattr(module, "variance_epsilon"):
            module.forward = MethodType(norm, module)  # type: ignore[method-assign]
    return model.to(dtype)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a tiny model is divided."""
    monkeypatch.setattr(sharding, "SMALL", 0)
    monkeypatch.setattr(gradient_sums, "BUCKET", 1 << 14)


def gradients(case: Case, model: nn.Module, batch: StepBatch, dtype: torch.dtype, group: DataGroup | None) -> Any:
    """Of every update; of several ranks each one's share of them."""
    trainable = TRAINABLE[case.trainable]
    policy = Policy(whole_in(dtype, copy.deepcopy(model)), None, name="tiny", compute=Compute(1))
    with contextlib.closing(policy):
        named = list(trainable.parameters(policy.model))
        after = placed(named)
        names = [name for name, _ in trainable.source(policy.model)]
        held = None
        if case.objective.reference is not None:
            held = case.objective.reference.hold([(name, policy.model.get_parameter(name)) for name in names])
        stepper: Any = Alone(named, after)
        if group is not None:
            recording, is_full = Recording(AdamW(), after), case.trainable == "full"
            stepper = ShardedStepper(recording, named, group, replicate=not is_full, local=case.local)
        with torch.no_grad():  # the first step is already away from what was loaded
            for name, parameter in named:
                parameter.copy_(after(0)[name])
        kind: type[LocalWork] = LocalWork if group is None else RankWork
        work = kind(
            policy=policy, objective=case.objective, stepper=stepper, sampling=Sampling(), reference=held,
            fold=lambda: trainable.fold(policy.model),
        )  # fmt: skip
        asyncio.run(stepped(case, work, batch, group))
        if group is None:
            return list(stepper.updates)
        return shares_of(stepper)


async def stepped(case: Case, work: LocalWork, batch: StepBatch, group: DataGroup | None) -> None:
    """As ``Step`` has ranks do it, this one's micro-batches through the wire."""
    compute = work.policy.compute
    for step in range(1, case.steps + 1):
        old: Sequence[OldLogprobs] = ()
        if isinstance(work, RankWork):
            assert group is not None
            indices = [of_ranks[group.rank] for of_ranks in batch.rounds]
            work.take([None if i is None else to_plain(batch.micro[i]) for i in indices])
        for _ in range(case.updates):
            await compute(work.fold)
            if isinstance(work, RankWork):
                await work.rounds()
            else:
                _, _, old = await work.passed(batch, old, lambda: None)
            await compute(work.apply, 1e-3, 1.0)
        if work.reference is not None and work.reference.due(step):
            await compute(work.fold)
            await compute(work.reference.move)


def check(
    name: str, world: int, run: Run, models: dict[str, nn.Module], groups: list[Group], dtype: torch.dtype
) -> None:
    case = CASES[name]
    model = models[case.trainable]
    # Products of other shapes round otherwise, which is no rank's doing: float64 shows that it is nothing else.
    own = packed(case.objective, groups, 1, budget=90 if dtype == torch.float64 else 40)
    want = gradients(case, model, own, dtype, None)
    batch = packed(case.objective, groups, world)
    assert len(batch.micro) > 2 * world
    like = {f"{name}/gradient-{i}": gradient for i, update in enumerate(want) for name, gradient in update.items()}
    computed = of_updates(whole_states(run(lambda group: gradients(case, model, batch, dtype, group)), like))
    assert len(computed) == len(want) == case.updates * case.steps
    for update, (ours, theirs) in enumerate(zip(computed, want, strict=True)):
        assert ours.keys() == theirs.keys()
        assert any(bool(gradient.any()) for gradient in theirs.values())
        for parameter, gradient in theirs.items():
            assert ours[parameter].dtype == dtype
            apart = float((ours[parameter] - gradient).abs().max())
            assert apart <= CLOSE[dtype] * float(gradient.abs().max()), (update, parameter, apart)


def trained(model: nn.Module, batches: list[StepBatch], group: DataGroup | None) -> dict[str, Tensor]:
    """Weights after a step on each batch, by the run's own optimizer."""
    policy = Policy(copy.deepcopy(model).bfloat16(), None, name="tiny", compute=Compute(1))
    with contextlib.closing(policy):
        named, optimizer = list(policy.model.named_parameters()), AdamW(lr=1e-2, weight_decay=0.1)
        stepper: Any = optimizer.bind(named)
        if group is not None:
            stepper = ShardedStepper(optimizer, named, group)
        kind: type[LocalWork] = LocalWork if group is None else RankWork
        work = kind(policy=policy, objective=OBJECTIVES["grpo"], stepper=stepper, sampling=Sampling())
        for batch in batches:
            asyncio.run(stepped(Case(objective=OBJECTIVES["grpo"]), work, batch, group))
        return {name: parameter.detach() for name, parameter in named}


@pytest.mark.slow
@pytest.mark.parametrize("world", long_but([2, 4], 2))
def test_bfloat16_weights_have_one_ranks_bits_on_every_rank_after_four_steps(
    world: int, two: Run, four: Run, models: dict[str, nn.Module], groups: list[Group]
) -> None:
    """One rank computes the same micro-batches, which in bfloat16 no two shapes compute alike."""
    batches = [packed(OBJECTIVES["grpo"], groups[i:], world) for i in range(4)]
    want = trained(models["full"], batches, None)
    before = {name: parameter.bfloat16() for name, parameter in models["full"].named_parameters()}
    assert all(float((want[name] != before[name]).float().mean()) > 0.05 for name in want)
    for weights in {2: two, 4: four}[world](lambda group: trained(models["full"], batches, group)):
        assert weights.keys() == want.keys()
        for name, tensor in want.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(weights[name].view(torch.int16), tensor.view(torch.int16)), name


TYPES = ("float32", "float64")
OF_TWO = [(name, dtype) for name in CASES for dtype in TYPES]
OF_FOUR = [
    (name, dtype)
    for name in ("reduction token", "reduction sequence", "reduction constant", "repeated updates")
    for dtype in TYPES
]
KEPT = [
    *((f"reduction {kind}", "float64") for kind in ("token", "sequence", "constant")),
    *(("repeated updates with a reference", dtype) for dtype in TYPES),
    ("adapter", "float32"),
    ("reference k3", "float64"),
]


@pytest.mark.slow
@pytest.mark.parametrize("source", long_but(OF_TWO, *KEPT), ids=" ".join)
def test_every_element_of_two_ranks_gradient_is_one_ranks(
    source: tuple[str, str], two: Run, models: dict[str, nn.Module], groups: list[Group]
) -> None:
    name, dtype = source
    check(name, 2, two, models, groups, getattr(torch, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("source", long_but(OF_FOUR, OF_FOUR[0], OF_FOUR[-1]), ids=" ".join)
def test_every_element_of_four_ranks_gradient_is_one_ranks(
    source: tuple[str, str], four: Run, models: dict[str, nn.Module], groups: list[Group]
) -> None:
    name, dtype = source
    check(name, 4, four, models, groups, getattr(torch, dtype))
