"""Merged LoRA: the gradient is that of W0 + s B A, weights never drift, and what is saved is an ordinary adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tandem.errors import CheckpointError, ConfigError
from tandem.trainable import _merged
from tandem.trainable._merged import MergedLinear
from tandem.trainable.base import layer_of
from tandem.trainable.lora import Lora

TOKENS = torch.arange(24).reshape(2, 12)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))


def model(*, dtype: torch.dtype = torch.float32, tie: bool = True, bias: bool = False) -> Any:
    """A Llama, or a Qwen2, which has biases at q, k and v."""
    torch.manual_seed(0)
    made: Any = (
        Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tie))
        if bias
        else LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tie))
    )
    for name, parameter in made.named_parameters():
        value = torch.randn_like(parameter) if name.endswith("bias") else parameter.data
        parameter.data = value.to(dtype)
    return made.eval()


def prepared(trainable: Lora, **options: Any) -> Any:
    """A merged model, its A drawn from the same seed each time."""
    base = model(**options)
    torch.manual_seed(1)
    return trainable.prepare(base)


def stir(trainable: Lora, live: nn.Module, seed: int = 2, size: float = 0.1) -> None:
    """What an optimizer does, as far as anyone here can tell; not folded."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable.parameters(live):
            parameter.add_(torch.randn_like(parameter) * size)


