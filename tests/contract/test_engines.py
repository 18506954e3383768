"""What every engine keeps: keys fix tokens, neighbours change nothing, a pause loses nothing, versions are true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiny_policy import live_policy

from tandem.config.registry import find, names
from tandem.engines.base import (
    Engine,
    EngineSpec,
    ExportsWeights,
    LoadsVersions,
    ReceivesBroadcast,
    Relaunches,
    ReportsChecksums,
    TakesAdapter,
)
from tandem.errors import EngineError
from tandem.model.policy import Policy
from tandem.types import Completion, PolicyVersion, Sampling

CONTEXT = 96
PROMPTS = [[72, 105], [5, 99, 31, 7], list(range(1, 21)), [3], [100] * 9]
REQUESTS = [(prompt, Sampling(max_tokens=6 + 4 * i), 1000 + i) for i, prompt in enumerate(PROMPTS)]
"""Requests that differ in prompt, length and key."""

ENGINES = sorted(set(names("engines")) - {"vllm"})
"""Engines that run in this very process; vllm is a server of its own environment, with its own suite in integration."""

Work = Callable[[Engine], Awaitable[Any]]


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model) as live:
        yield live


@pytest.fixture(params=ENGINES)
def engine_kind(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def spec(engine_kind: str) -> EngineSpec:
    return find("engines", engine_kind)()  # type: ignore[no-any-return]


@pytest.fixture
def run(spec: EngineSpec, policy: Policy) -> Callable[[Work], Any]:
    """Open an engine, do something with it, close it."""

    def run(work: Work) -> Any:
        async def main() -> Any:
            async with spec.open(policy, context=CONTEXT) as engine:
                return await asyncio.wait_for(work(engine), 30)

        return asyncio.run(main())

    return run


async def together(engine: Engine, requests: Sequence[tuple[Sequence[int], Sampling, int]]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(*request) for request in requests)))


async def alone(engine: Engine, requests: Sequence[tuple[Sequence[int], Sampling, int]]) -> list[Completion]:
    return [await engine.generate(*request) for request in requests]


async def underway(engine: Engine) -> None:
    """Return once something was sampled of what is asked."""
    while (await engine.health()).running == 0:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)


async def long_keys(engine: Engine, n: int) -> list[tuple[list[int], Sampling, int]]:
    """Requests that are known to go on for 60 tokens."""
    tried = [([8], Sampling(max_tokens=60), key) for key in range(10 * n)]
    done = await together(engine, tried)
    return [request for request, c in zip(tried, done, strict=True) if len(c.tokens) == 60][:n]


async def until_idle(engine: Engine) -> None:
    """Return once nothing runs or waits."""
    while (health := await engine.health()).running + health.waiting:
        await asyncio.sleep(0.001)


def same(a: Sequence[Completion], b: Sequence[Completion]) -> bool:
    """Same tokens and, within float32's noise between batch shapes, the same logprobs."""
    return [(c.tokens, c.versions, c.finish) for c in a] == [(c.tokens, c.versions, c.finish) for c in b] and all(
        x.logprobs == pytest.approx(y.logprobs, abs=1e-5) for x, y in zip(a, b, strict=True)
    )


def test_a_completion_is_whole(run: Callable[[Work], Any]) -> None:
    for (_, sampling, _), c in zip(REQUESTS, run(lambda engine: together(engine, REQUESTS)), strict=True):
        assert 1 <= len(c.tokens) <= sampling.max_tokens
        assert len(c.tokens) == len(c.logprobs) == len(c.versions)
        assert all(logprob <= 0 for logprob in c.logprobs)
        assert c.finish == "stop" or (c.finish == "length" and len(c.tokens) == sampling.max_tokens)


