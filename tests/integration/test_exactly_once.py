"""Parts of a system are killed at random moments; everything is trained exactly once. A short ``tests/long/kills.py``.

That its accounts can fail is seen by spoiling what a run wrote down.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kills_account import Account, Expected, drawn, equals, foreign, played, still

HARNESS = Path(__file__).parents[1] / "long" / "kills.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in Linux' /proc"),
]
STEPS = 8
KILLS = 4
"""Of each set-up."""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The folder of all of them, and the rows of the table."""
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, str(HARNESS), "--kills", str(KILLS), "--steps", str(STEPS)]
    command += ["--pace", "1.5", "--seed", "3", "--keep", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=1700, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()[-4:]]


def test_what_was_killed_trained_everything_once(trials: tuple[Path, list[list[str]]]) -> None:
    _, rows = trials
    assert [row[0] for row in rows] == [f"{name}, max_lag {lag}" for name, lag in LANES]
    for row in rows:
        assert sum(map(int, row[1:5])) == KILLS // 2
        assert row[-3:-1] == ["0", "0"]
        assert int(row[-4]) == 3 * STEPS * int(row[-6])


LANES = (("together", 0), ("together", 2), ("apart", 1), ("apart", 3))


def account(folder: Path, lane: int) -> Account:
    """What a trial's own account is, once more."""
    name, lag = LANES[lane]
    run = folder / "runs" / "run"
    return foreign(run, expected(lag), folder / "ledger") if name == "apart" else played(run, expected(lag))


def expected(lag: int) -> Expected:
    """What is known of every run."""
    return Expected(steps=STEPS, groups=3, size=3, lag=lag, options={"max_number": 60})


@pytest.fixture
def spoiled(trials: tuple[Path, list[list[str]]], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a lane's first run, to be spoiled."""
    lane: int = request.param
    copy = tmp_path / "copy"
    shutil.copytree(trials[0] / f"lane-{lane}" / "run-1", copy, symlinks=True)
    assert account(copy, lane).fine
    return copy


def rewritten(path: Path, change: Any) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


@pytest.mark.parametrize("spoiled", [1, 2], indirect=True)
def test_a_group_that_is_trained_again_is_doubled(spoiled: Path, request: pytest.FixtureRequest) -> None:
    lane: int = request.node.callspec.params["spoiled"]
    first, second = (spoiled / "runs" / "run" / "rollouts" / f"{step:06d}.jsonl" for step in (1, 2))
    stolen = [{**json.loads(line), "step": 2} for line in first.read_text().splitlines()[:3]]
    rewritten(second, lambda rows: [*stolen, *rows[3:]])
    audit = account(spoiled, lane)
    assert audit.doubled == 1
    assert any("were trained more than once" in what for what in audit.wrong)
    assert len(audit.lost) == 1, "the one in whose place it is"


@pytest.mark.parametrize("spoiled", [1], indirect=True)
@pytest.mark.parametrize("kept", [("again",), ("ready",), ("again", "ready")], ids="-".join)
def test_a_cursor_that_forgets_loses_groups(spoiled: Path, kept: tuple[str, ...]) -> None:
    run = spoiled / "runs" / "run"
    path = run / "checkpoints" / f"{STEPS:06d}" / "state.json"
    state = json.loads(path.read_text())
    if kept == ("again",) and not state["cursor"]["again"]:  # all was played by then: one as if it were being played
        state["cursor"]["again"].append(state["cursor"]["ready"].pop()[0])
        path.write_text(json.dumps(state))
        assert account(spoiled, 1).fine
    order = drawn(expected(2), max(state["cursor"]["drawn"].values()))
    forgotten = still({name: state["cursor"][name] if name in kept else [] for name in ("again", "ready")}, order)
    state["cursor"] |= {name: [] for name in kept}
    path.write_text(json.dumps(state))
    # Some may have been dropped while the checkpoint was written, which is undone if the run is gone on with.
    rewritten(run / "events.jsonl", lambda rows: [row for row in rows if row.get("group") not in forgotten])
    assert account(spoiled, 1).lost == forgotten
    assert forgotten or kept == ("ready",)


@pytest.mark.parametrize("spoiled", [3], indirect=True)
def test_a_group_that_leaves_the_ledger_untrained_is_lost(spoiled: Path) -> None:
    database = sqlite3.connect(spoiled / "ledger" / "ledger.sqlite")
    with database:
        database.execute("INSERT INTO witness VALUES ('gone', 'accepted', 1, NULL), ('gone', 'leased', 1, 2)")
        database.execute("INSERT INTO witness VALUES ('young', 'accepted', 5, NULL), ('young', 'queued', 5, 6)")
    database.close()
    audit = account(spoiled, 3)
    assert audit.lost == {"gone"}
    assert any("not too old, first young" in what for what in audit.wrong)


@pytest.mark.parametrize("spoiled", [0], indirect=True)
def test_an_on_policy_run_must_equal_the_uninterrupted_one(spoiled: Path, trials: tuple[Path, list[list[str]]]) -> None:
    reference = trials[0] / "lane-0" / "uninterrupted" / "runs" / "run"
    assert not equals(spoiled / "runs" / "run", reference)

    def other_token(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[0]["tokens"][0]["id"] ^= 1
        return rows

    rewritten(spoiled / "runs" / "run" / "rollouts" / "000003.jsonl", other_token)
    assert equals(spoiled / "runs" / "run", reference)
