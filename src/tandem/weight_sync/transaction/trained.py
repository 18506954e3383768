"""The trainer's weights or adapter, as the source of a publish."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tandem.engines.base import Engine, LoraAdapter, ReportsChecksums
from tandem.lazy import torch
from tandem.together import all_ended
from tandem.transport.buckets import TensorEntry, manifest
from tandem.transport.checksums import ChecksumCache, Shard, checksums
from tandem.transport.daemon import on_daemon
from tandem.transport.sharing import finish
from tandem.weight_sync.verify.checksums import Checksums

if TYPE_CHECKING:
    from tandem.model.policy import Policy
    from tandem.trainable.base import Trainable
    from tandem.transport.collective import Member


class Trained:
    """The trainer's weights or adapter, as weight sync reads them.

    They are looked up once, since looking parameters up and configuring PEFT takes longer than a publish may.

    Tensors are those that the parameters have at each call: binding moves their storage. What computes with them runs
    on the policy's compute thread; where ranks hold parts of the weights, all of them take part in it.
    """

    gathers: ClassVar[int] = 1
    """Parts of a bucket, one of which is on the wire at a time: 2 where the other is for gathering it from ranks."""
    sends_frozen = False
    """What no step changes is published, too."""

    def __init__(self, trainable: Trainable, policy: Policy):
        self._trainable = trainable
        self._policy = policy
        self._sums = ChecksumCache()
        self._stored = ChecksumCache()

    @cached_property
    def source(self) -> Iterable[tuple[str, Any]]:
        """Name and live tensor of the payload."""
        return self._trainable.source(self._policy.model)

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return self._trainable.adapter_config(self._policy.model)

    def adapter(self) -> LoraAdapter:
        """The adapter that is trained, live."""
        return LoraAdapter(config=self._config, tensors=tuple(self.source))

    @property
    def frozen(self) -> dict[str, Any]:
        """Weights that no publish carries, by Hugging Face name."""
        trained = dict(self.source)
        base = self._trainable.base_names(self._policy.model)
        return {name: parameter for name, parameter in base.items() if name not in trained}

    @property
    def _sent(self) -> Iterable[tuple[str, Any]]:
        return [*self.source, *self.frozen.items()] if self.sends_frozen else self.source

    @property
    def manifest(self) -> list[TensorEntry]:
        """Names, shapes and types of the payload."""
        return manifest(self._sent)

    async def send(self, member: Member, bucket_bytes: int) -> int:
        """Send the payload to all others of a broadcast group; returns its bytes.

        Raises:
            TransportError: one of them is lost.
        """
        return await on_daemon(self._send, member, bucket_bytes)

    def _send(self, member: Member, bucket_bytes: int) -> int:
        finish(self._policy.device)  # the optimizer wrote on another thread's stream
        return member.send(self._sent, bucket_bytes)

    async def save_weights(self, folder: Path) -> None:
        """Write all weights as a model's folder, as an engine is started on it."""
        policy = self._policy

        def save() -> None:
            weights = {name: p.detach() for name, p in self._trainable.base_names(policy.model).items()}
            policy.causal.save_pretrained(folder, state_dict=weights)

        await policy.compute(save)

    async def checksums(self) -> Checksums:
        """Checksums of the trainer's own bytes."""
        return await self._policy.compute(lambda: self._sums.take(Shard(name, tensor) for name, tensor in self.source))

    async def frozen_checksums(self) -> Checksums:
        """Checksums of the weights that no publish carries."""
        return await self._policy.compute(lambda: checksums(self.frozen.items()))

    async def finite(self) -> bool:
        """True if all trained values are finite."""
        return await self._policy.compute(lambda: all(bool(torch.isfinite(tensor).all()) for _, tensor in self.source))

    async def scores(self, tokens: Sequence[int], *temperatures: float) -> list[list[float]]:
        """Logprobs of tokens as the trainer computes them, at several temperatures: ``Policy.scores``."""
        return await self._policy.compute(self._policy.scores, tokens, *temperatures)

    async def bare_scores(self, tokens: Sequence[int]) -> list[float]:
        """Logprobs of the model without its adapter; empty where it has none."""
        return await self._policy.compute(self._scores_untrained, tokens)

    def _scores_untrained(self, tokens: Sequence[int]) -> list[float]:
        if (off := self._trainable.untrained(self._policy.model)) is None:
            return []
        with off:
            return self._policy.score(tokens)

    async def sums(
        self, engine: Engine, trainer_sums: Checksums | None
    ) -> tuple[Checksums, Checksums, Mapping[str, Checksums]]:
        """Checksums of the payload at both ends, which read their own memory at the same time: it must be written.

        Args:
            engine: in another process.
            trainer_sums: those of the trainer's own bytes, where they are taken already.

        Returns:
            Those of the trainer's own bytes, of these as engines store them, and of each engine's own bytes by name.
        """
        assert isinstance(engine, ReportsChecksums)
        here, there = self._sums_here(engine, trainer_sums), engine.checksums(self._trainable.payload)
        # Both to their end, whatever the other does: every rank takes part in what is summed here.
        works: Sequence[Awaitable[Any]] = (here, there)
        (sums, stored), engines = await all_ended(works)
        return sums, stored, engines

    async def _sums_here(self, engine: ReportsChecksums, trainer_sums: Checksums | None) -> tuple[Checksums, Checksums]:
        """Checksums of the trainer's own bytes, and of these as engines store them."""
        sums = await self.checksums() if trainer_sums is None else trainer_sums
        if self._trainable.payload == "adapter":
            return sums, await self._policy.compute(
                lambda: self._stored.take(Shard(*each) for each in engine.as_stored(self.adapter()))
            )
        return sums, sums
