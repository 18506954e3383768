"""Places with vLLM's scheduler: first come, first served, and some are always free for a probe."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_vllm import FakeClient, LoRARequest, install, settle

from tandem.engines.vllm.protocol import ProbeRequest
from tandem.engines.vllm.server.admission import PROBES, Places
from tandem.engines.vllm.server.frontend import Frontend, Stopped
from tandem.engines.vllm.server.routes import probe


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


class Request:
    """Takes places until it is told to leave them."""

    def __init__(self, places: Places, answers: int, log: list[Request]):
        self.over = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(places, answers, log))

    async def _run(self, places: Places, answers: int, log: list[Request]) -> None:
        async with places.taken(answers):
            log.append(self)
            await self.over.wait()


def test_first_come_first_served_and_nobody_overtakes() -> None:
    async def body() -> None:
        places, log = Places(3), list[Request]()
        two, also_two, one = (Request(places, n, log) for n in (2, 2, 1))
        await settle()
        assert (log, places.waiting) == ([two], 2)  # one would fit, but came after who does not
        two.over.set()
        await settle()
        assert (log, places.waiting) == ([two, also_two, one], 0)
        also_two.over.set()
        one.over.set()
        await asyncio.gather(two.task, also_two.task, one.task)

    run(body)


def test_who_needs_no_place_waits_for_none() -> None:
    async def body() -> None:
        places, log = Places(1), list[Request]()
        one, two = Request(places, 1, log), Request(places, 1, log)
        await settle()
        none = Request(places, 0, log)
        await settle()
        assert log == [one, none]
        for request in (one, two, none):
            request.over.set()
        await asyncio.gather(one.task, two.task, none.task)

    run(body)


def test_a_request_for_more_than_there_is_has_all_places_to_itself() -> None:
    async def body() -> None:
        places, log = Places(3), list[Request]()
        many, one = Request(places, 8, log), Request(places, 1, log)
        await settle()
        assert log == [many]
        many.over.set()
        await settle()
        assert log == [many, one]
        one.over.set()
        await one.task

    run(body)


def test_who_gives_up_waiting_lets_those_behind_go_on() -> None:
    async def body() -> None:
        places, log = Places(2), list[Request]()
        one, two, other = Request(places, 1, log), Request(places, 2, log), Request(places, 1, log)
        await settle()
        assert log == [one]
        two.task.cancel()
        await settle()
        assert log == [one, other]

    run(body)


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_gives_up_as_its_turn_comes_gives_the_place_back(when: str) -> None:
    """Before it comes, or after, but before the task could run."""

    async def body() -> None:
        places, log = Places(1), list[Request]()
        async with places.taken(1):
            second, third = (Request(places, 1, log) for _ in range(2))
            await settle()
            if when == "before":
                second.task.cancel()
        if when == "after":
            second.task.cancel()
        await settle()
        assert log == [third]

    run(body)


@pytest.mark.slow
def test_no_place_is_lost_or_given_twice() -> None:
    """Requests of any size come, leave and give up in any order."""

    async def body() -> None:
        for seed in range(60):
            draw = random.Random(seed)
            places, log = Places(4), list[Request]()
            held: dict[Request, int] = {}
            active: list[Request] = []
            for _ in range(60):
                if draw.random() < 0.5 or not active:
                    answers = draw.randint(1, 6)
                    active.append(Request(places, answers, log))
                    held[active[-1]] = min(answers, 4)
                else:
                    ends = active.pop(draw.randrange(len(active)))
                    if draw.random() < 0.5:
                        ends.task.cancel()
                    else:
                        ends.over.set()
                if draw.random() < 0.7:
                    await settle()
                assert sum(held[r] for r in log if not r.task.done()) <= 4
            for request in active:
                request.over.set()
            await asyncio.gather(*(request.task for request in held), return_exceptions=True)
            assert places.waiting == 0
            async with asyncio.timeout(1), places.taken(4):
                pass

    run(body)


def test_empty_waits_for_the_last_and_is_not_fooled_by_the_next() -> None:
    async def body() -> None:
        places = Places(4)
        async with places.counted():
            waits = asyncio.ensure_future(places.empty())
            await settle()
            assert not waits.done()
        async with places.counted(SimpleNamespace(lora_name="a")):  # before the waiter could look
            await settle()
            assert not waits.done()
            assert places.users == {"a": 1}
        await waits
        assert (places.running, places.users) == (0, {})

    run(body)


@pytest.mark.parametrize("flying", [False, True])
def test_a_probe_has_a_place_however_many_wait(flying: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first of all that waited for a pause to end."""
    install(monkeypatch)

    async def body() -> None:
        client = FakeClient(counts=True)
        client.vllm_config.scheduler_config.max_num_seqs = 2 + PROBES
        front = Frontend(client)
        begun = [asyncio.ensure_future(front.generate([9], {"max_tokens": 9, "logprobs": 0}))] if flying else []
        await settle()
        await front.pause()
        new = [asyncio.ensure_future(front.generate([i + 1], {"max_tokens": 3, "logprobs": 0})) for i in range(5)]
        await settle()
        assert [first(one) for one in client.seen] == [9] * flying
        client.weights = 1
        goes_on, seen = client.resume_generation, []

        async def resume() -> None:
            seen.append([first(one) for one in client.seen[flying:]])
            await goes_on()

        monkeypatch.setattr(client, "resume_generation", resume)
        probing = asyncio.ensure_future(probe(front, ProbeRequest(tokens=[7, 8], max_tokens=2)))
        while not probing.done():
            assert {first(one) for one in client.seen} <= {9, 7, 1, 2}
            await client.step()
        assert seen == [[] if flying else [7, 7]], "the scheduler goes on as soon as the probe is there"
        await settle()
        assert front.state == "proving"
        assert not any(task.done() for task in [*begun, *new])  # nobody has vouched for these weights
        await front.set_version(1, "d")
        await front.resume()
        while not all(task.done() for task in [*begun, *new]):
            await client.step()
            assert len(client.requests) <= 2
        answers = [(await task).completions[0] for task in [*begun, *new]]
        assert all({front.steps[generation] for generation in answer.generations} == {1} for answer in answers)
        assert {one.prompt["cache_salt"] for one in client.seen[flying + 2 :]} == {front.salt}

    run(body)


