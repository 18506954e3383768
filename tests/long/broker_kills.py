"""kill -9 of the broker at random moments under load: is anything accepted lost, anything acknowledged served again?

    python tests/long/broker_kills.py [--kills 100] [--server]

Producers submit groups under idempotency keys and trust only answers; a trainer leases batches and acknowledges them.
After the last kill the queue is emptied and what was answered is compared with what was served. By default the ledger
is driven by a small child process; ``--server`` kills ``tandem serve broker`` itself, over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

BATCH = 4
LEASE_SECONDS = 0.3
"""Of the child: batches whose answer was cut off come back before the end."""
SERVER_LEASE_SECONDS = 3
PRODUCERS = 8


@dataclass
class TrialResult:
    """What a trial showed."""

    kills: int = 0
    accepted: int = 0
    acknowledged: int = 0
    batches: int = 0
    lost: int = 0
    doubled: int = 0
    restart_seconds: list[float] = field(default_factory=list)


class Gone(Exception):
    """The broker died in the middle of a call."""


@dataclass
class Witness:
    """What clients know for certain."""

    accepted: set[str] = field(default_factory=set)
    acknowledged: Counter[str] = field(default_factory=Counter)
    pending: dict[str, list[str]] = field(default_factory=dict)
    """Batches to acknowledge; a call that was cut off is repeated."""
    served_after: set[str] = field(default_factory=set)
    """Served again after their acknowledgement was answered: must stay empty."""
    batches: int = 0

    def serve(self, names: list[str]) -> None:
        """A batch arrived."""
        self.batches += 1
        self.served_after |= {name for name in names if self.acknowledged[name]}

    def result(self, kills: int, restarts: list[float]) -> TrialResult:
        """Compare, once everything that was left is acknowledged."""
        return TrialResult(
            kills=kills,
            accepted=len(self.accepted),
            acknowledged=self.acknowledged.total(),
            batches=self.batches,
            lost=len(self.accepted - set(self.acknowledged)),
            doubled=len(self.served_after) + sum(n > 1 for n in self.acknowledged.values()),
            restart_seconds=restarts,
        )


# --- a child process that does what the server does, line by line ---


def child(folder: Path) -> None:
    """Read lines of JSON, answer each once the ledger has it."""
    from tandem_broker.journal.ledger import Ledger, read
    from tandem_broker.protocol.messages import RunParameters
    from tandem_broker.queue.records import GroupEntry, StoreOptions

    run = RunParameters(
        wandb_group="",
        wandb_project="",
        batch_size=BATCH,
        max_token_len=1,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=0,
    )
    ledger = Ledger.open(folder, StoreOptions(), time.time())
    store = ledger.store
    if store.run is None:
        store.register(run)
        store.take(time.time())
        ledger.settled().result()
    say({"ready": True})
    for line in sys.stdin:
        answers: list[dict[str, Any]] = []
        for call in json.loads(line):
            now = time.time()
            if "put" in call:
                payload = call["put"].encode() * 50
                store.put(GroupEntry(id=call["put"], env=None, size=1, payload=payload), now, key=call["put"])
                answers.append({})
            elif "ack" in call:
                answers.append({"ok": store.acknowledge(call["ack"], now).ok})
            else:
                batch = store.take(now, lease=True, seconds=LEASE_SECONDS)
                entries = batch.entries if batch else ()
                assert asyncio.run(read(entries)) == [entry.id.encode() * 50 for entry in entries]
                answers.append({"batch": batch and batch.id, "names": [entry.id for entry in entries]})
        ledger.settled().result()
        say(answers)


def say(answer: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Child:
    """The child from outside."""

    def __init__(self, folder: Path):
        self._command = [sys.executable, __file__, "--child", str(folder)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read()

    def read(self) -> Any:
        """Its next line."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise Gone
        return json.loads(line)

    def ask(self, calls: list[dict[str, Any]]) -> Any:
        """Send calls and wait for their answers."""
        self.send(calls)
        return self.read()

    def send(self, calls: list[dict[str, Any]]) -> None:
        """Send calls without waiting."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(calls) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Gone from None

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


def against_a_child(folder: Path, kills: int, seed: int) -> TrialResult:
    """A trial against the ledger alone; the moment of each kill is random within some tens of milliseconds of load."""
    chance, witness, names, restarts = random.Random(seed), Witness(), map(str, itertools.count()), []
    broker = Child(folder)
    for _ in range(kills):
        begin = time.perf_counter()
        broker.start()
        restarts.append(time.perf_counter() - begin)
        until = time.perf_counter() + chance.uniform(0.0, 0.1)
        while True:
            calls = [{"put": next(names)} for _ in range(PRODUCERS)] + [{"take": 1}]
            if time.perf_counter() >= until:
                broker.send(calls)
                time.sleep(chance.uniform(0.0, 0.004))  # somewhere within the write
                broker.kill()
                break
            _load(broker, calls, witness)
    broker.start()
    time.sleep(LEASE_SECONDS)
    while _load(broker, [{"take": 1}], witness):
        pass
    broker.kill()
    return witness.result(kills, restarts)


def _load(broker: Child, calls: list[dict[str, Any]], witness: Witness) -> bool:
    """One round: submit, take, acknowledge. False: no batch was left."""
    answers = broker.ask(calls)
    witness.accepted |= {call["put"] for call in calls if "put" in call}
    batch, names = answers[-1]["batch"], answers[-1]["names"]
    if batch is None:
        return False
    witness.serve(names)
    if broker.ask([{"ack": batch}])[0]["ok"]:
        witness.acknowledged.update(names)
    return True


# --- the server itself ---


class Server:
    """``tandem serve broker`` as a process."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        self._command = [sys.executable, "-m", "tandem", "serve", "broker", "--port", str(self.port)]
        self._command += ["--data", str(folder / "data")]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, session: aiohttp.ClientSession) -> float:
        """Start it; gives the seconds until it answers."""
        begin = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"the broker ended by itself: {self._log.read_text()[-2000:]}")
            try:
                async with session.get(f"{self.url}/info"):
                    return time.perf_counter() - begin
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


