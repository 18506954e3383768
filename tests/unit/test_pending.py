"""Numbers come from the device together: what arrives, and that nothing of a step asks for any before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import live_policy
from support.whole_steps import OBJECTIVES, TRAINABLE, whole_step
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tandem import pending
from tandem.algorithms.losses.grpo import Grpo
from tandem.metrics import Max, Mean, Share, Sum, flatten
from tandem.pending import Pending, fetch, settle
from tandem.trainable.full import Full
from tandem.trainer import step as steps
from tandem.trainer.step import Objective


class Copies(TorchFunctionMode):
    """Counts how often Python asks for a tensor's numbers."""

    ASK = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func in self.ASK
        return func(*args, **(kwargs or {}))


def test_values_arrive_where_they_were_asked_for_and_exactly() -> None:
    many = 2**24 + 1  # no float32
    parts = [
        {"a": Pending(Mean, torch.tensor(1 / 3), 3), "b": Sum(7.0), "c": Pending(Sum, torch.tensor(many))},
        {"d": Pending(Share, torch.tensor(2.0, dtype=torch.float64), torch.tensor(1e-60, dtype=torch.float64), 4)},
        {},
        {"a": Pending(Mean, torch.tensor(5, dtype=torch.int32), 2), "e": Pending(Max, torch.tensor([-1.5]))},
    ]
    tensors = [torch.tensor([0.1, 0.2]), torch.empty(0), torch.tensor([[1, 2], [3, 4]])]
    with Copies() as copies:
        settled, numbers = settle(parts, tensors)
    assert copies.num_copies == 1
    third = float(torch.tensor(1 / 3))
    assert settled == [
        {"a": Mean(third, 3), "b": Sum(7.0), "c": Sum(many)},
        {"d": Share(2.0, 1e-60, 4)},
        {},
        {"a": Mean(5.0, 2), "e": Max(-1.5)},
    ]
    assert numbers == [torch.tensor([0.1, 0.2]).tolist(), [], [1.0, 2.0, 3.0, 4.0]]
    assert [list(part) for part in settled] == [list(part) for part in parts]


def test_nothing_asked_nothing_copied() -> None:
    with Copies() as copies:
        assert settle([{}, {"a": Sum(1.0)}]) == ([{}, {"a": Sum(1.0)}], [])
    assert copies.num_copies == 0


def test_a_pending_number_holds_no_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    (total,) = Pending(Sum, weight.sum()).numbers
    assert isinstance(total, Tensor)
    assert not total.requires_grad


@contextmanager
def answered(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Sequence[Tensor]], Any]) -> Iterator[list[int]]:
    """Numbers come from ``answer``; how many tensors were asked for each time."""
    requests: list[int] = []

    def ask(tensors: Sequence[Tensor]) -> Any:
        requests.append(len(tensors))
        return answer(tensors)

    with monkeypatch.context() as patch:
        patch.setattr(pending, "fetch", ask)
        patch.setattr(steps, "fetch", ask)
        yield requests


CASES = [("full", name, 1) for name in OBJECTIVES] + [("lora", "grpo", 2), ("merged", "corrections", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("trainable", "objective", "updates"), CASES)
def test_a_step_asks_for_numbers_once_for_each_pass_and_once_for_the_norms(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, trainable: str, objective: str, updates: int
) -> None:
    """On a device without numbers: whatever looks at one, or lets a shape depend on one, raises."""
    with live_policy(tiny_model, trainable=TRAINABLE[trainable]) as policy:
        policy.model.to("meta")
        for module in policy.model.modules():
            if hasattr(module, "_w0"):
                module._w0 = module._w0.to("meta")
        step, batch = whole_step(policy, TRAINABLE[trainable], OBJECTIVES[objective], updates_per_batch=updates)
        assert batch.micro[0].tokens_T.is_meta

        async def main() -> None:
            stats = await step.forward_backward(batch)
            assert set(stats.logprobs) == {f"t0@0/{s}" for s in range(3)} | {f"t1@0/{s}" for s in range(2)}
            assert flatten(await step.apply(1, batch, stats))["grad_norm"] == 0.5

        with answered(monkeypatch, lambda tensors: [[0.5] * t.numel() for t in tensors]) as requests:
            asyncio.run(main())
        assert len(requests) == updates + 1


@pytest.mark.slow
@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_pass_on_a_cpu_reads_no_number_but_all_at_once(tiny_model: Path, objective: str) -> None:
    """Python's own questions, those of the backward pass and of the optimizer included."""
    with live_policy(tiny_model) as policy:
        step, batch = whole_step(policy, Full(), OBJECTIVES[objective])
        step.work.hook()
        with Copies() as copies:
            queued = [step.work.micro(micro, None) for micro in batch.micro]
            assert copies.num_copies == 0
            step.work.settle([(metrics, logprobs_N) for metrics, logprobs_N, _ in queued])
            assert copies.num_copies == 1
            norm = step.work.apply(1e-3, 1.0)
            assert copies.num_copies == 1
            assert step.work.norms([norm])[0] > 0
            assert copies.num_copies == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_the_host_never_waits_for_the_gpu_within_a_pass(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    with live_policy(tiny_model) as policy:
        policy.model.to("cuda")
        step, batch = whole_step(policy, Full(), OBJECTIVES[objective])

        def whole() -> None:
            async def main() -> None:
                await step.apply(1, batch, await step.forward_backward(batch))

            asyncio.run(main())

        whole()  # what is done once only, such as to load kernels

        def answer(tensors: Sequence[Tensor]) -> list[list[float]]:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return fetch(tensors)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        torch.cuda.set_sync_debug_mode("error")
        try:
            with answered(monkeypatch, answer) as requests:
                whole()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(requests) == 2


def test_a_loss_that_brings_its_own_numbers_is_welcome(tiny_model: Path) -> None:
    """One written elsewhere may give plain values."""

    class Own(Grpo):
        def __call__(self, logprobs_N: Tensor, micro: Any) -> Any:
            output = super().__call__(logprobs_N, micro)
            return replace(output, metrics={**output.metrics, "own": Sum(1.0)})

    with live_policy(tiny_model) as policy:
        step, batch = whole_step(policy, Full(), Objective(loss=Own()))
        stats = asyncio.run(step.forward_backward(batch))
        assert stats.metrics["own"] == Sum(float(len(batch.micro)))
