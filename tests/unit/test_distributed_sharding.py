"""The sharded optimizer: any number of ranks updates as one process does, to the bit where sums are exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_states import load_whole, shares_of, whole_states
from support.rank_threads import on_ranks
from torch import Tensor
from torch.nn import Parameter

from tandem.distributed import gradient_sums, sharding
from tandem.distributed.group import DataGroup
from tandem.distributed.sharding import ShardedStepper
from tandem.distributed.state_shards import StateShare
from tandem.errors import CheckpointError
from tandem.optimizers import _adam, _byte_moments, _narrow, _precise
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit
from tandem.optimizers.adamw_cpu import AdamWCpu

SHAPES = {"embed": (70, 64), "norm": (64,), "wide": (3, 1100), "even": (16, 512), "never": (40, 64)}
"""Divisible or not by ranks of 256; ``norm`` is small, and ``never`` has no gradient."""
STEPS, MICROS = 4, 6

OPTIMIZERS: dict[str, tuple[Any, torch.dtype]] = {
    "adamw float32": (AdamW(lr=1e-2, weight_decay=0.1), torch.float32),
    "adamw masters": (AdamW(lr=1e-2, weight_decay=0.1), torch.bfloat16),
    "adamw stochastic": (AdamW(lr=1e-3, precision="stochastic"), torch.bfloat16),
    "adamw8bit float32": (AdamW8bit(lr=1e-2), torch.float32),
    "adamw8bit masters": (AdamW8bit(lr=1e-2), torch.bfloat16),
    "adamw8bit stochastic": (AdamW8bit(lr=1e-3, precision="stochastic"), torch.bfloat16),
    "adamw_cpu": (AdamWCpu(lr=1e-2), torch.bfloat16),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which tiny tensors are divided, and gradients take several buckets."""
    monkeypatch.setattr(sharding, "SMALL", 1024)
    monkeypatch.setattr(gradient_sums, "BUCKET", 4096)
    monkeypatch.setattr(_byte_moments, "SMALL", 1024)
    for module in (_adam, _narrow, _precise):
        monkeypatch.setattr(module, "PIECE", 1024)


def weights(dtype: torch.dtype) -> list[tuple[str, Parameter]]:
    random = torch.Generator().manual_seed(1)
    return [(name, Parameter(torch.randn(shape, generator=random).to(dtype))) for name, shape in SHAPES.items()]


