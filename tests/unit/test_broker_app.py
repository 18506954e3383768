"""The broker over HTTP: bounds, keys, leases, and what people see."""

from __future__ import annotations

import asyncio
import gzip
import json
from itertools import chain
from typing import Any

import pytest
from support.brokers import RUN, Client, group, play

from tandem.errors import BrokerError
from tandem_broker.server import app
from tandem_broker.server.bodies import Bodies
from tandem_broker.server.keys import Keys


def small(**limits: Any) -> Bodies:
    return Bodies(**{"body_bytes": 2_000_000, **limits})


@pytest.mark.parametrize("size", [300, 1_200_000])
def test_gzip_in(size: int) -> None:
    body = json.dumps(group(1, images="x" * size)).encode()

    async def scene(client: Client) -> None:
        await client.begin(batch_size=1)
        for name in ("gzip", "GZip", "x-gzip"):
            zipped = gzip.compress(body)
            assert (await client.post("/scored_data", zipped, Content_Encoding=name)).json == {"status": "received"}
            batch = (await client.get("/batch")).json["batch"]
            assert batch[0]["images"] == "x" * size
        broken = await client.post("/scored_data", zipped[:-9], Content_Encoding="gzip")
        assert (broken.status, broken.body) == (400, b"Invalid gzip payload")
        assert broken.headers["Content-Type"].startswith("text/plain")

    play(scene, bodies=small(inflation=10_000))


# Named, since gzip holds the time: two processes that collect a second apart would call the tests by other names.


