"""Proof of a publish: a fault planted anywhere leaves the engine paused, and says what is wrong."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import msgspec
import pytest
import torch
from peft import PeftModel
from support.scripted_engine import Scripted, Wire, scripted
from support.sync_sessions import open_session, publish
from support.tiny_policy import live_policy, logprobs_of, reference
from support.uniform_engine import Fake
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.config.loading import RunConfig
from tandem.engines.base import Engine, EngineSpec, ExportsWeights, Health, LoraAdapter, UnmappedWeights
from tandem.engines.embedded.spec import Embedded
from tandem.engines.vllm.spec import Vllm
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import EngineError, StaleWeights, TornWeights, TransportError, UnsupportedPair
from tandem.metrics import Sum
from tandem.model.policy import Policy
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer.pairs import check_pairs
from tandem.transport import collective
from tandem.transport.bridge import VllmBridge
from tandem.transport.checksums import checksums, digest
from tandem.transport.sharing import attach, export_host
from tandem.types import Completion, PolicyVersion, Sampling
from tandem.weight_sync import broadcast
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.broadcast import Broadcast
from tandem.weight_sync.hotswap import SPARE, Hotswap
from tandem.weight_sync.restart import Restart
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction import session as session_module
from tandem.weight_sync.transaction import trained
from tandem.weight_sync.transaction.session import REQUESTS_DELAY, Published, WeightSyncSession
from tandem.weight_sync.verify.checksums import Checksums, differing
from tandem.weight_sync.verify.probe import PROBE

START = PolicyVersion(step=0, digest="")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence of a failed proof is kept in the working directory where no run's folder is named."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model) as live:
        yield live


@dataclass
class Watched(Engine):
    """The embedded engine; notes what is asked of it, and can be made to lie."""

    inner: Any
    events: list[str] = field(default_factory=list)
    comes: list[int | None] = field(default_factory=list)
    exported: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    scored: Callable[[list[float]], list[float]] = lambda logprobs: logprobs

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        return await self.inner.generate(prompt, sampling, key)  # type: ignore[no-any-return]

    async def score(self, tokens: Sequence[int]) -> list[float]:
        self.events.append("score")
        return self.scored(await self.inner.score(tokens))

    def version(self) -> PolicyVersion:
        return self.inner.version()  # type: ignore[no-any-return]

    async def set_version(self, version: PolicyVersion) -> None:
        self.events.append("set_version")
        await self.inner.set_version(version)

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        self.events.append("drain" if finish else "pause")
        self.comes.append(step)
        await self.inner.pause(finish=finish, step=step)

    async def resume(self) -> float:
        self.events.append("resume")
        return await self.inner.resume()  # type: ignore[no-any-return]

    async def health(self) -> Health:
        return await self.inner.health()  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self.inner.close()

    @property
    def context(self) -> int:
        return self.inner.context  # type: ignore[no-any-return]

    async def export_weights(self) -> dict[str, Tensor]:
        return {name: self.exported(name, tensor) for name, tensor in (await self.inner.export_weights()).items()}


@dataclass
class Attesting(Watched):
    """One that says it holds other bytes than the policy's own: ``held``."""

    held: dict[str, Tensor] = field(default_factory=dict)

    async def checksums(self, payload: str) -> dict[str, Checksums]:
        self.events.append("compare")
        return {"the engine": checksums(self.held.items())}

    def as_stored(self, adapter: LoraAdapter) -> Iterable[tuple[str, Tensor]]:
        return adapter.tensors


@dataclass(frozen=True, kw_only=True)
class Copied(WeightSync):
    """A way that copies to what the engine is said to hold; ``fault`` changes it on arrival."""

    payloads: ClassVar[frozenset[str]] = frozenset({"weights"})
    capability: ClassVar[type] = ExportsWeights
    pause: ClassVar[Literal["step", "transfer", "never"]] = "transfer"

    fault: Callable[[dict[str, Tensor]], None] = lambda held: None

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        engine = session.engine
        assert isinstance(engine, Attesting)
        engine.events.append("move")
        engine.held = {name: tensor.clone() for name, tensor in session.trainable.source(session.policy.model)}
        self.fault(engine.held)
        await asyncio.sleep(2 * REQUESTS_DELAY)  # on its way
        return sum(tensor.nbytes for tensor in engine.held.values())


@dataclass(frozen=True, kw_only=True)
class CopiedAtRest(Copied):
    pause: ClassVar[Literal["step", "transfer", "never"]] = "step"


