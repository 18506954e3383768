"""Merged LoRA: linear layers and experts whose weight is the sum of a frozen one and an adapter.

Dimensions: N positions, I inputs, O outputs, R rank, E experts; weights are W_OI, the adapter is A_RI and B_OR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from tandem.errors import ConfigError
from tandem.trainable._experts import read_live

_WITHIN = ".base_layer"
_CHUNK = 1 << 24
"""Elements of the float32 product that is held at once."""


class MergedLinear(nn.Linear):
    """x W^T + bias with W = W0 + scale * B A, which ``fold`` writes; the gradient goes to A and B alone.

    ``weight`` and ``bias`` are the layer's own frozen parameters, under their own names. Between an update of A or B
    and the ``fold`` after it the layer computes with the weights before the update.
    """

    def __init__(self, linear: nn.Linear, lora_A: Tensor, lora_B: Tensor, scale: float):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.lora_A = nn.Parameter(lora_A.detach())
        self.lora_B = nn.Parameter(lora_B.detach())
        self.scale = scale
        self._w0 = linear.weight.detach().clone()  # not a buffer: it is not saved
        self._rows, self._columns = slice(None), slice(None)  # of W, those that are here
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``'s."""
        if not torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        a, b = self.lora_A, self.lora_B
        out: Tensor = _Product.apply(input, self.weight, self.bias, a, b, self.scale)  # type: ignore[no-untyped-call]
        return out

    def unfold(self) -> None:
        """Bring W back to W0, of which no copy is left."""
        self.weight.data, self._w0 = self._w0.to(self.weight.device), self._w0.new_empty(0)

    def cut(self, rows: slice, columns: slice) -> None:
        """Take W0 from ``weight``, a distributed tensor of which this rank has these rows and columns."""
        self._rows, self._columns = rows, columns
        self._w0 = _here(self.weight).clone()

    @torch.no_grad()
    def fold(self) -> None:
        """Write W0 + scale * B A, summed in float32 and rounded once, into the storage that ``weight`` has now."""
        weight, a, b = _here(self.weight), self.lora_A[:, self._columns], self.lora_B[self._rows]
        self._w0 = self._w0.to(weight.device)  # the weights may have been moved into an engine's memory since
        if not len(weight):  # the last of several parts of few rows
            return
        rows = max(1, _CHUNK // self.in_features)
        for w, w0_rows, b_rows in zip(weight.split(rows), self._w0.split(rows), b.split(rows), strict=True):
            # Not addmm in the weights' own type: on a GPU that rounds the product before it adds it.
            torch.add(w0_rows, _float32_product(b_rows, a), alpha=self.scale, out=w)


class MergedStack(nn.Module):
    """Stacked experts, for each W = W0 + scale * B A, which ``fold`` writes; the gradient goes to A and B alone.

    A and B have PEFT's layout: (E R, I) and (O, R E), the latter's experts side by side.
    """

    def __init__(self, layer: Any, scale: float):
        super().__init__()
        self._owner = (layer.get_base_layer(),)  # in a tuple: no module within this one
        self.parameter_name: str = layer.parameter_name
        self.lora_A = nn.Parameter(layer.lora_A["default"].weight.detach())
        self.lora_B = nn.Parameter(layer.lora_B["default"].weight.detach())
        self.scale = scale
        self.outputs_last = bool(getattr(self._owner[0], "is_transposed", False))
        """Weights are W_EIO, as those of gpt-oss, not W_EOI."""
        self._w0 = self.weight.detach().clone()
        self._experts, self._rows = len(self._w0), slice(None)  # all, and those that are here

    @property
    def weight(self) -> nn.Parameter:
        """The experts' own frozen parameter, under its own name."""
        weight: nn.Parameter = self._owner[0]._parameters[self.parameter_name]
        return weight

    def forward(self) -> Tensor:
        """The weights, from which a gradient goes to A and B."""
        out: Tensor = _Stack.apply(self.weight, self.lora_A, self.lora_B, self.scale, self.outputs_last)  # type: ignore[no-untyped-call]
        return out

    def unfold(self) -> None:
        """Bring all W back to W0, of which no copy is left."""
        self.weight.data, self._w0 = self._w0.to(self.weight.device), self._w0.new_empty(0)

    def cut(self, rows: slice, columns: slice) -> None:
        """Take W0 of this rank's experts; ``columns`` are all."""
        self._rows, self._w0 = rows, _here(self.weight).clone()

    @torch.no_grad()
    def fold(self) -> None:
        """As a layer's."""
        weight, (a_ERI, b_EOR) = _here(self.weight), _of_experts(self.lora_A, self.lora_B, self._experts)
        self._w0 = self._w0.to(weight.device)
        for w, w0, a, b in zip(weight, self._w0, a_ERI[self._rows], b_EOR[self._rows], strict=True):
            product = _float32_product(b, a)
            torch.add(w0, product.T if self.outputs_last else product, alpha=self.scale, out=w)


class _WithStacks:
    """Mixed into a class of experts: a forward pass reads the weights of its ``MergedStack``s."""

    merged: nn.ModuleDict
    live: dict[str, Tensor]

    def stacks(self) -> list[MergedStack]:
        """As PEFT wraps them, from without."""
        return list(self.merged.values())  # type: ignore[arg-type]

    def forward(self, *args: Any, **more: Any) -> Any:
        """As the experts'."""
        self.live = {stack.parameter_name: stack() for stack in self.stacks()} if torch.is_grad_enabled() else {}
        try:
            return super().forward(*args, **more)  # type: ignore[misc]
        finally:
            self.live = {}


def _add(experts: Any, stack: MergedStack) -> None:
    """Have experts compute with a stack's weights."""
    read_live(experts, stack.parameter_name)
    if not isinstance(experts, _WithStacks):
        experts.__class__ = type(type(experts).__name__, (_WithStacks, type(experts)), {})
        experts.merged = nn.ModuleDict()
    experts.merged[stack.parameter_name] = stack


def _of_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """A_ERI and B_EOR, views of what PEFT has."""
    return a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)


