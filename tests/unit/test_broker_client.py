"""Clients of a broker: nothing is handed in twice, and an outage costs time alone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from support.fake_broker import FakeBroker, quick, run, until
from support.rollouts import make_group, make_rollout

from tandem.errors import BrokerError
from tandem.http import ServerAway
from tandem.types import Group
from tandem_broker.client import Connection, EnvClient, RequestRefused, TrainerClient
from tandem_broker.protocol.messages import EnvRegistration, RunParameters

SPEC = EnvRegistration(max_token_length=512, desired_name="made", weight=1.0, group_size=2)
RUN = RunParameters(
    wandb_group="", wandb_project="", batch_size=8, max_token_len=512, checkpoint_dir="", save_checkpoint_interval=1,
    starting_step=0, num_steps=10,
)  # fmt: skip


def connection(broker: FakeBroker, **options: Any) -> Connection:
    return Connection(broker.url, retry=quick(**options))


def environment(broker: FakeBroker, **options: Any) -> EnvClient:
    return EnvClient(connection(broker, **options), SPEC, key="me", poll=0.01)


def group(id: str = "t@0", *, version: int = 3) -> Group:
    answers = [make_rollout(f"{id}/{i}", [([1, 2], [7, i], [-0.5, -0.25])], float(i), version=version) for i in (0, 1)]
    return make_group(id, answers)


both = pytest.mark.parametrize("ours", [True, False], ids=["tandem", "atropos"])


@both
def test_finds_out_whose_broker_it_is(ours: bool) -> None:
    async def go() -> None:
        async with FakeBroker(ours=ours) as broker, environment(broker) as client:
            assert client.connection.speaks == ("tandem" if ours else "atropos")

    run(go())


def test_something_else_is_no_broker() -> None:
    class Other(FakeBroker):
        def _GET_(self, request: Any, body: Any) -> dict[str, Any]:
            return {"hello": "world"}

    async def go() -> None:
        async with Other(ours=False) as broker:
            with pytest.raises(BrokerError, match="is no broker"):
                async with environment(broker):
                    pass

    run(go())


@both
def test_registers_once_the_trainer_has_started(ours: bool) -> None:
    async def go() -> None:
        async with FakeBroker(ours=ours) as broker, environment(broker) as client:
            broker.started = False
            waiting = asyncio.create_task(client.register())
            await until(lambda: len([path for path, _, _ in broker.seen if path == "/register-env"]) > 1)
            broker.started = True
            assert (await waiting).wandb_name == "made_0"
            assert (await client.info()).batch_size == 8

    run(go())


@both
def test_a_group_arrives_as_the_wire_has_it(ours: bool) -> None:
    async def go() -> None:
        async with FakeBroker(ours=ours) as broker, environment(broker) as client:
            await client.register()
            assert await client.submit(group(), "k") == "received"
            (sent,) = broker.groups
            assert sent["env_id"] == 0
            assert sent["tokens"] == [[1, 2, 7, 0], [1, 2, 7, 1]]
            assert sent["masks"] == [[-100, -100, 7, 0], [-100, -100, 7, 1]]
            assert sent["group_overrides"]["tandem_version"] == 3

    run(go())


@pytest.mark.parametrize("fault", ["cut", "lose", 500, 503, 429])
def test_ours_gets_each_group_once_whatever_happens(fault: Any) -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker, environment(broker) as client:
            await client.register()
            broker.faults["/scored_data"].extend([fault, fault])
            assert await client.submit(group(), "k") == "received"
            assert len(broker.groups) == 1
            assert len([path for path, _, _ in broker.seen if path == "/scored_data"]) == 3

    run(go())


@pytest.mark.parametrize(("fault", "arrived"), [("lose", 1), ("cut", 0)])
def test_atropos_broker_is_never_told_twice(fault: Any, arrived: int, caplog: pytest.LogCaptureFixture) -> None:
    """It knows no keys, so what may have arrived is given up."""

    async def go() -> None:
        async with FakeBroker(ours=False) as broker, environment(broker) as client:
            await client.register()
            broker.faults["/scored_data"].append(fault)
            assert await client.submit(group(), "k") == "lost"
            assert len(broker.groups) == arrived
            assert await client.submit(group("u@0"), "l") == "received"

    run(go())
    assert "not sent again" in caplog.text


@pytest.mark.parametrize("fault", [503, 429])
def test_atropos_broker_is_told_again_when_it_refused(fault: int) -> None:
    async def go() -> None:
        async with FakeBroker(ours=False) as broker, environment(broker) as client:
            await client.register()
            broker.faults["/scored_data"].append(fault)
            assert await client.submit(group(), "k") == "received"
            assert len(broker.groups) == 1

    run(go())


@both
def test_a_refusal_is_final_and_says_why(ours: bool) -> None:
    async def go() -> None:
        async with FakeBroker(ours=ours) as broker, environment(broker) as client:
            await client.register()
            broker.faults["/scored_data"].append(422)
            with pytest.raises(RequestRefused, match="a fault"):
                await client.submit(group(), "k")
            broker.faults["/status-env"].append(401)
            with pytest.raises(RequestRefused, match="key_variable"):
                await client.status()

    run(go())


@both
def test_survives_a_broker_that_was_restarted_empty(ours: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is registered again before anything is handed in: until then Atropos' broker must get nothing."""

    async def go() -> None:
        async with FakeBroker(ours=ours) as broker, environment(broker) as client:
            await client.register()
            await broker.down()
            under_way = asyncio.create_task(client.submit(group(), "k"))
            await until(lambda: client.connection.outages == 1)
            broker.empty()
            broker.step, broker.started = 0, False
            broker.seen.clear()
            await broker.up()
            await until(lambda: len(broker.seen) > (0 if ours else 3))
            assert ours or not broker.groups  # a group in a broker of Atropos' without a trainer blocks it
            broker.started = True
            assert await under_way == "received"
            assert (await client.status()).current_step == 0
            assert client.registrations == 2
            assert await client.submit(group("u@0"), "l") == "received"
            assert len(broker.groups) == 2

    caplog.set_level(logging.WARNING)
    run(go())
    assert "has forgotten this environment" in caplog.text
    assert "answers again" in caplog.text


