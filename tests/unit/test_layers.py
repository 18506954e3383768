"""Decoder layers, compiled and computed again: the same gradients, in less memory, from one piece of code."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.families import config_of
from support.packed_layers import PLANS, distance, gradients, hidden
from support.tiny_policy import live_policy
from support.whole_steps import OBJECTIVES, TRAINABLE, whole_step
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engines.embedded.spec import Embedded
from tandem.errors import ConfigError
from tandem.model import compilation, layers, packing
from tandem.model.attention import Packed, sequential_positions
from tandem.model.policy import Policy
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.types import Sampling

# The compiler looks at tensors in ways that torch warns its users of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _compiled_code_is_dropped() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    compilation.decide.cache_clear()
    yield
    torch._dynamo.reset()
    compilation.decide.cache_clear()


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager needs no compiler of C++."""
    monkeypatch.setattr(compilation, "missing", lambda device: None)


def after_a_step(folder: Path, trainable: Trainable, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and logprobs after a whole step, its gradients handed to the optimizer as they are made."""
    with live_policy(folder, trainable=trainable) as policy:
        for name, parameter in trainable.parameters(policy.model):
            if "lora_B" in name:  # else A has no gradient
                nn.init.normal_(parameter, std=0.05)
        trainable.fold(policy.model)
        layers.tune(policy.model, **options)
        step, batch = whole_step(policy, trainable, OBJECTIVES["reference"])

        async def main() -> dict[str, Any]:
            stats = await step.forward_backward(batch)
            await step.apply(1, batch, stats)
            return dict(stats.logprobs)

        logprobs = asyncio.run(main())
        return {name: p.detach().clone() for name, p in policy.model.named_parameters()}, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("trainable", list(TRAINABLE))
@pytest.mark.parametrize("how", ["selective", "full"])
def test_computing_again_changes_no_bit_of_a_step(tiny_model: Path, how: Any, trainable: str) -> None:
    plain, logprobs = after_a_step(tiny_model, TRAINABLE[trainable])
    weights, same = after_a_step(tiny_model, TRAINABLE[trainable], compile=False, checkpointing=how)
    assert same == logprobs
    assert weights.keys() == plain.keys()
    for name, weight in plain.items():
        assert torch.equal(weights[name], weight), name


def kept(policy: Policy, plan: Packed) -> int:
    """Bytes that a forward pass leaves in memory for its backward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = hidden(policy, plan)
    # What is kept by name of the operation is in no saved tensor.
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and id(thing) not in before and thing is not out:
            note(thing)
    return sum(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("trainable", list(TRAINABLE))
def test_each_way_keeps_less_than_the_one_before(tiny_model: Path, trainable: str) -> None:
    bytes = []
    for how in ("none", "selective", "full"):
        with live_policy(tiny_model, trainable=TRAINABLE[trainable]) as policy:
            layers.tune(policy.model, compile=False, checkpointing=how)  # type: ignore[arg-type]
            bytes.append(kept(policy, Packed(lengths=(40,), parents=(None,))))
    none, selective, full = bytes
    # Of a layer: its input, against the products (q, k, v, o, gate, up, down: 512 numbers) and attention, against all.
    assert full < 0.25 * selective
    assert selective < 0.85 * none


class Times(TorchDispatchMode):
    """How often products and attention are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if ("attention" in name and "backward" not in name) or name in ("aten::mm", "aten::addmm"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def test_products_and_attention_are_computed_again_by_full_alone(tiny_model: Path) -> None:
    times = []
    for how in ("none", "selective", "full"):
        with live_policy(tiny_model) as policy:
            layers.tune(policy.model, compile=False, checkpointing=how)  # type: ignore[arg-type]
            with Times() as counted:
                gradients(policy, PLANS[0])
            times.append(counted.seen)
    none, selective, full = times
    assert any("attention" in name for name in none)
    assert selective == none
    assert all(full[name] > none[name] for name in none)


def test_transformers_does_not_recompute_as_well(tiny_model: Path) -> None:
    with live_policy(tiny_model) as policy:
        layers.tune(policy.model, compile=False, checkpointing="full")
        assert not any(layer.gradient_checkpointing for layer in layers.decoder_layers(policy.model))
        assert not any(module.training for module in policy.model.modules())


@pytest.mark.usefixtures("anywhere")
@pytest.mark.long
@pytest.mark.parametrize(("trainable", "how"), [("lora", "none"), ("full", "full"), ("merged", "none")])
def test_compiled_layers_give_the_gradients_of_eager_ones(tiny_model: Path, trainable: str, how: Any) -> None:
    with live_policy(tiny_model, trainable=TRAINABLE[trainable]) as policy:
        want = [gradients(policy, plan) for plan in PLANS]
        names = list(policy.model.state_dict())
        layers.tune(policy.model, compile=True, checkpointing=how, backend="aot_eager")
        for plan, expected in zip(PLANS, want, strict=True):
            assert distance(gradients(policy, plan), expected) < 1e-6
        assert counters["stats"]["unique_graphs"] > 0
        assert list(policy.model.state_dict()) == names


@pytest.mark.usefixtures("anywhere")
@pytest.mark.slow
def test_one_code_for_all_layers_and_all_plans_that_sampling_and_other_weights_leave_alone(tiny_model: Path) -> None:
    """Weights that move and change in place are those it computes with."""
    with live_policy(tiny_model) as policy, live_policy(tiny_model) as plain:
        layers.tune(policy.model, compile=True, backend="aot_eager")
        gradients(policy, PLANS[0])
        graphs = counters["stats"]["unique_graphs"]
        # The norm; queries, keys and values; attention, with nothing in it; the output; the rest.
        assert graphs == 5

        async def sample() -> None:
            async with Embedded(max_rows=4).open(policy, context=64) as engine:
                prompts = [tuple(range(n)) for n in (3, 7, 20)]
                requests = [engine.generate(prompt, Sampling(max_tokens=5), key=n) for n, prompt in enumerate(prompts)]
                await asyncio.gather(*requests)

        asyncio.run(sample())
        for plan in PLANS:
            assert distance(gradients(policy, plan), gradients(plain, plan)) < 1e-6
        for one, other in zip(policy.model.parameters(), plain.model.parameters(), strict=True):
            one.data = one.detach().clone()  # as when it comes to lie in an engine's memory
            with torch.no_grad():
                one.mul_(1.5)
                other.mul_(1.5)
        assert distance(gradients(policy, PLANS[1]), gradients(plain, PLANS[1])) < 1e-6
        assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.usefixtures("anywhere")
@pytest.mark.long
def test_one_code_that_remembers_nothing_for_all_plans_beside_the_one_that_does(tiny_model: Path) -> None:
    with live_policy(tiny_model) as policy:
        layers.tune(policy.model, compile=True, backend="aot_eager")
        gradients(policy, PLANS[0])
        with torch.no_grad():
            hidden(policy, PLANS[0])
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == 10  # of each of the five one that remembers and one that does not
        for plan in PLANS:
            gradients(policy, plan)
            with torch.no_grad():
                hidden(policy, plan)
        assert counters["stats"]["unique_graphs"] == graphs


needs_compiler = pytest.mark.skipif(
    compilation.missing(CPU) is not None, reason=f"there is no {compilation.missing(CPU)}"
)


@needs_compiler
@pytest.mark.long
def test_torchs_own_compiler_keeps_less_where_it_is_told_to(tiny_model: Path) -> None:
    bytes = {}
    with live_policy(tiny_model) as policy:
        want = gradients(policy, PLANS[1])
    for how in ("none", "selective", "full"):
        torch._dynamo.reset()
        with live_policy(tiny_model) as policy:
            layers.tune(policy.model, compile=True, checkpointing=how)  # type: ignore[arg-type]
            assert distance(gradients(policy, PLANS[1]), want) < 1e-6
            bytes[how] = kept(policy, Packed(lengths=(40,), parents=(None,)))
    assert bytes["full"] < 0.25 * bytes["selective"]
    assert bytes["selective"] < 0.85 * bytes["none"]


def lacking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    (tmp_path / "Python.h").write_text("")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    if what == "triton":
        monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    elif what == "C compiler":
        monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    elif what == "Python header":
        (tmp_path / "Python.h").unlink()
    elif what == "compiler 'mine'":
        monkeypatch.setenv("CC", "mine")
        monkeypatch.setattr(compilation.shutil, "which", lambda name: None if name == "mine" else f"/bin/{name}")


@pytest.mark.parametrize("what", ["triton", "C compiler", "Python header", "compiler 'mine'", ""])
def test_auto_compiles_where_a_gpu_has_what_it_needs_and_says_once_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    lacking(monkeypatch, tmp_path, what)
    gpu = torch.device("cuda")
    with caplog.at_level(logging.WARNING):
        assert [compilation.decide("auto", gpu) for _ in range(3)] == [not what] * 3
    assert len(caplog.messages) == bool(what)
    assert all(f"there is no {what}" in message for message in caplog.messages)
    if what:
        with pytest.raises(ConfigError, match=f"compile: true needs (a |the )?{what}"):
            compilation.decide(True, gpu)
    else:
        assert compilation.decide(True, gpu)
    assert not compilation.decide("auto", CPU)
    assert not compilation.decide(False, gpu)


@pytest.mark.slow
@pytest.mark.usefixtures("anywhere")
def test_auto_falls_back_where_the_compiler_fails_and_true_does_not(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compilation, "decide", lambda wanted, device: True)
    with live_policy(tiny_model) as policy:
        want = gradients(policy, PLANS[1])
        layers.tune(policy.model, compile="auto", checkpointing="full", backend=broken)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert distance(gradients(policy, PLANS[1]), want) == 0.0
        assert len(caplog.messages) == 1
        assert "no such instruction" in caplog.text
        layers.tune(policy.model, compile=True, backend=broken)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="no such instruction"):
            hidden(policy, PLANS[1])


@pytest.mark.usefixtures("anywhere")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("gpt_oss", "full"), ("lfm2", "none")])
def test_one_code_for_all_layers_that_read_what_a_prefix_left(name: str, how: Any) -> None:
    torch.manual_seed(0)
    config = config_of(name)
    model: Any = packing.causal_class(config).from_config(config, **packing.attention(config, "auto"))
    plan = Packed(lengths=(6, 4, 5, 7, 6, 3, 4), parents=(None, 0, 0, None, None, 4, 4))
    tokens, places = torch.arange(5, 40)[None], torch.from_numpy(sequential_positions(plan))[None]

    def passed(some: list[nn.Module], **options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        counters.clear()
        with mock.patch.object(layers, "decoder_layers", return_value=some):
            layers.tune(model, **options)
        hidden = packing.hidden(model, tokens, places, plan)
        hidden.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [hidden.detach(), *gradients]

    all_layers = layers.decoder_layers(model)
    eager, graphs = passed(all_layers, compile=False), list[int]()
    for some in (all_layers[1:3], all_layers):  # one of each kind, and all
        for mine, theirs in zip(passed(some, compile=True, checkpointing=how, backend="eager"), eager, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_a_model_without_known_layers_is_refused_where_something_is_asked_of_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    layers.tune(model, compile="auto")
    layers.tune(model, compile=False)
    for options in ({"compile": True}, {"checkpointing": "full"}):
        with pytest.raises(ConfigError, match="the layers of a Sequential are not known"):
            layers.tune(model, **options)  # type: ignore[arg-type]


def test_check_says_before_anything_is_loaded_that_true_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "missing", lambda device: "C compiler")
    with pytest.raises(ConfigError, match="compile: true needs C compiler"):
        compilation.decide(True, torch.device("cpu"))


@pytest.mark.slow
def test_trained_as_a_whole_and_tuned_twice_is_tuned_as_last_said(tiny_model: Path) -> None:
    with live_policy(tiny_model, trainable=Full()) as policy:
        plan = Packed(lengths=(40,), parents=(None,))
        layers.tune(policy.model, compile=False, checkpointing="full")
        least = kept(policy, plan)
        layers.tune(policy.model, compile=False, checkpointing="selective")
        assert kept(policy, plan) > 2 * least
