"""Both roles at a broker, Tandem's or Atropos': environments hand in groups, a trainer takes batches.

Nothing is handed in twice. A submission to Tandem's broker bears a key by which it knows a repetition. Atropos' broker
knows no keys: a submission whose answer was lost is given up and counted, since it may have arrived.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from tandem.broker.connection import ALWAYS, MIME, Connection, Fate, Lost, Refused, encoding_of, told
from tandem.broker.protocol import messages, wire
from tandem.broker.protocol.convert import group_to_wire
from tandem.errors import BrokerError
from tandem.http import Answer, Backoff, Unreachable
from tandem.printable import printable
from tandem.types import Group, Json

__all__ = [
    "Backoff",
    "Connection",
    "EnvClient",
    "Lost",
    "NotRegistered",
    "Refused",
    "Taken",
    "TrainerClient",
    "Unreachable",
]

log = logging.getLogger(__name__)

Receipt = Literal["received", "buffered", "lost"]
"""buffered: it waits at the broker for others that make up a group size; lost: whether it arrived is not known."""


class Status(msgspec.Struct, kw_only=True, frozen=True):
    """What an environment polls; sizes in groups of its own size."""

    current_step: int
    """Batches that the trainer was given, counted from its starting step."""
    queue_size: int
    """Own groups queued, and those of others as far as they count against it."""
    self_queue_size: int = 0
    """Own groups queued."""
    max_group_size: int = 1
    """Largest group queued, in sequences."""
    unallocated_fraction: float = 1.0
    """Share of each batch that nobody has reserved."""
    env_weight: float = 1.0
    """Its share of generation."""


class _Ticket(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to /register-env; a status other than success has nothing else."""

    status: str
    env_id: int = -1
    wandb_name: str = ""
    starting_step: int = 0
    num_steps: int = -1


class _Receipt(msgspec.Struct, kw_only=True, frozen=True):
    status: str


