"""An engine that sleeps while a step is trained: what it forgot is never served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from support.scripted_engine import Scripted
from support.sync_sessions import open_session
from support.tiny_policy import live_policy

from tandem.config.loading import RunConfig, from_options
from tandem.engines.base import (
    EngineRequirements,
    ExportsWeights,
    LoadsVersions,
    ProbeResult,
    ReceivesBroadcast,
    Relaunches,
)
from tandem.engines.vllm.spec import Vllm
from tandem.errors import ConfigError, EngineError, StaleWeights, TornWeights, UnsupportedPair
from tandem.model.policy import Policy
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer.pairs import check_pairs
from tandem.transport.checksums import checksums
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.transaction.session import WeightSyncSession

pytestmark = pytest.mark.slow

START = PolicyVersion(step=0, digest="")


@dataclass
class Sleepy(Scripted):
    """It forgets its weights in a deep sleep, and has no memory to read or write before it is woken."""

    depth: int = 2
    asleep: bool = False

    @property
    def sleeps(self) -> int:
        return self.depth

    def _at(self, point: str) -> None:
        super()._at(point)
        if point in ("move", "probe", "checksums", "resume"):
            assert not self.asleep, f"{point} in its sleep"

    async def sleep(self) -> None:
        self._at("sleep")
        assert not self.serves
        self.asleep = True

    async def wake(self) -> None:
        self._at("wake")
        if self.asleep and self.depth == 2:
            with torch.no_grad():
                for parameter in self.inner.model.parameters():
                    parameter.fill_(123.0)
        self.asleep = False

    def _start_again(self) -> None:
        super()._start_again()
        self.asleep = False


@dataclass(frozen=True, kw_only=True)
class Sent(WeightSync):
    """A way that writes into the engine, all that is trained or ``some`` of it."""

    payloads: ClassVar[frozenset[str]] = frozenset({"weights"})
    capability: ClassVar[type] = ReceivesBroadcast
    pause: ClassVar[Literal["step", "transfer", "never"]] = "transfer"

    some: Callable[[str], bool] = lambda name: True

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        engine = session.engine
        assert isinstance(engine, Sleepy)
        engine._at("move")
        return engine._take((n, t) for n, t in session.trainable.source(session.policy.model) if self.some(n))


@contextmanager
def pair(folder: Path, trainable: Trainable, **script: Any) -> Any:
    with live_policy(folder, trainable=trainable) as policy, live_policy(folder, trainable=trainable) as inner:
        yield policy, Sleepy(inner, trainable, **script)


async def steps(
    policy: Policy, engine: Sleepy, sync: WeightSync, trainable: Trainable, count: int = 2
) -> WeightSyncSession:
    """Steps as the loop takes them."""
    async with open_session(sync, policy, engine, START, trainable) as session:
        for step in range(1, count + 1):
            await session.sleep()
            assert engine.asleep == bool(engine.sleeps)
            async with session.commit(step):
                if trainable == Full():
                    with torch.no_grad():
                        policy.head.weight[3, 5] += 0.25
        return session


@pytest.mark.parametrize("depth", [1, 2])
def test_it_sleeps_from_the_batch_to_the_publish_which_brings_what_it_forgot(tiny_model: Path, depth: int) -> None:
    with pair(tiny_model, Full(), depth=depth) as (policy, engine):
        asyncio.run(steps(policy, engine, Sent(), Full()))
        step = ["drain", "sleep", "pause", "wake", "move", "probe", "checksums", "set_version", "resume"]
        assert engine.events[-18:] == [*step, *step]
        assert [step for step, _ in engine.resumed_versions] == [0, 1, 2]
        assert engine.held() == checksums(Full().source(policy.model))
        assert engine.serves


def test_an_engine_that_never_sleeps_is_left_alone(tiny_model: Path) -> None:
    with pair(tiny_model, Full(), depth=0) as (policy, engine):
        asyncio.run(steps(policy, engine, Sent(), Full()))
        assert not {"sleep", "wake"} & set(engine.events)


@pytest.mark.parametrize(
    ("some", "error"), [(lambda name: False, StaleWeights), (lambda name: "mlp" not in name, TornWeights)]
)
def test_weights_that_were_not_brought_back_are_never_served(
    tiny_model: Path, some: Callable[[str], bool], error: type[Exception]
) -> None:
    with pair(tiny_model, Full()) as (policy, engine):

        async def work() -> None:
            async with open_session(Sent(), policy, engine, START, Full()) as session:
                session.sync = Sent(some=some)
                await session.sleep()
                with pytest.raises(error):
                    async with session.commit(1):
                        pass

        asyncio.run(work())
        assert engine.events[-1] == "stop"
        assert not engine.serves
        assert [step for step, _ in engine.resumed_versions] == [0]


def test_what_no_checksum_covers_is_seen_by_the_probe(tiny_model: Path, tmp_path: Path) -> None:
    """Buffers and the like, which a sleep may lose as well."""
    slept = False

    def lost(probe: ProbeResult) -> ProbeResult:
        return ProbeResult(scored=tuple(2 * x for x in probe.scored), sampled=probe.sampled) if slept else probe

    with pair(tiny_model, Full(), probed=lost) as (policy, engine):

        async def work() -> None:
            nonlocal slept
            async with open_session(Sent(), policy, engine, START, Full(), tmp_path) as session:
                await session.sleep()
                slept = True
                with pytest.raises(StaleWeights, match="its logprobs of a probe differ"):
                    async with session.commit(1):
                        pass

        asyncio.run(work())
        assert not engine.serves


@pytest.mark.parametrize("trainable", [Full(layers=(0,)), Lora(rank=2, merged=True)], ids=["some layers", "merged"])
def test_a_deep_sleep_is_refused_where_weights_are_not_all_published(tiny_model: Path, trainable: Trainable) -> None:
    with pair(tiny_model, trainable) as (policy, engine):
        with pytest.raises(UnsupportedPair, match=r"sleep: 2 discards every weight.*use engine\.sleep: 1"):
            asyncio.run(steps(policy, engine, Sent(), trainable))
        assert not engine.resumed_versions
    with pair(tiny_model, trainable, depth=1) as (policy, engine):
        asyncio.run(steps(policy, engine, Sent(), trainable))


@pytest.mark.parametrize("point", ["sleep", "wake", "move"])
def test_one_that_dies_in_its_sleep_is_started_and_published_to(tiny_model: Path, point: str) -> None:
    with pair(tiny_model, Full()) as (policy, engine):

        async def work() -> None:
            async with open_session(Sent(), policy, engine, START, Full()) as session:
                engine.dies[point] = 1
                await session.sleep()
                async with session.commit(1):
                    with torch.no_grad():
                        policy.head.weight[3, 5] += 0.25

        asyncio.run(work())
        assert [step for step, _ in engine.resumed_versions] == [0, 1]
        assert engine.restart_count == 1


def test_one_that_cannot_wake_serves_nothing(tiny_model: Path) -> None:
    with pair(tiny_model, Full(), revivable=False) as (policy, engine):

        async def work() -> None:
            async with open_session(Sent(), policy, engine, START, Full()) as session:
                await session.sleep()
                engine.dies["wake"] = 1
                async with session.commit(1):
                    pass

        with pytest.raises(EngineError):
            asyncio.run(work())
        assert not engine.serves


# Recipes


def recipe(**changes: Any) -> RunConfig:
    options = {"model": "m", "steps": 9, "env": "arithmetic", "sync": "broadcast", **changes}
    return from_options(options, (), Path("r.yaml")).config


def asleep(depth: int = 1, **options: Any) -> Mapping[str, Any]:
    return {"kind": "vllm", "sleep": depth, **options}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one copy": ({"engine": asleep(), "sync": "shared"}, "need the memory"),
    "by name": ({"engine": asleep(), "sync": "hotswap", "trainable": "lora"}, "goes with sync: broadcast alone"),
    "ended anyway": ({"engine": asleep(), "sync": "restart", "max_lag": 2}, "goes with sync: broadcast alone"),
    "beside training": ({"engine": asleep(), "max_lag": 1}, "set max_lag to 0"),
    "elsewhere": ({"engine": asleep(devices=["1"])}, "releases nothing that the trainer could use"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sleep_that_gains_nothing_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedPair, match=message):
        check_pairs(recipe(**changes))


def test_a_sleep_is_accepted_where_engine_and_trainer_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    for options in ({}, {"devices": ["3"]}, {"devices": ["5,3"], "tensor_parallel_size": 2}):
        for depth in (1, 2):
            check_pairs(recipe(engine=asleep(depth, **options)))
    with pytest.raises(UnsupportedPair, match="releases nothing"):
        check_pairs(recipe(engine=asleep(devices=["5"])))


def test_a_cpu_has_no_sleep_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedPair, match="vLLM on a CPU has no sleep mode"):
        check_pairs(recipe(engine=asleep()))
    check_pairs(recipe(engine=asleep(0)))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (asleep(3), "sleep"),
        (asleep(urls=["http://h:1"]), "sleep"),
        ({"kind": "vllm", "args": {"enable_sleep_mode": True}}, "enable_sleep_mode is set by Tandem"),
        ({"kind": "embedded", "sleep": 1}, "sleep"),
    ],
)
def test_a_sleep_that_nobody_could_give_is_no_option(engine: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(engine=engine, sync="broadcast" if engine["kind"] == "vllm" else "shared")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_server_is_started_with_sleep_mode_if_it_is_to_sleep(depth: Literal[0, 1, 2]) -> None:
    requirements = EngineRequirements(model="m", dtype="bfloat16", capability=ReceivesBroadcast)
    command = Vllm(sleep=depth).command(requirements, 64, model="m", port=1)
    assert ("--enable-sleep-mode" in command) == bool(depth)


def test_ports_that_do_not_sleep_are_all_named() -> None:
    assert {ExportsWeights, LoadsVersions, Relaunches, ReceivesBroadcast} < Vllm.capabilities
