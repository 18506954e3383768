"""What no deadline of asyncio can end, a thread does, and says who waited for whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import Deadline, EngineError
from tandem.observability import vitals, waits, watchdog
from tandem.observability.watchdog import Timeouts, Watchdog

SHORT = Timeouts(wait_seconds=0.3, loop_seconds=60.0, end_seconds=60.0)
STUCK = Timeouts(wait_seconds=60.0, loop_seconds=0.3, end_seconds=60.0)


@dataclass
class Left:
    """Stands for the end of the process."""

    codes: list[int] = field(default_factory=list)
    event: threading.Event = field(default_factory=threading.Event)

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.event.set()


@pytest.fixture(autouse=True)
def spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of the machine's is ended by a test."""
    monkeypatch.setattr(watchdog, "kill", lambda processes: None)


def watched(
    timeouts: Timeouts, scene: Callable[[Watchdog], Coroutine[Any, Any, None]], folder: Path | None = None
) -> Left:
    """Play a scene under a watchdog."""
    left = Left()

    async def run() -> None:
        dog = Watchdog(timeouts, loop=asyncio.get_running_loop(), leave=left)
        dog.folder = folder
        with dog.watching():
            await asyncio.wait_for(scene(dog), 30)

    asyncio.run(run())
    return left


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_wait_that_nothing_comes_of_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(dog: Watchdog) -> None:
        with pytest.raises(Deadline, match=r"rollouts group 3 waited 0\.\d s for environment e .*0\.3 s.*trainer <- "):
            async with waits.waiting("trainer", "2 groups", on="rollouts"):
                await waits.wait(asyncio.Event().wait(), owner="rollouts group 3", reason="x", on="environment e")

    assert not watched(SHORT, scene).codes
    assert "environment e" in capsys.readouterr().err


@pytest.mark.slow
def test_what_goes_on_is_not_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(dog: Watchdog) -> None:
        async with waits.waiting("trainer", "an episode", on="environment e") as outer:
            while outer.seconds < 3 * SHORT.wait_seconds:
                await asyncio.sleep(0.02)
                waits.progress()

    assert not watched(SHORT, scene).codes
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_who_waits_for_one_that_waits_is_not_to_blame() -> None:
    async def scene(dog: Watchdog) -> None:
        engine = waits.waiting("rollouts group 3", "an answer", on="engine", deadline=2.0)
        with pytest.raises(Deadline, match="rollouts group 3 waited"):
            async with waits.waiting("trainer", "2 groups", on="rollouts"), engine:
                await asyncio.Event().wait()

    assert not watched(SHORT, scene).codes


def test_a_circle_is_given_up() -> None:
    async def scene(dog: Watchdog) -> None:
        one = waits.wait(asyncio.Event().wait(), owner="engine", reason="to go on", on="trainer")
        other = waits.wait(asyncio.Event().wait(), owner="trainer", reason="tokens", on="engine")
        errors = await asyncio.gather(one, other, return_exceptions=True)
        assert all(isinstance(error, Deadline) for error in errors)

    assert not watched(SHORT, scene).codes


def test_what_cannot_be_given_up_ends_the_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeouts = Timeouts(wait_seconds=0.2, loop_seconds=60.0, end_seconds=0.2)

    async def deaf(left: threading.Event) -> None:
        while not left.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        raise asyncio.CancelledError

    async def scene(dog: Watchdog) -> None:
        ended = dog._leave
        assert isinstance(ended, Left)
        with pytest.raises(Deadline):
            await waits.wait(deaf(ended.event), owner="trainer", reason="a batch", on="a deaf task")

    assert set(watched(timeouts, scene, folder).codes) == {10}
    assert "a deaf task" in capsys.readouterr().err
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "stalled"
    assert "a deaf task" in events[-1]["why"]
    assert ".deaf" in vitals.stacks(folder).read_text()


def test_a_call_that_holds_up_the_event_loop_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    def a_synchronous_call(left: threading.Event) -> None:
        assert left.wait(20)

    async def scene(dog: Watchdog) -> None:
        ended = dog._leave
        assert isinstance(ended, Left)
        async with waits.waiting("rollouts group 3", "a rollout", on="environment e"):
            a_synchronous_call(ended.event)

    assert set(watched(STUCK, scene).codes) == {10}
    stderr = capsys.readouterr().err
    assert "the event loop was held up" in stderr
    assert "Condition.wait" in stderr  # where it stands
    assert "rollouts group 3 waited" in stderr


@pytest.mark.slow
def test_while_the_event_loop_stands_still_it_is_to_blame_alone(capsys: pytest.CaptureFixture[str]) -> None:
    timeouts = Timeouts(wait_seconds=0.3, loop_seconds=1.0, end_seconds=60.0)

    async def scene(dog: Watchdog) -> None:
        ended = dog._leave
        assert isinstance(ended, Left)
        async with waits.waiting("rollouts group 3", "a rollout", on="environment e"):
            assert ended.event.wait(20)

    assert set(watched(timeouts, scene).codes) == {10}
    stderr = capsys.readouterr().err
    assert "given up" not in stderr
    assert "held up" in stderr


@pytest.mark.slow
def test_a_call_that_is_known_to_be_slow_may_hold_it_up() -> None:
    # A busy machine may hold a loop up for a few tenths of a second by itself, before the call and after it.
    timeouts = Timeouts(wait_seconds=60.0, loop_seconds=1.0, end_seconds=60.0)

    async def scene(dog: Watchdog) -> None:
        with waits.blocking("trainer", "a model", "its files", deadline=60):
            threading.Event().wait(2.5 * timeouts.loop_seconds)

    assert not watched(timeouts, scene).codes


def test_silence_is_a_stall_too(capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(dog: Watchdog) -> None:
        ended = dog._leave
        assert isinstance(ended, Left)
        while not ended.event.is_set():
            await asyncio.sleep(0.01)

    assert set(watched(SHORT, scene).codes) == {10}
    assert "no wait is registered" in capsys.readouterr().err


def test_a_run_that_does_not_end_after_a_stall_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    timeouts = Timeouts(wait_seconds=60.0, loop_seconds=60.0, end_seconds=0.2)

    async def scene(dog: Watchdog) -> None:
        ended = dog._leave
        assert isinstance(ended, Left)
        with pytest.raises(EngineError), dog.ends():
            raise EngineError("a request failed") from Deadline("trainer waited for engine x", on="engine x")
        while not ended.event.is_set():
            await asyncio.sleep(0.01)
        dog._late = None  # or it sees to the end of this very process

    assert set(watched(timeouts, scene).codes) == {10}
    assert "trainer waited for engine x; the run did not end within 0.2 s" in capsys.readouterr().err


def test_a_run_that_was_ended_by_a_wait_says_so_whatever_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "_end_process", lambda self: None)

    async def run() -> None:
        with watchdog.watching(Timeouts()):
            raise EngineError("the engine failed") from Deadline(
                "engine waited for compute thread", on="compute thread"
            )

    with pytest.raises(Deadline, match="engine waited for compute thread"):
        asyncio.run(run())
