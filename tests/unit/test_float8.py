"""Which layers compute in 8 bits, that their weights stay what they are, and how far the numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import live_policy
from support.whole_steps import TRAINABLE
from torch import Tensor

from tandem.config.loading import RunConfig
from tandem.envs.gsm8k import Gsm8k
from tandem.errors import ConfigError
from tandem.model import float8
from tandem.model.attention import Packed, sequential_positions
from tandem.model.policy import Policy
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchao")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers count."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(float8, "NARROWEST", 48)


def passed(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    plan = Packed(lengths=(9, 4, 5), parents=(None, 0, 0))
    out = policy.hidden(torch.arange(18)[None], torch.as_tensor(sequential_positions(plan))[None], plan)
    torch.manual_seed(0)
    (out * torch.randn_like(out)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return out.detach(), gradients


def off(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_layers_compute_in_8_bits_by_the_same_parameters(tiny_model: Path, trainable: str) -> None:
    # An adapter that would be wide enough stays all the same.
    with live_policy(tiny_model, trainable=Full() if trainable == "full" else Lora(rank=64)) as policy:
        policy.model.bfloat16()
        before, names = {id(p) for p in policy.model.parameters()}, list(policy.model.state_dict())
        want, gradients = passed(policy)
        changed = float8.convert(policy.model, emulate=True)
        # 2 layers of 7 products; keys and values are 32 wide. Adapters, head and embeddings stay.
        assert sorted({name.split(".")[-2 if trainable == "lora" else -1] for name in changed}) == [
            "down_proj",
            "gate_proj",
            "o_proj",
            "q_proj",
            "up_proj",
        ]
        assert len(changed) == 10
        assert {id(p) for p in policy.model.parameters()} == before
        assert list(policy.model.state_dict()) == names
        actual, others = passed(policy)
        assert others.keys() == gradients.keys()
        assert 1e-3 < off(actual, want) < 0.1, "3 bits of mantissa round by 2^-4 at most"
        whole = [torch.cat([g.flatten() for g in some.values()]) for some in (others, gradients)]
        assert off(*whole) < 0.15


@pytest.mark.usefixtures("small")
def test_the_gradient_of_a_weight_is_computed_in_its_own_type() -> None:
    """A product of the layer's input as it is, not rounded to 8 bits, and of any number of tokens."""
    layer = torch.nn.Linear(64, 64, bias=False).bfloat16()
    model = _one_layer(layer)
    float8.convert(model, emulate=True)
    for tokens in (1, 7, 33):
        x, dy = torch.randn(tokens, 64).bfloat16(), torch.randn(tokens, 64).bfloat16()
        model.linear.weight.grad = None  # type: ignore[union-attr]
        model.linear(x).backward(dy)  # type: ignore[operator]
        grad: Any = layer.weight.grad  # the same parameter
        assert off(grad, dy.T.double() @ x.double()) < 4e-3


def test_merged_adapters_and_small_models_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    with live_policy(tiny_model) as policy, pytest.raises(ConfigError, match="no layer has at least 1024 inputs"):
        float8.convert(policy.model.bfloat16())
    monkeypatch.setattr(float8, "NARROWEST", 16)
    with live_policy(tiny_model, trainable=TRAINABLE["merged"]) as policy:
        policy.model.bfloat16()
        with pytest.raises(ConfigError, match=r"trainable\.merged does not"):
            float8.convert(policy.model)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, True), ({"in_features": 72}, False), ({"out_features": 32}, False), ({"dtype": torch.float32}, False)],
)
def test_what_8_bit_products_take(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kept: bool) -> None:
    monkeypatch.setattr(float8, "NARROWEST", 48)
    sizes = {"in_features": 64, "out_features": 64, "dtype": torch.bfloat16, **options}
    assert float8._gains(torch.nn.Linear(**sizes)) is kept


def test_check_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs torchao"):
        float8.check()
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="this machine shows none"):
        float8.check()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda it=capability: it)
        float8.check()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9, and A100 has 8\.0"):
        float8.check()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"compile": False}])
def test_a_recipe_that_would_only_lose_by_it_is_refused(options: dict[str, Any]) -> None:
    RunConfig(model="m", steps=1, env=Gsm8k(), matmul="fp8")
    with pytest.raises(ValueError, match="matmul must be dtype"):
        RunConfig(model="m", steps=1, env=Gsm8k(), matmul="fp8", **options)


def _one_layer(linear: torch.nn.Linear) -> torch.nn.Module:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    return Layer()
