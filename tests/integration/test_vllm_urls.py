"""``kill -9`` of one of two real engines at urls: the run goes on with the other, and uses the first again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import (
    HEAD_DIM,
    Trainer,
    engine,
    groups_once,
    metrics,
    needs_engine,
    published,
    recipe,
    rollouts,
    same_logprobs,
)

from tandem.ports import free_port

pytestmark = [needs_engine, pytest.mark.long]

KEY = "TANDEM_TEST_ENGINE_KEY"


class Served:
    """``tandem serve engine`` in a process group of its own."""

    def __init__(self, place: Path, model: Path, port: int) -> None:
        own = {
            "engine": engine(port=port, api_key_variable=KEY),
            "sync": "broadcast",
            "rewards": {"number": 1.0},
        }
        options = recipe(model, place / "runs", **own)
        self.url = f"http://127.0.0.1:{port}"
        self._recipe = place / f"served-{port}.yaml"
        self._recipe.write_text(yaml.safe_dump(options))
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tandem", "serve", "engine", str(self._recipe)]
        with self._recipe.with_suffix(".txt").open("ab") as out:
            self._process = subprocess.Popen(
                command, cwd=self._recipe.parent, stdout=out, stderr=out, start_new_session=True
            )

    def kill(self) -> None:
        """The verb, its server and the scheduler, at once."""
        for pid in _family(self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(other for child in children for other in _family(int(child)))]


def test_the_other_takes_over_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    model = build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    served = [Served(tmp_path, model, free_port()) for _ in range(2)]
    urls = {"kind": "vllm", "urls": [each.url for each in served], "api_key_variable": KEY, "start_seconds": 240.0}
    run = Trainer.fresh(tmp_path, model, steps=100_000, sync="broadcast", engine=urls, checkpoint={"every": 50})
    try:

        def steps() -> int:
            return len(metrics(run.folder)) if run.folder.exists() else 0

        run.until(lambda: steps() >= 2, "two steps", 300)
        served[0].kill()
        alone = steps()
        run.until(lambda: steps() >= alone + 3, "steps with one engine")
        served[0].start()
        run.until(lambda: f"{served[0].url} answers again" in run.output(), "the return of the other", 240)
        back = steps()
        run.until(lambda: steps() >= back + 4, "steps with both engines")
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
        assert run.output().count("the other engines take over") == 1
        assert all(event["probe_gap"] is not None for event in published(run.folder).values())
        assert all(row["versions"] == [row["step"] - 1] * 2 for row in rollouts(run.folder))
        groups_once(run.folder, each=4)
        same_logprobs(run.folder)
    finally:
        run.clean()
        for each in served:
            each.kill()