class _Stack(torch.autograd.Function):
    """Merged experts as they are; the gradient of W is there for one of a layer's stacks at a time."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, a: Tensor, b: Tensor, scale: float, outputs_last: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale, ctx.outputs_last = scale, outputs_last
        return w.view_as(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        a_ERI, b_EOR = _of_experts(a, b, len(dw))
        dw_EOI = dw.transpose(1, 2) if ctx.outputs_last else dw
        da = (b_EOR.transpose(1, 2) @ dw_EOI).mul_(ctx.scale).reshape(a.shape)
        db = (dw_EOI @ a_ERI.transpose(1, 2)).mul_(ctx.scale).permute(1, 2, 0).reshape(b.shape)
        return None, da, db, None, None


def _here(weight: Any) -> Tensor:
    """What of a weight is in this process."""
    here: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return here.detach()


def _float32_product(b: Tensor, a: Tensor) -> Tensor:
    """B A of narrow factors in float32: on a GPU by tensor cores, whose sums are float32 already."""
    if b.is_cuda and b.dtype != torch.float32:
        return torch.mm(b, a, out_dtype=torch.float32)
    return b.float() @ a.float()


class _Product(torch.autograd.Function):
    """The merged product; its backward pass forms no gradient of W's shape and needs no activation but x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_OI: Tensor, bias: Tensor | None, a_RI: Tensor, b_OR: Tensor, s: float) -> Tensor:
        ctx.save_for_backward(x, w_OI, a_RI, b_OR)
        ctx.scale = s
        return nn.functional.linear(x, w_OI, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_OI, a_RI, b_OR = ctx.saved_tensors
        x_NI, dy_NO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        want_x, _, _, want_a, want_b, _ = ctx.needs_input_grad
        dx = dy @ w_OI if want_x else None
        da_RI = (dy_NO @ b_OR).mul_(ctx.scale).T @ x_NI if want_a else None
        db_OR = dy_NO.T @ (x_NI @ a_RI.T).mul_(ctx.scale) if want_b else None
        return dx, None, None, da_RI, db_OR, None


def convert(adapted: nn.Module, scale: float) -> nn.Module:
    """Turn a PEFT model's adapted layers into merged ones; returns the causal model itself, unwrapped.

    Raises:
        ConfigError: a layer's weight cannot hold the sum.
    """
    from peft.tuners.lora import LoraLayer

    model: nn.Module = adapted.get_base_model()  # type: ignore[operator]
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    adapters: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]
    for name, layer in adapters:
        base = layer.get_base_layer()
        if hasattr(layer, "parameter_name"):
            if not name.endswith(_WITHIN):  # PEFT wraps what it has wrapped for another parameter of the same experts
                model.set_submodule(name, base)
            _add(base, MergedStack(layer, scale))
            continue
        _check(name, base, owners[id(base.weight)])
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        model.set_submodule(name, MergedLinear(base, a, b, scale))
    del model.peft_config  # PEFT left it; it is a plain model again
    return model


def layers(model: nn.Module) -> Iterator[tuple[str, str, MergedLinear | MergedStack]]:
    """Each merged weight's Hugging Face name, what PEFT calls the module of its A and B, and what holds all three."""
    for name, module in model.named_modules():
        if isinstance(module, MergedLinear):
            yield f"{name}.weight", name, module
        elif isinstance(module, _WithStacks):
            for depth, stack in enumerate(module.stacks()):
                yield f"{name}.{stack.parameter_name}", name + _WITHIN * depth, stack


def _check(name: str, linear: Any, owners: int) -> None:
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        what = f"it is a {type(linear).__name__} of {linear.weight.dtype}"
    elif owners > 1:
        what = f"its weight is shared with {owners - 1} other module"
    else:
        return
    remedy = "leave it out of trainable.target_modules, or set merged: false"
    raise ConfigError(f"trainable.merged: {name} cannot hold W0 + alpha/rank * B A, since {what}; {remedy}")
