"""What every way of syncing keeps: the engine ends up with exactly the policy's weights, or gives out nothing new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.scripted_engine import Scripted, Wire, scripted
from support.sync_sessions import open_session
from support.tiers import long_but
from support.tiny_policy import live_policy

from tandem.config.loading import RunConfig
from tandem.config.registry import find, names
from tandem.config.sections import Evaluate
from tandem.engines.base import EngineSpec, ExportsWeights, ProbeResult, ReceivesBroadcast, ReportsChecksums
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import DoesNotFit, EngineError, StaleWeights, TornWeights, TransportError, UnsupportedPair
from tandem.model.policy import Policy
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer import assemble as runs
from tandem.transport import bridge, collective
from tandem.transport.checksums import checksums, digest
from tandem.types import PolicyVersion, Sampling
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.broadcast import Broadcast
from tandem.weight_sync.hotswap import Hotswap
from tandem.weight_sync.restart import Restart
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction.session import ATTEMPTS, WeightSyncSession

START = PolicyVersion(step=0, digest="")
MERGED = Lora(rank=2, merged=True)
NET = Broadcast(timeout_seconds=20)
WAYS: dict[str, tuple[WeightSync, Trainable]] = {
    "shared weights": (Shared(), Full()),
    "shared merged": (Shared(), MERGED),
    "shared adapter": (Shared(), Lora(rank=2)),
    "shared, requests end first": (Shared(in_flight="finish"), Full()),
    "restart weights": (Restart(every=1), Full()),
    "restart merged": (Restart(every=1), MERGED),
    "restart adapter": (Restart(every=1), Lora(rank=2)),
    "hotswap": (Hotswap(), Lora(rank=2)),
    "broadcast weights": (NET, Full()),
    "broadcast merged": (NET, MERGED),
    "broadcast adapter": (NET, Lora(rank=2)),
    "broadcast, requests end first": (replace(NET, in_flight="finish"), Full()),
}


@dataclass
class Pair:
    """A policy and an engine of the same model, tied together."""

    policy: Policy
    trainable: Trainable
    engine: Scripted
    sync: WeightSync
    folder: Path

    def train(self) -> None:
        """What an optimizer does: it writes in place, wherever the parameters are now."""
        with torch.no_grad():
            for name, parameter in self.trainable.parameters(self.policy.model):
                parameter += 0.01 if "norm" in name else 0.02 * torch.randn_like(parameter)

    def digest(self) -> str:
        return digest(checksums(self.trainable.source(self.policy.model)))

    @asynccontextmanager
    async def open(self, start: PolicyVersion = START) -> AsyncIterator[WeightSyncSession]:
        """As a run does; whatever happens, the engine never gave out tokens of other weights than it said."""
        try:
            async with open_session(self.sync, self.policy, self.engine, start, self.trainable, self.folder) as session:
                yield session
        finally:
            await self.engine.close()

    async def step(self, session: WeightSyncSession, step: int) -> None:
        """One optimizer step, published: afterwards the engine gives out tokens of exactly these weights."""
        async with session.commit(step) as commit:
            self.train()
        assert commit.published is not None
        version = commit.published.version
        assert version == PolicyVersion(step=step, digest=self.digest())
        self.agrees(version)

    def agrees(self, version: PolicyVersion) -> None:
        assert self.engine.serves
        assert self.engine.version() == version
        assert self.engine.resumed_versions[-1] == (version.step, version.digest)
        assert digest(self.engine.held()) == version.digest


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work(), 60)

    return asyncio.run(main())


DISTINCT = ("shared weights", "shared adapter", "restart weights", "restart adapter", "hotswap", "broadcast weights")
"""Ways that differ in what the engine is asked for."""
DEATHS = {
    "shared weights": "probe",
    "shared adapter": "move",
    "shared, requests end first": "drain",
    "restart weights": "checksums",
    "restart adapter": "load",
    "hotswap": "set_version",
    "broadcast weights": "resume",
}
"""One moment for each way in which an engine can die; every moment of every way is for --long."""


@pytest.fixture(params=long_but(WAYS, *DISTINCT))
def way(request: pytest.FixtureRequest) -> tuple[WeightSync, Trainable]:
    return WAYS[request.param]


more_ways = pytest.mark.parametrize(
    "way", long_but(WAYS, *DISTINCT, "shared merged", "shared, requests end first"), indirect=True
)
"""Also those that are another way's but for what is written, or for how requests end."""


