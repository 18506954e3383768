"""Which weights a token comes from, and when it may be given out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_vllm import SEQUENCES, FakeClient, FlatLogprobs, LoRARequest, install, settle

from tandem.engines.vllm.protocol import IN_PLACE, ProbeRequest, Refusal
from tandem.engines.vllm.server.frontend import ANSWERED, Frontend, PartialCompletion, RequestRecord, Stopped
from tandem.engines.vllm.server.routes import probe as question
from tandem.engines.vllm.speedups import AT_ONCE, PIECES_KEY

Body = Callable[[Frontend, FakeClient], Awaitable[None]]


COUNTS = {"tokens": False}
"""Whether the fake counts tokens in flight; otherwise they are handed over one by one."""


@pytest.fixture(autouse=True, params=[False, True], ids=["one by one", "counted"])
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    install(monkeypatch)
    monkeypatch.setitem(COUNTS, "tokens", request.param)


def run(body: Body) -> None:
    async def main() -> None:
        client = FakeClient(counts=COUNTS["tokens"])
        client.vllm_config.model_config.enable_sleep_mode = False
        await asyncio.wait_for(body(Frontend(client), client), 20)

    asyncio.run(main())


def submit(front: Frontend, tokens: int, **more: Any) -> asyncio.Task[RequestRecord]:
    return asyncio.ensure_future(front.generate([1, 2, 3], {"max_tokens": tokens, "logprobs": 0}, **more))


def steps(front: Frontend, record: RequestRecord) -> list[int]:
    return front.steps_of(record.completions[0])


async def publish(front: Frontend, client: FakeClient, step: int, *, verify: bool = False) -> None:
    await front.pause()
    client.weights = step
    if verify:
        async with front.proving():
            pass
    await front.set_version(step, f"digest {step}")
    await front.resume()


async def pending(task: asyncio.Task[Any]) -> bool:
    await settle()
    return not task.done()


def test_a_request_in_flight_carries_the_exact_step_of_each_token() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 4)
        task = submit(front, 9)
        await client.step(2)
        await publish(front, client, 5, verify=True)
        await client.step(3)
        await publish(front, client, 6)
        await client.step(4)
        record = await task
        assert steps(front, record) == [4, 4, 5, 5, 5, 6, 6, 6, 6]
        assert record.completions[0].tokens == [4, 4, 5, 5, 5, 6, 6, 6, 6], "the fake samples its weights' number"
        assert (front.step, front.digest, front.updates) == (6, "digest 6", 3)
        assert client.calls == [], "keys and values of those in flight stay"

    run(body)


def test_each_of_several_completions_carries_its_steps() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        task: asyncio.Task[RequestRecord] = asyncio.ensure_future(front.generate([1], {"max_tokens": 4, "n": 2}))
        await client.step()
        await publish(front, client, 1)
        await publish(front, client, 2)
        await client.step(3)
        assert [front.steps_of(answer) for answer in (await task).completions] == [[-1, 2, 2, 2]] * 2

    run(body)


def test_nothing_is_sampled_while_paused() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        task = submit(front, 3)
        await client.step()
        await front.pause()
        await front.pause()
        await client.step(5)
        assert client.requests[0].made == 1
        assert await front.resume() >= 0
        await client.step(2)
        assert steps(front, await task) == [-1, -1, -1], "nobody stamped anything"

    run(body)


def test_new_requests_wait_for_the_end_of_a_pause_and_begin_in_its_era() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        task = submit(front, 1)
        assert await pending(task)
        assert not client.seen, "it must not be handed to the scheduler with the old salt"
        before = front.salt
        await front.set_version(1, "")
        await front.resume()
        await client.step()
        assert steps(front, await task) == [1]
        assert client.seen[0].prompt["cache_salt"] == front.salt != before

    run(body)


def test_what_is_sampled_while_proving_is_held_back() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 1)
        flying = submit(front, 3)
        await client.step(2)
        await front.pause()
        client.weights = 2
        async with front.proving():
            pass
        new = submit(front, 1)
        await client.step(3)
        assert not client.requests, "both are sampled to their end"
        assert await pending(flying)
        assert await pending(new)
        await front.set_version(2, "")
        assert await pending(flying), "stamped is not resumed"
        await front.resume()
        assert steps(front, await flying) == [1, 1, 2]
        assert steps(front, await new) == [2]

    run(body)


def test_what_was_finished_before_a_pause_is_given_out_during_it() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 1)
        task = submit(front, 1)
        await client.step()
        await front.pause()
        assert steps(front, await task) == [1]

    run(body)


def test_a_failed_proof_gives_out_nothing_and_the_next_publish_recovers() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        client.weights = 7
        async with front.proving():
            pass
        held = submit(front, 1)
        await client.step()
        assert ("tandem_clear_cache", ()) not in client.calls
        await front.stop("torn")
        assert client.calls.count(("tandem_clear_cache", ())) == 1, "keys and values of torn weights may be no numbers"
        with pytest.raises(Stopped, match="torn"):
            await held
        with pytest.raises(Stopped, match="torn"):
            await front.generate([1], {"max_tokens": 1})
        with pytest.raises(Stopped, match="torn"):
            await front.resume()
        with pytest.raises(Stopped, match="torn"):
            await front.set_version(7, "")
        assert front.state == "stopped"
        assert client.paused
        await publish(front, client, 8, verify=True)
        task = submit(front, 1)
        await client.step()
        assert steps(front, await task) == [8]

    run(body)


def test_tokens_of_weights_that_were_never_proven_reach_nobody() -> None:
    """Also where the trainer does not stop the engine but publishes again."""

    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        async with front.proving():
            pass
        waits = asyncio.ensure_future(front.broken_off())
        await settle()
        await publish(front, client, 2)
        with pytest.raises(Stopped, match="before they were proven"):
            await waits

    run(body)


def test_a_stop_ends_what_is_in_flight() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 1)
        waits = [asyncio.ensure_future(front.broken_off()) for _ in range(3)]
        await settle()
        await front.stop("disk full")
        for wait in waits:
            with pytest.raises(Stopped, match="disk full"):
                await wait
        again = asyncio.ensure_future(front.broken_off())
        assert await pending(again), "a stop ends those who were there"
        again.cancel()

    run(body)


def test_weights_that_were_written_are_not_served_without_a_stamp() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        await front.resume()  # nothing was written
        await front.pause()
        front.written = True
        with pytest.raises(Refusal, match="stamp"):
            await front.resume()
        await front.set_version(1, "")
        await front.resume()
        await front.pause()
        async with front.proving():
            pass
        with pytest.raises(Refusal, match="stamp"):
            await front.resume()
        assert front.state == "proving"

    run(body)


def test_a_version_that_a_stop_took_back_is_not_served_later() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 1)
        await front.pause()
        await front.set_version(2, "")
        await front.stop("no")
        await front.pause()
        with pytest.raises(Refusal, match="stamp"):
            await front.resume()
        assert front.step == 1

    run(body)


def test_finishing_waits_for_requests_and_keeps_new_ones_out() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        first = submit(front, 2)
        await client.step()
        pause = asyncio.ensure_future(front.pause(finish=True))
        assert await pending(pause)
        second = submit(front, 1)
        await client.step()
        await first
        await pause
        assert len(client.seen) == 1
        await front.resume()
        await client.step()
        await second

    run(body)


def test_a_pause_that_nobody_ends_stops_the_engine() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        front.lease.renew(0.01)
        waits = submit(front, 1)
        with pytest.raises(Stopped, match="never resumed"):
            await waits
        assert front.state == "stopped"

    run(body)


def test_a_proof_that_nobody_ends_stops_the_engine() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        front.lease.renew(0.05)
        async with front.proving():
            pass
        waits = submit(front, 1)
        await client.step()
        with pytest.raises(Stopped, match="never resumed"):
            await waits
        assert front.state == "stopped"

    run(body)


def test_a_lease_ends_with_its_pause_and_is_renewed_by_the_next() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.pause()
        front.lease.renew(0.02)
        await front.resume()
        await front.pause()
        front.lease.renew(60)
        await asyncio.sleep(0.06)
        assert front.state == "paused"
        front.lease.renew(0.01)
        front.lease.renew(60)
        await asyncio.sleep(0.05)
        assert front.state == "paused"
        await front.resume()

    run(body)


def test_swapped_adapters_keep_the_version_a_request_began_with() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        one, two = LoRARequest("one", 1, "x"), LoRARequest("two", 2, "y")
        await front.set_version(1, "", one)
        old = submit(front, 4)
        await client.step(2)
        await front.set_version(2, "", two)
        new = submit(front, 2)
        by_name = submit(front, 2, adapter=one)
        unstamped = submit(front, 2, adapter=LoRARequest("three", 3, "z"))
        await client.step(2)
        assert steps(front, await old) == [1, 1, 1, 1]
        assert steps(front, await new) == [2, 2]
        assert steps(front, await by_name) == [1, 1]
        assert steps(front, await unstamped) == [-1, -1]
        assert [request.adapter.lora_name for request in client.seen] == ["one", "two", "one", "three"]
        assert front.state == "serving"
        assert not front.places.users, "nobody uses an adapter any more"
        front.forget(two)
        assert (front.adapter, front.step) == (None, -1), "the base is no version"

    run(body)


def test_an_adapter_that_is_written_in_place_changes_under_requests_in_flight() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        front.adapter = LoRARequest(IN_PLACE, 1_000_000, "in-memory")
        await front.pause()
        await front.set_version(1, "", front.adapter)
        await front.resume()
        task = submit(front, 3)
        await client.step()
        await front.pause()
        await front.set_version(2, "", front.adapter)
        await front.resume()
        await client.step(2)
        assert steps(front, await task) == [1, 2, 2]

    run(body)


def test_users_of_an_adapter_are_counted() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await front.set_version(1, "", LoRARequest("one", 1, "x"))
        task = submit(front, 2)
        await client.step()
        assert (front.places.users["one"], front.places.running) == (1, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (front.places.users["one"], front.places.running, client.aborted) == (0, 0, 1)

    run(body)


def test_a_probe_scores_and_samples_by_the_new_weights_and_sees_an_old_cache() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 1)
        for stale in (False, True):
            await front.pause()
            client.weights = 3
            async with front.proving():
                pass
            if stale:
                client.cache.add(front.salt)
            ask = ProbeRequest(tokens=[5, 6, 7], max_tokens=2)
            probe = asyncio.ensure_future(question(front, ask))
            while not probe.done():
                await client.step()
            result = probe.result()
            assert result["scored"] == [-3.0, -3.0]
            assert result["tokens"] == [3, 3]
            assert result["logprobs"] == [-3.0, -3.0]
            assert result["cached"] == (3 if stale else 0)
            sampled, scored = (request.prompt["cache_salt"] for request in client.seen[-2:])
            assert sampled == front.salt != scored, "what scoring puts into the cache would be taken for something old"
            await front.set_version(3, "")
            await front.resume()

    run(body)


@pytest.mark.parametrize(("at_once", "turns"), [(None, 0), ("1", 200), ("8", 25)])
def test_the_public_pause_and_the_quick_one_are_the_same(
    monkeypatch: pytest.MonkeyPatch, at_once: str | None, turns: int
) -> None:
    """Tokens that had left the engine before it stood still are filed under the weights that made them.

    vLLM files those of so many requests at once, and lets others have their turn before it goes on.
    """
    if at_once is not None:
        monkeypatch.setenv(AT_ONCE, at_once)

    class Core:
        def __init__(self, client: FakeClient):
            self.client = client
            self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()

        async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
            await self.client.pause_generation(mode=mode, clear_cache=clear_cache)
            self.outputs_queue.put_nowait("a step's tokens")
            self.handler = asyncio.ensure_future(self.handle())

        async def handle(self) -> None:
            for _ in range(50):
                await asyncio.sleep(0)
            self.outputs_queue.get_nowait()
            for _ in range(turns):
                await asyncio.sleep(0)
            request = self.client.requests[0]
            request.outputs.put_nowait(self.client._output(request))

    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 1)
        task = submit(front, 2)
        await client.step()
        client.engine_core = Core(client)  # type: ignore[attr-defined]
        client.vllm_config.scheduler_config.max_num_seqs = 200
        await front.pause()
        await front.set_version(2, "d")
        await front.resume()
        assert steps(front, await task) == [1, 1]

    run(body)


# Requests for a policy step that is to come


def test_a_request_waits_for_its_step_and_is_in_nobodys_way() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 4)
        early = [submit(front, 1, min_step=5) for _ in range(2 * SEQUENCES)]
        assert await pending(early[0])
        other = submit(front, 1, min_step=4)
        await client.step()
        assert steps(front, await other) == [4]
        await publish(front, client, 4)  # again, as after a restart
        await client.step()
        assert all([await pending(task) for task in early])
        await publish(front, client, 5)
        await client.step(4)
        assert [steps(front, await task) for task in early] == [[5]] * len(early)

    run(body)


def test_a_request_for_an_adapter_that_is_to_come_is_sampled_by_it() -> None:
    """A way that never pauses stamps while the engine serves."""

    async def body(front: Frontend, client: FakeClient) -> None:
        await front.set_version(1, "d", LoRARequest("one", 1, "/one"))
        early = submit(front, 1, min_step=2)
        assert await pending(early)
        await front.set_version(2, "d", LoRARequest("two", 2, "/two"))
        await client.step()
        assert steps(front, await early) == [2]
        assert client.seen[0].adapter.lora_name == "two"

    run(body)


@pytest.mark.parametrize(("coming", "samples"), [(5, True), (4, False), (None, False)])
def test_a_request_is_sampled_beside_the_proof_of_its_own_step_alone(coming: int | None, samples: bool) -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        await publish(front, client, 4)
        early = submit(front, 1, min_step=5)
        await front.pause(step=coming)
        async with front.proving():
            pass
        await client.step()
        assert bool(client.seen) is samples
        assert await pending(early), "nobody has said that the weights are right"
        await front.set_version(coming or 4, "d")
        await front.resume()
        assert await pending(early) is not samples

    run(body)


def test_a_request_for_a_step_that_fails_is_told() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        early = submit(front, 1, min_step=1)
        await front.pause(step=1)
        await front.stop("torn")
        with pytest.raises(Stopped, match="torn"):
            await early

    run(body)


def quick(client: FakeClient) -> None:
    """Give it what pauses the scheduler alone, so that requests are taken meanwhile."""
    client.engine_core = SimpleNamespace(pause_scheduler_async=client.pause_generation)  # type: ignore[attr-defined]


async def answered() -> None:
    """A pause has been answered, so those that there is room for are handed in."""
    await asyncio.sleep(2 * ANSWERED)
    await settle()


def salts(client: FakeClient) -> list[str]:
    return [request.prompt["cache_salt"] for request in client.seen]


def test_what_waits_for_a_step_is_with_vllm_before_it_goes_on() -> None:
    """So the first pass has all of them; the probe, which is asked last, does not hold them up."""

    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)
        await publish(front, client, 4)
        early, late = submit(front, 1, min_step=5), submit(front, 1, min_step=6)
        other = submit(front, 1)
        await client.step()
        assert steps(front, await other) == [4]
        client.seen.clear()
        await front.pause(step=5)
        more = submit(front, 1, min_step=5)
        other = submit(front, 1)
        await answered()
        assert len(client.seen) == 2
        client.weights = 5
        proof = asyncio.ensure_future(question(front, ProbeRequest(tokens=[1, 2], temperature=1.0, max_tokens=1)))
        await settle()
        assert len(client.seen) == 5, "two of the probe, and who asked for no step"
        assert len({salt.removesuffix("-scored") for salt in salts(client)}) == 1, "one era"
        assert salts(client)[0] == front.salt
        await client.step()
        await proof
        await front.set_version(5, "d")
        await front.resume()
        assert [steps(front, await task) for task in (early, more, other)] == [[5]] * 3
        assert await pending(late)
        late.cancel()

    run(body)


def test_a_pause_is_answered_before_requests_are_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes some turns of the event loop to answer, and long to hand in a whole wave."""
    monkeypatch.setattr("tandem.engines.vllm.server.frontend.ANSWERED", 0.3)

    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)
        early = submit(front, 1, min_step=1)
        await front.pause(step=1)
        await settle()
        assert not client.seen
        await asyncio.sleep(0.4)
        await settle()
        assert client.seen
        await front.set_version(1, "d")
        await front.resume()
        await client.step()
        assert steps(front, await early) == [1]

    run(body)


