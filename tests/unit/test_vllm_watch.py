"""An engine whose trainer is gone for good ends by itself, and one whose trainer came back does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tandem.engines.vllm.server.watch import LINGER, TRAINER, TrainerWatch
from tandem.processes import alive_after, identity

pytestmark = pytest.mark.slow

ENGINE = """
import signal, sys, time
from tandem.engines.vllm.server import watch
watch.GRACE = 0.5
watch.LOOK_SECONDS = 0.05
ignored, adopted = sys.argv[1:]
if ignored:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
w = watch.TrainerWatch.begin()
if adopted:
    w.reattach(adopted)
print("watching", flush=True)
time.sleep(60)
"""

SERVER = """
import multiprocessing, os, time
from tandem.engines.vllm.server import watch

def schedule():
    watch.end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)

child = multiprocessing.get_context("fork").Process(target=schedule)
child.start()
time.sleep(60)
"""


def named(pid: int) -> str:
    me = identity(pid)
    assert me is not None
    return f"{me.pid}:{me.started}"


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def engine(
    trainer: subprocess.Popen[bytes], *, ignored: str = "", adopted: str = "", linger: str = "0.5"
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, TRAINER: named(trainer.pid), LINGER: linger}
    command = [sys.executable, "-c", ENGINE, ignored, adopted]
    child = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"watching\n"
    return child


@pytest.mark.parametrize("linger", ["0", "0.5"])
def test_it_ends_when_its_trainer_is_gone(trainer: subprocess.Popen[bytes], linger: str) -> None:
    child = engine(trainer, linger=linger)
    time.sleep(1)  # many looks
    assert child.poll() is None
    trainer.kill()
    trainer.wait()
    assert child.wait(30) == -signal.SIGTERM


def test_one_that_does_not_end_is_killed(trainer: subprocess.Popen[bytes]) -> None:
    child = engine(trainer, ignored="yes")
    trainer.kill()
    trainer.wait()
    assert child.wait(30) == -signal.SIGKILL


def test_it_goes_on_with_a_trainer_that_adopted_it(trainer: subprocess.Popen[bytes]) -> None:
    child = engine(trainer, adopted=named(os.getpid()))
    trainer.kill()
    trainer.wait()
    time.sleep(1.5)  # longer than it would stay without
    assert child.poll() is None
    child.kill()
    child.wait()


def test_nobody_is_watched_where_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRAINER, raising=False)
    assert TrainerWatch.begin() is None


def test_a_scheduler_ends_with_its_server() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        scheduler = identity(int(server.stdout.readline()))
        assert scheduler is not None
        time.sleep(1)  # many looks
        assert alive_after(*scheduler)
        server.kill()
    deadline = time.monotonic() + 30
    while alive_after(*scheduler):
        assert time.monotonic() < deadline
        time.sleep(0.1)
