"""Whole models on packed rows: what tests of their layers compare."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.model.attention import Packed, sequential_positions
from tandem.model.policy import Policy

PLANS = [
    Packed(lengths=(9,), parents=(None,)),
    Packed(lengths=(9, 4, 5), parents=(None, 0, 0)),
    Packed(lengths=(30,), parents=(None,)),
    Packed(lengths=(8, 7, 6, 5), parents=(None, 0, 0, None)),
    Packed(lengths=(4, 3, 2, 6), parents=(None, 0, 1, 0)),
]


def hidden(policy: Policy, plan: Packed) -> Tensor:
    num = sum(plan.lengths)
    positions = torch.as_tensor(sequential_positions(plan))
    return policy.hidden(torch.arange(num, device=policy.device)[None] % 256, positions[None].to(policy.device), plan)


def gradients(policy: Policy, plan: Packed) -> dict[str, Tensor]:
    """Of a number that no normalisation makes constant."""
    torch.manual_seed(len(plan.lengths))
    out = hidden(policy, plan)
    (out * torch.randn_like(out)).sum().backward()
    named = {name: p for name, p in policy.model.named_parameters() if p.grad is not None}
    grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    policy.model.zero_grad()
    return grads


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    off = sum(float((a[n] - b[n]).double().square().sum()) for n in b)
    return float((off / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5)
