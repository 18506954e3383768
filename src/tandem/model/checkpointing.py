"""Activation checkpointing: what forward keeps, and what backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "selective", "full"]
"""none keeps all activations; selective the results of products and of attention; full what goes into each layer."""

_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""Names of products, and at which argument their factors begin."""
_LEAST = 16
"""A product is kept if what it sums over is at least this part of the width of its result."""


def recomputed(run: Callable[..., Any], how: Literal["selective", "full"]) -> Callable[..., Any]:
    """``run`` with less kept for its backward pass, which runs it again.

    It must draw nothing at random, and no weight may be written between a forward pass and its backward pass. selective
    sees eager products alone: compiled ones write where they are told to.
    """
    # To keep the random state would make the host wait for the device, and nothing here draws: there is no dropout.
    plain = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    return plain if how == "full" else partial(plain, context_fn=_selective)


def _selective() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention take nearly all the time of a layer; the rest is most of what it would keep."""
    name = op.name().rpartition("::")[2]
    kept = (name in _PRODUCTS and _costs(*args[_PRODUCTS[name] :][:2])) or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _costs(left: Tensor, right: Tensor) -> bool:
    """Whether a product takes long for the memory of its result: that of an adapter's narrow factors does not."""
    return left.shape[-1] * _LEAST >= right.shape[-1]