def gradient(name: str, step: int, micro: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/64 that every sum of is exact, in whatever order."""
    random = torch.Generator().manual_seed(100 * (10 * step + micro) + list(SHAPES).index(name))
    return (torch.randint(-64, 65, SHAPES[name], generator=random) / 64).to(dtype)


def trained(stepper: Any, named: Sequence[tuple[str, Parameter]], rank: int, world: int, most: float) -> list[float]:
    """Norms of the steps, on this rank's micro-batches; one rank's have no gradient of ``wide``."""
    norms = []
    for step in range(STEPS):
        for micro in range(0, MICROS, world):
            mine = micro + rank
            for name, parameter in reversed(named) if mine < MICROS else ():
                if name == "never" or (name == "wide" and mine % 2):
                    continue
                parameter.grad = gradient(name, step, mine, parameter.dtype)
                stepper.accumulate(parameter)
            getattr(stepper, "flush", lambda: None)()
        norms.append(float(stepper.step(1e-2, most)))
    return norms


def alone(optimizer: Any, dtype: torch.dtype, most: float) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    named = weights(dtype)
    stepper = optimizer.bind(named)
    norms = trained(stepper, named, 0, 1, most)
    return norms, {name: p.detach() for name, p in named}, stepper.state_dict()


TWO_AND_FOUR = ("adamw masters", "adamw8bit stochastic")
"""Optimizers that the default tier has on two and four ranks too, beside three."""
DIVIDED = [
    *((kind, 3, False) for kind in OPTIMIZERS),
    *(pytest.param(kind, 3, True, marks=pytest.mark.slow) for kind in OPTIMIZERS),
    *(
        pytest.param(kind, world, False, marks=[pytest.mark.slow if kind in TWO_AND_FOUR else pytest.mark.long])
        for kind in OPTIMIZERS
        for world in (2, 4)
    ),
]


@pytest.mark.parametrize(("kind", "world", "local"), DIVIDED)
def test_weights_and_states_have_the_same_bits_as_one_process(kind: str, world: int, local: bool) -> None:
    """Micro-batches do not divide by ranks. Bytes are not clipped: a norm's last digit decides which one is nearest."""
    optimizer, dtype = OPTIMIZERS[kind]
    most = 0.0 if "8bit" in kind else 5.0
    norms, want, states = alone(optimizer, dtype, most)

    def rank(group: DataGroup) -> tuple[list[float], dict[str, Tensor], list[StateShare]]:
        named = weights(dtype)
        stepper = ShardedStepper(optimizer, named, group, local=local)
        its_norms = trained(stepper, named, group.rank, world, most)
        return its_norms, {name: p.detach() for name, p in named}, shares_of(stepper)

    results = on_ranks(world, rank)
    for its_norms, its_weights, _ in results:
        assert its_norms == results[0][0], "every rank knows the same norm"
        assert its_norms == pytest.approx(norms, rel=1e-6)
        for name, tensor in its_weights.items():
            assert torch.equal(tensor, want[name]), name
    stored = whole_states([shares for _, _, shares in results], states)
    assert stored.keys() == states.keys()
    for key, tensor in states.items():
        assert torch.equal(stored[key], tensor), key


@pytest.mark.parametrize("kind", ["adamw masters", "adamw8bit masters", "adamw8bit stochastic"])
def test_states_go_on_with_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    optimizer, dtype = OPTIMIZERS[kind]
    *_, states = alone(optimizer, dtype, 1.0)

    def on(world: int, before: dict[str, Tensor]) -> dict[str, Tensor]:
        def rank(group: DataGroup) -> list[StateShare]:
            stepper = ShardedStepper(optimizer, weights(dtype), group)
            load_whole(stepper, before, tmp_path)
            return shares_of(stepper)

        return whole_states(on_ranks(world, rank), states)

    after = on(3, on(2, states))
    assert after.keys() == states.keys()
    assert all(torch.equal(after[key], states[key]) for key in states)


def test_states_of_other_parameters_are_refused(tmp_path: Path) -> None:
    *_, states = alone(AdamW(), torch.float32, 1.0)

    def rank(group: DataGroup) -> None:
        stepper = ShardedStepper(AdamW(), weights(torch.float32), group)
        with pytest.raises(CheckpointError, match=r"'other/exp_avg' does not match"):
            load_whole(stepper, {**states, "other/exp_avg": torch.zeros(3)}, tmp_path)
        missing = {key: value for key, value in states.items() if key != "wide/exp_avg"}
        with pytest.raises(CheckpointError, match=r"'wide/exp_avg' does not match"):
            load_whole(stepper, missing, tmp_path)

    on_ranks(2, rank)


def one_step(
    set_gradients: Callable[[int, dict[str, Parameter]], None], local: bool
) -> list[tuple[float, dict[str, Tensor]]]:
    """Norm and weights of two ranks after a step."""

    def rank(group: DataGroup) -> tuple[float, dict[str, Tensor]]:
        named = weights(torch.bfloat16)
        stepper = ShardedStepper(AdamW(lr=1e-2), named, group, local=local)
        set_gradients(group.rank, dict(named))
        for _, parameter in named:
            stepper.accumulate(parameter)
        stepper.flush()
        norm = float(stepper.step(1e-2, 1.0))
        return norm, {name: p.detach() for name, p in named}

    return on_ranks(2, rank)


@pytest.mark.parametrize("local", [False, True])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(local: bool) -> None:
    def nan_on_the_last(rank: int, named: dict[str, Parameter]) -> None:
        for name, parameter in named.items():
            parameter.grad = torch.ones_like(parameter)
            if rank == 1 and name == "wide":
                parameter.grad[0, 7] = math.nan

    before = dict(weights(torch.bfloat16))
    for norm, after in one_step(nan_on_the_last, local):
        assert math.isnan(norm)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_gradients_are_clipped_by_the_norm_over_all_ranks() -> None:
    def rank(group: DataGroup) -> dict[str, Tensor]:
        named = weights(torch.float32)
        stepper = ShardedStepper(AdamW8bit(lr=1e-2, beta1=0.0), named, group)
        trained(stepper, named, group.rank, 2, 0.5)
        return {name: p.detach() for name, p in named}

    norms, want, _ = alone(AdamW8bit(lr=1e-2, beta1=0.0), torch.float32, 0.5)
    assert min(norms) > 5
    first, second = on_ranks(2, rank)
    for name, tensor in want.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], tensor, atol=2e-4)