def deaths(*ways: str) -> list[Any]:
    """Each way with what its engine is asked for in a publish, one after the other: where it can die."""
    return [
        pytest.param(
            WAYS[way], point, id=f"{way}-{point}", marks=[] if DEATHS.get(way) == point else [pytest.mark.long]
        )
        for way in ways
        for point in ("pause", "drain", "move", "load", "checksums", "probe", "set_version", "resume")
        if mortal(*WAYS[way], point)
    ]


def mortal(sync: WeightSync, trainable: Trainable, point: str) -> bool:
    """Whether a publish asks the engine for this."""
    if point in ("pause", "drain"):
        return sync.pause != "never" and sync.finishes == (point == "drain")
    if point == "move":
        return not (isinstance(sync, Shared) and trainable.payload == "weights")
    if point == "load":
        return isinstance(sync, Restart) and trainable.payload == "adapter"
    return True


@pytest.fixture(autouse=True)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group in memory, but where the real one is wanted: it takes two seconds to leave."""
    if "gloo" not in request.fixturenames:
        monkeypatch.setattr(collective, "Member", Wire)
        monkeypatch.setattr(Scripted, "member", Wire)


@pytest.fixture
def gloo() -> None:
    """Wants the real process group."""


@contextlib.contextmanager
def paired(tiny_model: Path, folder: Path, way: tuple[WeightSync, Trainable], **script: Any) -> Iterator[Pair]:
    sync, trainable = way
    with live_policy(tiny_model, trainable=trainable) as policy, scripted(tiny_model, trainable, **script) as engine:
        if trainable.payload == "adapter":  # B is not zero, so that an engine without the adapter is seen
            with torch.no_grad():
                for _, parameter in trainable.parameters(policy.model):
                    parameter += 0.02 * torch.randn_like(parameter)
        yield Pair(policy, trainable, engine, sync, folder)


def test_every_way_is_here() -> None:
    assert {find("sync", name) for name in names("sync")} == {type(sync) for sync, _ in WAYS.values()}


@pytest.mark.slow
@more_ways
def test_an_honest_engine_serves_each_version(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable]
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                first = PolicyVersion(step=0, digest=pair.digest())
                pair.agrees(first)
                for step in (1, 2, 3):
                    await pair.step(session, step)
                assert len({digest_served for _, digest_served in pair.engine.resumed_versions}) == 4

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainable",
    [
        pytest.param(Full(), id="weights"),
        pytest.param(MERGED, id="merged", marks=pytest.mark.long),
        pytest.param(Lora(rank=2), id="adapter", marks=pytest.mark.long),
    ],
)
def test_a_real_process_group_does_too(gloo: None, tiny_model: Path, tmp_path: Path, trainable: Trainable) -> None:
    """Its engine dies once while tensors arrive, and a new group is formed."""
    with paired(tiny_model, tmp_path, (NET, trainable)) as pair:

        async def work() -> None:
            async with pair.open() as session:
                await pair.step(session, 1)
                pair.engine.dies["move"] = 1
                await pair.step(session, 2)
                await pair.step(session, 3)

        run(work)


@pytest.mark.slow
@more_ways
def test_requests_end_first_if_they_are_to(tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable]) -> None:
    sync, _ = way
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> list[str]:
            async with pair.open() as session:
                pair.engine.events.clear()
                await pair.step(session, 1)
                return [event for event in pair.engine.events if event in ("pause", "drain")]

        stood = run(work)
    if sync.pause == "never":
        assert stood == []
    else:
        assert set(stood) == {"drain" if sync.finishes else "pause"}


@pytest.mark.slow
def test_a_resumed_run_publishes_what_it_restored(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable]
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            start = PolicyVersion(step=7, digest=pair.digest())
            async with pair.open(start) as session:
                pair.agrees(start)
                await pair.step(session, 8)

        run(work)


@pytest.mark.slow
def test_a_resume_from_other_weights_is_refused(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable]
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            with pytest.raises(StaleWeights, match="0123456789abcdef"):
                async with pair.open(PolicyVersion(step=7, digest="0123456789abcdef")):
                    raise AssertionError("it must not open")
            assert pair.engine.resumed_versions == []
            assert not pair.engine.serves

        run(work)


# Death


def published_again(pair: Pair, point: str) -> None:
    """It dies in the second of three publishes."""

    async def work() -> None:
        async with pair.open() as session:
            await pair.step(session, 1)
            restart_count = pair.engine.restart_count
            pair.engine.dies[point] = 1
            await pair.step(session, 2)
            assert pair.engine.restart_count > restart_count
            await pair.step(session, 3)
            steps = [step for step, _ in pair.engine.resumed_versions]
            assert steps == [0, 1, 2, 3], "nothing was given out in between, and nothing twice"

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), deaths(*DISTINCT, *(way for way in WAYS if "end first" in way)))
def test_an_engine_that_dies_in_a_publish_is_published_to_again(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:
        published_again(pair, point)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), deaths(*DISTINCT))
def test_an_engine_that_a_request_revived_is_published_to_again(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str
) -> None:
    """It lives again when the publish looks, and holds nothing of it."""
    with paired(tiny_model, tmp_path, way, somebody_revives=True) as pair:
        published_again(pair, point)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), deaths(*DISTINCT))
def test_an_engine_that_dies_in_the_first_publish(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str
) -> None:
    """Neither the policy's weights in its memory nor an adapter is left of what it was bound to."""
    sync, _ = way
    if point == "move" and isinstance(sync, Restart):
        pytest.skip("it was started on these very weights")
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            pair.engine.dies[point] = 1
            async with pair.open() as session:
                pair.agrees(PolicyVersion(step=0, digest=pair.digest()))
                await pair.step(session, 1)

        run(work)