class _Client:
    """Opens and closes a connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        """Where the broker is."""

    async def __aenter__(self) -> Self:
        await self.connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.connection.close()

    async def info(self) -> messages.Info:
        """What the trainer wants; -1 before it has registered."""
        return told(await self.connection.ask("GET", "/info"), messages.Info)


class EnvClient(_Client):
    """An environment at a broker: ``async with EnvClient(...) as client``."""

    def __init__(self, connection: Connection, spec: messages.EnvRegistration, *, key: str, poll: float = 1.0):
        """Nothing is sent yet.

        Args:
            connection: not open yet.
            spec: what it registers as.
            key: its identity: with the same one a restarted environment is known again, where the broker can.
            poll: seconds between two questions whether the trainer has started.
        """
        super().__init__(connection)
        self.spec = spec
        self.registrations = 0
        """How often it was registered; the run's parameters may have changed with each."""
        self._key = key
        self._poll = poll
        self.ticket: messages.EnvAccepted | None = None
        """Of the last registration."""
        self._known = 0
        self._step = 0
        self._registering = asyncio.Lock()

    async def register(self) -> messages.EnvAccepted:
        """Wait until a trainer has started, and take part.

        Raises:
            Refused: the broker will not have it.
        """
        waited = False
        while True:
            outages = self.connection.outages
            headers = {"Idempotency-Key": self._key} if self.connection.speaks == "tandem" else {}
            answer = await self.connection.ask("POST", "/register-env", self.spec, headers=headers)
            found = told(answer, _Ticket)
            if found.status == "success":
                self.ticket = told(answer, messages.EnvAccepted)
                self._known, self._step = outages, self.ticket.starting_step
                self.registrations += 1
                log.info("registered at %s as %s", self.connection.name, self.ticket.wandb_name)
                return self.ticket
            if not waited:
                log.info("%s says: %s (tandem train RECIPE broker=...)", self.connection.name, found.status)
                waited = True
            await asyncio.sleep(self._poll)

    async def status(self) -> Status:
        """How much is queued; registers again where the broker has forgotten this environment.

        Raises:
            Unreachable: the broker stays away.
        """
        await self._still_known()
        while True:
            registrations = self.registrations
            found = await self._ask_status()
            if found is not None and found.current_step >= self._step:
                self._step = found.current_step
                return found
            await self._register_again(registrations)

    async def submit(self, group: Group, key: str, params: Mapping[str, Json] | None = None) -> Receipt:
        """Hand in a group, once.

        Args:
            group: its scored rollouts are handed in.
            key: unique to this group, for ever.
            params: how it was sampled, beside the temperature.

        Raises:
            Refused: the broker will not have this group.
            BrokerError: this broker could never serve it; says why.
        """
        scored = group_to_wire(group)
        scored.generation_params = {**(scored.generation_params or {}), **(params or {})} or None
        if len(scored.tokens) > self.spec.group_size and self.connection.speaks != "tandem":
            raise BrokerError(
                f"group {group.id} has {len(scored.tokens)} sequences, since a rollout of it holds several "
                f"conversations or temperatures; {self.connection.name} would keep a group larger than "
                f"{self.spec.group_size} for ever: use Tandem's (tandem serve broker), or have each prompt begin with "
                "all that was said before"
            )
        if scored.group_overrides and scored.group_overrides.get("tandem_version", 0) < 0:
            # An engine of others does not say: then the broker's own guess is the better one.
            for name in ("tandem_version", "tandem_versions"):
                scored.group_overrides.pop(name, None)
        while True:
            await self._still_known()
            if self.ticket is not None:
                scored.env_id = self.ticket.env_id
            try:
                answer = await self._hand_in(scored, key)
            except Lost as error:
                log.warning("group %s: %s", group.id, error)
                return "lost"
            except Unreachable:
                if self.connection.speaks == "tandem":
                    raise
            else:
                return "buffered" if told(answer, _Receipt).status == "buffered" else "received"

    async def _hand_in(self, scored: messages.ScoredGroup, key: str) -> Answer:
        if self.connection.speaks == "tandem":
            headers = {"Idempotency-Key": key}
            return await self.connection.ask("POST", "/scored_data", scored, headers=headers, encoding="msgpack")
        # Not even what was not sent is sent again at once: by then it may be a broker without a trainer.
        return await self.connection.ask("POST", "/scored_data", scored, repeat=frozenset())

    async def disconnect(self) -> None:
        """Leave; what was handed in stays."""
        if self.ticket is not None:
            await self.connection.ask("POST", "/disconnect-env", messages.EnvName(env_id=self.ticket.env_id))
            self.ticket = None

    async def _ask_status(self) -> Status | None:
        """The answer, or None where the broker does not know this environment."""
        assert self.ticket is not None, "register first"
        body = messages.EnvName(env_id=self.ticket.env_id)
        # Atropos' broker answers 500 to an id that it does not know.
        again = ALWAYS if self.connection.speaks == "tandem" else ALWAYS - {"failed"}
        try:
            answer = await self.connection.ask("GET", "/status-env", body, repeat=again)
        except Refused as error:
            if error.status in (401, 403):
                raise
            return None
        except Lost:
            return None
        return told(answer, Status)

    async def _still_known(self) -> None:
        """After an outage, make sure that the broker knows this environment before anything is handed in.

        Atropos' broker comes back empty. What is handed in before its trainer has registered would block it for good;
        and an id that it no longer knows could be given to another. One that runs backwards has started anew too.
        """
        if self._known == self.connection.outages:
            return
        async with self._registering:
            outages = self.connection.outages
            if self._known == outages:
                return
            found = await self._ask_status()
            if found is None or found.current_step < self._step:
                log.warning(
                    "%s does not know this environment any more, or went back to an earlier step; registering again",
                    self.connection.name,
                )
                await self.register()
            self._known = outages

    async def _register_again(self, registrations: int) -> None:
        async with self._registering:
            if self.registrations == registrations:
                log.warning(
                    "%s does not know this environment any more, or went back to an earlier step; registering again",
                    self.connection.name,
                )
                await asyncio.sleep(self._poll)
                await self.register()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch that a trainer was given."""

    id: str | None
    """To acknowledge it by; None: the broker counts it as trained already."""
    groups: Sequence[messages.ScoredGroup]
    """Exactly the batch's sequences, but for the malformed."""
    ids: Sequence[str | None]
    """What the broker calls each group; None where it does not say."""
    versions: Sequence[int | None]
    """Policy step that the broker noted for each group; None where it does not say."""
    malformed: Sequence[str] = ()
    """What was wrong with groups that could not be read, one line for each."""
    step: int | None = None
    """The broker's step with this batch served, where it says so."""


class NotRegistered(BrokerError):
    """The broker knows of no trainer: it was reset, or came back empty."""


