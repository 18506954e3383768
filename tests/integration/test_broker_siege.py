"""A broker's process under siege: strangers send what nobody would, hold connections, and it is killed meanwhile.

Beside them producers hand in groups and a trainer takes batches. Whatever happens, the broker has no error of its own,
answers everybody, keeps its memory, and loses nothing that it said it has.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from broker_kills import Clients, served
from support.brokers import group
from support.odd_messages import BODIES, damaged, mutated

pytestmark = pytest.mark.long

TRAINER, PRODUCER, STRANGER = ({"Authorization": f"Bearer {key}"} for key in ("trains", "plays", "strange"))
KEYS = {"TANDEM_BROKER_KEY": "trains", "TANDEM_BROKER_ENV_KEY": "plays,strange"}
SECONDS, KILLS = 240.0, 40
HANG_SECONDS = 5.0
"""The longest that anybody may wait for an answer."""
BEAT_SECONDS = 0.05
GROWTH_BYTES = 300 << 20
"""Memory that may come on top of what the first quarter of a siege took: bodies under way, and what glibc keeps."""
FEW_MIB = 8
"""Largest body here: what is bounded is bounded alike, and two cores make more of them."""
HEAD = b"POST /scored_data HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer strange\r\nContent-Type: application/json\r\n"


@dataclass
class Siege:
    """The broker and its clients, and what strangers saw of it."""

    clients: Clients
    session: aiohttp.ClientSession
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    stood_still: float = 0.0

    @property
    def kills(self) -> int:
        return len(self.clients.restart_seconds)

    async def call(self, method: str, path: str, **how: Any) -> None:
        """Ask once; one whose broker was killed meanwhile has no answer."""
        await self.clients.up.wait()
        kills, stood_still, begun = self.kills, self.stood_still, time.monotonic()
        try:
            async with asyncio.timeout(60), self.session.request(method, self.clients.url + path, **how) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            # Who was cut off within a body that is too large, or had to make room, has no answer.
            if isinstance(error, TimeoutError) and kills == self.kills:
                self.wrong.append(f"{method} {path}: no answer")
            await asyncio.sleep(0.02)
            return
        self.statuses[status] += 1
        if (seconds := time.monotonic() - begun) > HANG_SECONDS:
            await asyncio.sleep(3 * BEAT_SECONDS)  # until this process knows how long it stood still itself
            seconds -= self.stood_still - stood_still
        if status >= 500 and not (status == 503 and b"try again" in body):
            self.wrong.append(f"{method} {path} {how}"[:300] + f": {status} {body[:300]!r}")
        if seconds > HANG_SECONDS and kills == self.kills:
            self.wrong.append(f"{method} {path}: answered after {seconds:.1f} s")


async def stranger(siege: Siege, dice: random.Random) -> None:
    """An environment's key, and bodies that nobody would send."""
    await siege.call("POST", "/register-env", json=BODIES["POST", "/register-env"], headers=STRANGER)
    while True:
        (method, path), valid = dice.choice(list(BODIES.items()))
        body = json.dumps(mutated(valid, dice)).encode()
        headers = {**STRANGER, "Content-Type": "application/json"}
        body = damaged(body, dice) if dice.random() < 0.4 else body
        if dice.random() < 0.3:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
            body = damaged(body, dice) if dice.random() < 0.4 else body
        if dice.random() < 0.3:
            headers["Idempotency-Key"] = f"honest-{dice.randrange(2000)}"  # which a producer may use
        await siege.call(method, path, data=body, headers=headers)