BINDS = [
    pytest.param(WAYS[way], point, id=f"{way}-{point}")
    for way, points in (
        ("shared weights", ("pause", "export_weights")),
        ("shared adapter", ("pause", "export_weights")),
        ("broadcast weights", ("workers", "connect")),
    )
    for point in points
]
"""Where an engine can die before anything is published to it."""


@pytest.mark.slow
@pytest.mark.parametrize("somebody_revives", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "revived"])
@pytest.mark.parametrize(("way", "point"), BINDS)
def test_an_engine_that_dies_while_it_is_bound_is_bound_again(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str, somebody_revives: bool
) -> None:
    with paired(tiny_model, tmp_path, way, somebody_revives=somebody_revives) as pair:

        async def work() -> None:
            pair.engine.dies[point] = 1
            async with pair.open() as session:
                assert pair.engine.restart_count == 1
                pair.agrees(PolicyVersion(step=0, digest=pair.digest()))
                await pair.step(session, 1)
            assert [step for step, _ in pair.engine.resumed_versions] == [0, 1]

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), BINDS)
@pytest.mark.parametrize("revivable", [True, False], ids=["ours", "not ours"])
def test_an_engine_that_cannot_be_bound_ends_the_run(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str, revivable: bool
) -> None:
    with paired(tiny_model, tmp_path, way, revivable=revivable) as pair:

        async def work() -> None:
            pair.engine.dies[point] = 100
            with pytest.raises(EngineError, match=f"died in {point}"):
                async with pair.open():
                    raise AssertionError("it must not open")
            assert 100 - pair.engine.dies[point] == (ATTEMPTS if revivable else 1)
            assert pair.engine.resumed_versions == []

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), deaths(*DISTINCT))
def test_an_engine_that_dies_again_as_soon_as_it_is_back_is_brought_back_again(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                pair.engine.dies[point] = ATTEMPTS - 1
                await pair.step(session, 1)
                assert pair.engine.dies[point] == 0
                assert pair.engine.serves

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), deaths(*DISTINCT))
def test_an_engine_that_dies_again_and_again_is_given_up(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                before = list(pair.engine.resumed_versions)
                pair.engine.dies[point] = 100
                if point == "drain":  # an engine started anew is paused as it is
                    pair.engine.dies["pause"] = 100
                with pytest.raises(EngineError, match="died in (drain|pause)" if point == "drain" else point):
                    await pair.step(session, 1)
                assert not pair.engine.serves
                assert pair.engine.resumed_versions == before
                if point != "drain":  # or it dies in the pause that follows
                    assert 100 - pair.engine.dies[point] == ATTEMPTS
                assert pair.engine.events.count("recover") <= 2 * ATTEMPTS

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "point"), deaths(*(way for way in DISTINCT if not way.startswith("restart"))))
def test_an_engine_that_is_not_ours_to_start_ends_the_run(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], point: str
) -> None:
    with paired(tiny_model, tmp_path, way, revivable=False) as pair:

        async def work() -> None:
            async with pair.open() as session:
                before = list(pair.engine.resumed_versions)
                pair.engine.dies[point] = 1
                with pytest.raises(EngineError, match=f"died in {point}"):
                    await pair.step(session, 1)
                assert pair.engine.resumed_versions == before

        run(work)


