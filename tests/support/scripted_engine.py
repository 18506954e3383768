"""An engine of another process, in this one: it holds copies of what it is given, and dies or lies by a script."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from support.tiny_policy import live_policy
from torch import Tensor

from tandem.engines.base import PROBE_SAMPLES, Engine, Health, LoraAdapter, ProbeResult
from tandem.errors import EngineError, TransportError
from tandem.model.policy import Policy
from tandem.trainable.base import Trainable, read_into, safetensors_in
from tandem.trainable.full import Full
from tandem.transport.checksums import checksums
from tandem.transport.collective import Member
from tandem.transport.rendezvous import Rendezvous
from tandem.types import Completion, PolicyVersion, Sampling

SAMPLED = (70, 32, 71, 258)
"""What it says it sampled after a probe."""


class Wire:
    """A member of a group within this process: as ``Member`` behaves, without its seconds of leaving."""

    groups: ClassVar[dict[str, Wire]] = {}

    def __init__(self, rendezvous: Rendezvous):
        self.rendezvous = rendezvous
        self.leader: Wire = self
        self.changed = threading.Condition()
        self.joined = 1
        self.publish: tuple[list[Any], dict[str, Tensor]] | None = None
        self.taken = 0
        self.broken = False

    @classmethod
    def host(cls, rendezvous: Rendezvous, device: Any) -> Wire:
        wire = cls(replace(rendezvous, port=1))
        cls.groups[rendezvous.name] = wire
        return wire

    @classmethod
    def join(cls, rendezvous: Rendezvous, rank: int, device: Any, *, who: str) -> Wire:
        wire = cls(rendezvous)
        wire.leader = cls.groups[rendezvous.name]
        with wire.leader.changed:
            wire.leader.joined += 1
            wire.leader.changed.notify_all()
        return wire

    def _until(self, condition: Callable[[], bool]) -> None:
        leader = self.leader
        assert leader.changed.wait_for(lambda: leader.broken or condition(), self.rendezvous.seconds)
        if leader.broken:
            raise TransportError("a member left the group")

    def connect(self) -> None:
        with self.changed:
            self._until(lambda: self.joined == self.rendezvous.world)

    def send(self, named: Sequence[tuple[str, Tensor]], bucket_bytes: int) -> None:
        with self.changed:
            entries = [[name, tuple(tensor.shape), str(tensor.dtype)[6:]] for name, tensor in named]
            self.publish, self.taken = ([entries, bucket_bytes], {name: t.clone() for name, t in named}), 0
            self.changed.notify_all()
            self._until(lambda: self.taken == self.rendezvous.world - 1)
            self.publish = None
            self.changed.notify_all()

    def receive(self, entries: Sequence[tuple[str, tuple[int, ...], str]], bucket_bytes: int) -> Iterator[Any]:
        leader = self.leader
        with leader.changed:
            self._until(lambda: leader.publish is not None)
            assert leader.publish is not None
            expected, tensors = leader.publish
            assert expected == [[list(entry) for entry in entries], bucket_bytes]
        yield list(tensors.items())
        with leader.changed:
            leader.taken += 1
            leader.changed.notify_all()
            self._until(lambda: leader.publish is None or leader.publish[1] is not tensors)

    def abort(self) -> None:
        with self.leader.changed:
            self.leader.broken = True
            self.leader.changed.notify_all()

    close = abort


@dataclass
class Scripted(Engine):
    """It runs a second model, whose weights change by what it is given alone. It can be told when to die."""

    inner: Policy
    """Its model."""
    trainable: Trainable
    """What is published to it."""
    dies: Counter[str] = field(default_factory=Counter)
    """How often it dies when it is asked for something, by its name."""
    revivable: bool = True
    """False for one that was not started by us."""
    somebody_revives: bool = False
    """It is started again by whoever asked it something else when it died, before anybody asks it to recover."""
    probed: Callable[[ProbeResult], ProbeResult] = lambda probe: probe
    """What becomes of its answer to a probe."""
    summed: Callable[[dict[str, int]], Mapping[str, Mapping[str, int]]] = lambda sums: {"engine one": sums}
    """What it says of its checksums."""
    events: list[str] = field(default_factory=list)
    """What was asked of it."""
    resumed_versions: list[tuple[int, str]] = field(default_factory=list)
    """Digests of the versions under which it began to give out tokens."""
    serving: bool = False
    """It serves somebody else already."""
    member: ClassVar[Any] = Member
    """What it joins a group with."""
    reason: str = ""
    """What it was stopped for."""
    alive: bool = True
    adapted: bool = False
    _epoch: int = 0
    _version: PolicyVersion = field(default_factory=lambda: PolicyVersion(step=0, digest=""))
    _stamped: bool = False
    _interrupted: bool | None = None
    _gate: asyncio.Event = field(default_factory=asyncio.Event)
    _joining: list[asyncio.Future[Any]] = field(default_factory=list)
    _members: list[Any] = field(default_factory=list)
    _republish: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._started_on = {name: p.detach().clone() for name, p in self._base().items()}
        if self.trainable.payload == "adapter":
            self._forget_adapter()
        if self.serving:
            self._gate.set()

    def _base(self) -> Mapping[str, torch.nn.Parameter]:
        return self.trainable.base_names(self.inner.model)

    def _forget_adapter(self) -> None:
        with torch.no_grad():
            for _, tensor in self.trainable.source(self.inner.model):
                tensor.zero_()
        self.adapted = False

    def _at(self, point: str) -> None:
        """Note what is asked for; die if the script says so."""
        self.events.append(point)
        if self.alive and self.dies[point] > 0:
            self.dies[point] -= 1
            self.die()
            if self.somebody_revives:
                self._start_again()
            raise EngineError(f"the engine died in {point}")
        if not self.alive:
            raise EngineError("the engine is gone")

    def die(self) -> None:
        """End without a word."""
        self.alive = False
        self._gate.clear()
        for member in self._members:
            member.abort()

    def _start_again(self) -> None:
        """On the weights of its folder, in new memory; nothing was published to it."""
        for name, parameter in self._base().items():
            parameter.data = self._started_on[name].clone()
        if self.trainable.payload == "adapter":
            self._forget_adapter()
        self._epoch += 1
        self._stamped = False
        self.alive = True

    def held(self) -> dict[str, int]:
        """Checksums of the weights that travel, of its own bytes."""
        return checksums(self.trainable.source(self.inner.model))

    def _travelling(self) -> dict[str, int]:
        return self.held() if self.trainable.payload == "weights" else {}

    async def revive(self) -> None:
        """What a request in flight does when its engine died: start it, and ask for its weights."""
        if await self.recover() and self._republish is not None:
            await self._republish()

    # An engine

    @property
    def restart_count(self) -> int:
        return self._epoch

    @property
    def context(self) -> int:
        return 512

    def on_restart(self, republish: Callable[[], Awaitable[None]]) -> None:
        self._republish = republish

    async def recover(self) -> bool:
        self.events.append("recover")
        if self.alive or not self.revivable:
            return False
        self._start_again()
        return True

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        await self._gate.wait()
        return Completion(tokens=(7,), logprobs=(-1.0,), versions=(self._version.step,), finish="length")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        raise AssertionError("a probe is asked for instead")

    async def probe(self, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> Sequence[ProbeResult]:
        self._at("probe")
        drawn = (SAMPLED * samples)[:samples]
        logprobs = self.inner.score([*tokens, *drawn], 0.7)[len(tokens) - 1 :]
        sampled = Completion(tokens=drawn, logprobs=tuple(logprobs), versions=(0,) * samples, finish="length")
        scored = tuple(self.inner.score(tokens))
        # As a prefix cache does that was filled since the publish: by the same weights, which is in order.
        published = list(takewhile(lambda e: e not in ("set_version", "recover"), reversed(self.events)))
        again = len(tokens) * (published.count("probe") > 1)
        result = ProbeResult(name="engine one", scored=scored, sampled=sampled, temperature=0.7, cached=again)
        return [self.probed(result)]

    def version(self) -> PolicyVersion:
        return self._version

    async def set_version(self, version: PolicyVersion) -> None:
        self._at("set_version")
        self._version, self._stamped = version, True

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        self._at("drain" if finish else "pause")
        if self._interrupted is None:
            self._interrupted = self.serves
        self._gate.clear()

    async def resume_unchanged(self, reason: str) -> None:
        self._at("resume_unchanged")
        if self._interrupted:
            self._gate.set()
        self._interrupted = None

    async def resume(self) -> float:
        self._at("resume")
        assert self._stamped, "it gives out tokens of weights that were never published to it"
        self._interrupted = None
        self._gate.set()
        self.resumed_versions.append((self._version.step, self._version.digest))
        return 0.5

    async def stop(self, reason: str) -> None:
        self.events.append("stop")
        self.reason = reason
        self._interrupted = None
        self._gate.clear()
        if not self.alive:
            raise EngineError("the engine is gone")

    @property
    def serves(self) -> bool:
        """True if it gives out tokens."""
        return self.alive and self._gate.is_set()

    async def health(self) -> Health:
        return Health(ok=self.alive, running=0, waiting=0)

    async def close(self) -> None:
        await self.disconnect()

    # Its ports

    async def export_weights(self) -> Mapping[str, Tensor]:
        self._at("export_weights")
        return {name: p.detach() for name, p in self._base().items()}

    async def adapt(self, adapter: LoraAdapter, *, everywhere: bool = True) -> int:
        self._at("move")
        return self._take(adapter.tensors)

    async def swap(self, folder: Path, version: PolicyVersion, adapter: LoraAdapter) -> int:
        self._at("move")
        self._read(folder)
        return sum(t.nbytes for _, t in adapter.tensors)

    async def relaunch(self, weights: Path | None) -> None:
        self._at("move")
        if weights is not None:
            parameters = {name: p.detach() for name, p in self._base().items()}
            missing = read_into(list(parameters.items()), safetensors_in(weights))
            assert not missing, missing
            self._started_on = {name: tensor.clone() for name, tensor in parameters.items()}
        self._start_again()

    async def load(self, folder: Path, adapter: LoraAdapter) -> None:
        self._at("load")
        self._read(folder)

    def _read(self, folder: Path) -> None:
        self.trainable.load(self.inner.model, folder)
        self.adapted = True

    async def workers(self) -> Sequence[Sequence[str]]:
        self._at("workers")
        return [[""], [""]]

    async def addresses(self) -> Sequence[str]:
        return ["127.0.0.1", "127.0.0.1"]

    async def connect(self, rendezvous: Mapping[str, Any], first: Sequence[int]) -> None:
        """Two workers of one rank each: the first writes the weights, the second looks on."""
        self._at("connect")
        await self.disconnect()
        meeting = Rendezvous(**rendezvous)
        self._joining = [
            asyncio.ensure_future(asyncio.to_thread(self.member.join, meeting, rank, "cpu", who=f"engine rank {rank}"))
            for rank in first
        ]

    async def receive(
        self, manifest: Sequence[tuple[str, tuple[int, ...], str]], bucket_bytes: int, adapter: LoraAdapter | None
    ) -> None:
        self._at("move")
        self._members = [await task for task in self._joining]
        assert (adapter is not None) == (self.trainable.payload == "adapter")
        live = dict(self.trainable.source(self.inner.model))

        def take(member: Any, *, write: bool) -> None:
            for name, tensor in (pair for bucket in member.receive(manifest, bucket_bytes) for pair in bucket):
                if write:
                    live[name].detach().copy_(tensor)

        one, other = self._members
        await asyncio.gather(asyncio.to_thread(take, one, write=True), asyncio.to_thread(take, other, write=False))

    async def disconnect(self) -> None:
        joined = await asyncio.gather(*self._joining, return_exceptions=True)
        self._joining, self._members = [], []
        await asyncio.gather(*(asyncio.to_thread(m.close) for m in joined if not isinstance(m, BaseException)))

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        live, copied = dict(self.trainable.source(self.inner.model)), 0
        for name, tensor in tensors:
            live[name].detach().copy_(tensor)
            copied += tensor.nbytes
        self.adapted = True
        return copied

    async def checksums(self, payload: Literal["weights", "adapter"]) -> Mapping[str, Mapping[str, int]]:
        self._at("checksums")
        if payload == "weights":  # of which some may be no part of any publish
            base = self.trainable.base_names(self.inner.model).items()
            return self.summed({**checksums((name, p.detach()) for name, p in base), **self._travelling()})
        assert payload == self.trainable.payload
        return self.summed(checksums(_stored(self.trainable.source(self.inner.model))))

    def as_stored(self, adapter: LoraAdapter) -> Iterable[tuple[str, Any]]:
        return _stored(adapter.tensors)


def _stored(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Shorter names, and B scaled, as an engine may well keep an adapter."""
    for name, tensor in tensors:
        yield name.replace(".default.", "."), tensor * 2 if ".lora_B." in name else tensor


@contextmanager
def scripted(folder: Path, trainable: Trainable | None = None, **script: Any) -> Iterator[Scripted]:
    """One that was started on the model in ``folder``."""
    trainable = trainable or Full()
    with live_policy(folder, trainable=trainable) as inner:
        yield Scripted(inner, trainable, dies=Counter(script.pop("dies", {})), **script)
