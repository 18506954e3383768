"""Clients of a broker, Tandem's or Atropos': an environment submits groups, a trainer takes batches.

Nothing is submitted twice. A submission to Tandem's broker bears a key by which it knows a repetition. Atropos' broker
knows no keys: a submission whose answer was lost is given up and counted, since it may have arrived.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count, zip_longest
from typing import Literal, Self, TypeVar

import msgspec

from tandem.errors import BrokerError, ConfigError
from tandem.http import HttpClient, HttpResponse, HttpStatusError, OutageLog, ResponseLost, RetryPolicy, ServerAway
from tandem.observability import waits
from tandem.printable import printable
from tandem.types import Group, Json
from tandem_broker.protocol import messages, wire
from tandem_broker.protocol.convert import group_to_wire
from tandem_broker.protocol.submission import read_scored

log = logging.getLogger(f"tandem.{__name__}")

T = TypeVar("T")
Speaks = Literal["tandem", "atropos"]

BATCH_BYTES = 4 << 30
"""Largest response: a batch of long rollouts."""
SECONDS = 60.0
"""How long one answer may take."""
JSON = "application/json"
Receipt = Literal["received", "buffered", "lost"]
"""buffered: it waits at the broker for others that make up a group size; lost: whether it arrived is not known."""


class RequestRefused(BrokerError):
    """The broker will not have this, now or later; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class RequestLost(BrokerError):
    """The connection broke within a request that is unsafe to repeat: it may or may not have been carried out."""


