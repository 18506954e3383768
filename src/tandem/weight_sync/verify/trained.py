"""What is trained, as a publish sees it: looked up once, read every time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tandem.engines.base import Adapter, CanAttest, Engine
from tandem.lazy import torch
from tandem.transport.checksums import Shard, Standing
from tandem.weight_sync.verify.probe import Checksums

if TYPE_CHECKING:
    from tandem.model.policy import Policy


class Trained:
    """The trainer's end of a link. Looking parameters up and configuring PEFT takes longer than a publish may.

    Tensors are those that the parameters have at each call: binding moves their storage.
    """

    def __init__(self, trainable: Any, policy: Policy):
        self._trainable = trainable
        self._policy = policy
        self._sums = Standing()
        self._stored = Standing()

    @cached_property
    def source(self) -> Iterable[tuple[str, Any]]:
        """Name and live tensor of what travels."""
        found: Iterable[tuple[str, Any]] = self._trainable.source(self._policy.model)
        return found

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._trainable.adapter_config(self._policy.model)
        return found

    def adapter(self) -> Adapter:
        """The adapter that is trained, live."""
        return Adapter(config=self._config, tensors=tuple(self.source))

    def checksums(self) -> Checksums:
        """Of the trainer's own bytes."""
        return self._sums.take(Shard(name, tensor) for name, tensor in self.source)

    def finite(self) -> bool:
        """Whether every value of it is a number."""
        return all(bool(torch.isfinite(tensor).all()) for _, tensor in self.source)

    def _as_stored(self, engine: CanAttest) -> Checksums:
        """Of the adapter as the engine stores it, made anew from the trainer's own bytes."""
        return self._stored.take(Shard(name, tensor) for name, tensor in engine.as_stored(self.adapter()))

    async def sums(self, engine: Engine, mine: Checksums) -> tuple[Checksums, Mapping[str, Checksums]]:
        """Of what travels: the trainer's, as engines store it, and by name those of what each engine holds.

        Both ends read their own memory, at the same time.

        Args:
            engine: in another process.
            mine: those of the trainer's own bytes, taken already.
        """
        assert isinstance(engine, CanAttest)
        theirs = engine.checksums(self._trainable.travels)
        if self._trainable.travels == "adapter":
            return await asyncio.gather(self._policy.compute(self._as_stored, engine), theirs)
        return mine, await theirs