@dataclass(frozen=True, kw_only=True)
class CopiedDrained(Copied):
    @property
    def finishes(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class CopiedLive(Copied):
    pause: ClassVar[Literal["step", "transfer", "never"]] = "never"


@dataclass(frozen=True, kw_only=True)
class CopiedOnceSummed(Copied):
    sums_before_pause: ClassVar[bool] = True


def run(policy: Policy, work: Callable[[Watched], Coroutine[Any, Any, Any]], **lies: Any) -> Any:
    kind = lies.pop("kind", Watched)

    async def main() -> Any:
        async with Embedded(max_rows=2).open(policy, context=128) as inner:
            return await asyncio.wait_for(work(kind(inner, **lies)), 30)

    return asyncio.run(main())


async def is_paused(engine: Watched) -> bool:
    """True if a request gets nowhere."""
    try:
        await asyncio.wait_for(engine.generate([7], Sampling(max_tokens=1), 0), 0.15)
    except TimeoutError:
        return True
    return False


def refused(
    policy: Policy, sync: WeightSync, kind: type[Exception], *, start: PolicyVersion = START, **lies: Any
) -> str:
    """Open, and return what it was refused with; the engine must have stayed paused and unstamped."""

    async def work(engine: Watched) -> str:
        with pytest.raises(kind) as caught:
            async with open_session(sync, policy, engine, start, Full()):
                raise AssertionError("it must not open")
        assert type(caught.value) is kind
        assert await is_paused(engine)
        assert "set_version" not in engine.events
        assert "resume" not in engine.events
        return str(caught.value)

    return run(policy, work, **lies)  # type: ignore[no-any-return]


def test_an_honest_engine_is_published_to(policy: Policy) -> None:
    async def work(engine: Watched) -> None:
        source = Full().source(policy.model)
        async with open_session(Shared(), policy, engine, START, Full()) as session:
            first = engine.version()
            assert (first.step, first.digest) == (0, digest(checksums(source)))
            async with session.commit(1) as commit:
                with torch.no_grad():
                    policy.head.weight[3, 5] += 0.25
            assert commit.published is not None
            assert commit.published.bytes == 0
            assert commit.published.probe_gap is not None
            assert commit.published.probe_gap < 1e-4
            assert engine.version() == commit.published.version
            assert engine.version().step == 1
            assert engine.version().digest != first.digest
            assert not await is_paused(engine)
            done = await engine.generate([7], Sampling(max_tokens=3), 0)
            assert set(done.versions) == {1}

    run(policy, work)


def test_an_adapter_is_published(tiny_model: Path) -> None:
    trainable = Lora(rank=2)
    with live_policy(tiny_model, trainable=trainable) as policy:

        async def work(engine: Watched) -> None:
            async with open_session(Shared(), policy, engine, START, trainable) as session:
                async with session.commit(1):
                    pass
                assert engine.version().step == 1

        run(policy, work)


def test_another_tensor_than_the_trainers_is_refused(policy: Policy) -> None:
    """Equal bytes are not enough for shared: the next optimizer step would not reach them."""
    name = "model.layers.1.mlp.up_proj.weight"
    message = refused(policy, Shared(), UnsupportedPair, exported=lambda n, t: t.clone() if n == name else t)
    assert name in message


def test_a_resumed_digest_must_be_that_of_the_weights(policy: Policy) -> None:
    message = refused(policy, Shared(), StaleWeights, start=PolicyVersion(step=3, digest="0123456789abcdef"))
    assert "0123456789abcdef" in message
    right = digest(checksums(Full().source(policy.model)))

    async def work(engine: Watched) -> PolicyVersion:
        start = PolicyVersion(step=3, digest=right)
        async with open_session(Shared(), policy, engine, start, Full()):
            return engine.version()

    assert run(policy, work).step == 3


def test_an_engine_at_another_temperature_is_stale(policy: Policy, tiny_model: Path) -> None:
    tokens = policy.tokenizer.encode(PROBE)[:128]
    with torch.no_grad():
        warm = logprobs_of(reference(tiny_model), tokens[:1], tokens[1:], Sampling(temperature=1.02)).tolist()
    message = refused(policy, Shared(), StaleWeights, scored=lambda logprobs: warm[: len(logprobs)])
    assert "differ from the trainer's by" in message


def test_an_engine_that_samples_from_older_weights_is_stale(policy: Policy) -> None:
    """Its bytes are right (they were copied), but what it computes with is not what it holds."""
    kept: list[list[float]] = []

    def first_only(logprobs: list[float]) -> list[float]:
        kept.append(logprobs)
        return kept[0]

    async def work(engine: Watched) -> None:
        async with open_session(Shared(), policy, engine, START, Full()) as session:
            commit = session.commit(1)
            await commit.__aenter__()
            with torch.no_grad():
                policy.head.weight.mul_(1.05)
            with pytest.raises(StaleWeights):
                await commit.__aexit__(None, None, None)
            assert engine.version().step == 0
            assert await is_paused(engine)

    run(policy, work, scored=first_only)


def test_the_tolerance_is_the_recipes(policy: Policy) -> None:
    async def work(engine: Watched) -> float | None:
        sync = Shared(tolerance=10.0)
        async with open_session(sync, policy, engine, START, Full()) as session:
            return (await publish(session, START)).probe_gap

    gap = run(policy, work, scored=lambda logprobs: [x + 0.5 for x in logprobs])
    assert gap == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    ("sync", "order"),
    [
        (CopiedAtRest, ["pause", "release", "optimizer", "move", "score", "compare", "set_version", "resume"]),
        (Copied, ["optimizer", "pause", "move", "release", "score", "compare", "set_version", "resume"]),
        (CopiedDrained, ["optimizer", "drain", "move", "score", "compare", "set_version", "resume", "release"]),
        (CopiedLive, ["optimizer", "move", "compare", "score", "set_version", "resume", "release"]),
    ],
)
def test_the_order_of_a_commit(policy: Policy, sync: type[Copied], order: list[str]) -> None:
    events: list[str] = []

    async def work(engine: Watched) -> None:
        async with open_session(sync(), policy, engine, START, Full()) as session:
            events.clear()
            async with session.commit(1, free_slots=lambda: events.append("release")) as commit:
                events.append("optimizer")
            assert commit.published is not None
            assert commit.published.bytes == sum(t.nbytes for _, t in Full().source(policy.model))

    run(policy, work, kind=Attesting, events=events)
    assert events == order


