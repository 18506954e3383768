"""Compiled layers with attention's kernel within them: one graph each, whatever is packed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import naive_attention
from support.packed_layers import PLANS, distance, gradients, hidden
from support.tiny_policy import live_policy
from support.whole_steps import TRAINABLE
from torch._dynamo.utils import counters

from tandem.model import _varlen, compilation, layers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _kernel_of_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel takes everything on any device, and nothing has been compiled."""
    monkeypatch.setattr(compilation, "missing", lambda device: None)
    monkeypatch.setattr(_varlen, "_KERNEL", naive_attention.operation)
    monkeypatch.setattr(_varlen, "unsupported_input", lambda dtype, device: None)
    torch._dynamo.reset()
    counters.clear()
    compilation.decide.cache_clear()
    naive_attention.calls.clear()
    yield
    torch._dynamo.reset()
    compilation.decide.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize(("trainable", "how"), [("full", "selective"), ("full", "full"), ("lora", "none")])
def test_gradients_are_those_of_eager_layers(tiny_model: Path, trainable: str, how: Any) -> None:
    with live_policy(tiny_model, trainable=TRAINABLE[trainable]) as policy:
        plans = PLANS[:2] + PLANS[-1:]
        want = [gradients(policy, plan) for plan in plans]
        assert not naive_attention.calls
        layers.tune(policy.model, compile=True, checkpointing=how, backend="aot_eager")
        for plan, expected in zip(plans, want, strict=True):
            assert distance(gradients(policy, plan), expected) < 1e-6
        assert not counters["graph_break"]
        num = len(layers.decoder_layers(policy.model)) * len(plans)
        assert naive_attention.calls.count("backward") == num
        assert naive_attention.calls.count("forward") == num * (2 if how == "full" else 1), (
            "selective keeps what it gives"
        )


@pytest.mark.slow
def test_one_code_for_all_layers_and_all_plans(tiny_model: Path) -> None:
    with live_policy(tiny_model) as policy:
        want = [gradients(policy, plan) for plan in PLANS]
        assert not naive_attention.calls
        layers.tune(policy.model, compile=True, backend="aot_eager")
        for plan, expected in zip(PLANS, want, strict=True):
            assert distance(gradients(policy, plan), expected) < 1e-6
            if len(plan.lengths) == 1:
                with torch.no_grad():
                    hidden(policy, plan)
        # With shared parts and without; of the latter, one that remembers and one that does not.
        assert counters["stats"]["unique_graphs"] == 3
        assert not counters["graph_break"]


@pytest.mark.long
def test_what_the_kernel_cannot_take_is_computed_between_two_graphs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_varlen, "WIDEST", 1)
    with live_policy(tiny_model) as policy:
        want = gradients(policy, PLANS[1])
        layers.tune(policy.model, compile=True, backend="aot_eager")
        assert distance(gradients(policy, PLANS[1]), want) < 1e-6
        assert not naive_attention.calls


@pytest.mark.slow
def test_layers_that_cannot_be_compiled_with_attention_are_compiled_without(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(graph: Any, inputs: Any) -> Any:
        if any("varlen" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no such kernel")
        return graph

    with live_policy(tiny_model) as policy:
        want = gradients(policy, PLANS[1])
        layers.tune(policy.model, compile=True, backend=picky)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "tandem"):
            for _ in range(2):
                assert distance(gradients(policy, PLANS[1]), want) < 1e-6
    (message,) = caplog.messages
    assert "compiled without their attention" in message
    assert "no such kernel" in message
    assert counters["stats"]["unique_graphs"] > 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("trainable", list(TRAINABLE))
def test_on_a_gpu_it_is_torchs_own_kernel_in_torchs_own_compiler(
    tiny_model: Path, trainable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, compiled and eager: as far from float32 as one another."""
    monkeypatch.undo()
    results = {}
    for name, dtype, compile in (
        ("exact", torch.float32, False),
        ("eager", torch.bfloat16, False),
        ("whole", torch.bfloat16, True),
    ):
        with live_policy(tiny_model, trainable=TRAINABLE[trainable]) as policy:
            policy.model.to("cuda", dtype)
            layers.tune(policy.model, compile=compile)
            results[name] = [gradients(policy, plan) for plan in PLANS]
    assert not counters["graph_break"]
    for exact, eager, whole in zip(*results.values(), strict=True):
        assert distance(whole, exact) < 1.5 * distance(eager, exact) + 1e-3
