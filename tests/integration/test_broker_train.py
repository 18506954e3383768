"""A trainer, a broker and environments as processes of their own: what is accepted is trained once, come what may."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import (
    alive,
    engine,
    groups_once,
    lines,
    metrics,
    needs_engine,
    recipe,
    rollouts,
    same_logprobs,
)
from support.processes import start

from tandem.ports import free_port
from tandem_broker.client import Connection, EnvClient
from tandem_broker.protocol.messages import EnvRegistration, ScoredGroup

KEYS = {"TANDEM_ENGINE_KEY": "engine-key", "TANDEM_BROKER_KEY": "trainer-key", "TANDEM_BROKER_ENV_KEY": "env-key"}
SIZE = 4


@dataclass
class Place:
    """A folder, and the processes that were started in it."""

    path: Path
    url: str = ""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        """``tandem`` with these words."""
        environment = {**os.environ, **KEYS, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = start(words, cwd=self.path, out=self.path / f"{name}.log", environment=environment)
        self.started.append(process)
        return process

    def log_of(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text()

    def until(self, condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert process.poll() is None, f"it ended by itself: {self.logs()}"
            assert time.monotonic() < deadline, f"it did not come to it in {seconds} s: {self.logs()}"
            time.sleep(0.01)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.path.glob("*.log"))

    def broker(self) -> subprocess.Popen[str]:
        port = int(self.url.rpartition(":")[2]) if self.url else free_port()
        self.url = f"http://127.0.0.1:{port}"
        before = len(self.log_of("broker")) if (self.path / "broker.log").exists() else 0
        process = self.start("broker", "serve", "broker", "--port", str(port), "--data", "ledger")
        self.until(lambda: "broker at" in self.log_of("broker")[before:], process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    @property
    def run(self) -> Path:
        return self.path / "runs" / "run"

    def has(self, step: int) -> bool:
        return (self.run / "checkpoints" / f"{step:06d}").is_dir()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as place:
        yield place


def foreign_group(name: str) -> ScoredGroup:
    """A group of somebody who knows the tokens and nothing else; the first answers are better."""
    answers = [list(b"ab"), list(b"ba"), list(b"bb"), list(b"aa")]
    tokens = [[*b"say it:", *answer] for answer in answers]
    return ScoredGroup(
        tokens=tokens,
        masks=[[*[-100] * 7, *row[7:]] for row in tokens],
        scores=[1.0, 0.5, 0.0, 0.0],
        inference_logprobs=[[*[1.0] * 7, -3.0, -3.0]] * SIZE,
        messages=[
            [{"role": "user", "content": "say it:"}, {"role": "assistant", "content": bytes(a).decode()}]
            for a in answers
        ],
        group_overrides={"tandem_task": name},
    )


async def hand_in(url: str, count: int) -> None:
    """Groups of one environment, as soon as the trainer has started."""
    spec = EnvRegistration(max_token_length=64, desired_name="made", weight=1.0, group_size=SIZE)
    async with EnvClient(Connection(url, KEYS["TANDEM_BROKER_ENV_KEY"]), spec, key="made", poll=0.1) as client:
        ticket = await client.register()
        for n in range(count):
            scored = foreign_group(f"g{n}")
            scored.env_id = ticket.env_id
            headers = {"Idempotency-Key": f"made-{n}"}
            answer = await client.connection.ask("POST", "/scored_data", scored, headers=headers)
            assert json.loads(answer.body)["status"] == "received"


def train_recipe(place: Place, model: Path, **changes: Any) -> Path:
    options = recipe(model, place.path / "runs", **{
        "broker": {"url": place.url, "key_variable": "TANDEM_BROKER_KEY"},
        "max_lag": 50,
        "groups_per_step": 2,
        "group_size": SIZE,
        "engine": "embedded",
        "zero_variance_groups": "drop",
        **changes,
    })  # fmt: skip
    for name in ("env", "rewards", "evaluate"):
        if name not in changes:
            del options[name]
    path = place.path / "recipe.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def trained(folder: Path) -> list[str]:
    """Tasks in the order of the steps that trained them."""
    step_of: dict[str, int] = {}
    for row in rollouts(folder):
        step_of.setdefault(row["group"], row["step"])
    return [group.partition("@")[0] for group in step_of]


STEPS = 10


@pytest.mark.long
def test_kill_9_of_trainer_and_broker_loses_and_doubles_nothing(place: Place, tiny_model: Path) -> None:
    broker = place.broker()
    path = train_recipe(place, tiny_model, steps=STEPS, checkpoint={"every": 3, "keep": 10})
    trainer = place.start("train", "train", str(path))
    asyncio.run(hand_in(place.url, 2 * STEPS))
    place.until(lambda: len(lines(place.run / "metrics.jsonl")) >= 4, trainer)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    broker.send_signal(signal.SIGKILL)
    broker.wait()
    place.broker()
    trainer = place.start("train", "train", str(place.run))
    place.until(lambda: place.has(6), trainer)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer = place.start("train", "train", str(place.run))
    assert trainer.wait(120) == 0, place.logs()
    assert "Traceback" not in place.log_of("train")
    groups_once(place.run, each=2)
    assert sorted(trained(place.run)) == sorted(f"g{n}" for n in range(2 * STEPS)), "lost or doubled"
    (row, *_) = rollouts(place.run)
    assert (row["env"], row["text"], row["prompt"]) == ("foreign_0", "ab", [{"role": "user", "content": "say it:"}])
    assert "lease" not in place.log_of("train")
    assert "say it:" in (place.run / "report.html").read_text()
    last = metrics(place.run)[STEPS]
    assert last["reward/score"] == pytest.approx(0.375)


@needs_engine
@pytest.mark.slow
def test_broker_trainer_engine_and_environment_are_four_commands(place: Place) -> None:
    place.broker()
    tiny_model = build_tiny_model(place.path / "tiny", head_dim=32)
    port = free_port()
    path = train_recipe(
        place,
        tiny_model,
        env={"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        rewards={"learns.shaping:letters": 1.0},
        engine=engine(port=port, api_key_variable="TANDEM_ENGINE_KEY"),
        evaluate={"tasks": 2, "samples": 1, "before": False},
        max_lag=4,
    )
    trainer = place.start("train", "train", str(path))
    environment = place.start(
        "work",
        "work",
        str(path),
        f"engine.urls=http://127.0.0.1:{port}",
        "broker.key_variable=TANDEM_BROKER_ENV_KEY",
        "n=4",
    )
    assert trainer.wait(240) == 0, place.logs()
    assert environment.wait(60) == 0, place.logs()
    for name in ("train", "work"):
        assert "Traceback" not in place.log_of(name)
    groups_once(place.run, each=2)
    same_logprobs(place.run)
    for step, row in metrics(place.run).items():
        assert row["lag/max"] <= 4, step
        assert row["tokens/trained"] > 0
    for row in rollouts(place.run):
        assert row["env"] == "arithmetic"
        assert row["rewards"].keys() == {"learns.shaping:letters"}
        assert max(row["versions"]) <= row["step"] - 1, "no token is from a policy that was not there yet"
    assert [row["step"] for row in lines(place.run / "eval.jsonl")] == [3]
    for event in lines(place.run / "events.jsonl"):
        assert not (pid := event.get("pid")) or not alive(pid)