def test_a_command_comes_between_two_requests_that_are_handed_in() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)
        early = [submit(front, 1, min_step=1) for _ in range(8)]
        await front.pause(step=1)
        while not client.seen:
            await asyncio.sleep(0)
        assert len(client.seen) == 1
        await answered()
        assert len(client.seen) == 8
        await front.set_version(1, "d")
        await front.resume()
        await client.step()
        assert [steps(front, await task) for task in early] == [[1]] * 8

    run(body)


def test_no_more_is_handed_in_early_than_one_pass_reads() -> None:
    """20 tokens: of each prompt all that was not read before, of the same again a block of the cache."""

    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)

        def ask(*prompt: int) -> asyncio.Task[RequestRecord]:
            return asyncio.ensure_future(front.generate(prompt, {"max_tokens": 1}, min_step=1))

        tasks = [ask(*range(9)), ask(*range(9)), ask(*range(1, 10)), ask(7, 7), ask(7)]
        await front.pause(step=1)
        await answered()
        assert [len(request.prompt["prompt_token_ids"]) for request in client.seen] == [9, 9, 9, 1]
        await front.set_version(1, "d")
        await front.resume()
        await client.step()
        await asyncio.gather(*tasks)

    run(body)


def keeps_adapters(client: FakeClient) -> None:
    client.vllm_config.lora_config = object()


