"""The training loop with a buffer that is real, and everything else only noted: what comes in which order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.buffering import Trainer, ids
from support.buffering import run as limited

from tandem.errors import Deadline, EngineError, StaleWeights, TandemError
from tandem.rollout.source import Batch, DataState, RolloutSource
from tandem.trainer import loop
from tandem.trainer.pack import StepBatch
from tandem.trainer.state import TrainerState
from tandem.trainer.step import StepStats
from tandem.types import Group, Json, PolicyVersion
from tandem.weight_sync.transaction.session import Commit, Published

STEPS = 5
START = TrainerState(
    step=0, version=PolicyVersion(step=0, digest=""), tokens_seen=0, data_state=DataState(), config_digest="d"
)


@pytest.fixture(autouse=True)
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through all that the tests have imported takes longer than they do."""
    monkeypatch.setattr(loop.machine, "settled", nullcontext)


@dataclass
class Scene:
    """Every part of a run but its source. ``log`` has what happened, in order; ``saved`` each checkpoint, by step."""

    lag: int = 0
    stands_still: bool = False
    early: bool = False
    evaluates: Callable[[int], bool] = lambda step: False
    every: int = 1
    stop_at: str = ""
    failure: TandemError | None = None
    unproven: int = 0
    finite: bool = True
    log: list[str] = field(default_factory=list)
    recorded: list[tuple[int, bool, bool]] = field(default_factory=list)
    saved: dict[int, Json] = field(default_factory=dict)
    batches: list[list[Group]] = field(default_factory=list)
    trainer: Trainer = field(default_factory=Trainer)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    least: int = 0
    folder: Path = Path("runs/here/checkpoints")
    contents: str = "all"
    behind: bool = False
    writing: asyncio.Future[None] | None = None

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.stop_at:
            self.stop.set()

    def train(self, state: TrainerState = START) -> TrainerState:
        """Train from a state, as a run does that is put together around it."""
        self.trainer.step = state.step
        play = self.trainer.run

        async def held_back(*words: Any, **options: Any) -> Group:
            least = self.least
            while self.trainer.step < least:
                await asyncio.sleep(0)
            return await play(*words, **options)

        self.trainer.run = held_back  # type: ignore[method-assign]
        run: Any = loop.RunParts(
            steps=STEPS,
            policy=SimpleNamespace(device="cpu", compute=self.compute),  # type: ignore[arg-type]
            weight_sync=self,  # type: ignore[arg-type]
            source=Noted(self),
            pack=self.pack,  # type: ignore[arg-type]
            step=self,  # type: ignore[arg-type]
            checkpoints=self,  # type: ignore[arg-type]
            evaluator=SimpleNamespace(maybe=self.evaluate, wants=self.evaluates),  # type: ignore[arg-type]
            telemetry=self,  # type: ignore[arg-type]
            records=self.records,
            show=lambda step, groups, advantages: None,
            stop=self.stop,
            reached=lambda step: setattr(self.trainer, "step", step),
            grading=dict,
            on_policy=self.lag == 0,
        )
        return limited(loop.train(run, state))

    # The weight sync

    @asynccontextmanager
    async def open(self, start: PolicyVersion) -> AsyncIterator[Scene]:
        yield self

    @property
    def trained(self) -> SimpleNamespace:
        async def finite() -> bool:
            return self.finite

        return SimpleNamespace(finite=finite)

    async def compute(self, work: Callable[[], Any]) -> Any:
        return work()

    async def sleep(self) -> None:
        """It never sleeps."""

    def accept_requests_for(self, step: int, free_slots: Callable[[], None]) -> None:
        if self.early:
            self.least = step
            free_slots()

    @asynccontextmanager
    async def commit(
        self, step: int, *, free_slots: Callable[[], None] | None, last: bool, recent: Sequence[Sequence[int]]
    ) -> AsyncIterator[Commit]:
        commit = Commit(free_slots=free_slots)
        if self.stands_still:
            commit.accept_requests()
        yield commit
        await self.some_while()
        if step == self.unproven:
            commit.unverified = PolicyVersion(step=step, digest=f"d{step}")
            raise StaleWeights(f"version {step} was moved, but the engine does not sample from it")
        self.note(f"moved {step}")
        commit.published = Published(version=PolicyVersion(step=step, digest=f"d{step}"), moved=True)
        commit.accept_requests()

    # The step

    def pack(self, groups: Sequence[Group], *, version: int) -> StepBatch:
        return StepBatch(micro=(), groups=tuple(groups), advantages={}, num_loss_tokens=len(groups))

    async def packed(self, pack: Any, groups: Sequence[Group], version: int) -> StepBatch:
        packed: StepBatch = pack(groups, version=version)
        return packed

    async def forward_backward(self, batch: StepBatch, queued: Callable[[], None]) -> StepStats:
        queued()
        await self.some_while()
        self.note(f"computed {self.trainer.step + 1}")
        return StepStats(metrics={}, logprobs={})

    async def apply(self, step: int, batch: StepBatch, stats: StepStats) -> Mapping[str, Any]:
        self.batches.append(list(batch.groups))
        self.note(f"trained {step}")
        return {}

    # What becomes of it

    def records(self, step: int, batch: StepBatch, stats: StepStats) -> Sequence[Json]:
        return [{"step": step}]

    def rollouts(self, step: int, records: Sequence[Json]) -> None:
        time.sleep(0.01)
        self.recorded.append((step, f"moved {step}" in self.log, f"saved {step}" in self.log))  # on a thread
        self.log.append(f"written {step}")

    def event(self, name: str, **fields: Any) -> None:
        self.note(f"{name} {fields['step']}")

    def emit(self, step: int, values: Any) -> None:
        self.note(f"emitted {step}")

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == STEPS

    async def begin(self, state: TrainerState, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """As ``Checkpoints`` does, which writes no step twice, and one at a time; ``behind``: beside training."""
        await self.done()
        await self.some_while()
        if state.step not in self.saved:
            staged = state.to_json()
            self.writing = asyncio.ensure_future(self.write(state.step, staged, then))
            if not self.behind or state.step == STEPS:
                await self.done()

    async def write(self, step: int, staged: Json, then: Callable[[], Awaitable[None]] | None) -> None:
        if self.behind:
            await asyncio.sleep(0.02)
        self.saved[step] = staged
        self.note(f"saved {step}")
        if then is not None:
            await then()

    async def save(self, state: TrainerState) -> None:
        await self.begin(state)
        await self.done()

    async def done(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            await writing

    async def check(self) -> None:
        """Nothing has gone wrong."""

    async def end(self, *how: object) -> None:
        await self.done()

    async def evaluate(self, step: int) -> None:
        if self.evaluates(step):
            await self.some_while()
            self.note(f"evaluated {step}")

    async def some_while(self) -> None:
        """Long enough for what is played beside it to begin."""
        for _ in range(30):
            await asyncio.sleep(0)


@dataclass
class Noted:
    """A buffer that notes when it is told of what, and who was being played then."""

    scene: Scene

    @asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[RolloutSource]:
        async with self.scene.trainer.buffer(n=2, max_lag=self.scene.lag).open(data_state) as buffer:
            self.buffer = buffer
            yield self

    async def take(self) -> Batch:
        if self.scene.failure is not None and self.scene.trainer.step == 2:
            raise self.scene.failure
        batch = await self.buffer.take()
        free = batch.free

        def noted() -> None:
            self.scene.note(f"released {self.scene.trainer.step}")
            free()

        batch.free = noted
        return batch

    def data_state(self) -> DataState:
        return self.buffer.data_state()

    async def saved(self, data_state: DataState) -> None:
        self.scene.note(f"told of {data_state.taken if self.scene.behind else self.scene.trainer.step}")

    def metrics(self) -> Mapping[str, Any]:
        return self.buffer.metrics()


def steps_of(scene: Scene) -> dict[int, list[str]]:
    """What happened to each step, in order, but for what a thread wrote."""
    done = [what for what in scene.log if not what.startswith(("written ", "computed "))]
    return {step: [what.rpartition(" ")[0] for what in done if what.endswith(f" {step}")] for step in range(6)}


WRITTEN = ["published", "emitted", "saved", "told of"]


def test_sampling_goes_on_while_a_step_is_written_down_and_saved() -> None:
    scene = Scene()
    scene.train()
    done = steps_of(scene)
    assert all(done[step] == ["trained", "moved", "released", *WRITTEN] for step in range(1, STEPS))
    assert done[STEPS] == ["trained", "moved", *WRITTEN, "released"], "after the last there is nothing to go on with"
    assert scene.recorded == [(step, True, False) for step in range(1, STEPS + 1)], "each is, before it is saved"


def test_a_stop_ends_the_wait_for_a_broker_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    @asynccontextmanager
    async def absent(self: Noted, data_state: DataState) -> AsyncIterator[Noted]:
        asyncio.get_running_loop().call_later(0.01, scene.stop.set)
        await asyncio.Event().wait()
        yield self

    monkeypatch.setattr(Noted, "open", absent)
    assert scene.train() == START
    assert list(scene.saved) == [0]


@pytest.mark.parametrize("stop_at", ["", "emitted 2"])
def test_rollouts_are_written_one_step_at_a_time_while_the_next_is_sampled(stop_at: str) -> None:
    scene = Scene(every=10, stop_at=stop_at)
    last = scene.train().step
    assert scene.recorded == [(step, True, False) for step in range(1, last + 1)], "all, and before it ends"
    if not stop_at:
        assert scene.log.index("written 2") > scene.log.index("emitted 2")


def test_an_engine_that_stands_still_is_asked_while_its_weights_are_updated_moved_and_proven() -> None:
    scene = Scene(stands_still=True)
    scene.train()
    done = steps_of(scene)
    assert all(done[step] == ["released", "trained", "moved", *WRITTEN] for step in range(1, STEPS))
    assert done[STEPS] == ["trained", "moved", *WRITTEN, "released"]
    evaluating = Scene(stands_still=True, evaluates=lambda step: True)
    evaluating.train()
    assert steps_of(evaluating)[1] == ["trained", "moved", *WRITTEN, "evaluated", "released"]


def test_an_engine_that_takes_requests_for_the_next_policy_is_asked_while_the_device_is_busy() -> None:
    scene = Scene(early=True)
    scene.train()
    assert [what for what in scene.log if "released" in what] == [f"released {step}" for step in (0, 1, 2, 3, STEPS)]
    for step in range(1, STEPS):
        assert scene.log.index(f"released {step - 1}") < scene.log.index(f"computed {step}")
    for other in (Scene(early=True, evaluates=lambda step: True), Scene(early=True, lag=1)):
        other.train()
        assert other.least == 0, "what is evaluated, or sampled meanwhile, is of this policy"


def test_what_is_evaluated_has_the_engine_to_itself() -> None:
    scene = Scene(evaluates=lambda step: step % 2 == 0)
    scene.train()
    done = steps_of(scene)
    assert done[0] == ["evaluated"]
    for step in (2, 4):
        assert done[step] == ["trained", "moved", *WRITTEN, "evaluated", "released"]
    assert done[1] == done[3] == ["trained", "moved", "released", *WRITTEN]


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_next_wave_is_played_before_the_step_is_saved_or_after_it_is_evaluated(evaluates: bool) -> None:
    scene = Scene(evaluates=lambda step: evaluates)
    play = scene.trainer.run

    async def noted(*words: Any, **options: Any) -> Group:
        scene.log.append(f"played {scene.trainer.step}")
        return await play(*words, **options)

    scene.trainer.run = noted  # type: ignore[method-assign]
    scene.train()
    for step, happened in steps_of(scene).items():
        if 0 < step < STEPS:
            assert happened.count("played") == 2
            last = len(happened) - 1 - happened[::-1].index("played")
            if evaluates:
                assert happened.index("played") > happened.index("evaluated")
            else:
                assert last < happened.index("saved")


def test_the_state_that_is_saved_is_the_same_either_way() -> None:
    one, other, third, early = Scene(), Scene(evaluates=lambda step: True), Scene(stands_still=True), Scene(early=True)
    assert one.train() == other.train() == third.train() == early.train()
    assert one.saved == other.saved == third.saved == early.saved
    assert sorted(one.saved) == list(range(1, STEPS + 1))
    assert ids(one.batches) == ids(other.batches) == ids(early.batches)
    assert [TrainerState.from_json(state).data_state.admitted for state in one.saved.values()] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("stop_at", ["", "emitted 4", "saved 2"])
def test_training_goes_on_while_a_checkpoint_is_written_and_its_source_is_told_once_it_is_whole(stop_at: str) -> None:
    whole = Scene(lag=1)
    whole.train()
    scene = Scene(lag=1, every=2, behind=True, stop_at=stop_at)
    last = scene.train().step
    assert scene.writing is None
    assert scene.log.index("trained 3") < scene.log.index("saved 2") < scene.log.index("told of 2")
    assert list(scene.saved) == sorted({*range(2, last, 2), last})
    assert last == STEPS or stop_at
    assert scene.saved[2]["cursor"] == whole.saved[2]["cursor"], "as it stood after its step"  # type: ignore[index]
    second = Scene(lag=1)
    second.train(TrainerState.from_json(scene.saved[last]))
    assert ids(scene.batches) + ids(second.batches) == ids(whole.batches)


def test_what_is_written_ends_before_a_run_that_fails_does() -> None:
    scene = Scene(every=2, behind=True, unproven=3)
    with pytest.raises(StaleWeights, match="Step 3 is saved"):
        scene.train()
    assert list(scene.saved) == [2, 3]
    assert scene.log.index("told of 2") < scene.log.index("saved 3")
    other = Scene(every=2, behind=True, failure=EngineError("no engine"))
    with pytest.raises(EngineError, match="no engine"):
        other.train()
    assert list(other.saved) == [2]
    assert "told of 2" in other.log


STOPPED = [
    pytest.param(mode, every, lag, marks=[] if (every == 3) == (bool(lag) != (mode == "still")) else pytest.mark.long)
    for mode in ("moved", "still", "early")
    for every in (1, 3)
    for lag in (0, 1)
]
"""Every pair of these is in the default tier, and every three of them in the long one."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "every", "lag"), STOPPED)
@pytest.mark.parametrize(
    "stop_at", ["trained 2", "moved 2", "released 2", "emitted 2", "saved 3", "told of 3", "evaluated 4"]
)
def test_a_stop_in_between_loses_nothing(stop_at: str, mode: str, every: int, lag: int) -> None:
    """Whatever was being played when the run was stopped is trained by the run that goes on, once."""
    whole = Scene(lag=lag)
    whole.train()
    ways = {"stands_still": mode == "still", "early": mode == "early"}
    first = Scene(lag=lag, every=every, stop_at=stop_at, evaluates=lambda step: step == 4, **ways)  # type: ignore[arg-type]
    reached = first.train()
    next_one = stop_at == "released 2" and mode == "early" and not lag  # released while that one is computed
    assert reached.step == int(stop_at[-1]) + next_one
    assert sorted(first.saved)[-1] == reached.step
    second = Scene(lag=lag, every=every, **ways)  # type: ignore[arg-type]
    second.train(TrainerState.from_json(first.saved[reached.step]))
    assert ids(first.batches) + ids(second.batches) == ids(whole.batches)
    assert len(set(ids(whole.batches))) == 2 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("mode", ["moved", "still", "early"])
def test_a_step_whose_proof_fails_is_saved_and_the_run_goes_on_from_it(mode: str, lag: int) -> None:
    """It is the engine that is in doubt, not the policy: nothing is trained twice."""
    whole = Scene(lag=lag)
    whole.train()
    ways = {"stands_still": mode == "still", "early": mode == "early"}
    first = Scene(lag=lag, every=10, unproven=3, **ways)  # type: ignore[arg-type]
    with pytest.raises(StaleWeights, match=r"Step 3 is saved\. To go on, .*: tandem train runs/here"):
        first.train()
    assert list(first.saved) == [3]
    second = Scene(lag=lag, **ways)  # type: ignore[arg-type]
    second.train(TrainerState.from_json(first.saved[3]))
    assert ids(first.batches) + ids(second.batches) == ids(whole.batches)


def test_a_policy_that_holds_no_numbers_is_not_saved() -> None:
    scene = Scene(every=10, unproven=3, finite=False)
    with pytest.raises(StaleWeights, match="The policy itself holds NaN or infinities: it is not saved"):
        scene.train()
    assert not scene.saved


def test_what_was_played_since_the_last_step_is_not_played_again() -> None:
    first = Scene(every=10, stop_at="emitted 2")
    first.train()
    kept = {group.id for _, group in TrainerState.from_json(first.saved[2]).data_state.ready}
    assert kept
    second = Scene()
    second.train(TrainerState.from_json(first.saved[2]))
    assert not kept & set(second.trainer.started)


@pytest.mark.parametrize(
    ("failure", "saved"),
    [
        (EngineError("engine.restarts allows 3 restarts"), True),
        (Deadline("trainer waited 9 s for the broker", on="broker"), True),
        (Deadline("trainer waited 9 s for the compute thread", on="compute thread"), False),
    ],
    ids=["engine", "broker", "compute thread"],
)
def test_a_run_that_gets_no_groups_any_more_is_saved(failure: TandemError, saved: bool) -> None:
    """By whoever can: the compute thread would have to save it."""
    scene = Scene(every=10, failure=failure)
    with pytest.raises(type(failure), match=str(failure)):
        scene.train()
    assert list(scene.saved) == ([2] if saved else [])
    if saved:
        assert TrainerState.from_json(scene.saved[2]).data_state.ready, "what was played since is kept"
        second = Scene()
        second.train(TrainerState.from_json(scene.saved[2]))
        whole = Scene()
        whole.train()
        assert ids(scene.batches) + ids(second.batches) == ids(whole.batches)