@pytest.mark.slow
def test_a_gzip_bomb_and_large_bodies_are_refused() -> None:
    async def scene(client: Client) -> None:
        for bomb in (gzip.compress(bytes(100_000_000)), gzip.compress(bytes(1_900_000))):
            reply = await client.post("/scored_data", bomb, Content_Encoding="gzip")
            assert (reply.status, b"inflates" in reply.body) == (413, True)
        reply = await client.post("/scored_data", bytes(2_000_001))
        assert reply.status == 413

        async def chunks() -> Any:
            for _ in range(30):
                yield bytes(100_000)

        async with client.session.post(
            client.url + "/scored_data", data=chunks(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413
        assert (await client.get("/info")).status == 200
        assert client.broker.bodies.pending == 0

    play(scene, bodies=small())


def test_a_large_body_is_refused_before_it_comes() -> None:
    async def scene(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
        writer.write(b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 2000001\r\n\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()

    play(scene, bodies=small())


def test_too_many_bodies_at_once_are_put_off() -> None:
    async def scene(client: Client) -> None:
        reply = await client.post("/scored_data", group(1))
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert client.broker.bodies.pending == 0

    play(scene, bodies=small(pending_bytes=10))


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_without_a_content_type_a_body_is_none(kind: str | None) -> None:
    async def scene(client: Client) -> None:
        async with client.session.post(
            client.url + "/register",
            data=json.dumps(RUN).encode(),
            headers={"Content-Type": kind} if kind else {},
            skip_auto_headers=["Content-Type"],
        ) as response:
            assert response.status == 422
            assert b"send application/json" in await response.read()
        assert client.broker.store.run is None
        reply = await client.post("/register", RUN, Content_Type="application/json; charset=utf-8")
        assert reply.status == 200

    play(scene)


ROUTES = {
    "trainer": [
        "POST /register",
        "GET /batch",
        "POST /ack",
        "POST /renew",
        "POST /release",
        "GET /latest_example",
        "GET /reset_data",
    ],
    "environment": [
        "GET /info",
        "GET /wandb_info",
        "POST /register-env",
        "POST /disconnect-env",
        "GET /status-env",
        "POST /scored_data",
        "POST /scored_data_list",
        "GET /status",
    ],
    "": ["GET /"],
}


def test_keys() -> None:
    async def scene(client: Client) -> None:
        for needed, calls in ROUTES.items():
            for call in calls:
                for authorization, wrong in (
                    ("", 401),
                    ("Bearer bad", 401),
                    ("Basic trains", 401),
                    ("Bearer plays", 403),
                ):
                    reply = await client.call(
                        *call.split(), **({"Authorization": authorization} if authorization else {})
                    )
                    allowed = needed == "" or (needed == "environment" and authorization == "Bearer plays")
                    assert (reply.status in (401, 403)) != allowed, (call, authorization, reply.status)
                    assert allowed or reply.status == wrong, (call, authorization)
                    assert (reply.status == 401) == ("WWW-Authenticate" in reply.headers)
                reply = await client.call(*call.split(), Authorization="bearer trains")
                assert reply.status not in (401, 403)
        paths = {(r.method, r.resource.canonical) for r in client.broker.application().router.routes() if r.resource}
        assert paths == {tuple(call.split()) for calls in ROUTES.values() for call in calls}

    play(scene, keys=Keys(trainer="trains", environments="plays"))


PAGES = {
    "a name of somebody's": {"Host": "evil.example"},
    "another page": {"Origin": "http://evil.example"},
    "a page without a name": {"Origin": "null"},
    "an image": {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_in_a_browser_cannot_drive_a_broker_without_keys(page: dict[str, str]) -> None:
    async def scene(client: Client) -> None:
        await client.begin()
        await client.post("/scored_data", group())
        for call in chain.from_iterable(ROUTES.values()):
            method, path = call.split()
            body = {"/scored_data": group(), "/register": RUN}.get(path)
            reply = await client.call(method, path, body, **page)
            assert (reply.status, "detail" in reply.json) == (403, True), (call, reply.body)
        assert (await client.get("/status")).json == {"current_step": 0, "queue_size": 1}

    play(scene)


def test_leases() -> None:
    async def scene(client: Client) -> None:
        await client.begin(batch_size=4)
        for version in (1, 2):
            await client.post("/scored_data", group(group_overrides={"tandem_version": version}))
        reply = await client.get("/batch?lease=60&policy=3")
        lease = reply.json["tandem"]
        assert reply.headers["Tandem-Batch"] == lease["batch"]
        assert lease["versions"] == [1]
        for done in ("/renew", "/release"):
            assert (await client.post(done, {"batch": lease["batch"]})).json == {"status": "success"}
        assert (await client.post("/renew", {"batch": lease["batch"]})).json["status"] == "failure"
        again = (await client.get("/batch?lease=60")).json
        assert again["tandem"]["versions"] == [1]
        assert again["tandem"]["ids"] == lease["ids"]
        assert (await client.post("/ack", {"batch": again["tandem"]["batch"]})).json == {"status": "success"}
        assert (await client.post("/ack", {"batch": "none"})).json["status"] == "failure"
        assert (await client.post("/release", {"batch": again["tandem"]["batch"]})).json["status"] == "failure"
        assert (await client.get("/batch?policy=9&max_lag=2")).json == {"batch": None}  # the other is too old
        assert (await client.get("/status?detail=1")).json["detail"]["counts"]["dropped"] == 1
        await client.post("/scored_data", group())
        assert (await client.get("/batch?lease=60")).json["tandem"]["versions"] == [9]  # stamped at receipt
        for query in ("lease=x", "lease=-1", "lease=nan", "policy=1.5", "max_lag=-1", "policy=99999999999999999999"):
            assert (await client.get(f"/batch?{query}")).status == 422

    play(scene)


@pytest.mark.slow
def test_a_batch_whose_trainer_is_gone_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: Client) -> None:
        await client.begin(batch_size=4)
        await client.post("/scored_data", group())
        real, gone = app.web.Response.write_eof, asyncio.Event()

        async def broken(self: Any, data: bytes = b"") -> None:
            gone.set()
            monkeypatch.setattr(app.web.Response, "write_eof", real)
            # Sending ends when nothing is left in this process, not when little is.
            assert self._req.transport.get_write_buffer_limits() == (0, 0)
            raise ConnectionResetError("gone")

        monkeypatch.setattr(app.web.Response, "write_eof", broken)
        _, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
        writer.write(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n")
        await gone.wait()
        writer.close()
        assert len((await client.get("/batch")).json["batch"]) == 1

    play(scene)


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_what_is_sent_again_with_its_key_is_taken_once(path: str) -> None:
    async def scene(client: Client) -> None:
        await client.begin()
        body: Any = [group(), group()] if path.endswith("list") else group()
        for _ in range(3):
            assert (await client.post(path, body, Idempotency_Key="k1")).json["status"] == "received"
        queued = (await client.get("/status")).json["queue_size"]
        assert queued == (2 if path.endswith("list") else 1)
        await client.post(path, body, Idempotency_Key="k2")
        assert (await client.get("/status")).json["queue_size"] == 2 * queued
        for bad in ("x" * 201, "a b"):
            assert (await client.post(path, body, Idempotency_Key=bad)).status == 400

    play(scene)


def test_nothing_is_promised_before_it_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()

    async def committed() -> None:
        await gate.wait()

    async def scene(client: Client) -> None:
        monkeypatch.setattr(client.broker.store.journal, "committed", committed)
        calls = [
            asyncio.create_task(client.post(path, body))
            for path, body in (("/register", RUN), ("/scored_data", group()), ("/scored_data_list", [group()]))
        ] + [asyncio.create_task(client.get("/reset_data"))]
        while client.broker.store.counts["accepted"] < 2:
            await client.get("/info")  # answered meanwhile
        assert not any(call.done() for call in calls)
        gate.set()
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 4

    play(scene)


def test_a_ledger_that_cannot_be_written_is_no_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async def committed() -> None:
        raise BrokerError("the disk is full")

    async def scene(client: Client) -> None:
        monkeypatch.setattr(client.broker.store.journal, "committed", committed)
        reply = await client.post("/scored_data", group())
        assert (reply.status, reply.json["detail"]) == (503, "the disk is full")
        assert reply.headers["Retry-After"] == "5"

    play(scene)


def test_a_batch_is_out_only_when_all_of_it_was_sent() -> None:
    """Else a kill, or a connection that breaks, would lose the rest of it with nobody knowing."""

    async def scene(client: Client) -> None:
        await client.begin(batch_size=4)
        await client.post("/scored_data", group(images="x" * (12 << 20)))  # more than a connection holds
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]), limit=1 << 10)
        writer.write(b"GET /batch HTTP/1.1\r\nHost: b\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"

        async def counted() -> tuple[int, int]:
            detail = (await client.get("/status?detail=1")).json["detail"]
            return detail["leased_groups"], detail["counts"].get("trained", 0)

        assert await counted() == (1, 0)
        # Its trainer gave up waiting and asks anew, or another one of the same machine asks: this one is not out yet.
        assert (await client.get("/batch")).json == {"batch": None}
        assert await counted() == (1, 0)
        writer.transport.abort()
        while (await counted())[0]:
            pass
        assert await counted() == (0, 0)
        assert len((await client.get("/batch")).json["batch"]) == 1
        assert await counted() == (0, 1)

    play(scene)
