"""Tensors over a process group: from the trainer, rank 0, into the memory of any number of engine workers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tandem.engines.base import MOST_SECONDS, ReceivesBroadcast
from tandem.errors import EngineError, TandemError, TransportError, bounded
from tandem.observability import waits
from tandem.transport.bridge import NCCL_FILE, write_json
from tandem.transport.daemon import on_daemon
from tandem.types import PolicyVersion
from tandem.weight_sync.base import Periodic, SyncContext

if TYPE_CHECKING:
    from tandem.transport.rendezvous import Rendezvous

LEAVING = 60.0
"""Seconds that an end of the group may take to leave it."""


@dataclass(frozen=True, kw_only=True)
class Broadcast(Periodic):
    """NCCL between GPUs, gloo on a CPU; weights or adapter tensors land in place, and no disk is touched."""

    capability: ClassVar[type] = ReceivesBroadcast

    in_flight: Literal["continue", "finish"] = "continue"
    """Requests being sampled when weights change: go on under the new ones, token by token versioned, or end first."""
    host: str = ""
    """Address of the trainer, as the engines see it; empty: the one by which the trainer reaches them."""
    port: int = bounded(0, most=65535)
    """Port of the trainer's store; 0 takes a free one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: NCCL where every member has a GPU of its own, else gloo."""
    timeout_seconds: float = bounded(120.0, above=0, most=MOST_SECONDS)
    """Deadline for all to join, and for a transfer to make progress."""
    bucket_mb: int = bounded(256, least=1)
    """Megabytes sent at once."""

    async def bind(self, session: SyncContext) -> None:
        """Form the group.

        Raises:
            TransportError: a member did not join in time; the message names it.
        """
        await _leave(session)
        engine = session.engine
        assert isinstance(engine, ReceivesBroadcast)
        from tandem.transport.collective import Member  # which need torch
        from tandem.transport.rendezvous import Rendezvous, accelerator
        from tandem.transport.weight_transfer import WeightTransferGroup

        engine_starts, accelerators = session.engine.restart_count, await engine.workers()
        ranks = [len(those) for those in accelerators]
        device = session.policy.device
        backend = self.backend
        if backend == "auto":
            backend = _backend([accelerator(device), *chain.from_iterable(accelerators)])
        meeting = Rendezvous(
            host=self.host or _address(await engine.addresses()),
            port=self.port,
            world=1 + sum(ranks),
            backend=backend,
            # Of one group of one run, so that a late joiner of an older one is not taken for a member.
            name=f"tandem-{id(session):x}-{engine_starts}",
            seconds=self.timeout_seconds,
        )
        host = Member.host if session.engine.sums_bytes else WeightTransferGroup
        member = session.member = host(meeting, device)
        self._record(session, member.rendezvous)
        await engine.connect(asdict(member.rendezvous), list(accumulate(ranks, initial=1))[:-1])
        late = 2 * self.timeout_seconds
        try:
            async with waits.waiting("trainer", "the process group to form", on="engine workers", deadline=late):
                await on_daemon(member.connect)
        except TransportError as error:
            met = member.rendezvous
            raise TransportError(
                f"{error}. The engines were to meet the trainer at {met.host}:{met.port}; if that is not where they "
                "reach it, name its address in sync.host, and a port that is let through in sync.port"
            ) from error

    def _record(self, session: SyncContext, meeting: Rendezvous) -> None:
        """Write where the group meets and what will travel, for a person or a program that looks into the run."""
        if session.folder == Path():
            return  # outside a run
        entries = session.trained.manifest
        fields = {
            "nccl_init_method": f"tcp://{meeting.host}:{meeting.port}",
            "world_size": meeting.world,
            "param_metadata": {e.name: {"shape": list(e.shape), "dtype": e.dtype} for e in entries},
            "param_mappings": {e.name: e.name.replace(".default.", ".") for e in entries},
            "nccl_enabled": True,
            "tandem": {"backend": meeting.backend, "name": meeting.name},
        }
        write_json(session.folder / NCCL_FILE, fields)

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Send every tensor; the engines' workers write them where they sample from.

        Raises:
            TransportError: names the engine or rank that broke off.
        """
        engine, trained = session.engine, session.trained
        bucket_bytes = (self.bucket_mb << 20) // trained.gathers
        assert isinstance(engine, ReceivesBroadcast)
        trained.sends_frozen = not engine.sums_bytes  # vLLM reloads whole layers: what is left out would be garbage
        adapter = trained.adapter() if session.trainable.payload == "adapter" else None
        manifest = trained.manifest
        receiving = asyncio.ensure_future(engine.receive(manifest, bucket_bytes, adapter))
        sending = asyncio.ensure_future(trained.send(session.member, bucket_bytes))
        late = 4 * self.timeout_seconds
        try:
            async with waits.waiting("trainer", "a publish to arrive", on="engine workers", deadline=late):
                await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_EXCEPTION)
                if receiving.done() and receiving.exception() is not None:
                    session.member.abort()  # the other end is gone: do not wait for the group's own deadline
                await asyncio.wait((receiving, sending))
        finally:  # where this is cancelled, nothing is left running
            receiving.cancel()
            sending.cancel()
            results = await asyncio.gather(receiving, sending, return_exceptions=True)
        for error in results:
            if isinstance(error, EngineError):
                raise error  # an engine that died may be started again, and then be published to
        for error in results:
            if isinstance(error, BaseException):
                raise TransportError(f"the publish of version {version.step} broke off: {error}") from error
        return sum(entry.bytes for entry in manifest)

    async def unbind(self, session: SyncContext) -> None:
        """Leave the group, and have the engines leave it."""
        if session.member is not None:
            await asyncio.gather(_leave(session), _dismissed(session.engine))


async def _leave(session: SyncContext) -> None:
    """The trainer leaves the group."""
    member, session.member = session.member, None
    if member is not None:
        leaving = on_daemon(member.close)
        await waits.wait(leaving, owner="trainer", reason="to leave it", on="process group", deadline=LEAVING)


async def _dismissed(engine: Any) -> None:
    """The engines leave it; one that is gone, or does not answer, is not waited for."""
    assert isinstance(engine, ReceivesBroadcast)
    with contextlib.suppress(TandemError):
        leaving = engine.disconnect()
        await waits.wait(leaving, owner="trainer", reason="them to leave it", on="engine workers", deadline=LEAVING)


def _address(addresses: Sequence[str]) -> str:
    """Where all engines reach the trainer: one on this machine by any of its addresses.

    Raises:
        TransportError: engines elsewhere are reached from several.
    """
    elsewhere = sorted({address for address in addresses if not ipaddress.ip_address(address).is_loopback})
    if len(elsewhere) > 1:
        raise TransportError(
            f"the engines are reached from {', '.join(elsewhere)}: name the address that all of them reach in sync.host"
        )
    return elsewhere[0] if elsewhere else addresses[0]


def _backend(accelerators: Sequence[str]) -> Literal["nccl", "gloo"]:
    """NCCL, which wants an accelerator for each member; gloo on a host, or where two members have one between them."""
    return "nccl" if all(accelerators) and len(set(accelerators)) == len(accelerators) else "gloo"
