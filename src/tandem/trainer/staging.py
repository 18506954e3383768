"""Staging of a checkpoint: its tensors are copied, and written while training goes on, or written as they are.

A staged tensor must not change while it is written. Either it is a copy in host memory, or training waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from tandem.model.policy import Compute, Policy
from tandem.observability import waits

P = ParamSpec("P")
T = TypeVar("T")


class Staging:
    """How the tensors of a checkpoint are kept from changing while they are written.

    Args:
        compute: the compute thread writes, and nothing is copied: nothing is trained or sampled on it meanwhile. None:
            tensors are copied to host memory, from a GPU to pinned memory, and a thread of its own writes them.
    """

    def __init__(self, compute: Compute | None):
        self._compute = compute
        self._pool = ThreadPoolExecutor(1, "checkpoint")

    @property
    def waits(self) -> bool:
        """Whether training waits until a checkpoint is written."""
        return self._compute is not None

    @torch.no_grad()
    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as they are now, for the writer; called on the compute thread. Equal memory stays equal.

        Copies of tensors on a GPU are under way together, and there when this returns.
        """
        if self._compute is not None:
            return dict(tensors)
        copies: dict[tuple[object, ...], Tensor] = {}
        by_name: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if not tensor.numel() or memory not in copies:
                copies[memory] = _copy(tensor)
            by_name[name] = copies[memory]
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return by_name

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that writes, one at a time, on a thread that may block."""
        if self._compute is not None:
            return await self._compute(function, *args, **kwargs)
        loop = asyncio.get_running_loop()
        reason = getattr(function, "__qualname__", type(function).__name__)
        async with waits.waiting(waits.actor("checkpoint"), reason, on="checkpoint thread"):
            return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Let what is being written end."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _copy(tensor: Tensor) -> Tensor:
    """A copy in host memory; torch keeps pinned memory that is freed, for the next checkpoint."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def staging_of(asynchronous: bool | Literal["auto"], policy: Policy) -> Staging:
    """The recipe's way; auto: asynchronous where weights are on a GPU, beside which host memory is cheap."""
    chosen = policy.device.type != "cpu" if asynchronous == "auto" else asynchronous
    return Staging(None if chosen else policy.compute)
