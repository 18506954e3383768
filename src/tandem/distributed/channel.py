"""A connection between the lead and a follower: messages of msgpack, and beats while neither has anything to say."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

BEAT_SECONDS = 1.0
"""Between two signs of life."""
SILENT_SECONDS = 15.0
"""Without any sign of life, after which the other end is given up."""
NEXT_COMMAND = "its next command"
"""What a follower that has nothing to do waits for."""
COMMANDS = "commands/"
"""Before the name of a command that a follower executes, among its open spans."""

_SIZE_BYTES = 8
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode


class Channel:
    """One end. Messages are plain data: numbers, texts, bytes, lists and mappings; nothing in them is executed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._sending = asyncio.Lock()
        self._beats = asyncio.create_task(self._beat(), name="beats to a rank")

    async def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            ConnectionError: the other end is gone.
        """
        data = _encode(message)
        async with self._sending:
            self._writer.write(len(data).to_bytes(_SIZE_BYTES, "big"))
            self._writer.write(data)
            await self._writer.drain()

    async def receive(self) -> Any:
        """The next message, however long it takes to be sent.

        Raises:
            ConnectionError: the other end is gone, or gave no sign of life for ``SILENT_SECONDS``.
        """
        while not (size := int.from_bytes(await self._read(_SIZE_BYTES), "big")):
            pass  # a beat
        return _decode(await self._read(size))

    async def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                part = await asyncio.wait_for(self._reader.read(min(size, 1 << 20)), SILENT_SECONDS)
            except TimeoutError:
                raise ConnectionError(f"it gave no sign of life for {SILENT_SECONDS:g} s") from None
            if not part:
                raise ConnectionError("its connection was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def _beat(self) -> None:
        with contextlib.suppress(ConnectionError):  # what receives finds out
            while True:
                async with self._sending:
                    self._writer.write(bytes(_SIZE_BYTES))
                    await self._writer.drain()
                await asyncio.sleep(BEAT_SECONDS)

    def close(self) -> None:
        """End the connection."""
        self._beats.cancel()
        self._writer.close()
