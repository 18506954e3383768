"""Real atroposlib: its environments and its trainer's client on our broker, ours on its ``run-api``."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import build_tiny_model
from integration.atropos_peers import (
    START,
    Broker,
    Environment,
    Peers,
    Trainer,
    ask,
    fake_engine,
    key_of,
    lines,
    until,
)
from integration.test_broker_train import Place, hand_in, train_recipe, trained
from integration.vllm_runs import DTYPE, GAP, groups_once, metrics, needs_engine, recipe, rollouts
from integration.vllm_runs import engine as engine_options
from support.tiny_policy import reference

pytestmark = pytest.mark.slow

STEPS = 12
"""Batches that the example trainer takes."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[str]:
    with fake_engine(tiny_model) as url:
        yield url


@dataclass
class Played:
    """What came of three environments and a trainer on one broker."""

    broker: Broker
    trainer: list[dict[str, Any]]
    environments: dict[str, Environment]
    left: Trainer
    """Who took what the example trainer left."""

    def accepted(self) -> Counter[str]:
        return sum((env.accepted() for env in self.environments.values()), Counter())

    def served(self) -> Counter[str]:
        return Counter(key for line in self.trainer for key in line["keys"]) + self.left.served()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, engine: str) -> Iterator[Played]:
    """Three environments, one for each way of collecting, and the example trainer's client."""
    place = tmp_path_factory.mktemp("peers")
    with Peers(place, tiny_model) as peers:
        broker = peers.tandem_broker()
        record = place / "trainer.jsonl"
        options = {"batch_size": 4, "gradient_accumulation_steps": 4, "seq_len": 512, "training_steps": STEPS}
        go, enough = place / "go", place / "enough"
        trainer = peers.peer("peer_trainer", broker.url, record, json.dumps(options), go, enough)
        environments = {
            "trajectory": peers.environment(broker, engine, "trajectory", 2),
            "trajectories": peers.environment(broker, engine, "trajectories", 4),
            "managed": peers.environment(broker, engine, "managed", 4, min_batch_allocation=0.25),
        }

        def playing() -> list[Environment]:
            for env in environments.values():
                assert env.process.status() is None, env.process.output[-4000:]
            return list(environments.values())

        def known() -> bool:
            detail = ask(f"{broker.url}/status?detail")["detail"]
            return len(detail["envs"]) == len(playing())

        # A share is kept from when its environment has registered. And one that comes late finds every batch filled by
        # the others, and waits: a queue that is full is full for all.
        until(known, "three environments", START)
        go.touch()
        until(lambda: all(env.accepted() for env in playing()), "a group of each environment", START)
        enough.touch()
        until(lambda: trainer.status() is not None, "the trainer", 90)
        assert trainer.status() == 0, trainer.output
        for env in playing():
            env.process.end()
        left = Trainer(broker.url, 16)
        left.take_all()
        yield Played(broker, lines(record), environments, left)


def test_every_style_of_collecting_is_accepted(played: Played) -> None:
    for style, env in played.environments.items():
        assert env.accepted(), f"{style} sent nothing: {env.process.output[-2000:]}"
        assert env.refused() == []


def test_no_accepted_group_is_lost_or_doubled(played: Played) -> None:
    accepted, served = played.accepted(), played.served()
    assert set(accepted.values()) == {1}
    assert set(served.values()) == {1}
    assert len(served) >= STEPS * 4
    sent = set.union(*(env.sent() for env in played.environments.values()))
    assert set(served) <= sent
    detail = ask(f"{played.broker.url}/status?detail")["detail"]
    assert (accepted - served).total() <= detail["queued_groups"] + detail["buffered_groups"]
    assert not served - accepted - Counter(key for env in played.environments.values() for key in env.unanswered())


def test_its_trainer_can_use_every_batch(played: Played) -> None:
    for line in played.trainer:
        assert (line["rows"], line["same"]) == (16, True)


def test_minimum_share(played: Played) -> None:
    managed = played.environments["managed"].sent()
    for line in played.trainer:
        assert sum(key in managed for key in line["keys"]) >= 1


