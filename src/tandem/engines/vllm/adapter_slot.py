"""An adapter's slot lent to the trainer, which writes every version there itself: no copy of it lies in between.

As with weights, the engine is the one that lends, so whatever becomes of the trainer, nothing of it stays behind, and
its end takes no memory away from under the engine.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import EngineError
from tandem.lazy import torch
from tandem.transport import sharing

if TYPE_CHECKING:
    from torch import Tensor

SHARED_NAME = "tandem-adapter"
"""Names of files in shared memory begin with this; the rest says whose they are."""


class Loan:
    """The engine's end."""

    def __init__(self, stacked: Mapping[str, Tensor], folder: Path):
        """Make tensors attachable; on the host they move to a shared file in ``folder`` and views of them end."""
        self.key = ""
        """By which the last borrower names it; an earlier one learns that it is not alone."""
        self._lent: sharing.Lent | None = None
        if next(iter(stacked.values())).is_cuda:
            self._description = sharing.lend_cuda(stacked)
            return
        path = folder / f"{SHARED_NAME}-{os.getpid()}-{secrets.token_hex(4)}"
        self._lent = sharing.lend_host(stacked, path)
        self._description = self._lent.description
        for name, tensor in stacked.items():
            tensor.data = self._lent.tensors[name]

    def to_borrower(self, slot: int) -> dict[str, Any]:
        """What ``Borrowed`` needs; the borrower before, if any, holds it no longer."""
        self.key = secrets.token_hex(8)
        return {"key": self.key, "slot": slot, "lent": self._description}


class Borrowed:
    """The trainer's end."""

    def __init__(self, answer: Mapping[str, Any], expect: Iterable[tuple[str, Tensor]]):
        """Attach what ``Loan`` described.

        Args:
            answer: its description.
            expect: the adapter as it will be written.

        Raises:
            TransportError: it cannot be attached.
            EngineError: the engine's slot is of another type or has too little room.
        """
        self.key: str = answer["key"]
        self._views: list[Tensor] = []
        stacked = sharing.attach(answer["lent"])
        for name, tensor in expect:
            rows, columns = tensor.shape
            view = stacked[name][int(answer["slot"]), 0, :rows, :columns]
            if view.shape != tensor.shape or view.dtype != tensor.dtype:
                raise EngineError(
                    f"the engine's slot takes {name} as {view.dtype} {tuple(view.shape)}, the trainer has "
                    f"{tensor.dtype} {tuple(tensor.shape)}; give both the same dtype"
                )
            self._views.append(view)

    def write(self, stored: Iterable[tuple[str, Tensor]]) -> int:
        """Copy a version into the slot; returns its bytes. The engine must stand still."""
        values = [tensor for _, tensor in stored]
        torch._foreach_copy_(self._views, values)
        if values[0].is_cuda:
            # Streams order nothing between processes: only what is complete can be told of.
            torch.cuda.synchronize(values[0].device)
        return sum(tensor.nbytes for tensor in values)