@pytest.mark.slow
def test_an_engine_that_dies_between_publishes_gets_the_policys_weights(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable]
) -> None:
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                await pair.step(session, 1)
                pair.engine.die()
                await pair.engine.revive()
                pair.agrees(PolicyVersion(step=1, digest=pair.digest()))
                before = list(pair.engine.resumed_versions)
                assert pair.engine._republish is not None
                await pair.engine._republish()  # whoever else saw it die asks too
                assert pair.engine.resumed_versions == before
                await pair.step(session, 2)

        run(work)


@pytest.mark.slow
def test_an_engine_that_dies_during_the_optimizers_step(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable]
) -> None:
    """A request sees to it, but the weights are half written: it is published to when they are whole."""
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                await pair.step(session, 1)
                before = list(pair.engine.resumed_versions)
                async with session.commit(2):
                    pair.engine.die()
                    reviving = asyncio.create_task(pair.engine.revive())
                    for _ in range(20):
                        await asyncio.sleep(0)
                    pair.train()
                    assert pair.engine.resumed_versions == before
                await reviving
                pair.agrees(PolicyVersion(step=2, digest=pair.digest()))
                assert [step for step, _ in pair.engine.resumed_versions] == [0, 1, 2]
                await pair.step(session, 3)

        run(work)


# Proof


def moved(probe: ProbeResult) -> ProbeResult:
    return replace(probe, scored=tuple(logprob - 0.01 for logprob in probe.scored))


def flipped(sums: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"engine one": sums, "engine two": {**sums, list(sums)[3]: 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "kind"), [({"probed": moved}, StaleWeights), ({"summed": flipped}, TornWeights)], ids=["probe", "checksums"]
)
def test_a_failed_proof_stops_the_engine_for_good(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], lie: dict[str, Any], kind: type[Exception]
) -> None:
    sync, _ = way
    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                await pair.step(session, 1)
                served = pair.engine.version()
                for name, how in lie.items():
                    setattr(pair.engine, name, how)
                pair.engine.events.clear()
                with pytest.raises(kind, match=r"engine (one|two)"):
                    await pair.step(session, 2)
            assert pair.engine.version() == served
            assert not {"set_version", "resume", "recover"} & set(pair.engine.events)
            if sync.pause == "never":  # the last version lies beside the new one, untouched
                assert "stop" not in pair.engine.events
                assert pair.engine.serves
            else:
                assert pair.engine.events[-1] == "stop"
                assert not pair.engine.serves

        run(work)