def heavy() -> list[tuple[bytes, dict[str, str]]]:
    """Bodies that are much more than they look like, or are said to be."""
    plain, room = json.dumps(group(1))[:-1].encode(), FEW_MIB << 20
    as_json = {**STRANGER, "Content-Type": "application/json"}
    zipped = {**as_json, "Content-Encoding": "gzip"}
    fillers = [b"[],", b"{},", b'"a",', b"0,", b'{"a":0},']
    large = [plain + b',"images":[' + filler * ((room - 500) // len(filler)) + b"0]}" for filler in fillers]
    return [
        *((body, as_json) for body in large),
        *((gzip.compress(body, 1), zipped) for body in large),
        (gzip.compress(bytes(20 * room), 1), zipped),
        *((filler * (room // 5), as_json) for filler in (b"[", b'{"a":')),
    ]


async def brute(siege: Siege, dice: random.Random) -> None:
    """Few bodies that are large, some in pieces."""

    async def pieces(body: bytes) -> Any:
        for start in range(0, len(body), 300_000):
            yield body[start : start + 300_000]

    bodies = await asyncio.to_thread(heavy)
    while True:
        body, headers = dice.choice(bodies)
        path = dice.choice(["/scored_data", "/scored_data_list", "/register-env"])
        await siege.call("POST", path, data=pieces(body), headers=headers)
        await asyncio.sleep(0.3)


async def sluggish(siege: Siege, dice: random.Random) -> None:
    """Connections that say little, slowly, or what is hardly HTTP."""
    open_ones: list[asyncio.StreamWriter] = []
    try:
        while True:
            await siege.clients.up.wait()
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", int(siege.clients.url.rpartition(":")[2]))
                writer.write(
                    dice.choice([b"", b"P", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{", HEAD + b"X: " + b"x" * 70_000])
                    + dice.randbytes(dice.randrange(20))
                )
                open_ones.append(writer)
            if len(open_ones) > 200:
                open_ones.pop(0).transport.abort()
            await asyncio.sleep(0.02)
    finally:
        for writer in open_ones:
            writer.transport.abort()


async def heart(siege: Siege) -> None:
    """Measures for how long this process stood still, which is no fault of the broker's."""
    while True:
        begun = time.monotonic()
        await asyncio.sleep(BEAT_SECONDS)
        siege.stood_still += max(0.0, time.monotonic() - begun - 2 * BEAT_SECONDS)


async def watch(siege: Siege) -> None:
    """Asks what anybody may ask, and looks at the memory."""
    while True:
        await siege.call("GET", "/status?detail=1", headers=PRODUCER)
        with suppress(OSError):
            status = Path(f"/proc/{siege.clients.broker.pid}/status").read_text()
            siege.memory += [1024 * int(kib) for kib in re.findall(r"VmRSS:\s+(\d+)", status)]
        await asyncio.sleep(0.2)


async def besieged(folder: Path) -> Siege:
    """In the last half nobody is killed, so that memory can be looked at."""
    dice, headers = random.Random(1), {"trainer": TRAINER, "producer": PRODUCER}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    options = ("--max-body", str(FEW_MIB))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        served(folder, *options, environment=KEYS, **headers) as (clients, kill),
        asyncio.TaskGroup() as strangers,
    ):
        siege = Siege(clients, session)
        work = [stranger(siege, random.Random(seed)) for seed in range(4)]
        work += [brute(siege, dice), sluggish(siege, dice), heart(siege), watch(siege)]
        tasks = [strangers.create_task(each) for each in work]
        for _ in range(KILLS):
            await asyncio.sleep(dice.uniform(0, SECONDS / KILLS))
            await kill()
        siege.memory.clear()
        await asyncio.sleep(SECONDS / 2)
        assert clients.broker.alive, "it died by itself"
        for task in tasks:
            task.cancel()
    return siege


def test_a_broker_under_siege(tmp_path: Path) -> None:
    siege = asyncio.run(besieged(tmp_path))
    clients, half = siege.clients, len(siege.memory) // 2
    assert not siege.wrong, siege.wrong[:5]
    assert not [status for status in clients.statuses if status >= 500 and status != 503]
    assert len(clients.accepted) > 50
    assert {200, 413, 422} <= set(siege.statuses)
    assert clients.lost == clients.doubled == 0
    assert max(siege.memory[half:]) < max(siege.memory[:half]) + GROWTH_BYTES
    assert "Traceback" not in clients.broker.log.read_text()