class TrainerClient(_Client):
    """A trainer at a broker: ``async with TrainerClient(...) as client``."""

    @property
    def leases(self) -> bool:
        """True if batches can be leased and acknowledged."""
        return self.connection.speaks == "tandem"

    async def register(self, run: messages.RunParameters) -> int:
        """Say what is trained. Atropos' broker ignores all but the first, so it is reset before: see ``reset``."""
        return told(await self.connection.ask("POST", "/register", run), messages.Registered).uuid

    async def reset(self) -> None:
        """Drop all that is queued, and every registration."""
        await self.connection.ask("GET", "/reset_data")

    async def batch(
        self, *, lease: float | None = None, policy: int | None = None, max_lag: int | None = None
    ) -> Taken | None:
        """The next batch, or None while there are too few groups.

        Args:
            lease: seconds after which it is served again unless it was acknowledged; None: it counts as trained.
            policy: the trainer's policy step.
            max_lag: groups more steps older than ``policy`` are dropped by the broker.

        Raises:
            NotRegistered: register again.
        """
        headers, query = {}, ""
        if self.leases:
            asked = {"lease": lease, "policy": policy, "max_lag": max_lag}
            query = "&".join(f"{name}={value}" for name, value in asked.items() if value is not None)
            headers = {"Accept": MIME["msgpack"]}
        path = f"/batch?{query}" if query else "/batch"
        try:
            # A lost answer of a broker without leases is a lost batch, whether it is asked again or not.
            again: frozenset[Fate] = ALWAYS if self.leases and lease is not None else frozenset({"unsent"})
            answer = await self.connection.ask("GET", path, headers=headers, repeat=again)
        except Lost as error:
            log.warning("%s; a batch may be lost with it", error)
            return None
        found = _read_batch(answer.body, encoding_of(answer))
        if found.status == "error":
            raise NotRegistered(f"{self.connection.name} says: {found.message or 'no trainer has registered'}")
        if found.batch is None:
            return None
        return _taken(found, found.batch, encoding_of(answer))

    async def acknowledge(self, batch: str) -> bool:
        """A leased batch was trained on; False if the broker had given it to somebody else by then."""
        return await self._settle("/ack", batch)

    async def renew(self, batch: str) -> bool:
        """The lease of a batch begins anew; False if it has run out."""
        return await self._settle("/renew", batch)

    async def release(self, batch: str) -> bool:
        """A leased batch was not trained on and goes back to the front of the queue."""
        return await self._settle("/release", batch)

    async def _settle(self, path: str, batch: str) -> bool:
        try:
            answer = await self.connection.ask("POST", path, messages.BatchName(batch=batch))
        except Refused as error:
            if error.status in (401, 403):
                raise
            log.warning("%s", error)
            return False
        return told(answer, _Receipt).status == "success"

    async def status(self) -> dict[str, Any]:
        """At least ``current_step`` and ``queue_size`` (groups)."""
        found: dict[str, Any] = told(await self.connection.ask("GET", "/status"), dict)
        return found


class _Lease(msgspec.Struct, kw_only=True, frozen=True):
    """What Tandem's broker says beside the groups of a leased batch; the lists have an entry for each."""

    batch: str | None = None
    step: int | None = None
    ids: list[str | None] = []
    versions: list[int | None] = []


class _Batch(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to /batch, its groups unread."""

    batch: list[msgspec.Raw] | None = None
    status: str = ""
    message: str = ""
    tandem: _Lease = _Lease()


def _read_batch(body: bytes, encoding: wire.Encoding) -> _Batch:
    module: Any = msgspec.json if encoding == "json" else msgspec.msgpack
    try:
        found: _Batch = module.decode(body, type=_Batch)
    except msgspec.DecodeError as error:
        raise BrokerError(f"the broker answers /batch with something else than a batch: {error}") from error
    return found


def _taken(found: _Batch, raws: Sequence[msgspec.Raw], encoding: wire.Encoding) -> Taken:
    """The groups that can be read, and what is wrong with the others: one bad group does not cost the batch."""
    groups, ids, versions, malformed = [], [], [], []
    for raw, id, version in zip_longest(raws, found.tandem.ids[: len(raws)], found.tandem.versions[: len(raws)]):
        try:
            groups.append(wire.read(bytes(raw), messages.ScoredGroup, encoding))
        except (BrokerError, msgspec.ValidationError) as error:
            malformed.append(printable(f"{id}: {error}" if id else str(error)))
        else:
            ids.append(id)
            versions.append(version)
    return Taken(
        id=found.tandem.batch, groups=groups, ids=ids, versions=versions, malformed=malformed, step=found.tandem.step
    )