@pytest.mark.slow
def test_what_cannot_be_moved_stops_the_engine(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, trainable = way

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                with monkeypatch.context() as patch:
                    patch.setattr(type(trainable), "fold", broken)
                    with pytest.raises(OSError, match="No space"):
                        await pair.step(session, 1)
                assert pair.engine.serves == (sync.pause == "never")
                assert ("stop" in pair.engine.events) == (sync.pause != "never")

        run(work)


# Not every step


EVERY: dict[str, tuple[WeightSync, Trainable]] = {
    "restart weights": (Restart(every=3), Full()),
    "restart merged": (Restart(every=3), MERGED),
    "restart adapter": (Restart(every=3), Lora(rank=2)),
    "hotswap": (Hotswap(every=3), Lora(rank=2)),
    "broadcast": (replace(NET, every=3), Full()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_steps_that_are_not_due_ask_nothing_of_the_engine(tiny_model: Path, tmp_path: Path, name: str) -> None:
    with paired(tiny_model, tmp_path, EVERY[name]) as pair:

        async def work() -> None:
            async with pair.open() as session:
                for step in range(1, 6):
                    pair.engine.events.clear()
                    async with session.commit(step, last=step == 5) as commit:
                        pair.train()
                    published = commit.published
                    assert published is not None
                    assert published.version == PolicyVersion(step=step, digest=pair.digest())
                    assert published.moved == (step in (3, 5))
                    if published.moved:
                        pair.agrees(published.version)
                    else:
                        assert pair.engine.events == []
                        assert pair.engine.version().step == (0 if step < 3 else 3)
                        assert commit.metrics() == {}

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_an_engine_that_dies_while_it_is_behind_gets_the_policys_weights(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Those that it served exist no more."""
    with paired(tiny_model, tmp_path, EVERY[name]) as pair:

        async def work() -> None:
            async with pair.open() as session:
                for step in (1, 2):
                    async with session.commit(step):
                        pair.train()
                assert pair.engine.version().step == 0
                pair.engine.die()
                await pair.engine.revive()
                pair.agrees(PolicyVersion(step=2, digest=pair.digest()))
                await pair.step(session, 3)

        run(work)


# Leaving


@pytest.mark.slow
def test_the_way_is_left_however_it_ends(
    tiny_model: Path, tmp_path: Path, way: tuple[WeightSync, Trainable], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    unbind = type(way[0]).unbind

    async def noted(self: WeightSync, session: SyncContext) -> None:
        await unbind(self, session)
        left.append(session.member)

    with paired(tiny_model, tmp_path, way) as pair:

        async def work() -> None:
            async with pair.open() as session:
                monkeypatch.setattr(type(way[0]), "unbind", noted)
                await pair.step(session, 1)
            assert left == [None]
            pair.engine.probed = moved
            with pytest.raises(StaleWeights):
                async with pair.open():
                    raise AssertionError("it must not open")
            assert left[1:]
            assert set(left) == {None}

        run(work)


# An engine of somebody else's


OTHERS = [name for name in WAYS if not name.startswith("restart")]
"""Ways by which an engine can be published to that was not started by the run."""
BORROWED = [name for name in OTHERS if name in DISTINCT]


@contextlib.contextmanager
def borrowed(tiny_model: Path, folder: Path, way: tuple[WeightSync, Trainable]) -> Iterator[Pair]:
    """It serves its own version, which somebody else published."""
    with paired(tiny_model, folder, way, revivable=False, serving=True) as pair:
        yield pair


def entered(pair: Pair) -> WeightSyncSession:
    return WeightSyncSession(
        sync=pair.sync, policy=pair.policy, engine=pair.engine, trainable=pair.trainable, folder=pair.folder
    )


def refusing(monkeypatch: pytest.MonkeyPatch, engine: Scripted, point: str, error: BaseException) -> None:
    """It lives on, and answers with this."""

    async def no(*_: Any, **__: Any) -> None:
        engine.events.append(point)
        raise error

    monkeypatch.setattr(engine, point, no)


def serves_as_before(engine: Scripted, held: dict[str, int]) -> None:
    assert engine.serves
    assert engine.held() == held
    assert not {"stop", "set_version", "resume"} & set(engine.events)


@pytest.mark.slow
@pytest.mark.parametrize("error", [EngineError("refused"), TransportError("refused"), asyncio.CancelledError()])
@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("shared weights", "export_weights"),
        ("shared adapter", "export_weights"),
        ("broadcast weights", "workers"),
        ("broadcast weights", "connect"),
    ],
)
def test_an_engine_that_cannot_be_bound_serves_on(
    tiny_model: Path, tmp_path: Path, name: str, point: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    with borrowed(tiny_model, tmp_path, WAYS[name]) as pair:
        held = pair.engine.held()

        async def work() -> None:
            refusing(monkeypatch, pair.engine, point, error)
            with pytest.raises(type(error)):
                async with entered(pair) as session:
                    await session.bind(fresh=False)
            serves_as_before(pair.engine, held)
            assert pair.engine._joining == [], "nobody is left in a group"

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared weights", "shared adapter"])
@pytest.mark.parametrize("lie", ["dtype", "shape", "missing", "more"])
def test_an_engine_of_another_model_serves_on(
    tiny_model: Path, tmp_path: Path, name: str, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written before all of it was looked at."""
    with borrowed(tiny_model, tmp_path, WAYS[name]) as pair:
        with torch.no_grad():
            pair.engine._base()["model.norm.weight"] += 1
        held = checksums((n, p.detach()) for n, p in pair.engine._base().items())
        lend = pair.engine.export_weights

        async def other() -> dict[str, Any]:
            tensors = dict(await lend())
            last = list(tensors)[-1]
            change = {"dtype": tensors[last].double(), "shape": tensors[last][:1]}
            if lie in change:
                return {**tensors, last: change[lie]}
            return (
                {**tensors, "more": tensors[last]} if lie == "more" else {n: t for n, t in tensors.items() if n != last}
            )

        async def work() -> None:
            monkeypatch.setattr(pair.engine, "export_weights", other)
            with pytest.raises(UnsupportedPair):
                async with entered(pair) as session:
                    await session.bind(fresh=False)
            assert pair.engine.events == ["pause", "export_weights", "resume_unchanged"]
            assert pair.engine.serves
            assert checksums((n, p.detach()) for n, p in pair.engine._base().items()) == held

        run(work)


@pytest.mark.parametrize("file", ["missing", "broken"])
def test_a_file_of_the_engines_that_cannot_be_read_is_found_before_it_is_paused(
    tiny_model: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(bridge, "LAST_RESORT", tmp_path / "none")
    path = tmp_path / "vllm_bridge_config.json"
    if file == "broken":
        path.write_text("{}")
    with borrowed(tiny_model, tmp_path, (Shared(bridge=str(path)), Full())) as pair:

        async def work() -> None:
            with pytest.raises(TransportError):
                async with entered(pair) as session:
                    await session.bind(fresh=False)
            assert pair.engine.events == []
            assert pair.engine.serves

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(OTHERS, *BORROWED))
def test_what_fails_between_bind_and_publish_leaves_an_engine_of_these_very_weights_serving(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """The optimizer's states find no room, say."""
    with borrowed(tiny_model, tmp_path, WAYS[name]) as pair:
        held = pair.engine.held()

        async def fails() -> None:
            async with entered(pair) as session:
                await session.bind(fresh=False)
                raise MemoryError

        async def work() -> None:
            with pytest.raises(MemoryError):
                await fails()
            serves_as_before(pair.engine, held)
            assert pair.engine._joining == []

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["one value", "a zero's sign"])
def test_what_was_written_when_it_was_bound_is_never_served(tiny_model: Path, tmp_path: Path, change: str) -> None:
    """By its bytes, for a checksum sees every bit."""
    with borrowed(tiny_model, tmp_path, WAYS["shared weights"]) as pair:
        with torch.no_grad():
            mine, theirs = pair.policy.head.weight, pair.engine.inner.head.weight
            mine[3, 5] = -0.0 if change == "a zero's sign" else theirs[3, 5] + 1
            if change == "a zero's sign":
                theirs[3, 5] = 0.0

        async def fails() -> None:
            async with entered(pair) as session:
                await session.bind(fresh=False)
                assert pair.engine.held() == checksums(Full().source(pair.policy.model))
                raise MemoryError("no room")

        async def work() -> None:
            with pytest.raises(MemoryError, match="no room"):
                await fails()
            assert pair.engine.events[-1] == "stop"
            assert not pair.engine.serves
            assert "no room" in pair.engine.reason

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(OTHERS, *BORROWED))
@pytest.mark.parametrize("point", ["move", "checksums", "probe", "set_version"])
def test_a_first_publish_that_fails_serves_nothing_that_was_written(
    tiny_model: Path, tmp_path: Path, name: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, trainable = WAYS[name]
    if not mortal(sync, trainable, point):
        pytest.skip("nothing moves")
    with borrowed(tiny_model, tmp_path, WAYS[name]) as pair:

        async def work() -> None:
            moves = {"hotswap": "swap", "broadcast": "receive", "shared": "adapt"}
            method = moves[name.split()[0].rstrip(",")] if point == "move" else point
            async with entered(pair) as session:
                await session.bind(fresh=False)
                refusing(monkeypatch, pair.engine, method, EngineError("refused"))
                with pytest.raises((EngineError, TransportError), match="refused"):
                    async with session.open(START):
                        raise AssertionError("it must not open")
                never = sync.pause == "never"
                assert pair.engine.serves == never
                assert ("resume_unchanged" if never else "stop") in pair.engine.events
            assert pair.engine.resumed_versions == []
            assert pair.engine.serves == never
            assert pair.engine.events.count("stop") == (0 if never else 1)

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(OTHERS, *BORROWED))
def test_an_optimizer_that_fails_leaves_the_last_version_or_nothing(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Where it writes what is sampled from, an engine that gives out nothing."""
    with borrowed(tiny_model, tmp_path, WAYS[name]) as pair:

        async def fails() -> None:
            async with pair.open() as session:
                await pair.step(session, 1)
                async with session.commit(2):
                    raise MemoryError

        async def work() -> None:
            with pytest.raises(MemoryError):
                await fails()
            assert pair.engine.serves == (pair.sync.pause != "step")
            assert ("stop" in pair.engine.events) == (pair.sync.pause == "step")
            assert [step for step, _ in pair.engine.resumed_versions] == [0, 1]

        run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OTHERS if WAYS[name][0].pause != "never"])
def test_an_engine_that_is_paused_when_nothing_was_written_yet_serves_on(
    tiny_model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two engines does not answer, say, when both were asked to stand still."""
    with borrowed(tiny_model, tmp_path, WAYS[name]) as pair:
        pause = pair.engine.pause

        async def half(*, finish: bool = False, step: int | None = None) -> None:
            await pause(finish=finish, step=step)
            raise EngineError("the other does not answer")

        async def fails() -> None:
            async with pair.open() as session:
                await pair.step(session, 1)
                monkeypatch.setattr(pair.engine, "pause", half)
                await pair.step(session, 2)

        async def work() -> None:
            with pytest.raises(EngineError, match="the other"):
                await fails()
            assert pair.engine.events[-1] == "resume_unchanged"
            assert pair.engine.serves
            assert [step for step, _ in pair.engine.resumed_versions] == [0, 1]

        run(work)


@pytest.mark.parametrize("fails", [False, True])
def test_engines_leave_the_group_when_the_run_ends(tiny_model: Path, tmp_path: Path, fails: bool) -> None:
    with borrowed(tiny_model, tmp_path, WAYS["broadcast weights"]) as pair:

        async def work() -> None:
            with contextlib.suppress(MemoryError):
                async with entered(pair) as session:
                    await session.bind(fresh=False)
                    async with session.open(START):
                        await pair.step(session, 1)
                        assert len(pair.engine._members) == 2
                        if fails:
                            raise MemoryError
            assert pair.engine._members == []
            assert pair.engine.serves

        run(work)


def test_an_engine_that_cannot_be_told_to_leave_holds_nothing_up(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with borrowed(tiny_model, tmp_path, WAYS["broadcast weights"]) as pair:

        async def work() -> None:
            with monkeypatch.context() as patch:
                async with entered(pair) as session:
                    await session.bind(fresh=False)
                    async with session.open(START):
                        await pair.step(session, 1)
                    refusing(patch, pair.engine, "disconnect", EngineError("gone"))
            assert pair.engine.events[-1] == "disconnect"
            await pair.engine.close()

        run(work)


@dataclass(frozen=True, kw_only=True)
class Theirs(EngineSpec):
    """An engine of somebody else's, as a part of a recipe."""

    capabilities: ClassVar[frozenset[type]] = frozenset({ExportsWeights, ReceivesBroadcast, ReportsChecksums})

    engine: Scripted

    @asynccontextmanager
    async def open(self, policy: Any, *, context: int, requirements: Any = None) -> AsyncIterator[Scripted]:
        yield self.engine
        self.engine.events.append("closed")


class Adopted(Scripted):
    @property
    def started_elsewhere(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "eval"])
@pytest.mark.parametrize("fails", ["bind", "optimizer"])
@pytest.mark.parametrize("sync", [Shared(), pytest.param(NET, marks=pytest.mark.long)], ids=["shared", "broadcast"])
def test_a_run_that_cannot_begin_leaves_the_engine_serving(
    tiny_model: Path, tmp_path: Path, verb: str, fails: str, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (verb, fails) == ("eval", "optimizer"):
        pytest.skip("it has none")
    point = "export_weights" if isinstance(sync, Shared) else "connect"

    def full(*_: Any) -> None:
        raise MemoryError

    with live_policy(tiny_model) as inner:
        engine = Adopted(inner, Full(), revivable=False, serving=True)
        held = engine.held()
        config = RunConfig(
            model=str(tiny_model),
            steps=1,
            env=Arithmetic(),
            groups_per_step=1,
            group_size=2,
            sampling=Sampling(max_tokens=4),
            engine=Theirs(engine=engine),
            sync=sync,
            dtype="float32",
            runs=str(tmp_path),
            threads=1,
            evaluate=Evaluate(tasks=1),
        )

        async def work() -> None:
            if fails == "bind":
                refusing(monkeypatch, engine, point, EngineError("refused"))
            else:
                monkeypatch.setattr(type(config.optimizer), "bind", full)
            begin = runs.train(config, resume=None) if verb == "train" else runs.evaluate(config, weights=None)
            with pytest.raises(EngineError if fails == "bind" else (MemoryError, DoesNotFit)):
                await begin
            serves_as_before(engine, held)
            assert engine._joining == []

        # What the engine stands in for needs no model of its own, and its part no kind.
        monkeypatch.setattr(runs.run_folder, "write_recipe", lambda *_: None)
        monkeypatch.setattr(runs.recipes, "as_json", lambda *_: {})
        monkeypatch.setattr(runs.recipes, "digest", lambda *_: "")
        run(work)