def test_our_trainer_takes_what_others_handed_in_to_its_server(tmp_path: Path, tiny_model: Path) -> None:
    with Peers(tmp_path, tiny_model) as peers, Place(tmp_path, peers.run_api().url) as place:
        path = train_recipe(place, tiny_model, broker=place.url, sampling={"temperature": 0.7})
        trainer = place.start("train", "train", str(path))
        asyncio.run(hand_in(place.url, 6))
        assert trainer.wait(120) == 0, place.logs()
        assert "Traceback" not in place.log_of("train")
        groups_once(place.run, each=2)
        assert sorted(trained(place.run)) == [f"g{n}" for n in range(6)]
        other = yaml.safe_load(path.read_text()) | {"name": "other", "groups_per_step": 3}
        (place.path / "other.yaml").write_text(yaml.safe_dump(other))
        assert place.start("other", "train", "other.yaml").wait(120) == 7
        assert "the broker serves batches of 8 sequences and this run takes 12" in place.log_of("other")


@pytest.mark.long
def test_an_environment_lives_through_the_death_of_the_broker(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    """It dies after three calls in a row that were refused, which may be well within a second of each other."""
    with Peers(tmp_path, tiny_model) as peers:
        broker = peers.tandem_broker(held=True)
        trainer = Trainer(broker.url, 16).register()
        trainer.take()
        env = peers.environment(broker, engine, "managed", 4)
        risked: set[str] = set()
        """Groups of batches of which the broker may not know that they went out: nobody acknowledges them."""
        for _ in range(3):
            more(trainer)
            risked |= {key_of(group) for group in trainer.batches[-1]}
            broker.process.kill()
            broker.start()
        more(trainer)
        assert env.process.status() is None, env.process.output[-4000:]
        env.process.end()
        trainer.take_all()
        accepted, served = env.accepted(), trainer.served()
        assert (accepted - served).total() <= ask(f"{broker.url}/status")["queue_size"]
        assert set(served) <= env.sent()
        # A group whose answer was lost is sent again by BaseEnv, which knows no keys.
        assert {key for key, times in served.items() if times > 1} <= env.unanswered() | risked


def more(trainer: Trainer) -> None:
    """Take some batches more."""
    wanted = len(trainer.batches) + 10
    until(lambda: trainer.take() and len(trainer.batches) >= wanted, "batches", 60)


def sent(output: str) -> range:
    """How many groups an environment of ours can have handed in, by what it says: what it dropped was under way."""
    match = re.search(r"ended: .*: (\d+) groups sent(?: \((\d+) dropped\))?\n", output)
    assert match, output
    return range(int(match[1]), int(match[1]) + int(match[2] or 0) + 1)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["work", "env"])
def test_our_environment_on_run_api(tmp_path: Path, tiny_model: Path, engine: str, verb: str) -> None:
    """Every group that it says it handed in comes out once, by the flags of Atropos' environments too."""
    with Peers(tmp_path, tiny_model) as peers:
        broker = peers.run_api()
        trainer = Trainer(broker.url, 16).register(num_steps=20)
        trainer.take()
        options: dict[str, Any] = {"zero_variance_groups": "keep", "n": 6}
        if verb == "work":
            words = ["work", "env=arithmetic"]
            options |= {"model": tiny_model, "broker": broker.url, "engine": engine}
            options |= {"group_size": 4, "sampling.max_tokens": 12}
        else:
            flags = {"rollout_server_url": broker.url, "tokenizer_name": tiny_model, "group_size": 4}
            flags |= {"max_token_length": 128, "total_steps": 20}
            words = ["env", "arithmetic", "serve", "--openai.server_type", "vllm"]
            words += [word for name, value in flags.items() for word in (f"--env.{name}", str(value))]
            words += ["--openai.base_url", f"{engine}/v1", "--openai.model_name", str(tiny_model)]
        work = peers.start("work", *words, *(f"{name}={value}" for name, value in options.items()))

        def ended() -> bool:
            trainer.take()
            return work.status() is not None

        until(ended, "the end of the environment", 60)
        assert work.status() == 0, work.output
        trainer.take_all()
        served = trainer.served()
        assert set(served.values()) == {1}
        assert len(served) >= 20 * 4
        assert len(served) + ask(f"{broker.url}/status")["queue_size"] in sent(work.output)
        for batch in trainer.batches:
            for group in batch:
                assert "tandem_task" in group["group_overrides"]