def keeps_replicas(client: FakeClient) -> None:
    client.vllm_config.parallel_config.data_parallel_size = 2


def can_sleep(client: FakeClient) -> None:
    client.vllm_config.model_config.enable_sleep_mode = True


def pauses_as_vllm_does(client: FakeClient) -> None:
    del client.engine_core  # type: ignore[attr-defined]


@pytest.mark.parametrize("of", [keeps_adapters, keeps_replicas, can_sleep, pauses_as_vllm_does])
def test_what_an_engine_could_not_take_while_it_stands_still_waits(of: Callable[[FakeClient], None]) -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)
        of(client)
        early = submit(front, 1, min_step=1)
        await front.pause(step=1)
        await answered()
        assert not client.seen
        await front.set_version(1, "d")
        await front.resume()
        await client.step()
        assert steps(front, await early) == [1]

    run(body)


def test_nothing_is_handed_in_early_beside_what_is_in_flight() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)
        flying = submit(front, 2)
        await client.step()
        early = submit(front, 1, min_step=1)
        await front.pause(step=1)
        await answered()
        assert len(client.seen) == 1
        await front.set_version(1, "d")
        await front.resume()
        await client.step()
        assert steps(front, await flying) == [-1, 1]
        assert steps(front, await early) == [1]

    run(body)


