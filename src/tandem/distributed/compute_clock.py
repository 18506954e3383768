"""Clock of a rank's compute: without what it waits for others, so that ranks can be compared.

Ranks that wait for one another end each round together, and by the wall clock all are as slow as the slowest. On a GPU
moments are events in its queue, which the host never waits for: they are read when the step's numbers are there anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ComputeClock:
    """Seconds in which a rank computed micro-batches since they were taken last.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._computing: list[tuple[Any, Any]] = []
        self._waiting: list[tuple[Any, Any]] = []
        self._in_micro_batch = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a micro-batch."""
        begin, self._in_micro_batch = self._now(), True
        try:
            yield
        finally:
            self._in_micro_batch = False
            self._computing.append((begin, self._now()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever makes this rank, or its GPU's queue, wait for other ranks."""
        if not self._in_micro_batch:
            yield
            return
        begin = self._now()
        try:
            yield
        finally:
            self._waiting.append((begin, self._now()))

    def take(self) -> float:
        """The seconds, once the device is done with all micro-batches; the next ones begin at 0."""
        seconds = sum(map(self._seconds, self._computing)) - sum(map(self._seconds, self._waiting))
        self._computing.clear()
        self._waiting.clear()
        return max(0.0, seconds)

    def _now(self) -> Any:
        """This moment; on a GPU that at which its queue comes here."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, span: tuple[Any, Any]) -> float:
        begin, end = span
        return float(begin.elapsed_time(end)) / 1000 if self._on_gpu else end - begin