@pytest.mark.parametrize(
    ("sync", "order"),
    [
        (Copied, ["optimizer", "pause", "move", "score", "checksums", "compare", "set_version", "resume"]),
        (CopiedOnceSummed, ["optimizer", "checksums", "pause", "move", "score", "compare", "set_version", "resume"]),
    ],
)
def test_checksums_of_memory_that_the_trainer_alone_writes_are_taken_while_the_engine_samples(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, sync: type[Copied], order: list[str]
) -> None:
    events: list[str] = []
    own = trained.Trained.checksums

    async def noted(self: trained.Trained) -> Checksums:
        events.append("checksums")
        return await own(self)

    def torn(held: dict[str, Tensor]) -> None:
        next(iter(held.values())).view(-1)[0] += 1

    async def work(engine: Watched) -> None:
        monkeypatch.setattr(trained.Trained, "checksums", noted)
        async with open_session(sync(), policy, engine, START, Full()) as session:
            events.clear()
            async with session.commit(1):
                events.append("optimizer")
        with pytest.raises(TornWeights):
            async with open_session(sync(fault=torn), policy, engine, START, Full()):
                pass

    run(policy, work, kind=Attesting, events=events)
    assert events[: len(order)] == order


def test_both_ends_sum_at_the_same_time_and_only_what_is_written(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, events = asyncio.Event(), asyncio.Event(), list[str]()
    own = trained.Trained.checksums

    async def met(mine: asyncio.Event, other: asyncio.Event) -> None:
        mine.set()
        await asyncio.wait_for(other.wait(), 5)

    async def sums_here(self: trained.Trained) -> Checksums:
        await met(here, there)
        return await own(self)

    class Meeting(Attesting):
        async def checksums(self, payload: str) -> dict[str, Checksums]:
            await met(there, here)
            return await super().checksums(payload)

    async def work(engine: Watched) -> None:
        async with open_session(CopiedAtRest(), policy, engine, START, Full()) as session:
            events.clear()
            async with session.commit(1):
                events.append("optimizer")

    monkeypatch.setattr(trained.Trained, "checksums", sums_here)
    monkeypatch.setattr(session_module, "finish", lambda device: events.append("finish"))
    run(policy, work, kind=Meeting, events=events)
    assert events[:4] == ["pause", "optimizer", "finish", "move"]


def test_wrong_bytes_end_a_publish_whose_probe_is_still_waited_for(policy: Policy) -> None:
    cancelled: list[bool] = []

    class Slow(Attesting):
        async def probe(self, tokens: Sequence[int], *, samples: int = 0) -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

    def torn(held: dict[str, Tensor]) -> None:
        next(iter(held.values())).view(-1)[0] += 1

    async def work(engine: Watched) -> None:
        with pytest.raises(TornWeights):
            await asyncio.wait_for(open_session(Copied(fault=torn), policy, engine, START, Full()).__aenter__(), 20)

    run(policy, work, kind=Slow)
    assert cancelled


def test_the_engine_samples_before_its_sums_are_known(policy: Policy) -> None:
    probed = asyncio.Event()

    class Summing(Attesting):
        async def probe(self, tokens: Sequence[int], *, samples: int = 0) -> Any:
            probed.set()
            return await super().probe(tokens, samples=samples)

        async def checksums(self, payload: str) -> dict[str, Checksums]:
            await asyncio.wait_for(probed.wait(), 20)
            return await super().checksums(payload)

    async def work(engine: Watched) -> None:
        async with open_session(Copied(), policy, engine, START, Full()) as session:
            probed.clear()
            async with session.commit(1) as commit:
                pass
            assert commit.published is not None
            assert commit.published.moved

    run(policy, work, kind=Summing)


def test_an_engine_that_serves_meanwhile_samples_only_bytes_that_were_compared(policy: Policy) -> None:
    class Wrong(Attesting):
        wrong = False

    def torn(held: dict[str, Tensor]) -> None:
        if Wrong.wrong:
            next(iter(held.values())).view(-1)[0] += 1

    async def work(engine: Watched) -> None:
        async with open_session(CopiedLive(fault=torn), policy, engine, START, Full()) as session:
            order = [event for event in engine.events if event in ("compare", "score")]
            assert order.index("compare") < order.index("score")
            engine.events.clear()
            Wrong.wrong = True
            with pytest.raises(TornWeights):
                await publish(session, PolicyVersion(step=1, digest=""))
            assert "compare" in engine.events
            assert "score" not in engine.events

    run(policy, work, kind=Wrong)


def test_an_engine_that_cannot_sum_is_told_of_once_this_end_is_done(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    own = trained.Trained.checksums

    async def slow(self: trained.Trained) -> Checksums:
        await asyncio.sleep(0.05)
        sums = await own(self)
        ended.append(True)
        return sums

    class Gone(Attesting):
        async def checksums(self, payload: str) -> dict[str, Checksums]:
            raise EngineError("it died in checksums")

    async def work(engine: Watched) -> None:
        with pytest.raises(EngineError, match="died in checksums"):
            async with open_session(Copied(), policy, engine, START, Full()):
                pass
        assert ended

    monkeypatch.setattr(trained.Trained, "checksums", slow)
    run(policy, work, kind=Gone)


def test_an_engine_that_never_rests_is_not_paused_for_nothing(policy: Policy) -> None:
    async def work(engine: Watched) -> Any:
        async with open_session(CopiedLive(), policy, engine, START, Full()) as session:
            return await publish(session, START), engine.events

    published, events = run(policy, work, kind=Attesting)
    assert published.paused == 0.0
    assert "pause" not in events


def test_every_publish_is_proven(policy: Policy) -> None:
    async def work(engine: Watched) -> list[int]:
        async with open_session(Shared(), policy, engine, START, Full()) as session:
            proven = [engine.events.count("score")]
            for step in range(1, 4):
                async with session.commit(step) as commit:
                    pass
                proven.append(engine.events.count("score"))
                assert "probe_gap" in commit.metrics()
                assert engine.version().digest
            return proven

    assert run(policy, work) == [1, 2, 3, 4]


# Pairs


CAN: list[tuple[WeightSync, Trainable, EngineSpec]] = [
    (Shared(), Full(), Embedded()),
    (Shared(), Lora(), Embedded()),
    (Shared(), Lora(merged=True), Embedded()),
    *(
        (sync, trainable, Vllm())
        for sync in (Shared(), Restart(), Broadcast())
        for trainable in (Full(), Lora(), Lora(merged=True))
    ),
    (Hotswap(), Lora(), Vllm()),
    (Broadcast(), Full(), Vllm(tensor_parallel_size=2)),
    *((sync, Full(), Vllm(replicas=2)) for sync in (Shared(), Broadcast())),
    (Shared(), Lora(), Vllm(urls=("http://a:1", "http://b:1"))),
    (Hotswap(), Lora(), Vllm(urls=("http://there:8000",))),
    (Restart(), Full(), Vllm(replicas=2)),
]
CANNOT: list[tuple[WeightSync, Trainable, EngineSpec, str]] = [
    (Shared(), Full(), Fake(), "sync: shared .*ExportsWeights.*engine: uniform_engine has none.*embedded"),
    (Restart(), Full(), Embedded(), "sync: restart .*Relaunches.*engine: embedded has ExportsWeights.*sync: shared"),
    (Broadcast(), Lora(), Embedded(), "sync: broadcast .*ReceivesBroadcast"),
    (Hotswap(), Lora(), Embedded(), "sync: hotswap .*LoadsVersions"),
    (Hotswap(), Full(), Vllm(), "hotswap carries adapters alone.*trainable: full.*shared, broadcast or restart"),
    (Hotswap(), Lora(merged=True), Vllm(), "hotswap carries adapters alone.*trainable: lora changes whole weights"),
    (Shared(), Full(), Vllm(tensor_parallel_size=2), "tensor_parallel_size is 2.*broadcast"),
    (Shared(bridge="b"), Full(), Vllm(urls=("http://a:1", "http://b:1")), "urls has 2: remove sync.bridge"),
    (Restart(), Full(), Vllm(urls=("http://there:8000",)), "not ours to end; use hotswap or broadcast"),
]


def recipe(sync: WeightSync, trainable: Trainable, engine: EngineSpec, **options: Any) -> RunConfig:
    lag = options.pop("max_lag", sync.behind)
    return RunConfig(
        model="m", steps=1, env=Arithmetic(), sync=sync, trainable=trainable, engine=engine, max_lag=lag, **options
    )


@pytest.mark.parametrize(("sync", "trainable", "engine"), CAN)
def test_pairs_that_work(sync: WeightSync, trainable: Trainable, engine: EngineSpec) -> None:
    check_pairs(recipe(sync, trainable, engine))


@pytest.mark.parametrize(("sync", "trainable", "engine", "says"), CANNOT)
def test_pairs_that_cannot_work_are_named_before_anything_is_loaded(
    sync: WeightSync, trainable: Trainable, engine: EngineSpec, says: str
) -> None:
    with pytest.raises(UnsupportedPair, match=says):
        check_pairs(recipe(sync, trainable, engine))


# How often


@pytest.mark.parametrize("sync", [Restart(every=3), Hotswap(every=3), Broadcast(every=3)])
def test_the_engine_is_behind_by_what_every_says(sync: WeightSync) -> None:
    assert sync.behind == 2
    assert [step for step in range(1, 12) if sync.due(step, last=False)] == [3, 6, 9]
    assert sync.due(10, last=True)


def test_published_at_every_step_it_is_never_behind() -> None:
    for sync in (Shared(), Restart(every=1), Hotswap(), Broadcast()):
        assert sync.behind == 0
        assert all(sync.due(step, last=False) for step in range(1, 5))
    assert Restart().behind == 2, "a restart takes long, so it is not done at every step unless asked"


def test_the_lag_must_allow_an_engine_that_is_behind() -> None:
    for lag in (2, 3):
        check_pairs(recipe(Restart(every=3), Full(), Vllm(), max_lag=lag))
    with pytest.raises(UnsupportedPair, match=r"every: 3 .*2 steps behind.*max_lag to 2 at least.*every to 2 at most"):
        check_pairs(recipe(Restart(every=3), Full(), Vllm(), max_lag=1))
    check_pairs(recipe(Restart(every=2), Full(), Vllm(), max_lag=1))


@pytest.mark.parametrize(
    ("sync", "sleeps", "takes"),
    [
        (Shared(), 0, [3, 4]),
        (Hotswap(), 0, [3, 4]),
        (Shared(), 1, []),
        (Restart(every=2), 0, []),
        (Hotswap(every=2), 0, [4]),
    ],
    ids=["shared", "hotswap", "asleep", "started again", "every other"],
)
def test_requests_for_the_next_policy_are_taken_where_the_engine_stays_and_gets_it(
    sync: WeightSync, sleeps: int, takes: list[int]
) -> None:
    took: list[int] = []
    released: list[int] = []
    engine = SimpleNamespace(sleeps=sleeps, accept_requests_for=lambda step: not took.append(step))  # type: ignore[func-returns-value]
    session: Any = SimpleNamespace(sync=sync, engine=engine)
    for step in (3, 4):
        WeightSyncSession.accept_requests_for(session, step, partial(released.append, step))
    assert released == took == takes


@pytest.mark.parametrize(("sync", "steps"), [(CopiedAtRest, [1]), (Copied, [1]), (CopiedDrained, [1])])
def test_the_engine_is_told_which_step_it_stands_still_for(
    policy: Policy, sync: type[Copied], steps: list[int]
) -> None:
    async def work(engine: Watched) -> None:
        async with open_session(sync(), policy, engine, START, Full()) as session:
            assert set(engine.comes) == {0}
            engine.comes.clear()
            async with session.commit(1):
                pass
            assert engine.comes == steps

    run(policy, work, kind=Attesting)


def test_requests_in_flight_end_first_where_they_would_die_or_are_to() -> None:
    assert Restart().finishes
    assert not Hotswap().finishes
    for kind in (Shared, Broadcast):
        assert not kind().finishes
        assert kind(in_flight="finish").finishes


@pytest.mark.slow
def test_in_flight_finish_begins_no_request_under_one_version_and_ends_it_under_another(policy: Policy) -> None:
    async def work(engine: Watched) -> tuple[list[Completion], list[str]]:
        async with open_session(Shared(in_flight="finish"), policy, engine, START, Full()) as session:
            engine.events.clear()
            sampling = Sampling(max_tokens=40, top_k=20)
            requests = [asyncio.create_task(engine.generate([72, 105, key], sampling, key)) for key in range(5)]
            while (await engine.health()).running == 0:
                await asyncio.sleep(0)
            async with session.commit(1):
                under_way = sum(task.done() for task in requests)
                assert 0 < under_way <= 2, "those of its two rows"
                with torch.no_grad():
                    policy.head.weight[3, 5] += 0.25
            return list(await asyncio.gather(*requests)), engine.events

    done, events = run(policy, work)
    assert {completion.versions[0] for completion in done} == {0, 1}
    for completion in done:
        assert len(set(completion.versions)) == 1
    assert set(events) >= {"drain"}
    assert "pause" not in events


def test_an_engine_that_was_started_again_is_proven(policy: Policy, tiny_model: Path) -> None:
    async def work() -> None:
        with scripted(tiny_model) as engine:
            async with open_session(Shared(), policy, engine, START, Full()) as session:
                for step in range(1, 5):
                    engine.events.clear()
                    if step == 3:
                        engine.die()
                    async with session.commit(step):
                        pass
                    assert engine.serves
                    assert {"probe", "checksums"} <= set(engine.events)

    asyncio.run(work())


# Several engines, of which the first has the trainer's weights


@dataclass
class Beside(Scripted):
    """One with a second process, whose weights lie in memory that it lends."""

    folder: Path = Path()
    second: dict[str, Tensor] = field(default_factory=dict)
    export: Any = None
    lent: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors

    async def exports_of_ranks(self) -> Sequence[Any]:
        tensors = self.lent({name: tensor.clone() for name, tensor in self._started_on.items()})
        self.export = export_host(tensors, self.folder / str(self.restart_count))
        self.second = attach(self.export.description)
        places = {
            n: [{"vllm_name": n, "device": "cpu", "size": t.shape, "stride": t.stride(), "offset": 0}]
            for n, t in tensors.items()
        }
        return [json.loads(msgspec.json.encode(VllmBridge.of_places("m", self.export.description, places)))]

    async def slots_of_ranks(self, adapter: LoraAdapter) -> Sequence[Any]:
        raise AssertionError("no adapter here")

    async def checksums(self, payload: Literal["weights", "adapter"]) -> Mapping[str, Mapping[str, int]]:
        return {**await super().checksums(payload), "engine two": checksums(self.second.items())}


def test_a_publish_copies_the_weights_into_further_engines(policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
    async def work(inner: Policy) -> None:
        engine, ours = Beside(inner, Full(), folder=tmp_path), Full().base_names(policy.model)
        async with open_session(Shared(), policy, engine, START, Full()) as session:
            for step in (1, 2, 3):
                if step == 2:
                    engine.die()  # and is started again on what the model's folder has
                async with session.commit(step) as commit:
                    with torch.no_grad():
                        policy.head.weight[3, 5] += 0.25
                assert commit.published is not None
                assert commit.published.bytes == sum(parameter.nbytes for parameter in ours.values())
                assert all(torch.equal(engine.second[name], parameter) for name, parameter in ours.items())
                assert engine.inner.head.weight.data_ptr() == policy.head.weight.data_ptr(), "the first one's are ours"

    with live_policy(tiny_model) as inner:
        asyncio.run(work(inner))


def test_a_further_engine_that_lends_another_model_is_refused(policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
    async def work(inner: Policy) -> None:
        engine = Beside(inner, Full(), folder=tmp_path, lent=lambda t: {name: v.double() for name, v in t.items()})
        with pytest.raises(UnsupportedPair, match=r"float32 here and .* of torch.float64 in the engine"):
            async with open_session(Shared(), policy, engine, START, Full()):
                pass

    with live_policy(tiny_model) as inner:
        asyncio.run(work(inner))


# Weights that no publish carries


def published_beside(folder: Path, policy: Policy, trainable: Trainable, **script: Any) -> list[str]:
    """What an engine is asked for when it is opened, and in two publishes."""

    async def work() -> list[str]:
        with scripted(folder, trainable, **script) as engine:
            async with open_session(Shared(tolerance=100.0), policy, engine, START, trainable) as session:
                for step in (1, 2):
                    await publish(session, PolicyVersion(step=step, digest=""))
            return engine.events

    return asyncio.run(work())


@pytest.mark.slow
def test_the_base_beneath_an_adapter_is_compared_once_for_each_start(tiny_model: Path) -> None:
    trainable = Lora(rank=2)
    with live_policy(tiny_model, trainable=trainable) as policy:
        assert published_beside(tiny_model, policy, trainable).count("checksums") == 1 + 3
        again = published_beside(tiny_model, policy, trainable, dies={"probe": 1})
        assert again.count("checksums") == 2 + 4, "what was started anew may have started on other weights"
    with live_policy(tiny_model) as policy:
        assert published_beside(tiny_model, policy, Full()).count("checksums") == 3, "all of it is published"


@pytest.mark.parametrize(("changed", "kind"), [(1, TornWeights), (None, StaleWeights)], ids=["one", "all"])
def test_another_base_beneath_an_adapter_is_refused(
    tiny_model: Path, changed: int | None, kind: type[Exception]
) -> None:
    trainable = Lora(rank=2)

    def other(sums: dict[str, int]) -> dict[str, dict[str, int]]:
        wrong = [name for name in sums if "lora" not in name][:changed]
        return {"engine one": {name: value + (name in wrong) for name, value in sums.items()}}

    with live_policy(tiny_model, trainable=trainable) as policy:
        with pytest.raises(
            kind, match=r"weights that are not trained differ between the trainer and engine one"
        ) as caught:
            published_beside(tiny_model, policy, trainable, summed=other)
        assert type(caught.value) is kind


@pytest.mark.slow
def test_a_base_that_cannot_be_compared_is_probed_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a packed layout, for instance."""
    trainable, checksums = Lora(rank=2), Scripted.checksums

    async def packed(self: Scripted, payload: Any) -> Any:
        if payload == "weights":
            raise UnmappedWeights("the weights are packed")
        return await checksums(self, payload)

    monkeypatch.setattr(Scripted, "checksums", packed)
    with live_policy(tiny_model, trainable=trainable) as policy:
        events = published_beside(tiny_model, policy, trainable)
    assert events.count("resume") == 3
    assert "recover" not in events
    assert "only probed: the weights are packed" in caplog.text


# Torn or stale


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("summed", "kind", "names"),
    [
        (lambda sums: {"engine one": {**sums, NORM: 5}}, TornWeights, "one"),
        (lambda sums: {"engine one": {n: s for n, s in sums.items() if n != NORM}}, TornWeights, "one"),
        (lambda sums: {"engine one": sums, "engine two": {**sums, NORM: 5}}, TornWeights, "two"),
        (lambda sums: {"engine one": {n: s + 1 for n, s in sums.items()}}, StaleWeights, "one"),
        (lambda sums: {"engine one": {}}, StaleWeights, "one"),
    ],
    ids=["one differs", "one is missing", "of the second engine", "all differ", "all are missing"],
)
def test_tensors_that_differ_are_torn_or_stale_and_named(
    policy: Policy, tiny_model: Path, summed: Callable[..., Any], kind: type[Exception], names: str
) -> None:
    every = [name for name, _ in Full().source(policy.model)]
    count, first = (1, NORM) if kind is TornWeights else (len(every), every[0])

    async def work() -> None:
        with scripted(tiny_model, summed=summed) as engine:
            with pytest.raises(kind) as caught:
                async with open_session(Shared(), policy, engine, START, Full()):
                    raise AssertionError("it must not open")
            assert type(caught.value) is kind
            differ = f"{count} of {len(every)} published tensors differ between the trainer and engine {names}"
            assert f"{differ}, first {first!r}" in str(caught.value)
            assert not engine.serves

    asyncio.run(work())


def test_what_an_engine_holds_beside_is_its_own(policy: Policy, tiny_model: Path) -> None:
    """An adapter's base, for instance."""

    async def work() -> None:
        with scripted(tiny_model, summed=lambda sums: {"engine one": {**sums, "other": 1}}) as engine:
            async with open_session(Shared(), policy, engine, START, Full()):
                assert engine.serves

    asyncio.run(work())


# What is told


@pytest.mark.parametrize(("sync", "seconds"), [(CopiedAtRest, 3.0 + 20.0), (Copied, 3.0 + 20.0), (CopiedLive, 20.0)])
def test_the_time_of_a_publish_is_from_pause_to_resume_without_the_optimizers(
    policy: Policy, sync: type[Copied], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by 3 in a pause, 20 in a move and 100 in the optimizer."""
    now = 1000.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Slow(Attesting):
        async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
            later(3.0)
            await super().pause(finish=finish, step=step)

    async def work(engine: Watched) -> Published:
        async with open_session(sync(fault=lambda held: later(20.0)), policy, engine, START, Full()) as session:
            async with session.commit(1) as commit:
                later(100.0)
            assert commit.published is not None
            assert commit.metrics()["seconds/sync"] == Sum(commit.published.seconds)
            return commit.published

    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: now))
    assert run(policy, work, kind=Slow).seconds == seconds


# Ways that go through files


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def adapted(base: Path, folder: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        # PEFT asks transformers for a property by a name that transformers has since deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return PeftModel.from_pretrained(reference(base), folder).state_dict()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [Full(), Lora(rank=2, merged=True)], ids=["full", "merged"])
def test_restart_lays_down_a_model_folder_and_removes_the_last(
    tiny_model: Path, tmp_path: Path, trainable: Trainable
) -> None:
    """What transformers alone reads from it are the policy's weights, those that are not trained too."""

    async def work() -> None:
        with live_policy(tiny_model, trainable=trainable) as policy, scripted(tiny_model, trainable) as engine:
            async with open_session(Restart(every=1), policy, engine, START, trainable, tmp_path) as session:
                assert "move" not in engine.events, "it was started on these very weights"
                assert not (tmp_path / "weights").exists()
                for step in (1, 2):
                    async with session.commit(step) as commit:
                        with torch.no_grad():
                            for _, parameter in trainable.parameters(policy.model):
                                parameter += 0.02
                    folder = tmp_path / "weights" / f"step-00000{step}"
                    assert list((tmp_path / "weights").iterdir()) == [folder]
                    saved = weights_of(folder)
                    own = trainable.base_names(policy.model)
                    assert saved.keys() == own.keys()
                    assert all(torch.equal(saved[name], own[name]) for name in own)
                    assert len(AutoTokenizer.from_pretrained(folder)) == len(policy.tokenizer)
                    assert commit.published is not None
                    assert commit.published.bytes == sum(t.nbytes for _, t in trainable.source(policy.model))
            assert engine.restart_count == 2

    asyncio.run(work())


@pytest.mark.slow
def test_restart_loads_an_adapter_into_a_fresh_engine_and_begins_later_ones_anew(
    tiny_model: Path, tmp_path: Path
) -> None:
    trainable = Lora(rank=2)

    async def work() -> None:
        with live_policy(tiny_model, trainable=trainable) as policy, scripted(tiny_model, trainable) as engine:
            async with open_session(Restart(every=1), policy, engine, START, trainable, tmp_path) as session:
                assert engine.adapted
                assert engine.restart_count == 0, "the base that it was started on is the policy's own"
                assert [event for event in engine.events if event in ("move", "load")] == ["load"]
                engine.events.clear()
                async with session.commit(1):
                    with torch.no_grad():
                        policy.model.get_parameter(trainable.parameters(policy.model)[1][0]).add_(0.5)
                assert engine.restart_count == 1
                assert [event for event in engine.events if event in ("move", "load")] == ["move", "load"]
                folder = tmp_path / "weights" / "step-000001"
                assert list((tmp_path / "weights").iterdir()) == [folder]
                assert (folder / "adapter_config.json").is_file()
                live = adapted(tiny_model, folder)
                for name, tensor in trainable.source(policy.model):
                    assert torch.equal(live[name], tensor)

    asyncio.run(work())


def test_restart_does_not_take_an_engine_for_fresh_that_was_started_by_others(tiny_model: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with live_policy(tiny_model) as policy, scripted(tiny_model) as engine:
            session = WeightSyncSession(
                sync=Restart(every=1), policy=policy, engine=engine, trainable=Full(), folder=tmp_path
            )
            await session.bind(fresh=False)
            async with session.open(START):
                assert engine.restart_count == 1
                assert engine.serves

    asyncio.run(work())


def test_what_a_killed_run_left_half_written_is_removed(tiny_model: Path, tmp_path: Path) -> None:
    async def work() -> None:
        for leftover in (".step-000001.tmp", "step-000001", "step-000009"):
            (tmp_path / "weights" / leftover).mkdir(parents=True)
            (tmp_path / "weights" / leftover / "model.safetensors").write_bytes(b"half")
        with live_policy(tiny_model) as policy, scripted(tiny_model) as engine:
            async with open_session(Restart(every=1), policy, engine, START, Full(), tmp_path) as session:
                await publish(session, PolicyVersion(step=1, digest=""))
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step-000001"]

    asyncio.run(work())


@pytest.mark.slow
def test_hotswap_keeps_the_versions_that_requests_may_need(tiny_model: Path, tmp_path: Path) -> None:
    trainable = Lora(rank=2)

    async def work() -> None:
        with live_policy(tiny_model, trainable=trainable) as policy, scripted(tiny_model, trainable) as engine:
            async with open_session(Hotswap(), policy, engine, START, trainable, tmp_path) as session:
                session.versions = 2
                kept: dict[str, Tensor] = {}
                name = trainable.parameters(policy.model)[1][0]
                for step in range(1, 10):
                    async with session.commit(step):
                        with torch.no_grad():
                            policy.model.get_parameter(name).add_(0.5)
                    kept[f"step-{step:06d}"] = policy.model.get_parameter(name).detach().clone()
                left = sorted(path.name for path in (tmp_path / "adapters").iterdir())
                assert left == [f"step-{step:06d}" for step in range(10 - 2 - SPARE, 10)]
                for folder in left:
                    live = adapted(tiny_model, tmp_path / "adapters" / folder)
                    assert torch.equal(live[name], kept[folder]), "each holds its own version"

    asyncio.run(work())


@pytest.mark.slow
def test_hotswap_does_not_take_folders_of_an_earlier_life_for_newer_ones(tiny_model: Path, tmp_path: Path) -> None:
    """A run that got further than its last checkpoint goes on from an older step than its newest folder's."""
    trainable = Lora(rank=2)

    async def work() -> None:
        for step in range(3, 12):
            (tmp_path / "adapters" / f"step-{step:06d}").mkdir(parents=True)
        with live_policy(tiny_model, trainable=trainable) as policy, scripted(tiny_model, trainable) as engine:
            async with open_session(Hotswap(), policy, engine, PolicyVersion(step=4, digest=""), trainable, tmp_path):
                assert (tmp_path / "adapters" / "step-000004" / "adapter_config.json").is_file()

    asyncio.run(work())


# Broadcast


def test_broadcast_tells_each_engine_the_rank_of_its_first_worker(
    policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[tuple[int, list[int]]] = []

    async def work() -> None:
        with scripted(tiny_model) as engine:

            async def connect(rendezvous: dict[str, Any], first: list[int]) -> None:
                connections.append((rendezvous["world"], first))
                raise EngineError("enough")

            monkeypatch.setattr(engine, "workers", workers)
            monkeypatch.setattr(engine, "connect", connect)
            with pytest.raises(EngineError, match="enough"):
                async with open_session(Broadcast(timeout_seconds=5), policy, engine, START, Full()):
                    raise AssertionError("it must not open")

    async def workers() -> list[list[str]]:
        return [[""] * 2, [""], [""] * 4]

    monkeypatch.setattr(collective, "Member", Wire)
    asyncio.run(work())
    assert connections == [(8, [1, 3, 4])]


@pytest.mark.parametrize(
    ("accelerators", "backend"),
    [
        (["", ""], "gloo"),
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),  # NCCL refuses two members on one card
        (["GPU-a", "GPU-b", "GPU-b"], "gloo"),
        (["GPU-a", ""], "gloo"),
        (["GPU-a", "GPU-b", "GPU-c"], "nccl"),
    ],
)
def test_the_backend_follows_from_where_the_members_are(accelerators: list[str], backend: str) -> None:
    assert broadcast._backend(accelerators) == backend


@pytest.mark.parametrize(
    ("reached", "host"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["::1", "127.0.0.1"], "::1"),
        (["10.0.0.4"], "10.0.0.4"),
        (["127.0.0.1", "10.0.0.4", "10.0.0.4"], "10.0.0.4"),
        (["fd00::4", "::1"], "fd00::4"),
    ],
)
def test_a_broadcast_meets_engines_where_they_are_reached_from(reached: list[str], host: str) -> None:
    assert broadcast._address(reached) == host


def test_engines_that_are_reached_from_several_addresses_need_one_that_is_named() -> None:
    with pytest.raises(TransportError, match=r"10\.0\.0\.4, 10\.1\.0\.4.*sync\.host"):
        broadcast._address(["10.1.0.4", "10.0.0.4", "127.0.0.1"])


@pytest.mark.slow
def test_a_group_that_does_not_form_says_where_it_was_to_meet(
    policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        with scripted(tiny_model) as engine:

            async def connect(rendezvous: dict[str, Any], first: list[int]) -> None:
                pass  # as if it looked for the trainer on its own machine

            monkeypatch.setattr(engine, "connect", connect)
            with pytest.raises(TransportError, match=r"meet the trainer at 127\.0\.0\.1:\d+; .*sync\.host"):
                async with open_session(Broadcast(timeout_seconds=1), policy, engine, START, Full()):
                    raise AssertionError("it must not open")
            await engine.close()

    asyncio.run(work())


def test_a_broadcast_that_breaks_off_says_why(
    policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that lives on but could not receive: it is stopped, and nothing is published again."""

    async def work() -> None:
        with scripted(tiny_model) as engine:
            async with open_session(Broadcast(timeout_seconds=5), policy, engine, START, Full()) as session:
                receive = engine.receive

                async def other(manifest: list[Any], bucket_bytes: int, adapter: Any) -> None:
                    for member in engine._members:
                        member.abort()
                    await receive(manifest, bucket_bytes, adapter)

                monkeypatch.setattr(engine, "receive", other)
                with pytest.raises(TransportError, match=r"publish of version 1 broke off: .*left the group"):
                    async with session.commit(1):
                        pass
                assert not engine.serves
                assert engine.version().step == 0
            await engine.close()

    monkeypatch.setattr(collective, "Member", Wire)
    monkeypatch.setattr(Scripted, "member", Wire)
    asyncio.run(work())


def test_a_broadcast_that_is_given_up_leaves_nothing_running(
    policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        with scripted(tiny_model) as engine:
            receiving = asyncio.Event()

            async def receive(manifest: list[Any], bucket_bytes: int, adapter: Any) -> None:
                receiving.set()
                await asyncio.Event().wait()

            async def publish() -> None:
                async with open_session(Broadcast(timeout_seconds=5), policy, engine, START, Full()) as session:
                    monkeypatch.setattr(engine, "receive", receive)
                    async with session.commit(1):
                        pass

            publishing = asyncio.create_task(publish())
            await receiving.wait()
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not engine.serves
            await engine.close()

    monkeypatch.setattr(collective, "Member", Wire)
    monkeypatch.setattr(Scripted, "member", Wire)
    asyncio.run(work())


# Comparing


def test_checksums_and_digest_see_every_bit() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
    first = checksums(tensors.items())
    assert first == checksums(reversed(tensors.items()))
    assert digest(first) == digest(dict(reversed(first.items())))
    assert first["a"] == checksums([("a", tensors["a"].t().contiguous().t())])["a"], "the layout is not the value"
    tensors["b"].view(torch.int16)[2] ^= 1
    changed = checksums(tensors.items())
    assert [n for n in first if first[n] != changed[n]] == ["b"]
    assert digest(first) != digest(changed)
    assert digest({"a": 1, "b": 2}) != digest({"a": 2, "b": 1})


def test_differing_names_what_is_missing_and_what_is_other() -> None:
    assert differing({"a": 1, "b": 2, "c": 3}, {"c": 3, "a": 2, "d": 4}) == ["a", "b"]
    assert differing({"a": 1}, {"a": 1, "b": 0}) == []
