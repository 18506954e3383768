"""PEFT's LoRA layers with less activation traffic: each pass writes its wide result once and adds to it.

Dimensions: N positions, I inputs, O outputs, R rank; weights are W_OI, the adapter is A_RI and B_OR.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tandem.trainable._experts import read_live

_ADAPTER = "default"
"""PEFT's name of an only adapter."""


class AdaptedLinear(Linear):
    """PEFT's layer with one adapter and no dropout, computed by ``_Sum``: hooks of the modules within are not called.

    Switched off, or beside a base that is no plain linear layer, such as an 8-bit one, it computes as PEFT does.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As PEFT's."""
        base: Any = self.base_layer
        if self.disable_adapters or type(base) is not nn.Linear:
            other: Tensor = super().forward(x, *args, **kwargs)
            return other
        a, b = self.lora_A[_ADAPTER].weight, self.lora_B[_ADAPTER].weight
        weights: Any = (base.weight, base.bias, a, b, self.scaling[_ADAPTER])
        if not torch.is_grad_enabled():
            return _sum(x, *weights)[0].view(*x.shape[:-1], base.out_features)
        out_NO: Tensor = _Sum.apply(x, *weights)  # type: ignore[no-untyped-call]
        # Here, since models may write to it: a view made in _Sum may not be.
        return out_NO.view(*x.shape[:-1], base.out_features)


class AdaptedExperts(ParamWrapper):
    """PEFT's adapter of stacked experts, whose sum is no parametrization: PEFT's autocasts, which is none on meta."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As PEFT's."""
        experts: Any = self.get_base_layer()
        if not self.disable_adapters:
            left, right, scale = self.get_delta_factors(_ADAPTER)  # type: ignore[no-untyped-call]
            weights: Tensor = getattr(experts, self.parameter_name)
            experts.live[self.parameter_name] = torch.baddbmm(weights, left, right, alpha=scale)
        try:
            out: Tensor = self.base_layer(x, *args, **kwargs)
        finally:
            experts.live.pop(self.parameter_name, None)
        return out


def adapt(model: nn.Module) -> nn.Module:
    """Make a PEFT model's adapters ``AdaptedLinear`` and ``AdaptedExperts``: the same objects, names and parameters."""
    for module in model.modules():
        # Not a `forward` of its own for each: the compiler would make new code for every layer of a model.
        if type(module) is Linear:
            module.__class__ = AdaptedLinear
        elif type(module) is ParamWrapper:
            module.__class__ = AdaptedExperts
            read_live(module.get_base_layer(), module.parameter_name)
    return model


def _add_products(bias: Tensor | None, x_NI: Tensor, w_IO: Tensor, h_NR: Tensor, b_RO: Tensor, scale: float) -> Tensor:
    """bias + x w + scale * h b; the products scale as they add, in the type that they sum in."""
    y_NO = torch.mm(x_NI, w_IO) if bias is None else torch.addmm(bias, x_NI, w_IO)
    return y_NO.addmm_(h_NR, b_RO, alpha=scale)


def _fake(bias: Tensor | None, x_NI: Tensor, w_IO: Tensor, h_NR: Tensor, b_RO: Tensor, scale: float) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], w_IO.shape[1])


# One operation, since the compiler would put the second sum into memory of its own. By the end of its name, and by its
# second and third argument, checkpointing knows it as a product whose result is kept. Not by custom_op, whose wrapping
# costs 30 microseconds a call.
_library = torch.library.Library("tandem", "FRAGMENT")
_library.define(
    "addmm(Tensor? bias, Tensor x_NI, Tensor w_IO, Tensor h_NR, Tensor b_RO, float scale) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # nothing is to be copied for it: products take any strides
)
_library.impl("addmm", _add_products, "CompositeExplicitAutograd")
torch.library.register_fake("tandem::addmm", _fake, lib=_library)
_addmm = torch.ops.tandem.addmm.default


def _sum(
    x: Tensor, w_OI: Tensor, bias: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """x W^T + bias + scale * h B^T, and h."""
    x_NI = x.reshape(-1, x.shape[-1])
    h_NR = x_NI @ a_RI.T
    y_NO: Tensor = _addmm(bias, x_NI, w_OI.T, h_NR, b_OR.T, scale)
    return y_NO, h_NR


class _Sum(torch.autograd.Function):
    """x W^T + bias + scale * (x A^T) B^T; W and bias get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_OI: Tensor, bias: Tensor | None, a_RI: Tensor, b_OR: Tensor, s: float) -> Tensor:
        y, h_NR = _sum(x, w_OI, bias, a_RI, b_OR, s)
        ctx.save_for_backward(x, w_OI, a_RI, b_OR, h_NR)
        ctx.scale = s
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x, w_OI, a_RI, b_OR, h_NR = ctx.saved_tensors
        x_NI = x.reshape(-1, x.shape[-1])
        want_x, _, _, want_a, want_b, _ = ctx.needs_input_grad
        dh_NR = dy_NO @ b_OR  # times the scale, which each of its products takes
        dx = _addmm(None, dy_NO, w_OI, dh_NR, a_RI, ctx.scale).view(x.shape) if want_x else None
        da_RI = (dh_NR.T @ x_NI).mul_(ctx.scale) if want_a else None
        db_OR = (dy_NO.T @ h_NR).mul_(ctx.scale) if want_b else None
        return dx, None, None, da_RI, db_OR, None
