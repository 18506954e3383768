"""Recorded traffic of Atropos' clients and of its own broker, replayed: every answer is the same, or better on purpose.

The recordings are of run-api 0.4.0. Where our answer differs, the difference is written down here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.brokers import ENV, Client, Reply, play

SAMPLES = Path(__file__).parent / "samples"
ELIDED = re.compile(r"\.\.\. (\d+) more \.\.\.")
RUN = {
    "wandb_group": "heldout-group",
    "wandb_project": "heldout-project",
    "batch_size": 8,
    "max_token_len": 2048,
    "checkpoint_dir": "/tmp/heldout_ckpt",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 1000,
}


def whole(value: Any) -> Any:
    """A recorded value with what was cut out of lists filled in by the entry before."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if not isinstance(value, list):
        return value
    made: list[Any] = []
    for one in value:
        if isinstance(one, str) and (elision := ELIDED.fullmatch(one)):
            made += [made[-1]] * int(elision[1])
        else:
            made.append(whole(one))
    return made


def exchanges(name: str) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = whole(json.loads((SAMPLES / f"{name}.json").read_text()))["exchanges"]
    return recorded


async def replay(client: Client, exchange: dict[str, Any]) -> Reply:
    sent = dict(exchange["request_headers"])
    zipped = sent.pop("Content-Encoding", None) == "gzip"
    body = exchange["request"]
    body = None if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return await client.call(exchange["method"], exchange["path"], body, zipped, **sent)


def same(reply: Reply, exchange: dict[str, Any]) -> None:
    assert reply.status == exchange["status"], reply.body
    wanted = exchange["response"]
    kind = exchange["response_headers"]["Content-Type"]
    assert reply.headers["Content-Type"].split(";")[0] == kind.split(";")[0]
    if kind.startswith("text/plain"):
        assert reply.body.decode() == wanted
    elif isinstance(wanted, dict) and "uuid" in wanted:
        assert set(reply.json) == {"uuid"}
        assert 0 <= reply.json["uuid"] < 2**128
    else:
        assert simple(reply.json) == simple(wanted)


def simple(answer: Any) -> Any:
    """Without what a parser says in its own words: of a 422 the first problem's place."""
    if isinstance(answer, dict) and isinstance(answer.get("detail"), list):
        assert {"type", "loc", "msg"} <= set(answer["detail"][0])
        return answer["detail"][0]["loc"]
    if isinstance(answer, dict) and answer.get("status") == "failure":
        return {"status": "failure", "error": type(answer["error"])}
    return answer


DIFFERENT = {
    # The original's fault, and what we say: (file, place): (status, part of the answer).
    ("run_api_answers_and_errors", 10): (422, b"no environment has env_id 99"),
    ("run_api_answers_and_errors", 14): (422, b"Expected `array"),
    ("run_api_answers_and_errors", 19): (200, b'{"status":"received"}'),  # was: in the buffer for ever
    ("run_api_answers_and_errors", 23): (200, b"Trainer not registered"),  # was: 500, for ever after
    ("run_api_answers_and_errors", 26): (422, b"JSON decode error"),
    ("run_api_answers_and_errors", 27): (200, b'{"batch":null}'),  # was: 500, and the batch was gone
    ("run_api_answers_and_errors", 29): (200, b'{"current_step":0,"queue_size":0}'),  # nothing was served
    ("run_api_first_boot", 8): (422, b"no environment has env_id 0"),
    ("run_api_first_boot", 11): (200, b'{"batch_size":8,"max_token_len":512}'),  # early data did not break it
    ("run_api_first_boot", 12): (200, b'{"batch":null}'),
}


@pytest.mark.parametrize("name", ["run_api_first_boot", "run_api_answers_and_errors"])
def test_whole_sessions(name: str) -> None:
    async def scene(client: Client) -> None:
        for place, exchange in enumerate(exchanges(name)):
            reply = await replay(client, exchange)
            if (name, place) in DIFFERENT:
                status, part = DIFFERENT[name, place]
                assert reply.status == status, (place, reply.body)
                assert part in reply.body, (place, reply.body)
            else:
                same(reply, exchange)

    play(scene)


async def begin(client: Client) -> None:
    assert (await client.post("/register", RUN)).status == 200
    assert (await client.get("/batch")).json == {"batch": None}
    assert await client.env(group_size=4) == 0


def test_register_and_info() -> None:
    async def scene(client: Client) -> None:
        for exchange in exchanges("register"):
            same(await replay(client, exchange), exchange)
        for exchange in exchanges("info_wandb_status")[:2]:
            same(await replay(client, exchange), exchange)

    play(scene)


def test_an_environment_waits_for_the_first_poll() -> None:
    wait, success = exchanges("register_env")

    async def scene(client: Client) -> None:
        same(await replay(client, wait), wait)
        await client.post("/register", RUN)
        same(await replay(client, wait), wait)
        await client.get("/batch")
        same(await replay(client, success), success)

    play(scene)


@pytest.mark.parametrize(
    "name",
    [
        "scored_data",
        "scored_data_default_collect_trajectories",
        "scored_data_list",
        "scored_data_openai_server_type",
        "scored_data_partial_groups",
        "disconnect_env",
    ],
)
def test_submissions(name: str) -> None:
    async def scene(client: Client) -> None:
        await begin(client)
        for exchange in exchanges(name):
            same(await replay(client, exchange), exchange)

    play(scene)


def test_status_env() -> None:
    first, later = exchanges("status_env")

    async def scene(client: Client) -> None:
        await begin(client)
        same(await replay(client, first), first)
        (scored,) = exchanges("scored_data")
        for _ in range(10):
            await replay(client, scored)
        for _ in range(3):
            await client.get("/batch")
        same(await replay(client, later), later)

    play(scene)


def test_a_batch_has_the_groups_as_they_were_sent() -> None:
    empty, full = exchanges("batch")

    async def scene(client: Client) -> None:
        await begin(client)
        same(await replay(client, empty), empty)
        for group in full["response"]["batch"]:
            sent = {key: value for key, value in group.items() if value is not None}  # absent comes back as null
            assert (await client.call("POST", "/scored_data", json.dumps(sent).encode(), zipped=True)).status == 200
        reply = await replay(client, full)
        same(reply, full)
        assert list(reply.json["batch"][0].keys() ^ full["response"]["batch"][0].keys()) == []

    play(scene)


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_empty_and_null_come_back_as_sent(path: str) -> None:
    (scored,) = exchanges("scored_data_default_collect_trajectories")

    async def scene(client: Client) -> None:
        await begin(client)
        sent = scored["request"]
        for _ in range(2):
            await client.post(path, [sent] if path.endswith("list") else sent)
        for group in (await client.get("/batch")).json["batch"]:
            assert group == sent | {"generation_params": None, "inference_logprobs": None}

    play(scene)


def test_head_and_unknown_methods() -> None:
    async def scene(client: Client) -> None:
        assert (await client.call("HEAD", "/info")).status == 405
        assert (await client.post("/status-env", ENV)).status == 405
        assert (await client.get("/info/")).status == 404

    play(scene)
