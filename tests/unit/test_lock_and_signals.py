"""A run's folder has one trainer at a time, and signals end a run in order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tandem.api.blocking import run_to_end
from tandem.config.loading import from_options
from tandem.errors import ConfigError, Interrupted
from tandem.trainer import run_folder
from tandem.trainer.run_folder import RunLock


def test_the_folder_of_a_run_of_many_environments_bears_the_first_ones_name(tmp_path: Path) -> None:
    envs = {f"sums_of_many_digits_{i}": {"env": "arithmetic"} for i in range(20)}
    recipe = {"model": "m", "steps": 1, "groups_per_step": 20, "envs": envs, "runs": str(tmp_path)}
    folder = run_folder.new_folder(from_options(recipe, (), Path("recipe")).config)
    assert folder.name.startswith("sums_of_many_digits_0+19-m-20")


def test_a_folder_that_is_there_is_gone_on_with_if_it_has_a_checkpoint(tmp_path: Path) -> None:
    """One whose start failed has none: with its recipe, which may be why, it would fail again."""
    options = {"model": "m", "steps": 1, "env": "arithmetic", "runs": str(tmp_path), "name": "a b"}
    config = from_options(options, (), Path("recipe")).config
    folder = run_folder.new_folder(config)
    with pytest.raises(ConfigError, match=r"a b exists already; it has no checkpoint: .*remove it to start anew"):
        run_folder.new_folder(config)
    (folder / "checkpoints" / "000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"go on with it by: tandem train '.*/a b', or choose another name="):
        run_folder.new_folder(config)


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda *_: "20260101-000000")
    options = {"model": "m", "steps": 1, "env": "arithmetic", "runs": str(tmp_path)}
    config = from_options(options, (), Path("recipe")).config
    names = [run_folder.new_folder(config).name for _ in range(3)]
    first = "arithmetic-m-20260101-000000"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_an_echo_of_the_first_signal_is_no_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` sends SIGTERM to a process and then to its group."""
    before = signal.getsignal(signal.SIGTERM)

    async def scene() -> None:
        stop = asyncio.Event()
        with run_folder.signals(stop, tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGTERM)  # would end the tests

    asyncio.run(scene())
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("stuck", [False, True])
def test_a_second_signal_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    monkeypatch.setattr(run_folder, "ECHO_SECONDS", 60.0 if stuck else 0.0)

    async def scene() -> None:
        stop = asyncio.Event()
        with run_folder.signals(stop, tmp_path):
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
            if stuck:  # the event loop never got to give the signal back
                monkeypatch.setattr(run_folder, "ECHO_SECONDS", 0.0)
            else:
                await asyncio.sleep(0.01)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    asyncio.run(scene())


def test_a_folder_is_locked_for_one_trainer_until_it_lets_go(tmp_path: Path) -> None:
    with closing(RunLock()) as first, closing(RunLock()) as second:
        first.take(tmp_path)
        first.take(tmp_path)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} on .* is at work"):
            second.take(tmp_path)
    with closing(RunLock()) as third:
        third.take(tmp_path)
        third.check()


LEAVES_A_CHILD = """
import os, pathlib, signal, sys, time
from tandem.trainer.run_folder import RunLock
RunLock().take(pathlib.Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_trainer_had_forked_keeps_no_lock(tmp_path: Path) -> None:
    """An environment's workers may outlive it."""
    ended = subprocess.run([sys.executable, "-c", LEAVES_A_CHILD, str(tmp_path)], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -signal.SIGKILL
    child = int(ended.stdout)
    try:
        with closing(RunLock()) as lock:
            lock.take(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_that_is_ended_at_once_says_how_to_go_on(tmp_path: Path) -> None:
    async def training() -> None:
        with run_folder.reporting(tmp_path):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    with pytest.raises(
        Interrupted, match=f"^ended at once; go on from its last checkpoint with: tandem train {tmp_path}$"
    ):
        run_to_end(training())