def test_who_was_handed_in_early_for_a_step_that_nobody_publishes_is_told() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        quick(client)
        early = submit(front, 1, min_step=1)
        await front.pause(step=1)
        await answered()
        assert client.seen
        broken_off = asyncio.ensure_future(front.broken_off())
        await settle()
        await front.resume()
        with pytest.raises(Stopped, match="was not published"):
            await broken_off
        early.cancel()

    run(body)


def test_an_answer_that_comes_whole_is_split_by_what_was_counted_at_each_pause() -> None:
    """Where vLLM counts tokens in flight, they are handed over once, at the end."""
    record = RequestRecord([PartialCompletion(), PartialCompletion()])
    record.completions[0].marks += [(3, 2), (4, 2), (5, 4)]
    record.completions[1].marks += [(3, 9)]
    parts = [
        SimpleNamespace(index=0, token_ids=[7] * 6, logprobs=None, text="", finish_reason="stop"),
        SimpleNamespace(index=1, token_ids=[7] * 3, logprobs=None, text="", finish_reason="stop"),
    ]
    record.add(SimpleNamespace(prompt_logprobs=None, num_cached_tokens=0, outputs=parts), 6)
    assert record.completions[0].generations == [3, 3, 5, 5, 6, 6]
    assert record.completions[1].generations == [3, 3, 3]