def weights(live: nn.Module) -> dict[str, Tensor]:
    return {name: layer.weight.clone() for name, _, layer in _merged.layers(live)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@torch.no_grad()
def logits(live: nn.Module) -> Tensor:
    return live(input_ids=TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
def test_gradient_is_that_of_the_explicit_sum(bias: bool) -> None:
    """One layer against float64 autograd through W0 + s B A."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    w0 = linear.weight.double().clone()
    layer = MergedLinear(linear, torch.randn(3, 24), torch.randn(40, 3), 1.5)
    layer.fold()
    x, dy = torch.randn(2, 5, 24, requires_grad=True), torch.randn(2, 5, 40)
    y = layer(x)
    y.backward(dy)

    x64, a, b = (t.detach().double().requires_grad_() for t in (x, layer.lora_A, layer.lora_B))
    y64 = nn.functional.linear(x64, w0 + 1.5 * b @ a, None if layer.bias is None else layer.bias.double())
    y64.backward(dy.double())
    assert layer.weight.grad is None
    assert layer.bias is None or layer.bias.grad is None
    pairs = [(y, y64), (x.grad, x64.grad), (layer.lora_A.grad, a.grad), (layer.lora_B.grad, b.grad)]
    for actual, wanted in pairs:
        assert actual is not None
        assert wanted is not None
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-4)


def test_gradient_through_a_checkpointed_layer_is_the_same() -> None:
    torch.manual_seed(0)
    layer = MergedLinear(nn.Linear(24, 40).requires_grad_(False), torch.randn(3, 24), torch.randn(40, 3), 1.5)
    x = torch.randn(5, 24)
    layer(x).square().sum().backward()
    wanted = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert same({name: p.grad for name, p in layer.named_parameters() if p.grad is not None}, wanted)
    assert set(wanted) == {"lora_A", "lora_B"}


def test_starts_as_plain_lora_does() -> None:
    """The same seed draws the same A, and B is zero: the first token is the base's, to the bit."""
    live = prepared(Lora(rank=4, merged=True))
    torch.manual_seed(0)
    base = model()
    torch.manual_seed(1)
    plain = dict(Lora(rank=4).prepare(base).named_parameters())
    for _, name, layer in _merged.layers(live):
        assert torch.equal(layer.lora_A, plain[f"base_model.model.{name}.lora_A.default.weight"])
        assert not layer.lora_B.any()
    before = logits(live)
    assert torch.equal(before, logits(model()))
    Lora(rank=4, merged=True).fold(live)
    assert torch.equal(logits(live), before)


class Formed(TorchDispatchMode):
    """Shapes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and not func.is_view:
                self.shapes.add(tuple(tensor.shape))
        return out


def test_no_gradient_of_a_weights_shape_is_formed() -> None:
    torch.manual_seed(0)
    layer = MergedLinear(nn.Linear(70, 90).requires_grad_(False), torch.randn(2, 70), torch.randn(90, 2), 1.0)
    x = torch.randn(5, 70, requires_grad=True)
    with Formed() as seen:
        layer(x).sum().backward()
    assert seen.shapes >= {(5, 90), (5, 2), (2, 70), (90, 2), (5, 70)}
    assert not seen.shapes & {(90, 70), (70, 90)}

    explicit = nn.Parameter(torch.randn(90, 70))
    with Formed() as seen:
        nn.functional.linear(x, explicit).sum().backward()
    assert seen.shapes & {(90, 70), (70, 90)}, "the hook sees one where there is one"


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    torch.manual_seed(0)
    layer = MergedLinear(nn.Linear(70, 90).requires_grad_(False), torch.randn(2, 70), torch.randn(90, 2), 1.0)
    own = {p.data_ptr() for p in layer.parameters()}
    x = torch.randn(5, 70, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in kept} - own == {x.data_ptr()}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fold_is_one_rounding_of_the_sum(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64; chunks of a few rows, of which the last is short."""
    monkeypatch.setattr(_merged, "_CHUNK", 24 * 7)
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, dtype=dtype, device=device).requires_grad_(False)
    w0 = linear.weight.double().clone()
    a, b = torch.randn(8, 24, dtype=dtype, device=device), torch.randn(40, 8, dtype=dtype, device=device)
    layer = MergedLinear(linear, a, b, 0.3)
    address = layer.weight.data_ptr()
    layer.fold()
    exact = w0 + 0.3 * b.double() @ a.double()
    # Half of the last bit, and what float32 loses beneath it.
    allowed = exact.abs() * torch.finfo(dtype).eps * 0.5 + 1e-6 * (0.3 * b.abs().double() @ a.abs().double())
    assert ((layer.weight.double() - exact).abs() <= allowed + 1e-6).all()
    assert layer.weight.data_ptr() == address


def test_fold_writes_where_the_weight_is_now() -> None:
    """An engine that lends its storage moves the weight there, into rows of a larger one."""
    trainable = Lora(rank=4, merged=True)
    live = prepared(trainable)
    source = trainable.source(live)
    stir(trainable, live)
    trainable.fold(live)
    there = weights(live)
    fused: dict[str, Tensor] = {}
    for name, _, layer in _merged.layers(live):
        out, into = layer.weight.shape
        fused[name] = torch.zeros(2 * out, into)
        layer.weight.data = fused[name][out:]
    trainable.fold(live)
    for name, value in there.items():
        assert torch.equal(fused[name][len(value) :], value)
        assert not fused[name][: len(value)].any()
    assert all(t.untyped_storage().data_ptr() == fused[n].untyped_storage().data_ptr() for n, t in source)


@pytest.mark.parametrize("tie", [True, False])
def test_what_travels_is_the_adapted_weights(tie: bool) -> None:
    trainable = Lora(rank=4, layers=(1,), merged=True)
    live = prepared(trainable, tie=tie)
    names = [name for name, _ in trainable.source(live)]
    plain = dict(model(tie=tie).named_parameters())
    assert names == [n for n in plain if layer_of(n) == 1 and n.endswith("_proj.weight")]
    assert [tensor.shape for _, tensor in trainable.source(live)] == [plain[n].shape for n in names]
    trained = [name for name, _ in trainable.parameters(live)]
    assert len(trained) == 14
    assert all(name.endswith(("_proj.lora_A", "_proj.lora_B")) and layer_of(name) == 1 for name in trained)
    owners = dict(live.named_parameters())
    assert all(tensor.data_ptr() == owners[name].data_ptr() for name, tensor in trainable.source(live))


def test_bytes_beside_the_model() -> None:
    adapted = sum(t.nbytes for _, t in Lora(merged=True).source(prepared(Lora(merged=True))))
    assert Lora(merged=True).kept_bytes(prepared(Lora(merged=True))) == adapted
    with torch.device("meta"):
        empty = LlamaForCausalLM(model().config)
    assert Lora(merged=True).kept_bytes(Lora(merged=True).prepare(empty)) == adapted


# PEFT asks transformers for a property by a name that transformers has since deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("options", [{}, {"layers": (1,), "target_modules": ("q_proj", "down_proj")}])
def test_round_trip(tmp_path: Path, tiny_model: Path, dtype: torch.dtype, near: float, options: dict[str, Any]) -> None:
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trainable = Lora(rank=4, alpha=8, merged=True, **options)
    live = prepared(trainable, dtype=dtype)
    stir(trainable, live)
    trainable.fold(live)
    trainable.save(live, tokenizer, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == tokenizer.eos_token

    loaded = PeftModel.from_pretrained(model(dtype=dtype), tmp_path, autocast_adapter_dtype=False).eval()
    assert (logits(loaded) - logits(live)).norm() <= near * logits(live).norm()
    assert (logits(loaded) - logits(model(dtype=dtype))).norm() > 0.1 * logits(live).norm()
    stored = {name.replace(".default.weight", ""): p for name, p in loaded.named_parameters() if ".lora_" in name}
    assert same({f"base_model.model.{n}": p for n, p in trainable.parameters(live)}, stored), "bit for bit"

    other = prepared(trainable, dtype=dtype)
    stir(trainable, other, 7)
    addresses = {name: p.data_ptr() for name, p in other.named_parameters()}
    trainable.load(other, tmp_path)
    assert same(dict(other.named_parameters()), dict(live.named_parameters())), "A, B and the folded weights"
    assert addresses == {name: p.data_ptr() for name, p in other.named_parameters()}, "in place"

    plain = Lora(rank=4, alpha=8, **options)
    plain.load(plain.prepare(model(dtype=dtype)), tmp_path)  # the folder is the same, whichever way trained it


def test_folders_that_do_not_fit_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trainable = Lora(rank=4, merged=True)
    live = prepared(trainable)
    trainable.save(live, tokenizer, tmp_path / "whole")
    narrow = Lora(rank=2, merged=True)
    thin = prepared(narrow)
    with pytest.raises(CheckpointError, match=r"lora_A.*\(4, \d+\).*\(2, \d+\)"):
        narrow.load(thin, tmp_path / "whole")
    part = Lora(rank=4, target_modules=("q_proj",), merged=True)
    part.save(prepared(part), tokenizer, tmp_path / "part")
    with pytest.raises(CheckpointError, match="lacks 24 of 28 adapter tensors"):
        trainable.load(live, tmp_path / "part")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    file = tmp_path / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainable.load(live, tmp_path / "cut")


def test_weights_that_cannot_hold_the_sum_are_refused() -> None:
    shared = model()
    shared.model.layers[1].self_attn.q_proj.weight = shared.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(ConfigError, match=r"q_proj cannot hold.*shared with 1 other module; leave it out"):
        Lora(merged=True).prepare(shared)

    class Packed(nn.Linear):
        """As libraries of quantised layers derive theirs."""

    def packed() -> Any:
        made = model()
        made.model.layers[0].mlp.up_proj = Packed(32, 48, bias=False)
        return made

    with pytest.raises(ConfigError, match=r"up_proj cannot hold.*it is a Packed"):
        Lora(merged=True).prepare(packed())
    Lora(merged=True, target_modules=("q_proj",)).prepare(packed())
