"""Groups that a client without keys may send again because the answer to them did not reach it.

Atropos' environments repeat a submission whose connection broke, and nothing in it says that it is a repetition. To
take any group that looks like an earlier one for a repetition would be wrong: short answers come out alike. So only
those are remembered whose answer is known to have had no client to go to, and those accepted last before a restart.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tandem.broker.journal.payloads import PayloadReader
from tandem.broker.queue.records import GroupEntry
from tandem.errors import BrokerError

log = logging.getLogger(__name__)

SECONDS = 60.0
"""How long one is remembered: BaseEnv tries three times within some ten seconds."""
MOST = 10_000
"""How many are remembered; the oldest are forgotten first."""
BEFORE_END = 2.0
"""Seconds before the last group of an earlier process in which an answer may not have gone out."""


class Resent:
    """Digests of payloads, which hold the environment's id; each stands for one repetition."""

    def __init__(self) -> None:
        self._at: OrderedDict[bytes, float] = OrderedDict()

    def note(self, payloads: Iterable[bytes], now: float) -> None:
        """These were accepted, and their sender may not know."""
        for payload in payloads:
            self._at[_digest(payload)] = now
            self._at.move_to_end(_digest(payload))
        while len(self._at) > MOST:
            self._at.popitem(last=False)

    def restored(self, entries: Iterable[GroupEntry], now: float) -> None:
        """An earlier process had accepted these. Of one that is damaged there is nothing to know again."""
        held = list(entries)
        last = max((entry.received for entry in held), default=0.0)
        for entry in held:
            if entry.received >= last - BEFORE_END:
                try:
                    payloads = PayloadReader([entry]).bytes()
                except BrokerError as error:
                    log.error("%s", error)
                else:
                    self.note(payloads, now)

    def among(self, payloads: Sequence[bytes], now: float) -> dict[int, bytes]:
        """Which of these are repetitions: by their places, names to ``forget`` them by."""
        while self._at and now - next(iter(self._at.values())) > SECONDS:
            self._at.popitem(last=False)
        if not self._at:
            return {}
        names = {_digest(payload): place for place, payload in enumerate(payloads)}
        return {place: name for name, place in names.items() if name in self._at}

    def forget(self, names: Iterable[bytes]) -> None:
        """These came again: another like them is a new one."""
        for name in names:
            self._at.pop(name, None)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
