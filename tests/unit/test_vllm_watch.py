"""An engine whose trainer is gone for good ends by itself, and one whose trainer came back does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tandem.engines._processes import identity
from tandem.engines._vllm_watch import LINGER, TRAINER, Watch

ENGINE = """
import signal, sys, time
from tandem.engines import _vllm_watch as watch
watch.GRACE = 0.5
ignored, adopted = sys.argv[1:]
if ignored:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
w = watch.Watch.begin()
if adopted:
    w.adopt(adopted)
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
    return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("linger", ["0", "0.5"])
def test_it_ends_when_its_trainer_is_gone(trainer: subprocess.Popen[bytes], linger: str) -> None:
    child = engine(trainer, linger=linger)
    time.sleep(4)
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
    time.sleep(3)
    assert child.poll() is None
    child.kill()
    child.wait()


def test_nobody_is_watched_where_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRAINER, raising=False)
    assert Watch.begin() is None
