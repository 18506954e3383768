"""``tandem train`` with several ranks: the run of one process, resumed with any number, ended where one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kills_ranks import wide_model
from safetensors.torch import load_file
from support.processes import start

from tandem.config.tree import render
from tandem.distributed.state_shards import MOST_BOXES
from tandem.processes import Identity, alive_after, identity
from tandem.trainer.state import checkpoints_in

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
END_SECONDS = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def training(folder: Path, target: Path, *overrides: str, module: str = "tandem") -> Iterator[subprocess.Popen[str]]:
    """A trainer under way."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    words = ["train", str(target), *overrides]
    with start(words, cwd=folder, out=subprocess.PIPE, environment=env, module=module) as process:
        try:
            yield process
        finally:
            process.kill()


def recipe(folder: Path, model: Path, name: str, **changes: Any) -> Path:
    options = {
        "model": str(model), "runs": str(folder / "runs"), "name": name, "steps": 4, "dtype": "float32",
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"number": 1.0, "learns.shaping:letters": 0.5},
        "groups_per_step": 2, "group_size": 4, "zero_variance_groups": "keep", "sampling": {"max_tokens": 6},
        "optimizer": {"kind": "adamw", "lr": 1e-3}, "micro_batch_tokens": 30, "threads": 1,
        "evaluate": {"tasks": 0}, "checkpoint": {"every": 2}, "loggers": [], **changes,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(render(options), encoding="utf-8")
    return path


def trained(folder: Path, target: Path, *overrides: str) -> None:
    with training(folder, target, *overrides) as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_ranks_train_as_one_process_and_a_run_goes_on_with_another_number(model: Path, tmp_path: Path) -> None:
    """Two ranks, then three, then one, against one process all along; it saves as it goes on, and they do not wait."""
    saving = {"every": 1, "asynchronous": True}
    trained(tmp_path, recipe(tmp_path, model, "alone"))
    trained(tmp_path, recipe(tmp_path, model, "several", ranks=2, steps=2, checkpoint=saving))
    run = tmp_path / "runs" / "several"
    trained(tmp_path, run, "steps=3", "ranks=3")
    trained(tmp_path, run, "steps=4", "ranks=1")
    alone = tmp_path / "runs" / "alone"
    for mine, theirs in zip(rows(run), rows(alone), strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy", "kl_behavior"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert any(row["grad_norm"] > 0 for row in rows(alone))
    assert "ranks/imbalance" in rows(run)[0]
    kept, want = (load_file(next((r / "checkpoints/000004/model").glob("*.safetensors"))) for r in (run, alone))
    for name, tensor in want.items():
        far = (kept[name] - tensor).abs() > 1e-4
        assert float(far.float().mean()) < 0.01, name
    states = load_file(run / "checkpoints/000004/optimizer.safetensors")
    expected = load_file(alone / "checkpoints/000002/optimizer.safetensors")
    assert {key: value.shape for key, value in states.items()} == {key: v.shape for key, v in expected.items()}
    assert written_by(run / "checkpoints/000003") == {0, 1, 2}


def written_by(checkpoint: Path) -> set[int]:
    """Ranks that have written states of it."""
    assert not (checkpoint / "optimizer.safetensors").exists()
    return {(int(path.name.split("-")[1]) - 1) // MOST_BOXES for path in (checkpoint / "optimizer").iterdir()}


def follower_of(lead: int) -> Identity:
    """The second rank, which the lead has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                environment = (entry / "environ").read_bytes().split(b"\0")
                if int(status[1]) == lead and b"RANK=1" in environment:
                    follower = identity(pid)
                    assert follower is not None
                    return follower
        time.sleep(0.1)
    raise AssertionError("no follower was started")


def ends(process: Identity, seconds: float = 2.0) -> None:
    """See a process end; by default at once, but for the moment in which it is killed for the one it stands behind."""
    deadline = time.monotonic() + seconds
    while alive_after(*process) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive_after(*process)


def wait_for_steps(run: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if len(rows(run)) >= 2:
                return
        time.sleep(0.1)
    raise AssertionError(f"{run} has trained nothing")


@pytest.mark.long  # of the default tier one is lost while it saves, below
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_lost_ends_the_run_by_name(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    endless = recipe(tmp_path, model, "run", ranks=2, steps=100_000)
    with training(tmp_path, endless, module="integration.impatient") as lead:
        follower = follower_of(lead.pid)
        wait_for_steps(tmp_path / "runs/run")
        os.kill(follower.pid, how)
        since = time.monotonic()
        out, _ = lead.communicate(timeout=2 * END_SECONDS)
    assert time.monotonic() - since < END_SECONDS + 5
    assert lead.returncode == 13, out
    assert f"rank 1 (pid {follower.pid} on " in out
    assert "was lost in command" in out
    ends(follower)


def test_a_follower_ends_when_the_lead_is_killed(model: Path, tmp_path: Path) -> None:
    with training(tmp_path, recipe(tmp_path, model, "run", ranks=2, steps=100_000)) as lead:
        follower = follower_of(lead.pid)
        wait_for_steps(tmp_path / "runs/run")
        lead.kill()
        ends(follower, END_SECONDS)
    assert "lost the lead, rank 0" in (tmp_path / "runs/run/logs/rank-1.log").read_text()


def test_a_rank_killed_while_it_saves_leaves_whole_checkpoints_alone(model: Path, tmp_path: Path) -> None:
    """Each step is saved, and the kill comes while a checkpoint is being written; the run goes on from a whole one."""
    run = tmp_path / "runs/run"
    saving = {"every": 1, "asynchronous": True}
    every = recipe(tmp_path, model, "run", ranks=2, steps=100_000, checkpoint=saving)
    with training(tmp_path, every) as lead:
        follower = follower_of(lead.pid)
        wait_for_steps(run)
        deadline = time.monotonic() + 60
        while not list((run / "checkpoints").glob(".*.tmp/optimizer")) and time.monotonic() < deadline:
            pass
        os.kill(follower.pid, signal.SIGKILL)
        out, _ = lead.communicate(timeout=2 * END_SECONDS)
    assert lead.returncode == 13, out
    assert f"rank 1 (pid {follower.pid} on " in out
    assert "was lost in command" in out
    left = checkpoints_in(run / "checkpoints")
    assert left
    trained(tmp_path, run, f"steps={max(left) + 1}", "ranks=1")
    assert len(rows(run)) == max(left) + 1


def test_what_ranks_cannot_do_is_refused_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    with training(tmp_path, recipe(tmp_path, model, "run", ranks=2, optimizer="adafactor")) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "ranks: 2 cannot go with optimizer" in out
    assert not (tmp_path / "runs").exists()
