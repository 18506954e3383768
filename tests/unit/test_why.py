"""What a run tells of its waits from outside: by its folder, and by stacks where nothing else speaks."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import why
from tandem.distributed.channel import NEXT_COMMAND
from tandem.observability import vitals, waits
from tandem.processes import identity

pytestmark = pytest.mark.slow

NUMBERS = itertools.count(1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("model: tiny\n")
    return folder


def signs(run: Path, *, at: float, loop: float = 0.1, started: str | None = None, waiting: Any = ()) -> None:
    me = identity(os.getpid())
    assert me is not None
    vitals_now = {"pid": me.pid, "started": started or me.started, "at": at, "loop": loop, "waits": list(waiting)}
    vitals.file(run).write_text(json.dumps(vitals_now | {"doing": [["seconds/wait", 1.0]]}))


def wait(owner: str, on: str, seconds: float, deadline: float | None = None, reason: str = "something") -> Any:
    left = None if deadline is None else deadline - seconds
    return {
        "number": next(NUMBERS),
        "within": None,
        "owner": owner,
        "on": on,
        "reason": reason,
        "seconds": seconds,
        "left": left,
    }


def test_the_chain_leads_from_the_longest_wait_to_who_delivers(run: Path) -> None:
    waiting = [
        wait("rollouts", "engine http://a (pid 7)", 20.0, 600.0),
        wait("trainer", "rollouts", 30.0),
        wait("rollouts", "engine http://a (pid 7)", 25.0, 600.0),
        wait("evaluation", "graders", 1.0, 10.0),
    ]
    signs(run, at=100.0, waiting=waiting)
    story = why.read(run, now=102.0)
    assert [(one.owner, one.on) for one in story.chain] == [
        ("trainer", "rollouts"),
        ("rollouts", "engine http://a (pid 7)"),
    ]
    assert story.chain[-1].on == "engine http://a (pid 7)"
    assert story.chain[1].seconds == 27.0  # the longest, and the two seconds since the sign
    assert story.chain[1].left == 573.0
    assert (story.state, "all waits for engine http://a (pid 7)" in story.headline) == ("alive", True)


def test_waits_of_siblings_are_one_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [f"{task}@0/{sibling}" for task in ("3+4", "5+8") for sibling in range(8)]
    playing = [wait(f"rollouts group {id[:5]}", f"environment sums ({id})", 5.0, reason=f"rollout {id}") for id in ids]
    sampling = [wait(f"environment sums ({id})", "engine", 5.0 + len(ids), reason="an answer") for id in ids]
    signs(run, at=time.time(), waiting=[*playing, *sampling, wait("engine", "trainer", 4.0, reason="go on")])
    assert len(why.read(run, now=time.time()).waits) == 33
    assert why.why(run, stacks=False) == 0
    rows = capsys.readouterr().out.partition("who waits ")[2].splitlines()[1:]
    text = " ".join(" ".join(rows).split())
    assert text.count("(16)") == 2, "one row for each kind"
    assert "@" not in text


def test_states(run: Path) -> None:
    signs(run, at=100.0)
    assert why.read(run, now=101.0).headline.endswith("waits for nothing; it is at: sampling")
    assert why.read(run, now=100.0 + vitals.STALE + 1).state == "stuck"
    signs(run, at=100.0, loop=vitals.STALE + 1)
    story = why.read(run, now=100.0)
    assert (story.state, "event loop has stood still" in story.headline) == ("stuck", True)
    signs(run, at=100.0, started="another boot")
    story = why.read(run, now=100.0)
    assert (story.state, "gone without a word" in story.headline) == ("gone", True)


def test_without_signs_the_last_event_tells(run: Path) -> None:
    assert why.read(run, now=1.0).state == "gone"
    (run / "events.jsonl").write_text('{"time": 5, "event": "run_started"}\n{"time": 9, "event": "run_done"}\n')
    story = why.read(run, now=19.0)
    assert (story.state, "ended in order 10 s ago" in story.headline) == ("ended", True)
    (run / "events.jsonl").write_text('{"time": 5, "event": "run_done"}\n{"time": 9, "event": "resumed"}\n')
    assert why.read(run, now=19.0).state == "gone"
    (run / "vitals.json").write_text("{torn")
    assert why.read(run, now=19.0).state == "gone"


@pytest.mark.parametrize(
    "last",
    [
        {"event": "run_failed", "error": "Starved", "message": "nothing to train on"},
        {"event": "stalled", "why": "nothing to train on"},
    ],
)
def test_a_run_that_failed_says_by_what(run: Path, last: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    begin, end = {"time": 5, "event": "run_started"}, {"time": 9, **last}
    (run / "events.jsonl").write_text(f"{json.dumps(begin)}\n{json.dumps(end)}\n")
    story = why.read(run, now=19.0)
    assert story.state == "failed"
    assert "failed 10 s ago: nothing to train on" in story.headline
    assert f"tandem train {run}" in story.headline
    assert why.why(run, stacks=False) == 1
    (run / "events.jsonl").write_text(f"{json.dumps(end)}\n{json.dumps({'time': 12, 'event': 'resumed'})}\n")
    assert why.read(run, now=19.0).state == "gone", "the failure was before it was resumed"


def test_last_words_of_each_part(run: Path) -> None:
    (run / "logs" / "run.log").write_text("1970-01-01T00:00:01Z INFO    tandem.trainer.loop: first\n")
    (run / "logs" / "engine-0.log").write_text("booting\nloading\n\n")
    words = {part: text for part, _, text in why.read(run, now=10.0).last}
    assert (words["engine-0.log"], words["run.log"].endswith("first")) == ("loading", True)


def test_a_living_process_shows_its_waits_and_takes_the_file_away(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "PERIOD", 0.02)

    async def scene() -> why.RunState:
        with vitals.shown(run):
            async with waits.waiting("trainer", "a batch", on="the broker", deadline=60):
                while not vitals.file(run).exists() or not why.read(run, now=time.time()).waits:
                    await asyncio.sleep(0.01)
                return why.read(run, now=time.time())

    story = asyncio.run(scene())
    assert (story.state, story.chain[-1].on) == ("alive", "the broker")
    assert story.waits[0].left is not None
    assert 50 < story.waits[0].left < 60
    assert not vitals.file(run).exists()


def test_stacks_name_where_threads_and_tasks_stand(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "PERIOD", 0.02)

    async def a_hidden_place() -> None:
        await asyncio.Event().wait()

    async def scene() -> str:
        with vitals.shown(run):
            task = asyncio.create_task(a_hidden_place(), name="lost rollout")
            await asyncio.sleep(0)
            vitals.request(run).touch()
            while vitals.request(run).exists():
                await asyncio.sleep(0.01)
            task.cancel()
        return vitals.stacks(run).read_text()

    text = asyncio.run(scene())
    task = text[text.index("-- task lost rollout") :]
    assert "a_hidden_place" in task
    assert "Event.wait" in task
    assert "-- thread MainThread" in text


@contextmanager
def process(run: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that shows signs of life and then does ``body``; it has said "ready" when this is entered."""
    code = f"""
        import asyncio, ctypes, pathlib, sys, time
        from tandem.observability import vitals
        vitals.PERIOD = 0.05
        run = pathlib.Path({str(run)!r})
        async def main():
            with vitals.shown(run):
                while not vitals.file(run).exists():
                    await asyncio.sleep(0.01)
                print("ready", flush=True)
                {body}
        asyncio.run(main())
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_an_event_loop_that_stands_still_is_seen(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "STALE", 0.5)
    with process(run, "time.sleep(60)"):
        while (story := why.read(run, now=time.time())).state != "stuck":
            time.sleep(0.05)
        assert "event loop has stood still" in story.headline
        stacks = why._stacks(run)
    assert stacks is not None
    assert "in main" in stacks


def test_stacks_of_a_process_whose_interpreter_is_held(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "STALE", 0.5)
    monkeypatch.setattr(why, "ANSWER_SECONDS", 2.0)
    with process(run, "ctypes.PyDLL(None).usleep(60_000_000)"):  # PyDLL keeps the interpreter's lock
        while (story := why.read(run, now=time.time())).state != "stuck":
            time.sleep(0.05)
        assert "holds the interpreter" in story.headline
        stacks = why._stacks(run)
    assert stacks is not None
    assert "Current thread" in stacks
    assert "in main" in stacks


def test_a_killed_process_is_gone(run: Path) -> None:
    with process(run, "await asyncio.sleep(60)") as child:
        assert why.read(run, now=time.time()).state == "alive"
        child.kill()
        child.wait()
        story = why.read(run, now=time.time())
    assert (story.state, "gone without a word" in story.headline) == ("gone", True)


def sign_of(run: Path, rank: int, *, at: float, doing: Any = (), waiting: Any = (), **changes: Any) -> None:
    me = identity(os.getpid())
    assert me is not None
    signs = {"pid": me.pid, "started": me.started, "host": socket.gethostname(), "at": at, "loop": 0.1}
    signs |= {"waits": list(waiting), "doing": list(doing), **changes}
    vitals.file(run, rank).write_text(json.dumps(signs))


def test_each_follower_tells_its_command_and_what_it_waits_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    signs(run, at=now, waiting=[wait("trainer", "the other ranks", 40.0)])
    sign_of(run, 1, at=now, waiting=[wait("rank 1", "rank 0", 3.0, reason=NEXT_COMMAND)])
    busy = [["commands/micros", 40.0], ["seconds/forward_backward", 39.0]]
    sign_of(run, 2, at=now, doing=busy, waiting=[wait("rank 2", "the other ranks", 38.0, reason="sums of gradients")])
    sign_of(run, 10, at=now, doing=busy)
    idle, waiting, computing = why.read(run, now=now).followers
    assert (idle.rank, idle.state) == (1, "alive")
    assert idle.headline == "idle for 3.0 s: waiting for rank 0's next command"
    assert waiting.headline == (
        "in command 'micros' for 40 s; waiting for the other ranks (sums of gradients), for 38 s"
    )
    assert (computing.rank, computing.headline) == (10, "in command 'micros' for 40 s; waiting for nothing")
    assert why.why(run, stacks=False) == 0
    assert re.findall(r"^(\d+) +\d+ on ", capsys.readouterr().out, re.MULTILINE) == ["1", "2", "10"]


def test_a_follower_that_is_gone_or_of_a_silent_host_is_said_to_be(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    signs(run, at=now)
    sign_of(run, 1, at=now - 20, started="another boot")
    sign_of(run, 2, at=now - 20, doing=[["commands/apply", 1.0]])
    sign_of(run, 3, at=now - 20, host="elsewhere")
    sign_of(run, 4, at=now, host="elsewhere", started="of its boot")
    states = why.read(run, now=now).followers
    assert [one.state for one in states] == ["gone", "stuck", "silent", "alive"]
    assert all("the last sign of life was 20 s ago" in one.headline for one in states[:3])
    assert states[1].headline.endswith("it was in command 'apply' for 21 s; waiting for nothing")
    assert why.why(run, stacks=False) == 1
    assert "on elsewhere" in capsys.readouterr().out


def test_stacks_of_every_rank_and_files_of_an_earlier_start(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "PERIOD", 0.02)
    sign_of(run, 3, at=0.0)

    async def scene() -> dict[int, str | None]:
        with vitals.shown(run):
            assert vitals.followers(run) == [], "the lead takes away what an earlier start has left"
            with vitals.shown(run, 2):
                while not vitals.file(run).exists() or vitals.followers(run) != [2]:
                    await asyncio.sleep(0.01)
                return why._all_stacks(run, why.read(run, now=time.time()))

    stacks = asyncio.run(scene())
    assert stacks.keys() == {0, 2}
    assert all("-- thread MainThread" in (text or "") for text in stacks.values())
    assert "MainThread" in vitals.stacks(run, 2).read_text()
    assert vitals.followers(run) == []


def test_the_verb(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = [wait("trainer", "rollouts", 5.0), wait("rollouts", "engine [x]", 4.0, 10.0)]
    signs(run, at=time.time(), waiting=waiting)
    assert why.why(run, stacks=False) == 0
    out = capsys.readouterr().out
    assert "trainer ← rollouts ← engine [x]" in out
    signs(run, at=time.time(), started="gone")
    assert why.why(run, stacks=True) == 1