@pytest.mark.parametrize("under_way", [True, False])
def test_an_id_that_is_anothers_since_the_broker_was_restarted_empty_is_given_up(under_way: bool) -> None:
    """Tandem's broker answers 403 where the environment of an id was registered with another key."""

    async def go() -> None:
        async with FakeBroker(ours=True) as broker, environment(broker) as client:
            await client.register()
            broker.faults["/status-env"].append(403)
            if under_way:
                broker.faults["/scored_data"].extend(["cut", 403])
                assert await client.submit(group(), "k") == "received"
            else:
                await client.status()
            assert client.registrations == 2

    run(go())


def test_nothing_reaches_atropos_broker_between_its_restart_and_a_registration() -> None:
    async def go() -> None:
        async with FakeBroker(ours=False) as broker, environment(broker) as client:
            await client.register()
            await broker.down()
            asking = asyncio.create_task(client.status())
            await until(lambda: client.connection.outages == 1)
            broker.empty()
            broker.started = False
            await broker.up()
            submitting = asyncio.create_task(client.submit(group(), "k"))
            await until(lambda: [p for p, _, _ in broker.seen].count("/register-env") >= 3)
            assert broker.groups == []
            broker.started = True
            assert await submitting == "received"
            await asking
            assert client.registrations == 2

    run(go())


def test_a_broker_that_runs_backwards_is_another_one() -> None:
    """Atropos gives ids from 0 again: ours may be somebody else's by now."""

    async def go() -> None:
        async with FakeBroker(ours=False) as broker, environment(broker) as client:
            await client.register()
            broker.step = 5
            await client.status()
            await broker.down()
            asking = asyncio.create_task(client.status())
            await until(lambda: client.connection.outages == 1)
            broker.empty()
            broker.envs, broker.keys = {0: "another"}, {"0": 0}
            await broker.up()
            await asking
            assert client.ticket is not None
            assert client.ticket.env_id == 1

    run(go())


def test_gives_up_when_patience_ends() -> None:
    async def go() -> None:
        client = EnvClient(Connection("http://127.0.0.1:9", retry=quick(give_up_seconds=0.05)), SPEC, key="me")
        with pytest.raises(ServerAway, match="does not answer"):
            async with client:
                pass

    run(go())


def wired(n: int = 2) -> dict[str, Any]:
    return {"tokens": [[1, 2]] * n, "masks": [[-100, 2]] * n, "scores": [0.0] * n, "advantages": [], "images": None}


def test_a_leased_batch_says_what_each_group_is() -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker, TrainerClient(connection(broker)) as client:
            await client.register(RUN)
            lease = {"batch": "b", "step": 4, "ids": ["x", "y", "z"], "versions": [1, 2, 3], "expires": 9.0}
            broker.batches.append({"batch": [wired(), {"tokens": 5}, wired(4)], "tandem": lease})
            taken = await client.batch(lease=60, policy=3, max_lag=2)
            assert broker.seen[-1][0] == "/batch?lease=60&policy=3&max_lag=2"
            assert taken is not None
            assert taken.id == "b"
            assert [len(g.tokens) for g in taken.groups] == [2, 4]
            assert (taken.ids, taken.versions) == (["x", "z"], [1, 3])
            assert len(taken.malformed) == 1
            assert await client.acknowledge("b") == ""
            assert "no batch is called another" in await client.acknowledge("another")
            assert await client.acknowledge("mute") == "the broker gives no reason"
            assert await client.batch() is None

    run(go())


def test_atropos_broker_is_spared_a_group_that_it_would_keep_for_ever() -> None:
    apart = make_rollout("t@0/0", [([1], [2], [-1.0]), ([9], [2], [-1.0])], 1.0)
    wide = make_group("t@0", [apart, make_rollout("t@0/1", [([1], [3], [-1.0])], 0.0)])

    async def go(ours: bool) -> None:
        async with FakeBroker(ours=ours) as broker, environment(broker) as client:
            await client.register()
            try:
                await client.submit(wide, "k")
            finally:
                assert len(broker.groups) == (1 if ours else 0)

    run(go(True))
    with pytest.raises(BrokerError, match=r"t@0 has 3 sequences.*never serves it; use Tandem's"):
        run(go(False))
