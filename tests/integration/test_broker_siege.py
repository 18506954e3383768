"""A broker's process under siege: strangers send what nobody would, hold connections, and it is killed meanwhile.

Beside them eight environments hand in groups and a trainer takes batches. Whatever happens, the broker has no error of
its own, answers everybody, keeps its memory, and loses nothing that it said it has.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.brokers import RUN, group
from support.odd_messages import BODIES, damaged, mutated

from tandem_broker.server.serving import listening

log = logging.getLogger(__name__)
pytestmark = pytest.mark.long

TRAINER, HONEST, STRANGER = ({"Authorization": f"Bearer {key}"} for key in ("trains", "plays", "strange"))
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
    """The broker's process, and what everybody saw of it."""

    folder: Path
    until: float
    url: str = ""
    accepted: set[str] = field(default_factory=set)
    trained: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    kills: int = 0
    stood_still: float = 0.0
    over: bool = False
    up: asyncio.Event = field(default_factory=asyncio.Event)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, at the port it had before."""
        variables = {"TANDEM_BROKER_KEY": "trains", "TANDEM_BROKER_ENV_KEY": "plays,strange"}
        command = [sys.executable, "-m", "tandem", "serve", "broker", "--port", self.url.rpartition(":")[2]]
        command += ["--data", str(self.folder / "data"), "--max-body", str(FEW_MIB)]
        with (self.folder / "said").open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **variables})

    async def started(self, session: aiohttp.ClientSession) -> None:
        """Start it and wait until it answers."""
        self.start()
        while True:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "said").read_text()[-2000:]
            with suppress(aiohttp.ClientError):
                async with session.get(self.url + "/"):
                    break
            await asyncio.sleep(0.05)
        self.up.set()

    async def call(self, session: aiohttp.ClientSession, method: str, path: str, **how: Any) -> tuple[int, bytes]:
        """Ask once; a broker that was killed meanwhile is waited for, and gives (0, b"")."""
        await self.up.wait()
        kills, stood_still, begun = self.kills, self.stood_still, time.monotonic()
        try:
            async with asyncio.timeout(60), session.request(method, self.url + path, **how) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            # Who was cut off within a body that is too large, or had to make room, has no answer.
            if isinstance(error, TimeoutError) and kills == self.kills:
                self.wrong.append(f"{method} {path}: no answer")
            await asyncio.sleep(0.02)
            return 0, b""
        self.statuses[status] += 1
        if (seconds := time.monotonic() - begun) > HANG_SECONDS:
            await asyncio.sleep(3 * BEAT_SECONDS)  # until this process knows how long it stood still itself
            seconds -= self.stood_still - stood_still
        if status >= 500 and not (status == 503 and b"try again" in body):
            self.wrong.append(f"{method} {path} {how}"[:300] + f": {status} {body[:300]!r}")
        if seconds > HANG_SECONDS and kills == self.kills:
            self.wrong.append(f"{method} {path}: answered after {seconds:.1f} s")
        return status, body


async def environment(siege: Siege, session: aiohttp.ClientSession, names: Iterator[int]) -> None:
    """Hands in groups, each until it is accepted; trusts answers alone."""
    for name in names:
        overrides = {"tandem_task": f"honest {name}"}
        sent = group(2, scores=[0.0, 1.0], group_overrides=overrides)
        while not siege.over:
            headers = {**HONEST, "Idempotency-Key": f"k{name}"}
            status, _ = await siege.call(session, "POST", "/scored_data", json=sent, headers=headers)
            if status == 200:
                siege.accepted.add(overrides["tandem_task"])
                break
            await asyncio.sleep(0.05)
        if siege.over:
            return
        await asyncio.sleep(0.02)


async def take(siege: Siege, session: aiohttp.ClientSession, pending: dict[str, list[str]]) -> int:
    """Acknowledge what was taken, then take a batch; gives its groups."""
    for batch, names in list(pending.items()):
        status, body = await siege.call(session, "POST", "/ack", json={"batch": batch}, headers=TRAINER)
        if status == 200:
            siege.trained.update(names if json.loads(body)["status"] == "success" else ())
            del pending[batch]
    status, body = await siege.call(session, "GET", "/batch?lease=5", headers=TRAINER)
    response = json.loads(body) if status == 200 else {"batch": None}
    if response["batch"] is None:
        return 0
    tasks = [(one["group_overrides"] or {}).get("tandem_task") for one in response["batch"]]
    pending[response["tandem"]["batch"]] = [
        name for name in tasks if isinstance(name, str) and name.startswith("honest ")
    ]
    return len(tasks)


async def trainer(siege: Siege, session: aiohttp.ClientSession) -> None:
    """Takes and acknowledges, in the end all that is left."""
    pending: dict[str, list[str]] = {}
    empty = 0
    while not siege.over or pending or empty < 40:
        taken = await take(siege, session, pending)
        empty = 0 if taken else empty + 1
        if not taken:
            await asyncio.sleep(0.2)
        if siege.over and empty == 20:  # fewer than a batch may be left: others make it one
            await siege.call(session, "POST", "/scored_data", json=group(2), headers=HONEST)


async def stranger(siege: Siege, session: aiohttp.ClientSession, dice: random.Random) -> None:
    """An environment's key, and bodies that nobody would send."""
    await siege.call(session, "POST", "/register-env", json=BODIES["POST", "/register-env"], headers=STRANGER)
    while not siege.over:
        (method, path), valid = dice.choice(list(BODIES.items()))
        value = mutated(valid, dice)
        body = json.dumps(value).encode()
        headers = {**STRANGER, "Content-Type": "application/json"}
        body = damaged(body, dice) if dice.random() < 0.4 else body
        if dice.random() < 0.3:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
            body = damaged(body, dice) if dice.random() < 0.4 else body
        if dice.random() < 0.3:
            headers["Idempotency-Key"] = f"k{dice.randrange(2000)}"  # which an honest environment may use
        await siege.call(session, method, path, data=body, headers=headers)


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