def test_what_a_token_itself_has_is_told_without_the_others() -> None:
    """What was sampled comes first, and need not be the likeliest; answers come whole or in pieces."""
    record = RequestRecord([PartialCompletion()])
    for tokens in ([7, 8], [9]):
        logprobs = FlatLogprobs(
            [{t: SimpleNamespace(logprob=-float(t)), 5: SimpleNamespace(logprob=-0.5)} for t in tokens]
        )
        part = SimpleNamespace(index=0, token_ids=tokens, logprobs=logprobs, text="", finish_reason=None)
        record.add(SimpleNamespace(prompt_logprobs=None, num_cached_tokens=0, outputs=[part]), 6)
    (answer,) = record.completions
    assert answer.own_logprobs == [-7.0, -8.0, -9.0]
    assert answer.logprobs == [{7: -7.0, 5: -0.5}, {8: -8.0, 5: -0.5}, {9: -9.0, 5: -0.5}]


def test_an_answer_ended_from_without_has_no_token_without_its_logprob() -> None:
    for finish, tokens in (("abort", [7, 8]), ("length", [7, 8, 9])):
        logprobs = FlatLogprobs([{token: SimpleNamespace(logprob=-1.0)} for token in tokens])
        record = RequestRecord([PartialCompletion(marks=[(3, 1)])])
        part = SimpleNamespace(index=0, token_ids=[7, 8, 9], logprobs=logprobs, text="", finish_reason=finish)
        record.add(SimpleNamespace(prompt_logprobs=None, num_cached_tokens=0, outputs=[part]), 6)
        (answer,) = record.completions
        assert (answer.tokens, answer.generations) == (tokens, [3, 6, 6][: len(tokens)])
        assert len(answer.logprobs) == len(answer.own_logprobs) == len(tokens)
    part.logprobs, part.finish_reason = None, "abort"
    record = RequestRecord([PartialCompletion()])
    record.add(SimpleNamespace(prompt_logprobs=None, num_cached_tokens=0, outputs=[part]), 6)
    assert record.completions[0].tokens == [7, 8, 9], "where none were asked for none are missing"