class Connection:
    """A client's connection to a broker: address, key and retries."""

    def __init__(self, url: str, key: str = "", *, retry: RetryPolicy | None = None):
        """Nothing is opened yet: ``url`` is such as http://127.0.0.1:8000; an empty ``key`` sends none."""
        self.http = HttpClient(url, key, kind="broker", most_bytes=BATCH_BYTES)
        self.name = self.http.name
        """For messages."""
        self.outage = OutageLog(self.name)
        self._retry = retry or RetryPolicy()
        self.speaks: Speaks = "atropos"
        """Whose broker it is; known once opened."""
        self.outages = 0
        """Times that the server was found away; after each it may have forgotten its clients."""

    async def open(self) -> Connection:
        """Wait for the broker and find out whose it is.

        Raises:
            ServerAway: no response within ``give_up_seconds``.
            BrokerError: the server is no broker, or wants another key.
        """
        try:
            answer = await self.ask("GET", "/")
            if answer.headers.get("Tandem"):
                self.speaks = "tandem"
            elif b"AtroposLib" in answer.body:
                self.speaks = "atropos"
            else:
                raise BrokerError(f"{self.name} is no broker: GET / answers {answer.body[:80]!r}; look at the port")
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close connections."""
        await self.http.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        repeat: bool = True,
    ) -> HttpResponse:
        """Ask until it is answered.

        Args:
            method: GET or POST.
            path: the route.
            body: what is said.
            headers: beside the usual ones.
            repeat: whether a request that may have been carried out is made again; if not, none is.

        Raises:
            ServerAway: no response within ``give_up_seconds``, or unsent requests are not repeated.
            RequestRefused: it answers with an error that asking again will not mend.
            RequestLost: it may have been carried out, and is not repeated.
        """
        data = None if body is None else wire.write(body)
        sent_headers = {"Accept": JSON, **({} if data is None else {"Content-Type": JSON}), **(headers or {})}
        async with waits.waiting(waits.actor("client"), f"{method} {path.partition('?')[0]}", on=self.name):
            for attempt in count():
                try:
                    answer = await self.http.call(method, path, data, sent_headers, SECONDS)
                except (ServerAway, ResponseLost, HttpStatusError) as error:
                    await self._fail(error, repeat, attempt)
                else:
                    self.outage.end()
                    return answer
        raise AssertionError("attempts have no end")

    async def _fail(self, error: ServerAway | ResponseLost | HttpStatusError, repeat: bool, attempt: int) -> None:
        """Wait before a request that failed is made again; raises where it is not."""
        status = error.status if isinstance(error, HttpStatusError) else None
        # Atropos' broker answers 500 to what it cannot do, such as an id that it does not know.
        if status is not None and status != 429 and status < (500 if self.speaks == "tandem" else 501):
            key = "; name the variable that holds the broker's key (broker.key_variable)" * (status in (401, 403))
            raise RequestRefused(f"{error}{key}", status) from error
        is_put_off = status in (429, 503)
        if not (repeat or is_put_off or isinstance(error, ServerAway)):
            if status is None:
                self._seconds_away(error)
            raise RequestLost(f"{error}; it is not sent again, since it may have been carried out") from error
        if is_put_off:  # it is there and says when to come back, however often
            log.info("%s", error)
        elif self._seconds_away(error) > self._retry.give_up_seconds:
            raise error
        await self._retry.pause(attempt, getattr(error, "retry_after", None) or 0.0)
        if not repeat:
            raise ServerAway(str(error), error.reason) from error

    def _seconds_away(self, error: BrokerError) -> float:
        """Remember that the server is away; returns the seconds since it went."""
        self.outages += not self.outage.ongoing
        return self.outage.report(f"{error}; is it running? (tandem serve broker)")


class _StatusReply(msgspec.Struct, kw_only=True, frozen=True):
    status: str = ""
    error: str | None = None


class _Client:
    """Opens and closes a connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        """Where the broker is."""

    async def __aenter__(self) -> Self:
        await self.connection.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.connection.close()

    async def info(self) -> messages.Info:
        """What the trainer wants; -1 before it has registered."""
        return parse(await self.connection.ask("GET", "/info"), messages.Info)


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
            RequestRefused: the broker will not have it.
        """
        for attempt in count():
            outages = self.connection.outages
            headers = {"Idempotency-Key": self._key} if self.connection.speaks == "tandem" else {}
            answer = await self.connection.ask("POST", "/register-env", self.spec, headers=headers)
            reply = parse(answer, _StatusReply)
            if reply.status == "success":
                self.ticket = parse(answer, messages.EnvAccepted)
                self._known, self._step = outages, self.ticket.starting_step
                self.registrations += 1
                log.info("registered at %s as %s", self.connection.name, self.ticket.wandb_name)
                return self.ticket
            if not attempt:
                log.info("%s says: %s (tandem train RECIPE broker=...)", self.connection.name, reply.status)
            await asyncio.sleep(self._poll)
        raise AssertionError("attempts have no end")

    async def status(self) -> messages.EnvStatus:
        """How much is queued; registers again where the broker has forgotten this environment.

        Atropos' broker comes back empty. What is handed in before its trainer has registered would block it for good;
        and an id that it no longer knows could be given to another. One that runs backwards has started anew too.

        Raises:
            ServerAway: the broker stays away.
        """
        while True:
            outages, registrations = self.connection.outages, self.registrations
            status = await self._ask_status()
            if status is not None and status.current_step >= self._step:
                self._known, self._step = outages, status.current_step
                return status
            async with self._registering:
                if self.registrations == registrations:
                    log.warning("%s has forgotten this environment; registering again", self.connection.name)
                    await asyncio.sleep(self._poll)
                    await self.register()

    async def submit(self, group: Group, key: str, params: Mapping[str, Json] | None = None) -> Receipt:
        """Hand in a group, once.

        Args:
            group: its scored rollouts are handed in.
            key: unique to this group, for ever.
            params: how it was sampled, beside the temperature.

        Raises:
            RequestRefused: the broker will not have this group.
            BrokerError: this broker could never serve it.
        """
        knows_keys = self.connection.speaks == "tandem"
        scored = group_to_wire(group)
        scored.generation_params = {**(scored.generation_params or {}), **(params or {})} or None
        if (size := len(scored.tokens)) > self.spec.group_size and not knows_keys:
            raise BrokerError(f"group {group.id} has {size} sequences: Atropos' broker never serves it; use Tandem's")
        headers = {"Idempotency-Key": key} if knows_keys else {}
        # Without keys not even what was not sent is sent again at once: by then it may be a broker without a trainer.
        while True:
            if self._known != self.connection.outages:
                await self.status()
            if self.ticket is not None:
                scored.env_id = self.ticket.env_id
            outages = self.connection.outages
            try:
                answer = await self.connection.ask("POST", "/scored_data", scored, headers=headers, repeat=knows_keys)
            except RequestLost as error:
                log.warning("group %s: %s", group.id, error)
                return "lost"
            except RequestRefused:
                if self.connection.outages == outages:
                    raise
                # It was away meanwhile and may have come back empty: the id is then nobody's, or another's.
            except ServerAway:
                if knows_keys:
                    raise
            else:
                return "buffered" if parse(answer, _StatusReply).status == "buffered" else "received"

    async def disconnect(self) -> None:
        """Leave; what was handed in stays."""
        if self.ticket is not None:
            await self.connection.ask("POST", "/disconnect-env", messages.EnvName(env_id=self.ticket.env_id))
            self.ticket = None

    async def _ask_status(self) -> messages.EnvStatus | None:
        """The answer, or None where the broker does not know this environment."""
        assert self.ticket is not None, "register first"
        body = messages.EnvName(env_id=self.ticket.env_id)
        try:
            answer = await self.connection.ask("GET", "/status-env", body)
        except RequestRefused as error:
            if error.status == 401:  # 403: the id is that of another key's environment
                raise
            return None
        return parse(answer, messages.EnvStatus)


class TakenBatch(msgspec.Struct, frozen=True, kw_only=True):
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


class NotRegistered(BrokerError):
    """The broker knows of no trainer: it was reset, or came back empty."""


class TrainerClient(_Client):
    """A trainer at a broker: ``async with TrainerClient(...) as client``."""

    async def register(self, run: messages.RunParameters) -> None:
        """Say what is trained. Atropos' broker ignores all but the first: ``info`` says what it goes on with."""
        await self.connection.ask("POST", "/register", run)

    async def batch(
        self, *, lease: float | None = None, policy: int | None = None, max_lag: int | None = None
    ) -> TakenBatch | None:
        """The next batch, or None while there are too few groups.

        Args:
            lease: seconds after which it is served again unless it was acknowledged; None: it counts as trained.
            policy: the trainer's policy step.
            max_lag: groups more steps older than ``policy`` are dropped by the broker.

        Raises:
            NotRegistered: register again.
        """
        query = ""
        if self.connection.speaks == "tandem":  # whose batches can be leased and acknowledged
            parameters = {"lease": lease, "policy": policy, "max_lag": max_lag}
            query = "&".join(f"{name}={value}" for name, value in parameters.items() if value is not None)
        # A lost answer of a broker without leases is a lost batch, whether it is asked again or not.
        reply = parse(await self.connection.ask("GET", f"/batch?{query}" if query else "/batch"), _BatchReply)
        if reply.status == "error":
            raise NotRegistered(f"{self.connection.name} says: {reply.message or 'no trainer has registered'}")
        return None if reply.batch is None else _taken(reply, reply.batch)

    async def acknowledge(self, batch: str) -> str:
        """A leased batch was trained on; returns why the broker does not count it so, or nothing if it does."""
        return await self._settle("/ack", batch)

    async def renew(self, batch: str) -> bool:
        """The lease of a batch begins anew; False if it has run out."""
        return not await self._settle("/renew", batch)

    async def _settle(self, path: str, batch: str) -> str:
        """Why it was not done; empty if it was."""
        try:
            answer = await self.connection.ask("POST", path, messages.BatchName(batch=batch))
        except RequestRefused as error:
            if error.status in (401, 403):
                raise
            log.warning("%s", error)
            return str(error)
        reply = parse(answer, _StatusReply)
        return "" if reply.status == "success" else reply.error or "the broker gives no reason"