async def brute(siege: Siege, session: aiohttp.ClientSession, dice: random.Random) -> None:
    """Few bodies that are large, some in pieces."""

    async def pieces(body: bytes) -> Any:
        for start in range(0, len(body), 300_000):
            yield body[start : start + 300_000]

    bodies = await asyncio.to_thread(heavy)
    while not siege.over:
        body, headers = dice.choice(bodies)
        path = dice.choice(["/scored_data", "/scored_data_list", "/register-env"])
        await siege.call(session, "POST", path, data=pieces(body), headers=headers)
        await asyncio.sleep(0.3)


async def sluggish(siege: Siege, dice: random.Random) -> None:
    """Connections that say little, slowly, or what is hardly HTTP."""
    held: list[asyncio.StreamWriter] = []
    while not siege.over:
        await siege.up.wait()
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", int(siege.url.rpartition(":")[2]))
            writer.write(
                dice.choice([b"", b"P", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{", HEAD + b"X: " + b"x" * 70_000])
                + dice.randbytes(dice.randrange(20))
            )
            held.append(writer)
        for writer in held[: max(0, len(held) - 200)]:
            writer.transport.abort()
        del held[: max(0, len(held) - 200)]
        await asyncio.sleep(0.02)
    for writer in held:
        writer.transport.abort()


async def heart(siege: Siege) -> None:
    """Measures for how long this process stood still, which is no fault of the broker's."""
    while not siege.over:
        begun = time.monotonic()
        await asyncio.sleep(BEAT_SECONDS)
        siege.stood_still += max(0.0, time.monotonic() - begun - 2 * BEAT_SECONDS)


async def watch(siege: Siege, session: aiohttp.ClientSession) -> None:
    """Asks what anybody may ask, and looks at the memory."""
    while not siege.over:
        await siege.call(session, "GET", "/status?detail=1", headers=HONEST)
        with suppress(OSError):
            assert siege.process is not None
            status = Path(f"/proc/{siege.process.pid}/status").read_text()
            siege.memory += [1024 * int(kib) for kib in re.findall(r"VmRSS:\s+(\d+)", status)]
        await asyncio.sleep(0.2)


async def killer(siege: Siege, session: aiohttp.ClientSession, dice: random.Random, kills: int) -> None:
    """kill -9, now and then; in the last half nobody is killed, so that memory can be looked at."""
    begun = time.monotonic()
    for place in range(kills):
        pause = (siege.until - begun) / 2 / kills
        await asyncio.sleep(max(0.0, begun + place * pause + dice.uniform(0, pause) - time.monotonic()))
        siege.up.clear()
        assert siege.process is not None
        assert siege.process.poll() is None, (siege.folder / "said").read_text()[-2000:]
        siege.process.kill()
        siege.process.wait()
        siege.kills += 1
        await siege.started(session)
    siege.memory.clear()
    await asyncio.sleep(max(0.0, siege.until - time.monotonic()))
    siege.over = True


async def besieged(folder: Path, seconds: float, kills: int) -> Siege:
    (free,) = listening("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    siege = Siege(folder, time.monotonic() + seconds, f"http://127.0.0.1:{port}")
    names, dice = itertools.count(), random.Random(1)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            await siege.started(session)
            siege.until = time.monotonic() + seconds
            await siege.call(session, "POST", "/register", json=RUN | {"batch_size": 4}, headers=TRAINER)
            await siege.call(session, "GET", "/batch?lease=5", headers=TRAINER)
            tasks: list[Coroutine[Any, Any, None]] = [environment(siege, session, names) for _ in range(8)]
            tasks += [stranger(siege, session, random.Random(seed)) for seed in range(4)]
            tasks += [
                trainer(siege, session),
                brute(siege, session, dice),
                sluggish(siege, dice),
                watch(siege, session),
            ]
            await asyncio.gather(killer(siege, session, dice, kills), *tasks)
            assert siege.process is not None
            assert siege.process.poll() is None, "it died by itself"
        finally:
            if siege.process is not None:
                siege.process.kill()
                siege.process.wait()
    return siege


def test_a_broker_under_siege(tmp_path: Path) -> None:
    siege = asyncio.run(besieged(tmp_path, seconds=240.0, kills=40))
    half = len(siege.memory) // 2
    early, late = max(siege.memory[:half]), max(siege.memory[half:])
    log.info(
        "%d kills, %d requests %s, %d groups accepted, memory at most %d MiB and then %d MiB",
        *(siege.kills, siege.statuses.total(), dict(siege.statuses), len(siege.accepted), early >> 20, late >> 20),
    )
    assert not siege.wrong, siege.wrong[:5]
    assert siege.kills >= 20
    assert len(siege.accepted) > 50
    assert {200, 401, 403, 413, 422} & set(siege.statuses) >= {200, 413, 422}
    lost = siege.accepted - set(siege.trained)
    assert not lost, f"{len(lost)} of {len(siege.accepted)} are lost, such as {sorted(lost)[:3]}"
    assert max(siege.trained.values()) == 1, "trained twice"
    assert late < early + GROWTH_BYTES
    assert "Traceback" not in (tmp_path / "said").read_text()
