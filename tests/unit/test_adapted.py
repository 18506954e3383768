"""PEFT's layers as they are trained: the same sums and gradients as PEFT's, their wide results written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from support.tiers import long_but
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.model import compilation
from tandem.model.layers import recomputed
from tandem.trainable import _adapted
from tandem.trainable.lora import Lora

INS, OUTS, R, SCALE = 24, 40, 4, 1.75
needs_compiler = pytest.mark.skipif(
    compilation.missing(torch.device("cpu")) is not None, reason="there is no C++ compiler"
)


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that compiles: the compiler looks at tensors in ways that torch warns its users of."""
    test = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")(test)
    return pytest.mark.usefixtures("_compiled_code_is_dropped")(test)


@pytest.fixture
def _compiled_code_is_dropped() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Narrowed(nn.Linear):
    """A base layer that computes in its own way, as an 8-bit one does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Block(nn.Module):
    """Two products, of which the second reads what the first wrote."""

    def __init__(self, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.up = nn.Linear(INS, OUTS, bias=bias, dtype=dtype)
        self.down = nn.Linear(OUTS, INS, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.up(x)))
        return out


def block(*, bias: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A block in which PEFT adapted both layers."""
    torch.manual_seed(seed)
    config = LoraConfig(r=R, lora_alpha=int(R * SCALE), target_modules=["up", "down"], **options)
    model = get_peft_model(Block(bias, dtype), config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return _adapted.adapt(model).eval()


def layer_of(model: Any) -> Any:
    return model.get_base_model().up


def by_peft(layer: Any, x: Tensor) -> Tensor:
    return PeftLinear.forward(layer, x)


def explicit(layer: Any, x: Tensor) -> list[Tensor]:
    """y and the gradients of x, A and B for a given gradient of y, in float64."""
    base, tensors = layer.base_layer, (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    x64, a, b = (tensor.detach().double().requires_grad_() for tensor in tensors)
    y = x64 @ base.weight.double().T + SCALE * (x64 @ a.T) @ b.T
    if base.bias is not None:
        y = y + base.bias.double()
    y.backward(pull(y))
    return [tensor for tensor in (y.detach(), x64.grad, a.grad, b.grad) if tensor is not None]


def computed(layer: Any, x: Tensor, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """The same from the layer itself."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x) if run is None else run(layer, x)
    y.backward(pull(y))
    assert layer.base_layer.weight.grad is None
    grads = (x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad)
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def pull(y: Tensor) -> Tensor:
    """A gradient of a result, the same in every type."""
    torch.manual_seed(7)
    return torch.randn(y.shape).bfloat16().to(y.dtype)


def near(one: list[Tensor], other: list[Tensor], within: float) -> bool:
    assert len(one) == len(other) == 4
    assert [t.shape for t in one] == [t.shape for t in other]
    return all((a.double() - b.double()).norm() <= within * b.double().norm() for a, b in zip(one, other, strict=True))


class Seen(TorchDispatchMode):
    """Operations, and the shapes of the storages that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in before:
            self.made.append(tuple(out.shape))
        return out


@pytest.fixture
def asked_peft(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers that PEFT's own forward was called for."""
    calls: list[Any] = []
    own = PeftLinear.forward

    def spied(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(PeftLinear, "forward", spied)
    return calls


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(50, INS), (2, 25, INS), (INS,)])
def test_sum_and_gradients_are_the_explicit_ones(
    dtype: torch.dtype, within: float, bias: bool, shape: tuple[int, ...], asked_peft: list[Any]
) -> None:
    layer = layer_of(block(bias=bias, dtype=dtype))
    x = torch.randn(shape).to(dtype)
    mine = computed(layer, x)
    assert {t.dtype for t in mine} == {dtype}
    assert near(mine, explicit(layer, x), within)
    assert layer.base_layer.bias is None or layer.base_layer.bias.grad is None
    assert not asked_peft
    with torch.no_grad():
        assert torch.equal(layer(x), mine[0])


@pytest.mark.parametrize("bias", [True, False])
def test_sum_and_gradients_are_those_of_peft(bias: bool) -> None:
    layer = layer_of(block(bias=bias))
    x = torch.randn(2, 25, INS)
    assert near(computed(layer, x), computed(layer, x, by_peft), 1e-6)


def test_each_wide_result_is_written_once() -> None:
    """The operation is one to all who look from outside, so its inside is looked at as well."""
    layer = layer_of(block())
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x, w = torch.randn(50, INS), layer.base_layer.weight
    for bias in (None, torch.randn(OUTS)):
        with torch.no_grad(), Seen() as inside:
            _adapted._add_products(bias, x, w.T, x @ a.T, b.T, SCALE)
        assert [shape for shape in inside.made if shape[0] == 50] == [(50, R), (50, OUTS)]
    dy = torch.ones(50, OUTS)
    with Seen() as outside:
        layer(x.requires_grad_()).backward(dy)
    assert [shape for shape in outside.made if shape[0] == 50] == [(50, R), (50, OUTS), (50, R), (50, INS)]
    with Seen() as theirs:
        by_peft(layer, x)
    assert theirs.made.count((50, OUTS)) > 1, "the hook sees more where there is more"


def test_only_the_input_and_a_narrow_product_are_kept() -> None:
    layer = layer_of(block())
    own = {p.data_ptr() for p in layer.parameters()}
    x = torch.randn(50, INS, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    shapes = [tuple(t.shape) for t in kept if t.data_ptr() not in own | {x.data_ptr()}]
    assert shapes == [(50, R)]


def test_no_gradient_is_computed_that_nobody_wants() -> None:
    layer, x = layer_of(block()), torch.randn(50, INS)
    wanted = explicit(layer, x)
    y = layer(x)
    with Seen() as seen:
        y.backward(pull(y))
    assert not [name for name in seen.names if name == "tandem::addmm"], "x wants none"
    for part, want in (("lora_A", wanted[2]), ("lora_B", wanted[3])):
        parameter = getattr(layer, part)["default"].weight
        assert near([parameter.grad] * 4, [want] * 4, 1e-6)
        layer.zero_grad()
        parameter.requires_grad_(False)
        y = layer(x.detach().requires_grad_())
        with Seen() as seen:
            y.backward(pull(y))
        assert parameter.grad is None
        assert tuple(parameter.shape) not in seen.made
        parameter.requires_grad_(True)


OTHERS: dict[str, Callable[[Any], object]] = {
    "base of a kind of its own": lambda m: setattr(layer_of(m).base_layer, "__class__", Narrowed),
    "switched off": lambda m: layer_of(m).enable_adapters(False),
}


@pytest.mark.parametrize("what", list(OTHERS))
def test_what_it_does_not_know_goes_to_peft(what: str, asked_peft: list[Any]) -> None:
    model = block(bias=True)
    OTHERS[what](model)
    layer, x = layer_of(model), torch.randn(5, INS)
    out = layer(x)
    assert asked_peft == [layer]
    assert torch.equal(out, by_peft(layer, x))


def test_switched_off_it_is_the_base_and_on_again_itself(asked_peft: list[Any]) -> None:
    model, x = block(bias=True), torch.randn(5, INS)
    on = model(x)
    with model.disable_adapter():
        off = model(x)
    base = Block(True, torch.float32)
    base.load_state_dict(
        {n.replace(".base_layer", ""): t for n, t in model.get_base_model().state_dict().items() if "lora" not in n}
    )
    assert torch.equal(off, base(x))
    assert len(asked_peft) == 2
    assert torch.equal(model(x), on)
    assert not torch.equal(on, off)
    assert len(asked_peft) == 2


def test_the_operation_is_what_torch_asks_of_one() -> None:
    """Its fake result and its schema, of which the memory plan and the compiler make use."""
    for bias in (None, torch.randn(OUTS)):
        tensors = (torch.randn(5, INS), torch.randn(OUTS, INS).T, torch.randn(5, R), torch.randn(OUTS, R).T)
        torch.library.opcheck(_adapted._addmm, (bias, *tensors, SCALE), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_computed_again_it_is_the_same_and_its_product_is_kept_by_selective(how: Any) -> None:
    model, x = block(bias=True), torch.randn(50, INS, requires_grad=True)
    counts, grads = [], []
    for run in (model, recomputed(model, how)):
        model.zero_grad()
        with Seen() as seen:
            run(x).square().sum().backward()
        counts.append(seen.names.count("tandem::addmm"))
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *grads))
    assert counts[0] == 4
    # Of the block the backward pass wants again what the first layer gave, and stops before the second one.
    assert counts[1] == 4 + (how == "full") * 2


def step(run: Callable[[Tensor], Tensor], model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.backward(pull(y))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def compiled(backend: str) -> Callable[..., Tensor]:
    """As ``tandem.model.layers`` compiles the layers of a model: one code for all."""
    run: Callable[..., Tensor] = torch.compile(Block.forward, dynamic=True, fullgraph=True, backend=backend)
    return run


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])])
@pytest.mark.parametrize("bias", long_but([True, False], True))
def test_compiled_it_is_as_eager_for_any_number_of_positions_and_any_layer(backend: str, bias: bool) -> None:
    run = compiled(backend)
    first, second = (block(bias=bias, seed=seed).get_base_model() for seed in (0, 1))
    for number, model in [(50, first), (7, first), (64, second), (2, second)]:
        x = torch.randn(1, number, INS)
        for one, other in zip(step(partial(run, model), model, x), step(model, model, x), strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()
        with torch.no_grad():
            assert (run(model, x) - model(x)).norm() <= 1e-6 * model(x).norm()
    assert counters["stats"]["unique_graphs"] == 2, "one that remembers and one that does not"
    second.up.set_scale("default", 3.0)
    assert (run(second, x) - second(x)).norm() <= 1e-6 * second(x).norm(), "PEFT's scale now"
    assert (second.up(x) - by_peft(second.up, x)).norm() <= 1e-6 * second.up(x).norm()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_prepare_adapts_every_layer_and_no_name_changes(asked_peft: list[Any]) -> None:
    def base() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
        )
        return LlamaForCausalLM(config).eval()

    live = Lora(rank=R).prepare(base())
    plain = get_peft_model(base(), LoraConfig(r=R, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert list(live.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in live.named_modules()] == [name for name, _ in plain.named_modules()]
    live(input_ids=torch.arange(8)[None]).logits.sum().backward()
    assert not asked_peft
    plain(input_ids=torch.arange(8)[None])
    assert len(asked_peft) == 2 * 7
