"""What travels between ranks as plain data: micro-batches and metrics, of classes that are listed here."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.losses.base import MicroBatch
from tandem.metrics import Histogram, Max, Mean, Share, Sum
from tandem.model.attention import Packed
from tandem.model.penalties import Events, Penalties, TokenHistory
from tandem.trainer.pack import Micro

_SENT = (Micro, Packed, MicroBatch, TokenHistory, Penalties, Events, Mean, Sum, Max, Share, Histogram)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _SENT}
_FIELDS = {kind: tuple(inspect.signature(kind).parameters) for kind in _SENT}
_KIND = "kind"
"""Key under which a mapping has the class that it is of."""


def to_plain(value: Any) -> Any:
    """Numbers, texts, bytes, lists and mappings of a value; of a tensor its type, shape and bytes."""
    if isinstance(value, Tensor):
        on_host = value.detach().cpu().contiguous()
        dtype = str(on_host.dtype).removeprefix("torch.")
        return {_KIND: "Tensor", "dtype": dtype, "shape": list(on_host.shape), "data": on_host.numpy().tobytes()}
    if isinstance(value, _SENT):
        return {_KIND: type(value).__name__, **{name: to_plain(getattr(value, name)) for name in _FIELDS[type(value)]}}
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    return [to_plain(each) for each in value] if isinstance(value, tuple | list) else value


def of_plain(plain: Any, device: torch.device | None = None) -> Any:
    """The value of ``to_plain``, tensors on a device; lists are tuples."""
    if isinstance(plain, list):
        return tuple(of_plain(each, device) for each in plain)
    if not isinstance(plain, dict):
        return plain
    if plain.get(_KIND) == "Tensor":
        # A copy: what came from the wire may not be written to.
        elements = torch.frombuffer(bytearray(plain["data"]), dtype=getattr(torch, plain["dtype"]))
        return elements.view(plain["shape"]).to(device)
    fields = {key: of_plain(each, device) for key, each in plain.items() if key != _KIND}
    return _KINDS[plain[_KIND]](**fields) if _KIND in plain else fields


def micro_of(plain: dict[str, Any], device: torch.device, *, is_shared: bool = False) -> Micro:
    """A micro-batch on a device.

    Of one that ranks share ``predict_N`` is on the host, where each sees which tokens are its own: to ask the device
    would hold up all that is queued after it.
    """
    micro: Micro = of_plain(plain, device)
    return dataclasses.replace(micro, predict_N=of_plain(plain["predict_N"])) if is_shared else micro
