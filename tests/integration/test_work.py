"""``tandem work`` against Tandem's own broker, with an engine without a model and a trainer that only takes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Literal

import pytest
from support.fake_broker import FakeBroker, quick, until
from support.fake_engine import END, FakeEngine

from tandem_broker import recipe as recipes
from tandem_broker.client import Connection, TakenBatch, TrainerClient
from tandem_broker.commands import work
from tandem_broker.journal import Ledger
from tandem_broker.producer import GroupTally
from tandem_broker.protocol.convert import group_from_wire
from tandem_broker.protocol.messages import RunParameters, ScoredGroup
from tandem_broker.queue.records import StoreOptions
from tandem_broker.server.app import BrokerServer
from tandem_broker.server.serving import serving

RUN = RunParameters(
    wandb_group="", wandb_project="", batch_size=8, max_token_len=256, checkpoint_dir="", save_checkpoint_interval=1,
    starting_step=0, num_steps=4,
)  # fmt: skip


def config(model: Path, broker: str, engine: FakeEngine, *more: str) -> recipes.Work:
    options = [
        f"model={model}", "env=arithmetic", f"broker={broker}", f"engine.urls=[{engine.url}]", "engine.model=m",
        "rewards={overlong: {weight: 1.0, max_tokens: 16, cache: 12}}", "group_size=4", "sampling.max_tokens=16",
        "n=4", *more,
    ]  # fmt: skip
    return recipes.load(None, options)


@asynccontextmanager
async def tandem_broker(folder: Path, port: int = 0) -> AsyncIterator[str]:
    with closing(Ledger.open(folder, StoreOptions(), time.time())) as ledger:
        async with serving(BrokerServer(ledger.store), "127.0.0.1", port) as url:
            yield url


async def take(client: TrainerClient, step: int) -> TakenBatch:
    while (taken := await client.batch(lease=60, policy=step)) is None:
        await asyncio.sleep(0.02)
    assert taken.id is not None
    assert await client.acknowledge(taken.id) == ""
    return taken


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_broker.commands.work.RetryPolicy", lambda **options: quick())


@pytest.mark.parametrize("dialect", ["tandem", "atropos", "openai"])
def test_a_trainer_gets_what_the_engine_sampled(
    tiny_model: Path, tmp_path: Path, dialect: Literal["tandem", "atropos", "openai"]
) -> None:
    async def go() -> None:
        tallies: dict[str, GroupTally] = {}
        async with (
            asyncio.timeout(60),
            tandem_broker(tmp_path) as url,
            FakeEngine(dialect) as engine,
            TrainerClient(Connection(url)) as trainer,
            asyncio.TaskGroup() as tasks,
        ):
            engine.version = 2
            await trainer.register(RUN)
            await trainer.batch()
            working = tasks.create_task(work.run(config(tiny_model, url, engine), tallies))
            taken = [await take(trainer, step) for step in range(4)]
            await working  # ends, since the trainer wanted four steps
            groups = [group for batch in taken for group in batch.groups]
            assert [len(group.tokens) for group in groups] == [4] * 8
            for scored, version in zip(groups, [v for batch in taken for v in batch.versions], strict=True):
                group = group_from_wire(scored, id="g", version=version or 0)
                assert not group.zero_variance
                for rollout in group.rollouts:
                    (turn,) = rollout.turns
                    assert turn.completion.tokens[-1] == END
                    first = turn.completion.tokens[0] - 97  # the fake's number modulo 26
                    assert 0 <= first < 26
                    assert len(set(turn.completion.logprobs)) == 1
                    if dialect == "tandem":
                        assert set(turn.completion.versions) == {2}
            assert tallies["arithmetic"].groups["sent"] >= 8
            status = await trainer.connection.ask("GET", "/status")
            assert json.loads(status.body)["current_step"] == 4

    asyncio.run(go())


def test_a_broker_that_is_restarted_loses_and_doubles_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        tallies: dict[str, GroupTally] = {}
        seen: list[ScoredGroup] = []
        async with asyncio.timeout(90), FakeEngine("tandem") as engine, asyncio.TaskGroup() as tasks:
            async with tandem_broker(tmp_path) as url, TrainerClient(Connection(url)) as trainer:
                port = int(url.rpartition(":")[2])
                await trainer.register(RUN)
                await trainer.batch()
                working = tasks.create_task(work.run(config(tiny_model, url, engine), tallies))
                seen += (await take(trainer, 0)).groups
            await asyncio.sleep(0.1)
            async with tandem_broker(tmp_path, port) as url, TrainerClient(Connection(url)) as trainer:
                seen += [group for step in (1, 2, 3) for group in (await take(trainer, step)).groups]
                await working
        assert len(Counter(str(group.tokens) for group in seen)) == 8, "a group came twice"
        assert not {"lost", "refused", "failed"} & set(tallies["arithmetic"].groups)

    asyncio.run(go())


SEVERAL = {
    "sums": {"env": {"kind": "arithmetic"}, "weight": 1.0, "min_share": 0.5},
    "more": {"env": {"kind": "arithmetic", "operators": ["-"]}, "weight": 3.0},
}
LENGTH = {"overlong": {"weight": 1.0, "max_tokens": 16, "cache": 12}}


def several(model: Path, broker: str, engine: FakeEngine, *more: str) -> recipes.Work:
    options = {
        "model": str(model), "broker": broker, "engine": {"urls": [engine.url], "model": "m"}, "group_size": 4,
        "sampling": {"max_tokens": 16}, "n": 8,
        "envs": {name: {**one, "rewards": LENGTH} for name, one in SEVERAL.items()},
    }  # fmt: skip
    return recipes.from_options(options, more, "a test")


def test_several_environments_are_several_to_the_broker_and_fill_their_shares(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        tallies: dict[str, GroupTally] = {}
        async with (
            asyncio.timeout(60),
            tandem_broker(tmp_path) as url,
            FakeEngine("tandem") as engine,
            TrainerClient(Connection(url)) as trainer,
            asyncio.TaskGroup() as tasks,
        ):
            await trainer.register(RUN)
            await trainer.batch()
            working = tasks.create_task(work.run(several(tiny_model, url, engine), tallies))
            taken = [await take(trainer, step) for step in range(4)]
            await working
        read = [group_from_wire(group, id="g", version=0) for batch in taken for group in batch.groups]
        for first, second in zip(read[::2], read[1::2], strict=True):
            assert "sums" in (first.env, second.env), "half of every batch is owed to it"
        assert {group.env for group in read} == {"sums", "more"}
        assert tallies["sums"].groups["sent"] >= 4
        assert tallies["more"].groups["sent"]

    asyncio.run(go())


def test_an_engine_that_goes_away_costs_no_group(tiny_model: Path) -> None:
    async def go() -> None:
        tallies: dict[str, GroupTally] = {}
        async with (
            asyncio.timeout(60),
            FakeBroker(ours=True) as broker,
            FakeEngine("tandem") as engine,
            asyncio.TaskGroup() as tasks,
        ):
            engine.gate.clear()
            working = tasks.create_task(work.run(config(tiny_model, broker.url, engine), tallies))
            await until(lambda: len(engine.requests) >= 16)
            await engine.down()
            engine.gate.set()
            engine.faults.extend(["cut", 503, 500])
            await engine.up()
            await until(lambda: len(broker.groups) >= 4)
            broker.step = 10
            await working
        assert not {"failed", "lost", "refused"} & set(tallies["arithmetic"].groups)

    asyncio.run(go())


def test_ctrl_c_finishes_what_is_under_way(tiny_model: Path, tmp_path: Path) -> None:
    """As a process: the groups being played are handed in, then it ends and says what it did."""

    async def go() -> tuple[int | None, str, str, int, int]:
        async with asyncio.timeout(120), FakeBroker(ours=True) as broker, FakeEngine("atropos") as engine:
            engine.gate.clear()
            words = [
                "work", f"model={tiny_model}", "env=arithmetic", f"broker={broker.url}", f"engine={engine.url}",
                "engine.model=m", "rewards={overlong: {weight: 1.0, max_tokens: 16, cache: 12}}", "group_size=4", "n=3",
                "sampling.max_tokens=16",
            ]  # fmt: skip
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tandem", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            await until(lambda: len(engine.requests) == 12 or child.returncode is not None, seconds=90)
            if child.returncode is None:
                child.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
            engine.gate.set()
            out, err = await child.communicate()
            return child.returncode, out.decode(), err.decode(), len(broker.groups), len(broker.envs)

    code, out, err, groups, envs = asyncio.run(go())
    assert code == 0, err
    assert groups + out.count("zero-variance") > 0
    assert f"{groups} groups sent" in out
    assert "finishing 3 groups" in err
    assert envs == 0, "it leaves the broker"
    assert "Traceback" not in err
