"""Waits: nobody hangs in silence, and whoever is late is named."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tandem.errors import Deadline
from tandem.observability import waits


def test_a_wait_is_listed_while_it_lasts() -> None:
    async def run() -> None:
        batch = waits.waiting("trainer", "the next batch", "rollout workers", deadline=5)
        async with batch, waits.waiting("feed", "a free slot", "trainer"):
            now = waits.current()
            assert [(w.owner, w.reason, w.on, w.deadline) for w in now] == [
                ("trainer", "the next batch", "rollout workers", 5),
                ("feed", "a free slot", "trainer", None),
            ]
            assert now[0].seconds >= now[1].seconds >= 0
        assert waits.current() == []

    asyncio.run(run())


def test_past_its_deadline_a_wait_names_who_was_waited_for() -> None:
    cancelled = []

    async def never() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(Deadline, match=r"trainer waited 0\.\d s for engine \(pid 7\) \(weights\).*deadline is 0\.02 s"):
        asyncio.run(waits.wait(never(), owner="trainer", reason="weights", on="engine (pid 7)", deadline=0.02))
    assert cancelled == [True]
    assert waits.current() == []


def test_a_timeout_of_the_block_itself_is_not_a_deadline() -> None:
    async def run() -> None:
        async with waits.waiting("a", "b", "c", deadline=60):
            raise TimeoutError("a socket's")

    with pytest.raises(TimeoutError, match="a socket's"):
        asyncio.run(run())
    assert waits.current() == []


def test_cancelling_the_waiter_is_not_a_deadline() -> None:
    async def run() -> None:
        task = asyncio.create_task(waits.wait(asyncio.sleep(60), owner="a", reason="b", on="c", deadline=60))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert waits.current() == []


def test_listeners_hear_of_waits_that_are_late_or_fail_after_long(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, str]] = []
    stop = waits.listen(lambda wait, state: heard.append((wait.owner, state)))

    async def run() -> None:
        async with waits.waiting("done", "b", "c"):
            pass
        with pytest.raises(Deadline):
            async with waits.waiting("late", "b", "c", deadline=0.005):
                await asyncio.sleep(60)
        for long in (60.0, 0.0):
            monkeypatch.setattr(waits, "LONG", long)
            with pytest.raises(ConnectionError):
                async with waits.waiting(f"failed, {long:g} s being long", "b", "c"):
                    raise ConnectionError

    try:
        asyncio.run(run())
    finally:
        stop()
    with pytest.raises(Deadline), waits.blocking("after", "b", "c", deadline=0) as wait:
        raise wait.late()
    assert heard == [("late", "deadline"), ("failed, 0 s being long", "failed")]


def test_a_late_wait_fails_the_one_around_it_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LONG", 0.0)
    ended: dict[str, str] = {}
    stop = waits.listen(lambda wait, state: ended.update({wait.owner: state}))

    async def run() -> None:
        async with waits.waiting("outer", "b", "c", deadline=60), waits.waiting("inner", "b", "c", deadline=0.01):
            await asyncio.sleep(60)

    try:
        with pytest.raises(Deadline, match="inner waited"):
            asyncio.run(run())
    finally:
        stop()
    assert ended == {"outer": "failed", "inner": "deadline"}


def test_a_broken_listener_harms_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waits, "LONG", 0.0)

    def broken(wait: waits.Wait, state: waits.State) -> None:
        raise RuntimeError("no")

    stop = waits.listen(broken)
    try:
        with pytest.raises(OSError, match="gone"), waits.blocking("a", "b", "c"):
            raise OSError("gone")
    finally:
        stop()
    assert "a listener of waits failed" in caplog.text


def test_a_wait_within_another_is_for_whom_that_one_waits() -> None:
    async def run() -> None:
        assert waits.actor("nobody") == "nobody"
        async with waits.waiting("rollouts group 3", "a rollout", on="environment e") as outer:
            assert waits.actor("nobody") == "environment e"
            async with waits.waiting(waits.actor("nobody"), "an answer", on="engine http://a") as inner:
                assert (inner.owner, inner.within, outer.within) == ("environment e", outer.number, None)
                task = asyncio.create_task(later())
            task_saw.append(await task)

    task_saw: list[str] = []

    async def later() -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return waits.actor("nobody")  # the wait that this task began in is over

    asyncio.run(run())
    assert task_saw == ["nobody"]


def test_a_chain_goes_by_what_a_wait_is_within_and_then_by_names() -> None:
    async def run() -> None:
        started = asyncio.Event()

        async def played() -> None:
            async with (
                waits.waiting("rollouts group 3", "a rollout", on="environment e"),
                waits.waiting(waits.actor(""), "an answer", on="engine http://a"),
            ):
                started.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(played())
        async with waits.waiting("trainer", "2 groups", on="rollouts") as first:
            await started.wait()
            every = waits.current()
            assert [wait.owner for wait in waits.chain(first, every)] == [
                "trainer",
                "rollouts group 3",
                "environment e",
            ]
            last = waits.chain(first, every)[-1]
            links = ["trainer", "rollouts", "rollouts group 3", "environment e", "engine http://a"]
            assert waits.parties(last) == links
            assert waits.parties(first) == links
            assert last.sentence().endswith("who waits for whom: " + " <- ".join(links))
            task.cancel()

    asyncio.run(run())


@pytest.mark.slow
def test_progress_begins_a_deadline_anew() -> None:
    async def run() -> int:
        steps = 0
        async with waits.waiting("trainer", "an episode", on="environment e", deadline=0.4) as outer:
            while outer.seconds < 1.0:
                async with waits.waiting("environment e", "an answer", on="engine"):
                    await asyncio.sleep(0.05)
                    waits.progress()
                steps += 1
        return steps

    assert asyncio.run(run()) > 2
    with pytest.raises(Deadline):
        asyncio.run(waits.wait(asyncio.sleep(60), owner="a", reason="b", on="c", deadline=0.05))


def test_a_wait_can_be_given_up_from_another_thread() -> None:
    async def run() -> None:
        async with waits.waiting("a", "b", on="c") as wait:
            assert wait.give_up is not None
            threading.Thread(target=wait.give_up).start()
            await asyncio.Event().wait()

    with pytest.raises(Deadline, match="a waited"):
        asyncio.run(run())


def test_a_task_that_is_cancelled_while_its_wait_is_given_up_stays_cancelled() -> None:
    async def run() -> None:
        async def waiter() -> None:
            async with waits.waiting("a", "b", on="c") as wait:
                assert wait.give_up is not None
                wait.give_up()
                await asyncio.Event().wait()

        task = asyncio.create_task(waiter())
        await asyncio.sleep(0)  # it waits, and is given up in the loop's next turn
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(run())
    assert waits.current() == []


def test_a_given_up_wait_within_another_leaves_that_one_whole() -> None:
    async def run() -> bool:
        async with waits.waiting("a", "b", on="c"):
            with pytest.raises(Deadline, match="inner waited"):
                await waits.wait(asyncio.sleep(60), owner="inner", reason="b", on="d", deadline=0.0)
            await asyncio.sleep(0)
        return True

    assert asyncio.run(run())


def test_an_interrupted_wait_was_cancelled_and_did_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LONG", 0.0)
    states: dict[str, waits.State] = {}

    async def lasting(name: str) -> None:
        async with waits.waiting(name, "an answer", on="engine"):
            await asyncio.Event().wait()

    async def failing() -> None:
        async with waits.waiting("failing", "an answer", on="engine"):
            raise OSError("engine is gone")

    async def run() -> None:
        ended = asyncio.create_task(lasting("ended"))
        await asyncio.sleep(0)
        ended.cancel()
        await asyncio.gather(ended, failing(), return_exceptions=True)

    stop = waits.listen(lambda wait, state: states.update({wait.owner: state}))
    try:
        asyncio.run(run())
        with pytest.raises(KeyboardInterrupt), waits.blocking("thread", "an answer", "engine"):
            raise KeyboardInterrupt
    finally:
        stop()
    assert states == {"failing": "failed"}