@pytest.mark.long
def test_our_trainer_on_run_api(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    """A BaseEnv plays, run-api hands on, ours trains: no group twice, and whole ones alone."""
    steps = 4
    recipe = {
        "model": str(tiny_model),
        "steps": steps,
        "runs": str(tmp_path / "runs"),
        "name": "run",
        "groups_per_step": 4,
        "group_size": 4,
        "max_lag": steps,
        "zero_variance_groups": "keep",
        "dtype": "float32",
        "threads": 1,
        "loggers": [],
        "checkpoint": {"every": 2},
    }
    with Peers(tmp_path, tiny_model) as peers:
        broker = peers.run_api()
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "broker": broker.url}))
        train = peers.start("train", "train", "recipe.yaml")
        env = peers.environment(broker, engine, "managed", 4)
        until(lambda: train.status() is not None, "the end of the run", 120)
        assert train.status() == 0, train.output
        folder = tmp_path / "runs" / "run"
        groups_once(folder, each=4)
        assert sorted(metrics(folder)) == list(range(1, steps + 1))
        env.process.end()
        # Each answer that was trained is one that was sent, token for token, and none was trained twice.
        trained = [tuple(token["id"] for token in row["tokens"]) for row in rollouts(folder)]
        assert set(trained) <= env.answers()
        assert len(set(trained)) == len(trained) == steps * 16


@needs_engine
@pytest.mark.long
def test_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BaseEnv and an environment of ours sample from our vLLM, whose logprobs are those of the model."""
    model = build_tiny_model(tmp_path / "model", head_dim=32)
    monkeypatch.setenv("ENGINE_KEY", "x")
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logdir"))
    own = engine_options(api_key_variable="ENGINE_KEY", max_num_seqs=16)
    options = recipe(model, Path("runs"), engine=own, rewards={"number": 1.0})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(options))
    with Peers(tmp_path, model) as peers:
        served = peers.start("engine", "serve", "engine", "recipe.yaml")
        broker = peers.tandem_broker()
        trainer = Trainer(broker.url, 16).register()
        trainer.take()
        until(lambda: "Ctrl-C ends it" in served.output or served.status() is not None, "the engine", 240)
        assert served.status() is None, served.output
        url = served.output.partition("serving at ")[2].partition(";")[0].strip()
        env = peers.environment(broker, url, "managed", 4, min_batch_allocation=0.25)
        words = ["env=arithmetic", f"model={model}", f"broker={broker.url}", "min_share=0.25", "n=4", "group_size=4"]
        words += [f"engine.urls=[{url}]", "engine.api_key_variable=ENGINE_KEY", "sampling.max_tokens=8"]
        work = peers.start("work", "work", *words, "zero_variance_groups=keep")

        def groups(*, ours: bool) -> list[dict[str, Any]]:
            return [group for batch in trainer.batches for group in batch if bool(group["group_overrides"]) == ours]

        until(lambda: trainer.take() and min(len(groups(ours=True)), len(groups(ours=False))) >= 4, "batches", 120)
        env.process.end()
        work.end()
        trainer.take_all()
        assert set(trainer.served().values()) == {1}
        ours, theirs = groups(ours=True), groups(ours=False)
        assert all(set(group["group_overrides"]) >= {"tandem_version", "tandem_task"} for group in ours)
        for group in (ours[0], theirs[0]):
            near_the_model(model, group)


def near_the_model(model: Path, group: dict[str, Any]) -> None:
    """Each logprob of a group is the model's own, of the token at its place."""
    live = reference(model, getattr(torch, DTYPE))
    for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        with torch.no_grad():
            scores = live(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        assert any(token != -100 for token in mask)
        for i, (token, logprob) in enumerate(zip(mask, logprobs, strict=True)):
            if token == -100:
                assert logprob == 1.0
            else:
                assert token == tokens[i]
                assert abs(float(scores[i - 1, token]) - logprob) <= GAP