def test_logprobs_come_in_pieces_where_nobody_reads_an_answer_before_its_end() -> None:
    async def body(front: Frontend, client: FakeClient) -> None:
        for params, wanted in (({}, False), ({"detokenize": True}, False), ({"detokenize": False}, COUNTS["tokens"])):
            task = asyncio.ensure_future(front.generate([1], {"max_tokens": 1, "logprobs": 0, **params}))
            await client.step()
            await task
            assert bool((client.seen[-1].params.extra_args or {}).get(PIECES_KEY)) == wanted

    run(body)


async def _marked_by_the_processor() -> list[int]:
    client = FakeClient()
    client.output_processor = SimpleNamespace(request_states={})
    frontend = Frontend(client)
    request = asyncio.create_task(frontend.generate([1], {"max_tokens": 3}))
    await settle()
    (key,) = frontend._live
    count = SimpleNamespace(num_output_tokens=lambda: 2)
    state = SimpleNamespace(parent_req=None, external_req_id=key, request_index=0, detokenizer=count)
    client.output_processor.request_states["internal"] = state
    await frontend.pause()
    await frontend.set_version(8, "")
    await frontend.resume()
    await client.step(3)
    return (await request).completions[0].generations


def test_tokens_in_flight_at_a_pause_are_counted_by_vllms_own_record() -> None:
    assert asyncio.run(_marked_by_the_processor()) == [0, 0, 1]