@pytest.mark.parametrize("local", [False, True])
def test_a_parameter_with_a_gradient_on_one_rank_alone_moves_on_all_and_others_do_not(local: bool) -> None:
    def on_the_last(rank: int, named: dict[str, Parameter]) -> None:
        if rank == 1:
            named["wide"].grad = torch.ones_like(named["wide"])

    before = dict(weights(torch.bfloat16))
    for norm, after in one_step(on_the_last, local):
        assert norm == pytest.approx(math.sqrt(before["wide"].numel()))
        assert {name for name in before if not torch.equal(after[name], before[name])} == {"wide"}
        assert (after["wide"] != before["wide"]).float().mean() > 0.9


def test_float64_gradients_are_summed_in_float64() -> None:
    """Thirds, which float32 sums would get wrong in the eighth digit."""
    recorded: list[dict[str, Tensor]] = []

    class Recording(AdamW):
        def bind_parts(self, parts: Any) -> Any:
            return Kept(parts, recorded)

    def rank(group: DataGroup) -> None:
        named = [(name, Parameter(p.detach().double())) for name, p in weights(torch.float32)]
        stepper = ShardedStepper(Recording(), named, group)
        for name, parameter in named:
            parameter.grad = (gradient(name, 0, group.rank, torch.float64) + 1) / 3
            stepper.accumulate(parameter)
        stepper.flush()
        stepper.step(0.0, 0.0)

    on_ranks(2, rank)
    for name in SHAPES:
        want = sum((gradient(name, 0, r, torch.float64) + 1) / 3 for r in range(2)).flatten()  # type: ignore[union-attr]
        whole = torch.full_like(want, math.nan)
        for own in recorded:
            for label, grad in own.items():
                at = int(label.partition("@")[2] or 0)
                if label.partition("@")[0] == name:
                    whole[at : at + grad.numel()] = grad.flatten()
        assert float((whole - want).abs().max()) < 1e-12


class Kept:
    """A part stepper that keeps gradients."""

    def __init__(self, parts: Any, recorded: list[dict[str, Tensor]]):
        self.label = {part.parameter: part.label for part in parts}
        self.sums: dict[Parameter, Tensor] = {}
        recorded.append({})
        self.out = recorded[-1]

    def add(self, parameter: Parameter, grad: Tensor) -> None:
        self.sums[parameter] = self.sums.get(parameter, torch.zeros_like(grad)) + grad

    def gradients(self) -> dict[Parameter, Tensor]:
        return self.sums

    def forget(self, parameter: Parameter) -> None:
        self.sums.pop(parameter, None)

    def update_by(self, norm: Tensor, lr: float, max_grad_norm: float) -> None:
        self.out.update({self.label[parameter]: grad for parameter, grad in self.sums.items()})

    def zero_grad(self) -> None:
        self.sums = {}


def test_adapters_are_updated_whole_by_every_rank() -> None:
    def rank(group: DataGroup) -> list[str]:
        return list(ShardedStepper(AdamW(), weights(torch.float32), group, replicate=True).state_dict())

    first, _ = on_ranks(2, rank)
    assert sorted(first) == sorted(f"{name}/{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq"))
