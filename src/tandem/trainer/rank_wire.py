"""What travels between ranks: micro-batches and metrics as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem import metrics
from tandem.algorithms.losses.base import MicroBatch
from tandem.metrics import Value
from tandem.model.penalties import Events, Penalties, TokenHistory
from tandem.model.plans import Packed
from tandem.trainer.pack import Micro

_VALUES: dict[str, Any] = {
    kind.__name__: kind for kind in (metrics.Mean, metrics.Sum, metrics.Max, metrics.Share, metrics.Histogram)
}


def tensor_to_plain(tensor: Tensor) -> list[Any]:
    """A tensor as plain data: its type, shape and bytes."""
    on_host = tensor.detach().cpu().contiguous()
    return [str(on_host.dtype).removeprefix("torch."), list(on_host.shape), on_host.numpy().tobytes()]


def tensor_of(plain: Any, device: torch.device) -> Tensor:
    """The tensor of ``tensor_to_plain``, on a device."""
    kind, shape, data = plain
    # A copy: what came from the wire may not be written to.
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, kind)).view(shape).to(device)


def micro_to_plain(micro: Micro) -> dict[str, Any]:
    """A micro-batch as plain data."""
    history = micro.history
    return {
        **{name: tensor_to_plain(getattr(micro, name)) for name in _TENSORS},
        "lengths": micro.plan.lengths,
        "parents": micro.plan.parents,
        "batch": {name: tensor_to_plain(getattr(micro.batch, name)) for name in _BATCH},
        "num_samples": micro.batch.num_samples,
        "places": micro.places,
        "history": None
        if history is None
        else {
            "penalties": dataclasses.asdict(history.penalties),
            "tensors": [tensor_to_plain(t) for t in (*history.seen, *history.output, history.age_N1)],
        },
    }


def micro_of(plain: Mapping[str, Any], device: torch.device, *, is_shared: bool = False) -> Micro:
    """The micro-batch of ``micro_to_plain``, on a device.

    Of one that ranks share ``predict_N`` is on the host, where each sees which tokens are its own: to ask the device
    would hold up all that is queued after it.
    """

    def tensor(each: Any) -> Tensor:
        return tensor_of(each, device)

    history = None
    if plain["history"] is not None:
        stored = dict(plain["history"]["penalties"])
        tensors = [tensor(each) for each in plain["history"]["tensors"]]
        history = TokenHistory(
            penalties=Penalties(**{**stored, "ends": tuple(stored["ends"])}),
            seen=Events(*tensors[:3]),
            output=Events(*tensors[3:6]),
            age_N1=tensors[6],
        )
    return Micro(
        **{name: tensor(plain[name]) for name in _TENSORS if name != "predict_N"},
        predict_N=tensor_of(plain["predict_N"], torch.device("cpu") if is_shared else device),
        plan=Packed(lengths=tuple(plain["lengths"]), parents=tuple(plain["parents"])),
        batch=MicroBatch(**{name: tensor(plain["batch"][name]) for name in _BATCH}, num_samples=plain["num_samples"]),
        places=tuple((rollout, count) for rollout, count in plain["places"]),
        history=history,
    )


def metrics_to_plain(values: Mapping[str, Value]) -> dict[str, Any]:
    """Metrics as plain data."""
    return {
        name: [type(value).__name__, *(getattr(value, field.name) for field in dataclasses.fields(value))]  # type: ignore[arg-type]
        for name, value in values.items()
    }


def metrics_of(plain: Mapping[str, Any]) -> dict[str, Value]:
    """The metrics of ``metrics_to_plain``."""
    return {
        name: _VALUES[kind](*(tuple(x) if isinstance(x, list) else x for x in numbers))
        for name, (kind, *numbers) in plain.items()
    }


_TENSORS = ("tokens_T", "positions_T", "predict_N", "targets_N", "temperature_N", "weights_N")
_BATCH = ("behavior_logprobs_N", "advantages_N", "sample_N")
