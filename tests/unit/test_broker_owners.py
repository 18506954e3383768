"""Environments of several keys: what one registers and submits is out of the others' reach."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.brokers import ENV, Client, env_spec, group, play, run_parameters, served, some

from tandem_broker.journal import Ledger
from tandem_broker.queue.records import StoreOptions
from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.keys import Keys

KEYS = Keys(trainer="trains", environments="alice, bob")
ALICE, BOB, TRAINER = ({"Authorization": f"Bearer {key}"} for key in ("alice", "bob", "trains"))


async def begun(client: Client) -> None:
    client.headers = TRAINER
    await client.begin(batch_size=4)
    client.headers = {}


def test_nobody_speaks_for_the_environment_of_another_key() -> None:
    async def scene(client: Client) -> None:
        await begun(client)
        bobs = (await client.post("/register-env", ENV, **BOB)).json["env_id"]
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/disconnect-env", {"env_id": bobs}),
            ("GET", "/status-env", {"env_id": bobs}),
            ("POST", "/scored_data", group(env_id=bobs)),
            ("POST", "/scored_data_list", [group(), group(env_id=bobs)]),
        ]
        for method, path, body in calls:
            reply = await client.call(method, path, body, **ALICE)
            assert (reply.status, reply.json) == (403, {"detail": "environment 0 was registered with another key"})
        assert client.broker.store.status(0.0)["queued_groups"] == 0
        assert client.broker.store.tenants.by_id[bobs].connected
        for method, path, body in reversed(calls):
            assert (await client.call(method, path, body, **BOB)).status == 200
        assert (await client.post("/disconnect-env", {"env_id": bobs}, **TRAINER)).json == {"status": "success"}
        assert (await client.post("/scored_data", group(env_id=99), **ALICE)).status == 200  # nobody's: anonymous

    play(scene, keys=KEYS)


def test_nobody_uses_up_the_idempotency_key_of_another() -> None:
    async def scene(client: Client) -> None:
        await begun(client)
        for path, body, held in (("/scored_data", group(), (1, 2)), ("/scored_data_list", [group()] * 2, (4, 6))):
            for then, who in zip(held, (ALICE, BOB), strict=True):
                for _ in range(2):
                    assert (await client.post(path, body, Idempotency_Key="k", **who)).status == 200
                    assert client.broker.store.status(0.0)["queued_groups"] == then
        ids = [(await client.post("/register-env", ENV, Idempotency_Key="e", **who)).json["env_id"]
               for who in (ALICE, BOB, ALICE)]  # fmt: skip
        assert ids == [0, 1, 0]

    play(scene, keys=KEYS)


def test_owners_are_known_after_a_restart(tmp_path: Path) -> None:
    async def scene(ledger: Ledger, env_id: int | None) -> int:
        async with served(ledger=ledger, keys=KEYS) as client:
            await begun(client)
            if env_id is None:
                return int((await client.post("/register-env", ENV, Idempotency_Key="e", **BOB)).json["env_id"])
            assert (await client.post("/scored_data", group(env_id=env_id), **ALICE)).status == 403
            assert (await client.post("/scored_data", group(env_id=env_id), **BOB)).status == 200
            return env_id

    known_id: int | None = None
    for _ in range(2):
        ledger = Ledger.open(tmp_path, StoreOptions(), 0.0)
        known_id = asyncio.run(scene(ledger, known_id))
        ledger.close()
    assert b"alice" not in (tmp_path / "ledger.sqlite").read_bytes()


def test_names_of_environments_are_printable_and_forgotten(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        await client.begin()
        reply = await client.post("/register-env", {**ENV, "desired_name": "\x1b[31mred\r" + "x" * 3000})
        assert reply.json["wandb_name"] == "�[31mred�" + "x" * 191 + "_0"

    play(scene)
    store = GroupQueue(StoreOptions(max_environments=20))
    store.register(run_parameters(batch_size=4, max_token_len=8))
    store.take(0.0)
    assert store.register_env(env_spec(name="stays", max_token_length=8), 0.0)
    for place in range(500):
        other = some(store.register_env(env_spec(name=f"n{place}", max_token_length=8), 0.0))
        store.disconnect(other.env_id, 0.0)
    assert len(store.tenants.by_id) <= 20
    again = some(store.register_env(env_spec(name="stays", max_token_length=8), 0.0))
    assert again.wandb_name == "stays_1", "one that is there keeps its count"
