"""Payloads that a ledger has: in memory while there is room, and always where the disk has them once they are written.

Whatever stands for a payload (bytes in a store without a ledger, ``Kept`` in one with it) is read by ``Reading``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import FileIO

from tandem.broker.journal.payloads import Payloads, Place
from tandem.broker.queue.records import Entry


class Kept:
    """One payload. A ledger's thread changes it; a place that was told stays right until the payload is let go."""

    __slots__ = ("_files", "data", "place")

    def __init__(self, files: Payloads, data: bytes | None = None, place: Place | None = None) -> None:
        self._files = files
        self.data = data
        """The bytes, while they are in memory."""
        self.place = place
        """Where the disk has them; None before they are written, and then they are in memory."""

    def __len__(self) -> int:
        if self.place is not None:
            return self.place.length
        return len(self.data or b"")

    def pinned(self, files: dict[int, FileIO]) -> Callable[[], bytes]:
        """What reads it, whatever becomes of it meanwhile, as long as its file is open.

        Args:
            files: by number; its own is added if it is not among them.

        Raises:
            BrokerError: the file is missing. The reader: what is there is not what was written.
        """
        while True:
            place = self.place
            assert place is not None
            try:
                if place.file not in files:
                    files[place.file] = self._files.opened(place)
                return partial(self._files.checked, files[place.file], place)
            except FileNotFoundError:
                if self.place is place:  # else it was moved to another file meanwhile
                    raise self._files.damaged(place) from None


class Memory:
    """What a ledger has, by the order of arrival, and the bytes of it that are in memory. Its thread alone uses it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, Kept] = {}
        self.bytes = 0
        """In memory and on disk alike."""

    def written(self, order: int, kept: Kept, place: Place) -> None:
        """It is on disk now, and leaves memory if that is full: those that came before are served before."""
        kept.place = place
        self._held[order] = kept
        if self.bytes + place.length > self._most:
            kept.data = None
        else:
            self.bytes += place.length

    def restored(self, order: int, kept: Kept) -> None:
        """One that is on disk alone."""
        self._held[order] = kept

    def moved(self, order: int, place: Place) -> None:
        """It is somewhere else on the disk, and soon no more where it was."""
        self._held[order].place = place

    def gone(self, order: int) -> None:
        """Nobody will ask for it again."""
        kept = self._held.pop(order)
        if kept.data is not None:
            self.bytes -= len(kept)

    def clear(self) -> None:
        """Nobody will ask for any of it again."""
        self._held.clear()
        self.bytes = 0


class Reading:
    """The payloads of some entries: what is in memory is held at once, and the files of the others are open."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        """Raises BrokerError if a file is missing."""
        self._found: list[bytes | Callable[[], bytes]] = []
        self._files: dict[int, FileIO] = {}
        try:
            for entry in entries:
                payload = entry.payload
                data = payload.data if isinstance(payload, Kept) else payload
                self._found.append(payload.pinned(self._files) if data is None else data)
        except BaseException:
            self._close()
            raise

    @property
    def on_disk(self) -> bool:
        """True if the disk must be read, which is better done in a thread."""
        return bool(self._files)

    def bytes(self) -> list[bytes]:
        """The bytes, in order. Once.

        Raises:
            BrokerError: what is on disk is not what was written.
        """
        try:
            return [found() if callable(found) else found for found in self._found]
        finally:
            self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.close()


async def read(entries: Sequence[Entry]) -> list[bytes]:
    """The payloads of entries that are held now, whatever becomes of these entries meanwhile.

    Raises:
        BrokerError: one is not on disk as it was written.
    """
    reading = Reading(entries)
    return await asyncio.to_thread(reading.bytes) if reading.on_disk else reading.bytes()
