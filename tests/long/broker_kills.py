"""kill -9 of the broker at random moments under load: is anything accepted lost, anything acknowledged served again?

    python tests/long/broker_kills.py [--kills 100]

Producers submit groups under idempotency keys to ``tandem serve broker`` and trust only answers; a trainer leases
batches and acknowledges them. After the last kill the queue is emptied and what was answered is compared with what was
served.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from processes import Broken, Child

from tandem.ports import free_port

BATCH = 4
LEASE_SECONDS = 3
PRODUCERS = 8
OURS = "honest-"
"""How the names of their groups begin."""
RUN = {
    "batch_size": BATCH, "max_token_len": 64, "wandb_group": "", "wandb_project": "", "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1,
}  # fmt: skip


@dataclass
class Clients:
    """Producers and a trainer, and what they know for certain."""

    url: str
    session: aiohttp.ClientSession
    broker: Child
    up: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: set[str] = field(default_factory=set)
    acknowledged: Counter[str] = field(default_factory=Counter)
    pending: dict[str, list[str]] = field(default_factory=dict)
    """Batches to acknowledge; a call that was cut off is repeated."""
    served_again: set[str] = field(default_factory=set)
    """After their acknowledgement was answered: must stay empty."""
    statuses: Counter[int] = field(default_factory=Counter)
    restart_seconds: list[float] = field(default_factory=list)
    trainer: Mapping[str, str] = field(default_factory=dict)
    """Headers of the trainer's requests."""
    producer: Mapping[str, str] = field(default_factory=dict)
    """Headers of the producers'."""

    @property
    def lost(self) -> int:
        """Groups accepted and never acknowledged, once everything that was left is."""
        return len(self.accepted - set(self.acknowledged))

    @property
    def doubled(self) -> int:
        """Groups served again, or acknowledged twice."""
        return len(self.served_again) + sum(n > 1 for n in self.acknowledged.values())

    async def produce(self, numbers: Iterator[int]) -> None:
        """Submit one group after another, each until that is answered."""
        for number in numbers:
            name = f"{OURS}{number}"
            while name not in self.accepted:
                await self.up.wait()
                try:
                    if await self._submit(name, **{"Idempotency-Key": name}) == 200:
                        self.accepted.add(name)
                    else:
                        await asyncio.sleep(0.05)
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)

    async def train(self) -> None:
        """Take batches and acknowledge them."""
        while True:
            await self.up.wait()
            try:
                if not await self._take():
                    await asyncio.sleep(0.01)
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)

    async def drain(self) -> None:
        """Until nothing comes any more and the leases of trainers cut off have run out."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if await self._take():
                deadline = time.monotonic() + 5.0
            else:
                await asyncio.sleep(0.2)
        for _ in range(BATCH - 1):  # fewer than a batch may be left: others make it one
            await self._submit("filler")
        while await self._take():
            pass

    async def _submit(self, name: str, **headers: str) -> int:
        """Hand a group in; the status."""
        group = {"tokens": [[1, 5] * 20], "masks": [[-100, 5] * 20], "scores": [1.0]}
        body = {**group, "group_overrides": {"tandem_task": name}}
        headers = {**self.producer, **headers}
        async with self.session.post(f"{self.url}/scored_data", json=body, headers=headers) as answer:
            self.statuses[answer.status] += 1
            return answer.status

    async def _take(self) -> bool:
        """Acknowledge what was cut off before, then take a batch and acknowledge it. False: none was there."""
        for earlier, names in list(self.pending.items()):
            body = {"batch": earlier}
            async with self.session.post(f"{self.url}/ack", json=body, headers=self.trainer) as answer:
                self.statuses[answer.status] += 1
                if answer.status == 200 and (await answer.json())["status"] == "success":
                    self.acknowledged.update(names)
            del self.pending[earlier]
        lease = {"lease": str(LEASE_SECONDS)}
        async with self.session.get(f"{self.url}/batch", params=lease, headers=self.trainer) as answer:
            self.statuses[answer.status] += 1
            batch = (await answer.json())["batch"] if answer.status == 200 else None
            batch_id = answer.headers.get("Tandem-Batch")
        if batch is None or batch_id is None:
            return False
        tasks = [str((group["group_overrides"] or {}).get("tandem_task")) for group in batch]
        names = [task for task in tasks if task.startswith(OURS)]
        self.served_again |= {name for name in names if self.acknowledged[name]}
        self.pending[batch_id] = names
        return True


@asynccontextmanager
async def served(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    trainer: Mapping[str, str] | None = None,
    producer: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Clients, Callable[[], Awaitable[None]]]]:
    """A broker under load: its clients, and what kills it and starts it again. What is left is drained in the end."""
    port = free_port()
    words = ["-m", "tandem", "serve", "broker", "--port", str(port), "--data", "data", *options]
    broker = Child("broker", folder, lambda: words, environment or {})
    async with aiohttp.ClientSession() as session:
        clients = Clients(f"http://127.0.0.1:{port}", session, broker, trainer=trainer or {}, producer=producer or {})

        async def kill() -> None:
            clients.up.clear()
            if broker.process is not None and not broker.alive:
                raise Broken(f"the broker ended by itself: {broker.log_tail()}")
            broker.kill()
            begun = time.monotonic()
            broker.start()
            while not clients.up.is_set():
                if not broker.alive:
                    raise Broken(f"the broker ended by itself: {broker.log_tail()}")
                try:
                    async with session.get(f"{clients.url}/"):
                        clients.up.set()
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
            clients.restart_seconds.append(time.monotonic() - begun)

        try:
            await kill()
            async with session.post(f"{clients.url}/register", json=RUN, headers=clients.trainer) as answer:
                answer.raise_for_status()
            async with asyncio.TaskGroup() as load:
                numbers = itertools.count()
                tasks = [load.create_task(clients.produce(numbers)) for _ in range(PRODUCERS)]
                tasks.append(load.create_task(clients.train()))
                yield clients, kill
                for task in tasks:
                    task.cancel()
            await clients.drain()
        finally:
            broker.kill()


async def trial(folder: Path, kills: int, seed: int) -> Clients:
    """Kill the broker so often, and compare what clients were told."""
    chance = random.Random(seed)
    async with served(folder) as (clients, kill):
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            await kill()
    return clients


def main() -> None:
    """Run a trial and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clients = asyncio.run(trial(Path(folder), options.kills, options.seed))
    restart = sorted(clients.restart_seconds)
    print(
        f"{options.kills} kills, {len(clients.accepted)} groups accepted, {clients.acknowledged.total()} acknowledged: "
        f"{clients.lost} lost, {clients.doubled} doubled; restart {restart[len(restart) // 2]:.2f} s (median), "
        f"{restart[-1]:.2f} s (longest)"
    )
    sys.exit(bool(clients.lost or clients.doubled))


if __name__ == "__main__":
    main()