def test_the_key_fixes_the_tokens(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> tuple[list[Completion], list[Completion]]:
        requests = [([72, 105], Sampling(max_tokens=12), key) for key in range(6)]
        return await together(engine, requests), await together(engine, requests)

    first, again = run(work)
    other, _ = run(work)
    assert same(first, again)
    assert same(first, other), "another engine of the same weights"
    assert len({c.tokens for c in first}) == 6


@pytest.mark.slow
def test_neighbours_change_nothing(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        lonely = await alone(engine, REQUESTS)
        assert same(await together(engine, REQUESTS), lonely)
        assert same((await together(engine, REQUESTS[::-1]))[::-1], lonely)
        crowd = [([42], Sampling(max_tokens=5 + key % 7, temperature=1.5), key) for key in range(20)]
        assert same((await together(engine, [*crowd, *REQUESTS]))[20:], lonely)

    run(work)


@pytest.mark.slow
def test_joining_late_changes_nothing(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        lonely = await alone(engine, REQUESTS)
        others = [asyncio.create_task(engine.generate(*request)) for request in await long_keys(engine, 3)]
        await underway(engine)
        tasks = []
        for request in REQUESTS:
            tasks.append(asyncio.create_task(engine.generate(*request)))
            await asyncio.sleep(0.002)
        assert same(await asyncio.gather(*tasks), lonely)
        await asyncio.gather(*others)

    run(work)


def test_each_request_has_its_own_end(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        (prompt, _, key), *_ = await long_keys(engine, 1)
        lengths = [1, 17, 3, 60, 8]
        done = await together(engine, [(prompt, Sampling(max_tokens=n), key) for n in lengths])
        assert [len(c.tokens) for c in done] == lengths
        longest = done[3].tokens
        assert all(c.tokens == longest[: len(c.tokens)] and c.finish == "length" for c in done)

    run(work)


def test_the_context_is_an_end(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        assert engine.context == CONTEXT
        (_, _, key), *_ = await long_keys(engine, 1)
        done = await engine.generate([8] * (CONTEXT - 1), Sampling(max_tokens=60), key)
        assert len(done.tokens) == 1

    run(work)


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 50])
def test_a_prompt_without_room_is_an_error(run: Callable[[Work], Any], length: int) -> None:
    async def work(engine: Engine) -> None:
        with pytest.raises(EngineError, match=str(CONTEXT)):
            await engine.generate([8] * length, Sampling(), 0)
        await engine.generate([8], Sampling(max_tokens=2), 0)  # nobody else's fault

    run(work)


def test_greedy_needs_no_key(run: Callable[[Work], Any]) -> None:
    requests = [([72, 105], Sampling(temperature=0, max_tokens=8), key) for key in range(4)]
    done = run(lambda engine: together(engine, requests))
    assert len({c.tokens for c in done}) == 1


@pytest.mark.slow
def test_a_stop_text_is_one_requests_own(run: Callable[[Work], Any], policy: Policy) -> None:
    async def work(engine: Engine) -> tuple[Completion, Completion, str]:
        (request,) = await long_keys(engine, 1)
        prompt, _, key = request
        free = await engine.generate(prompt, Sampling(max_tokens=60), key)
        text = policy.tokenizer.decode(free.tokens, skip_special_tokens=True)
        pairs = (text[i : i + 2] for i in range(20, len(text)))
        stop = next(pair for pair in pairs if pair.isascii() and pair.isprintable() and text.count(pair) == 1)
        stopped, neighbour = await together(
            engine,
            [(prompt, Sampling(max_tokens=60, stop=("never", stop)), key), (prompt, Sampling(max_tokens=60), key)],
        )
        assert neighbour.tokens == free.tokens
        return stopped, free, stop

    stopped, free, stop = run(work)
    assert stopped.finish == "stop"
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert policy.tokenizer.decode(stopped.tokens, skip_special_tokens=True).endswith(stop)


def test_tokens_carry_the_version_that_sampled_them(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        for step in (4, 9):
            version = PolicyVersion(step=step, digest="d")
            await engine.set_version(version)
            assert engine.version() == version
            assert {v for c in await together(engine, REQUESTS) for v in c.versions} == {step}

    run(work)


@pytest.mark.slow
def test_a_stamp_in_the_middle_shows_on_the_tokens_after_it(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> list[Completion]:
        await engine.set_version(PolicyVersion(step=1, digest=""))
        requests = await long_keys(engine, 3)
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        await underway(engine)
        await engine.pause()
        await engine.set_version(PolicyVersion(step=2, digest=""))
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    for c in run(work):
        assert c.versions == tuple(sorted(c.versions))
        assert (c.version_min, c.version_max) == (1, 2)


@pytest.mark.slow
def test_a_pause_holds_and_loses_nothing(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        requests = await long_keys(engine, 3)
        expected = await together(engine, requests)
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests[:2]]
        await underway(engine)
        await engine.pause()
        await engine.pause()  # twice is once
        tasks.append(asyncio.create_task(engine.generate(*requests[2])))  # one that comes during the pause
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        assert len(await engine.score([1, 2, 3])) == 2, "a proof needs a score while nothing is sampled"
        await engine.resume()
        assert same(await asyncio.gather(*tasks), expected)

    run(work)


def test_every_other_engine_is_held_to_this() -> None:
    assert set(names("engines")) == {*ENGINES, "vllm"}


@pytest.mark.slow
def test_a_pause_may_let_requests_end_first(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        requests = await long_keys(engine, 3)
        await engine.set_version(PolicyVersion(step=1, digest=""))
        expected = await together(engine, requests)
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests[:2]]
        await underway(engine)
        pause = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(*requests[2]))
        await pause
        assert [task.done() for task in tasks] == [True, True], "nothing is sampled, and nothing is half sampled"
        await asyncio.sleep(0.05)
        assert not late.done()
        health = await engine.health()
        assert (health.ok, health.running + health.waiting) == (True, 1)
        assert len(await engine.score([1, 2, 3])) == 2
        await engine.set_version(PolicyVersion(step=2, digest=""))
        await engine.resume()
        assert same([task.result() for task in tasks], expected[:2])
        assert set((await late).versions) == {2}, "it began under the weights that it is sampled from"
        await until_idle(engine)

    run(work)


def test_a_pause_that_lets_requests_end_takes_no_time_when_idle_and_twice_is_once(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        for _ in range(2):
            await engine.pause(finish=True)
            await engine.pause(finish=True)
            late = asyncio.create_task(engine.generate([8], Sampling(max_tokens=2), 0))
            await asyncio.sleep(0.02)
            assert not late.done()
            await engine.resume()
            assert len((await late).tokens) <= 2

    run(work)


@pytest.mark.slow
def test_what_one_pause_holds_another_does_not_wait_for(run: Callable[[Work], Any]) -> None:
    """Its end would wait for the resume, which comes after the pause."""

    async def work(engine: Engine) -> None:
        requests = await long_keys(engine, 2)
        expected = await together(engine, requests)
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        await underway(engine)
        await engine.pause()
        await asyncio.wait_for(engine.pause(finish=True), 5)
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in tasks)
        await engine.resume()
        assert same(await asyncio.gather(*tasks), expected)

    run(work)


def test_a_pause_given_up_ends_no_request(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in await long_keys(engine, 2)]
        await underway(engine)
        pause = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)
        await engine.resume()
        assert [len(completion.tokens) for completion in await asyncio.gather(*tasks)] == [60, 60]

    run(work)


def test_a_request_given_up_is_not_waited_for(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in await long_keys(engine, 2)]
        await underway(engine)
        pause = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait_for(pause, 5)
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.resume()
        assert len((await engine.generate([8], Sampling(max_tokens=2), 0)).tokens) <= 2

    run(work)


def test_resume_tells_how_long_nothing_was_sampled(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        assert await engine.resume() == 0.0
        began = time.monotonic()
        await engine.pause()
        since = time.monotonic()
        await asyncio.sleep(0.02)
        await engine.pause(finish=True)  # twice is once, and is counted from the first
        await asyncio.sleep(0.02)
        least = time.monotonic() - since
        assert least <= await engine.resume() <= time.monotonic() - began
        assert await engine.resume() == 0.0

    run(work)


@pytest.mark.slow
def test_a_stopped_engine_gives_out_nothing_until_it_is_resumed(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        requests = await long_keys(engine, 1)
        await engine.stop("the publish of version 3 failed")
        task = asyncio.create_task(engine.generate(*requests[0]))
        await asyncio.sleep(0.05)
        assert not task.done()
        await engine.resume()
        assert len((await task).tokens) == 60

    run(work)


def test_a_probe_sees_the_weights_during_a_pause(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        tokens = [5, 9, 31, 7]
        await engine.pause()
        (probe,) = await engine.probe(tokens)
        assert probe.scored is None or list(probe.scored) == await engine.score(tokens)
        assert probe.scored is not None or probe.sampled is not None
        assert probe.cached == 0
        assert probe.sampled is None or len(probe.sampled.tokens) == len(probe.sampled.logprobs)

    run(work)


def test_an_engine_in_process_has_one_life(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        restart_count = engine.restart_count
        assert not engine.started_elsewhere
        assert not await engine.recover()
        await engine.pause()
        await engine.resume()
        assert engine.restart_count == restart_count

    run(work)


@pytest.mark.slow
def test_cancelling_one_leaves_the_others(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        requests = await long_keys(engine, 4)
        expected = await together(engine, requests)
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        await underway(engine)
        tasks[0].cancel()
        tasks[2].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert isinstance(done[2], asyncio.CancelledError)
        assert same([done[1], done[3]], [expected[1], expected[3]])  # type: ignore[list-item]
        await until_idle(engine)

    run(work)


@pytest.mark.slow
def test_cancelling_during_a_pause(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        requests = await long_keys(engine, 2)
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        await underway(engine)
        await engine.pause()
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        await engine.resume()
        assert len((await tasks[1]).tokens) == 60
        await until_idle(engine)

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True])
def test_closing_fails_who_waits(run: Callable[[Work], Any], paused: bool) -> None:
    async def work(engine: Engine) -> None:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in await long_keys(engine, 3)]
        await underway(engine)
        if paused:
            await engine.pause()
        await engine.close()
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError)
        with pytest.raises(EngineError):
            await engine.generate([8], Sampling(), 0)
        assert not (await engine.health()).ok

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize("drained", [False, True])
def test_closing_fails_who_waits_to_begin(run: Callable[[Work], Any], drained: bool) -> None:
    """Whoever came while others were to end first, before they had ended and after."""

    async def work(engine: Engine) -> None:
        (first, second) = await long_keys(engine, 2)
        tasks = [asyncio.create_task(engine.generate(*first))]
        await underway(engine)
        pause = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.generate(*second)))
        await asyncio.sleep(0)
        if drained:
            await pause
        await engine.close()
        await asyncio.wait_for(asyncio.gather(pause, return_exceptions=True), 5)
        first_done, second_done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert isinstance(second_done, EngineError)
        assert isinstance(first_done, Completion) == drained

    run(work)


def test_score_is_one_logprob_less_than_tokens(run: Callable[[Work], Any]) -> None:
    scored = run(lambda engine: engine.score([5, 9, 31, 7]))
    assert len(scored) == 3
    assert all(logprob <= 0 for logprob in scored)


@pytest.mark.slow
def test_health_counts(run: Callable[[Work], Any]) -> None:
    async def work(engine: Engine) -> None:
        assert (await engine.health()).ok
        tasks = [asyncio.create_task(engine.generate(*request)) for request in await long_keys(engine, 3)]
        await underway(engine)
        await engine.pause()
        health = await engine.health()
        assert (health.ok, health.running + health.waiting) == (True, 3)
        await engine.resume()
        await asyncio.gather(*tasks)
        await until_idle(engine)

    run(work)


def test_ports_are_kept(spec: EngineSpec, run: Callable[[Work], Any], policy: Policy) -> None:
    """What an engine's options promise, the engine does."""

    async def work(engine: Engine) -> None:
        for port in (ExportsWeights, TakesAdapter, LoadsVersions, Relaunches, ReceivesBroadcast, ReportsChecksums):
            assert isinstance(engine, port) == (port in spec.capabilities), port.__name__
        if isinstance(engine, ExportsWeights):
            exported = {name: tensor.data_ptr() for name, tensor in (await engine.export_weights()).items()}
            assert exported == {name: p.data_ptr() for name, p in policy.model.named_parameters()}

    run(work)
