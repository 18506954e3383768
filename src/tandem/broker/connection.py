"""A connection to a broker of Tandem or of Atropos: finds out which, and asks until it is answered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any, Literal, TypeVar

import msgspec

from tandem.broker.protocol import wire
from tandem.errors import BrokerError
from tandem.http import Answer, Answered, AnswerLost, Backoff, Http, Trouble, Unreachable
from tandem.observability import waits

log = logging.getLogger(__name__)

T = TypeVar("T")
Speaks = Literal["tandem", "atropos"]
Fate = Literal["unsent", "broken", "failed"]
"""Of a request without an answer: it did not arrive, it may have arrived, or the broker failed at it (5xx)."""
ALWAYS: frozenset[Fate] = frozenset({"unsent", "broken", "failed"})

SECONDS = 60.0
"""How long one answer may take."""
MIME: dict[wire.Encoding, str] = {"json": "application/json", "msgpack": "application/msgpack"}


class Refused(BrokerError):
    """The broker will not have this, now or later; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Lost(BrokerError):
    """Nobody knows whether a request was carried out, and repeating it could do it twice."""


class Connection:
    """Where the broker is, and what it speaks."""

    def __init__(self, url: str, key: str = "", *, patience: float = 1800.0, backoff: Backoff | None = None):
        """Nothing is opened yet.

        Args:
            url: such as http://127.0.0.1:8000.
            key: API key; empty: none is sent.
            patience: seconds for which the broker may be away before a call gives up.
            backoff: waits between tries.
        """
        self._http = Http(url, key, who="broker")
        self._patience = patience
        self._backoff = backoff or Backoff()
        self._trouble = Trouble(self.name)
        self.speaks: Speaks = "atropos"
        """Whose broker it is; known once opened."""
        self.outages = 0
        """How often it was found away since; whoever it knew may then be unknown to it."""

    @property
    def name(self) -> str:
        """For messages."""
        return self._http.who

    @property
    def encoding(self) -> wire.Encoding:
        """Of bodies: MessagePack where the broker understands it."""
        return "msgpack" if self.speaks == "tandem" else "json"

    async def open(self) -> Connection:
        """Wait for the broker and find out whose it is.

        Raises:
            Unreachable: nobody answered for as long as patience lasts.
            BrokerError: who answers is no broker, or wants another key.
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
        await self._http.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        encoding: wire.Encoding = "json",
        repeat: Set[Fate] = ALWAYS,
    ) -> Answer:
        """Ask until it is answered.

        Args:
            method: GET or POST.
            path: the route.
            body: what is said.
            headers: beside the usual ones.
            encoding: of the body.
            repeat: what may have become of a request that is made again.

        Raises:
            Unreachable: nobody answered for as long as patience lasts, or unsent requests are not repeated.
            Refused: it answers with an error that asking again will not mend.
            Lost: it may have been done, or it failed, and such requests are not repeated.
        """
        async with waits.waiting(waits.actor("client"), f"{method} {path.partition('?')[0]}", on=self.name):
            return await self._asked(method, path, body, headers, encoding, repeat)

    async def _asked(
        self,
        method: str,
        path: str,
        body: object,
        headers: Mapping[str, str] | None,
        encoding: wire.Encoding,
        repeat: Set[Fate],
    ) -> Answer:
        data = None if body is None else wire.write(body, encoding)
        typed = {} if data is None else {"Content-Type": MIME[encoding]}
        said = {"Accept": MIME["json"], **typed, **(headers or {})}
        backoff = self._backoff.fresh()
        while True:
            try:
                answer = await self._http.call(method, path, data, said, SECONDS)
            except Unreachable as error:
                await self._wait(error, "unsent" in repeat, backoff)
            except AnswerLost as error:
                if "broken" not in repeat:
                    self._note(error)
                    raise Lost(f"{error}; it is not sent again, since it may have arrived") from error
                await self._wait(error, True, backoff)
            except Answered as error:
                if error.status < 500 and error.status != 429:
                    raise Refused(_advice(error), error.status) from error
                if error.status in (429, 503):
                    await self._put_off(error, "unsent" in repeat, backoff)
                elif "failed" not in repeat:
                    raise Lost(f"{error}; it is not sent again, since it may have been carried out") from error
                else:
                    await self._wait(error, True, backoff)
            else:
                self._trouble.over()
                return answer

    def _note(self, error: BrokerError) -> float:
        """Remember that the broker is away; returns the seconds since it went."""
        self.outages += not self._trouble.there
        return self._trouble.lasts(f"{error}; is it running? (tandem serve broker)")

    async def _wait(self, error: BrokerError, again: bool, backoff: Backoff) -> None:
        late = self._note(error) > self._patience
        if late:
            raise error
        await backoff.wait()
        if not again:
            raise error

    async def _put_off(self, error: Answered, again: bool, backoff: Backoff) -> None:
        """It is there and says when to come back, however often."""
        log.info("%s", error)
        await backoff.wait(error.retry_after or 0.0)
        if not again:
            raise Unreachable(str(error)) from error


def told(answer: Answer, kind: type[T]) -> T:
    """What a JSON or MessagePack answer says, leniently.

    Raises:
        BrokerError: it is something else.
    """
    try:
        return wire.read(answer.body, kind, encoding_of(answer))
    except (BrokerError, msgspec.ValidationError) as error:
        raise BrokerError(f"the broker answers with something else than was asked for: {error}") from error


def encoding_of(answer: Answer) -> wire.Encoding:
    """What the body is in."""
    return "msgpack" if "msgpack" in answer.headers.get("Content-Type", "") else "json"


def plain(answer: Answer) -> dict[str, Any]:
    """An answer that is an object."""
    found: dict[str, Any] = told(answer, dict)
    return found


def _advice(error: Answered) -> str:
    if error.status in (401, 403):
        return f"{error}; name the variable that holds the broker's API key (broker.key_variable)"
    return str(error)