class _LeaseReply(msgspec.Struct, kw_only=True, frozen=True):
    """What Tandem's broker says beside the groups of a leased batch; the lists have an entry for each."""

    batch: str | None = None
    ids: list[str | None] = []
    versions: list[int | None] = []


class _BatchReply(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to /batch, its groups unread."""

    batch: list[msgspec.Raw] | None = None
    status: str = ""
    message: str = ""
    tandem: _LeaseReply = _LeaseReply()


def _taken(reply: _BatchReply, raws: Sequence[msgspec.Raw]) -> TakenBatch:
    """The groups that can be read, and what is wrong with the others: one bad group does not cost the batch."""
    groups, ids, versions, malformed = [], [], [], []
    for raw, id, version in zip_longest(raws, reply.tandem.ids[: len(raws)], reply.tandem.versions[: len(raws)]):
        try:
            groups.append(read_scored(bytes(raw)))
        except wire.Malformed as error:
            malformed.append(printable(f"{id}: {error}" if id else str(error)))
        else:
            ids.append(id)
            versions.append(version)
    return TakenBatch(id=reply.tandem.batch, groups=groups, ids=ids, versions=versions, malformed=malformed)


def parse(answer: HttpResponse, kind: type[T]) -> T:
    """Decode a response.

    Raises:
        BrokerError: it is something else.
    """
    try:
        return wire.read(answer.body, kind)
    except wire.Malformed as error:
        raise BrokerError(f"the broker answers with something else than was asked for: {error}") from error


def key_in(variable: str, option: str) -> str:
    """The key in an environment variable, which an option names; empty where none is named.

    Raises:
        ConfigError: it is not set.
    """
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(f"{option}: {variable} is not set in the environment; export the key in it")
    return key