async def against_the_server(folder: Path, kills: int, seed: int) -> TrialResult:
    """A trial over HTTP: eight producers, one trainer."""
    chance, witness, restarts = random.Random(seed), Witness(), []
    server, up, names = Server(folder), asyncio.Event(), map(str, itertools.count())
    async with aiohttp.ClientSession() as session:
        await server.start(session)
        run = {"batch_size": BATCH, "max_token_len": 64, "wandb_group": "", "wandb_project": "", "checkpoint_dir": ""}
        run |= {"save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
        async with session.post(f"{server.url}/register", json=run) as answer:
            answer.raise_for_status()
        up.set()
        tasks = [asyncio.create_task(_produce(session, server.url, up, names, witness)) for _ in range(PRODUCERS)]
        tasks.append(asyncio.create_task(_train(session, server.url, up, witness)))
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            server.kill()
            up.clear()
            restarts.append(await server.start(session))
            up.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.kill()
        await server.start(session)
        await _drain(session, server.url, witness)
    server.kill()
    return witness.result(kills, restarts)


async def _produce(session: aiohttp.ClientSession, url: str, up: asyncio.Event, names: Any, witness: Witness) -> None:
    for name in names:
        token = int(name)
        group = {"tokens": [[1, token] * 20], "masks": [[-100, token] * 20], "scores": [float(token)]}
        while name not in witness.accepted:
            await up.wait()
            try:
                headers = {"Idempotency-Key": name}
                async with session.post(f"{url}/scored_data", json=group, headers=headers) as answer:
                    if answer.status == 200:
                        witness.accepted.add(name)
                    else:
                        await asyncio.sleep(0.05)
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)


async def _take(session: aiohttp.ClientSession, url: str, witness: Witness) -> bool:
    """Acknowledge what was cut off before, then take a batch and acknowledge it. False: none was there."""
    for earlier, groups in list(witness.pending.items()):
        async with session.post(f"{url}/ack", json={"batch": earlier}) as answer:
            if answer.status == 200 and (await answer.json())["status"] == "success":
                witness.acknowledged.update(groups)
        del witness.pending[earlier]
    async with session.get(f"{url}/batch", params={"lease": str(SERVER_LEASE_SECONDS)}) as answer:
        batch, name = (await answer.json())["batch"], answer.headers.get("Tandem-Batch")
    if batch is None or name is None:
        return False
    names = [str(int(group["scores"][0])) for group in batch]
    witness.serve(names)
    witness.pending[name] = names
    return True


async def _train(session: aiohttp.ClientSession, url: str, up: asyncio.Event, witness: Witness) -> None:
    while True:
        await up.wait()
        try:
            if not await _take(session, url, witness):
                await asyncio.sleep(0.01)
        except aiohttp.ClientError:
            await asyncio.sleep(0.01)


async def _drain(session: aiohttp.ClientSession, url: str, witness: Witness) -> None:
    """Until nothing comes any more and the leases of trainers cut off have run out."""
    patience = time.perf_counter() + 5.0
    while time.perf_counter() < patience:
        if await _take(session, url, witness):
            patience = time.perf_counter() + 5.0
        else:
            await asyncio.sleep(0.2)
    async with session.get(f"{url}/status") as answer:
        left = (await answer.json())["queue_size"]
    for name in range(-left % BATCH):  # fewer than a batch are left: others make it one
        group = {"tokens": [[1]], "masks": [[1]], "scores": [-1.0 - name]}
        async with session.post(f"{url}/scored_data", json=group) as answer:
            answer.raise_for_status()
    while await _take(session, url, witness):
        pass


def main() -> None:
    """Run a trial and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", action="store_true", help="kill tandem serve broker instead of a child process")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.server:
            result = asyncio.run(against_the_server(Path(folder), options.kills, options.seed))
        else:
            result = against_a_child(Path(folder), options.kills, options.seed)
    restart = sorted(result.restart_seconds)
    print(
        f"{result.kills} kills, {result.accepted} groups accepted, {result.batches} batches served, "
        f"{result.acknowledged} groups acknowledged: {result.lost} lost, "
        f"{result.doubled} doubled; restart {restart[len(restart) // 2]:.2f} s (median), {restart[-1]:.2f} s (longest)"
    )
    sys.exit(bool(result.lost or result.doubled))


if __name__ == "__main__":
    main()