def first(request: Any) -> int:
    """Of its prompt's tokens."""
    return int(request.prompt["prompt_token_ids"][0])


def test_an_adapter_asked_for_by_name_is_in_use_while_its_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    async def body() -> None:
        client = FakeClient(counts=True)
        client.vllm_config.scheduler_config.max_num_seqs = 1 + PROBES
        front, old = Frontend(client), LoRARequest("old", 1, "/old")
        tasks = [
            asyncio.ensure_future(front.generate([i + 1], {"max_tokens": 1, "logprobs": 0}, adapter=adapter))
            for i, adapter in enumerate((None, old))
        ]
        await settle()
        assert (front.places.waiting, front.places.users["old"]) == (1, 1)
        await client.step()
        assert (front.places.waiting, front.places.users["old"]) == (0, 1)
        await client.step()
        await asyncio.gather(*tasks)
        assert front.places.users == {}

    run(body)


def test_who_waits_for_a_place_learns_that_the_engine_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    async def body() -> None:
        client = FakeClient(counts=True)
        client.vllm_config.scheduler_config.max_num_seqs = 1 + PROBES
        front = Frontend(client)
        served, waits = (asyncio.ensure_future(front.generate([i + 1], {"max_tokens": 2})) for i in range(2))
        await settle()
        await front.stop("its trainer is gone")
        await client.step(2)
        served.cancel()  # as the route does with what is in flight
        with pytest.raises(Stopped, match="its trainer is gone"):
            await waits

    run(body)
