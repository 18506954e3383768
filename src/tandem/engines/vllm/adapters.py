"""LoRA adapters as vLLM's slots store them: what can be served, B times alpha/rank, and slots in shared memory.

The engine is the one that lends its slot, as with weights, and the trainer writes every version there itself: no copy
lies in between, and the trainer's end takes no memory away from under the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.engines.base import LoraAdapter
from tandem.errors import EngineError
from tandem.lazy import Tensor, torch
from tandem.transport import sharing


def scaling(config: Mapping[str, Any]) -> float:
    """LoRA scaling of the adapter's output: alpha/rank, or alpha/sqrt(rank) with ``use_rslora``."""
    rank = config["r"]
    return float(config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def rank_of(config: Mapping[str, Any], most: int) -> int:
    """The adapter's rank, if it fits slots of rank ``most``.

    Raises:
        EngineError: it does not.
    """
    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= most:
        raise EngineError(f"the adapter has rank {rank!r}, the engine's slots hold 1 to {most}: raise --max-lora-rank")
    return rank


class AdapterWriter:
    """A process's end of the slot of its engine: its adapter as it is stored there, and where."""

    def __init__(self) -> None:
        self._products: dict[str, Tensor] = {}
        self._key = ""
        self._views: list[Tensor] = []

    def stored(self, adapter: LoraAdapter) -> list[tuple[str, Tensor]]:
        """The adapter's tensors, in order, under the names and with the values that the engine stores them.

        B is multiplied into memory of its own, the same every time.
        """
        factor = scaling(adapter.config)
        plain = [(name.replace(".default.", "."), tensor.detach()) for name, tensor in adapter.tensors]
        return [(name, self._product(name, t, factor) if ".lora_B." in name else t) for name, t in plain]

    def _product(self, name: str, tensor: Tensor, factor: float) -> Tensor:
        if factor == 1:
            return tensor
        out = self._products.get(name)
        if out is None or (out.shape, out.dtype, out.device) != (tensor.shape, tensor.dtype, tensor.device):
            out = self._products[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # Not the fused form for lists, which rounds the factor to the tensors' type first.
        return torch.mul(tensor, factor, out=out)

    def copy(self, description: Mapping[str, Any], stored: Sequence[tuple[str, Tensor]]) -> int:
        """Copy a version into the slot that an engine described, attached anew when it is lent anew; returns its bytes.

        The engine must stand still.

        Raises:
            TransportError: the slot cannot be attached.
            EngineError: it is of another type or has too little room.
        """
        if self._key != description["key"]:
            stacked, slot = sharing.attach(description["lent"]), int(description["slot"])
            self._views = [_view(name, stacked[name][slot, 0], tensor) for name, tensor in stored]
            self._key = description["key"]
        values = [tensor for _, tensor in stored]
        torch._foreach_copy_(self._views, values)
        sharing.finish(values[0].device)  # streams order nothing between processes
        return sum(tensor.nbytes for tensor in values)

    def write(self, description: Mapping[str, Any], adapter: LoraAdapter) -> int:
        """Copy what the adapter holds now; as ``copy``."""
        return self.copy(description, self.stored(adapter))


def _view(name: str, slot: Tensor, tensor: Tensor) -> Tensor:
    """The part of an engine's slot in which a tensor is stored."""
    rows, columns = tensor.shape
    view = slot[:rows, :columns]
    if view.shape != tensor.shape or view.dtype != tensor.dtype:
        raise EngineError(
            f"the engine's slot takes {name} as {view.dtype} {tuple(view.shape)}, the trainer has "
            f"{tensor.dtype} {tuple(tensor.shape)}; give both the same dtype"
        )
    return view
