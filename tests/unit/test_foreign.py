"""Groups from a broker: whatever happens to the trainer, every group is trained once in the history that counts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brokers import Client, run_parameters, served
from support.tiers import examples

from tandem.config.loading import from_options
from tandem.engines.base import Engine
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.errors import BrokerError, Deadline, EngineError, Starved
from tandem.metrics import flatten
from tandem.rollout.source import DataState
from tandem.rollout.turns import unrecorded_options
from tandem.trainer.environments import StepCounter
from tandem.trainer.pack import StepBatch
from tandem.trainer.record import records
from tandem.trainer.state import TrainerState
from tandem.trainer.step import StepStats
from tandem.types import Group, PolicyVersion, Sampling
from tandem_broker.client import Connection, NotRegistered, TakenBatch, TrainerClient
from tandem_broker.protocol.convert import Rules, group_from_wire
from tandem_broker.protocol.messages import Info, RunParameters, ScoredGroup
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue.records import ServedBatch
from tandem_broker.queue.store import GroupQueue
from tandem_broker.run_source import BrokerSource, broker_source

T = TypeVar("T")
RUN = RunParameters(
    wandb_group="",
    wandb_project="",
    batch_size=4,
    max_token_len=64,
    checkpoint_dir="",
    save_checkpoint_interval=1,
    starting_step=0,
    num_steps=9,
)
CONFIG = from_options(
    {"model": "m", "steps": 9, "broker": "http://b:1", "groups_per_step": 2, "max_lag": 2, "dtype": "float32"},
    [],
    Path(),
).config


def sent(name: str, *scores: float, version: int | None = None, **changed: Any) -> ScoredGroup:
    """A group as an environment sends it: one prompt token, two trained ones."""
    overrides = {"tandem_task": name} | ({} if version is None else {"tandem_version": version})
    n = len(scores or (0.0, 1.0))
    plain: dict[str, Any] = {
        "tokens": [[1, 2, 3]] * n,
        "masks": [[-100, 2, 3]] * n,
        "scores": list(scores or (0.0, 1.0)),
        "inference_logprobs": [[1.0, -0.5, -0.5]] * n,
        "group_overrides": overrides,
        **changed,
    }
    return ScoredGroup(**plain)


@dataclass
class Local:
    """The broker's own store in this process, asked as a client asks it. It can forget everything, or not lease."""

    leases: bool = True
    drops: bool = False
    store: GroupQueue = field(default_factory=GroupQueue)
    now: float = 0.0
    polls: int = 0
    registered: list[RunParameters] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    malformed: tuple[str, ...] = ()
    on_empty: Callable[[], None] = lambda: None
    batch_size: int | None = None
    renewals: int = 0
    away: bool = False
    outage: Exception = field(default_factory=lambda: BrokerError("the broker does not answer"))
    sent: dict[str, ScoredGroup] = field(default_factory=dict)

    async def __aenter__(self) -> Local:
        return self

    async def __aexit__(self, *error: object) -> None:
        return

    def put(self, *groups: ScoredGroup) -> None:
        for scored in groups:
            version = (scored.group_overrides or {}).get("tandem_version")
            name = f"e{self.store.counts['accepted']}"
            entry = GroupEntry(id=name, env=None, size=len(scored.scores), version=version, payload=b"")
            self.sent[name] = scored
            self.store.put(entry, self.now)

    async def info(self) -> Info:
        size = self.batch_size or (self.store.run.batch_size if self.store.run else -1)
        return Info(batch_size=size, max_token_len=64)

    async def register(self, run: RunParameters) -> int:
        self.registered.append(run)
        return self.store.register(run)

    async def batch(
        self, *, lease: float | None = None, policy: int | None = None, max_lag: int | None = None
    ) -> TakenBatch | None:
        await asyncio.sleep(0)
        self.polls += 1
        if self.store.run is None:
            raise NotRegistered("the broker says: no trainer has registered")
        lease, max_lag = lease if self.leases else None, max_lag if self.drops else None
        taken = self.store.take(self.now, lease=lease, policy=policy, max_lag=max_lag)
        if taken is None:
            self.on_empty()
            return None
        return self._as_taken(taken)

    def _as_taken(self, taken: ServedBatch) -> TakenBatch:
        return TakenBatch(
            id=taken.id if self.leases else None,
            groups=[self.sent[entry.id] for entry in taken.entries],
            ids=[entry.id for entry in taken.entries],
            versions=[entry.version if self.leases else None for entry in taken.entries],
            malformed=self.malformed,
        )

    async def renew(self, batch: str) -> bool:
        self.renewals += 1
        if self.away:
            raise self.outage
        return not self.store.renew(batch, self.now)

    async def acknowledge(self, batch: str) -> str:
        reason = self.store.acknowledge(batch, self.now)
        if reason:
            self.refused.append(batch)
        return reason


@dataclass
class Trainer:
    """What has been reached, and a source over the broker."""

    broker: Local | TrainerClient
    step: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    failure: Exception | None = None

    def source(self, **options: Any) -> BrokerSource:
        rules = {name: options.pop(name) for name in ("env_advantages", "policy_logprobs") if name in options}
        bounds = {name: options.pop(name) for name in ("max_dropped_batches",) if name in options}
        config = replace(CONFIG, **options)
        return BrokerSource(
            broker=self.broker,
            config=config,
            run=msgspec.structs.replace(RUN, batch_size=2 * config.groups_per_step),
            lease_seconds=60.0,
            **bounds,
            rules=Rules(**rules),
            poll_seconds=0.0,
            version=lambda: self.step,
            on_drop=lambda reason, group: self.dropped.append((reason, group.id.partition("@")[0])),
            failure=lambda: self.failure,
        )


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


def names(groups: Sequence[Group]) -> list[str]:
    return [group.id.partition("@")[0] for group in groups]


def taken(broker: Local, steps: int, trainer: Trainer | None = None, **options: Any) -> tuple[list[list[str]], Trainer]:
    """Names of the groups of the next steps."""
    trainer = trainer or Trainer(broker)

    async def go() -> list[list[str]]:
        batches = []
        async with trainer.source(**options).open(DataState()) as source:
            for _ in range(steps):
                batches.append(names((await source.take()).groups))
                trainer.step += 1
        return batches

    return run(go()), trainer


def filled(count: int, **broker: Any) -> Local:
    made = Local(**broker)
    made.put(*(sent(f"g{n}") for n in range(count)))
    return made


def counted(source: BrokerSource) -> Mapping[str, float]:
    return {name: value for name, value in flatten(source.metrics()).items() if value}


# Batches


def test_batches_are_the_brokers_in_order() -> None:
    broker = filled(6)
    batches, _ = taken(broker, 3)
    assert batches == [["g0", "g1"], ["g2", "g3"], ["g4", "g5"]]
    assert broker.registered[0].batch_size == 4


def test_it_registers_at_the_step_that_was_reached_and_waits_for_groups() -> None:
    broker = Local(on_empty=lambda: broker.put(sent("late")))
    batches, _ = taken(broker, 1, Trainer(broker, step=7))
    assert batches == [["late", "late"]]
    assert broker.registered[0].starting_step == 7
    assert broker.store.policy_step == 7


def test_a_run_that_waits_for_environments_says_so(caplog: pytest.LogCaptureFixture) -> None:
    broker = Local()
    waiting = Trainer(broker).source()
    waiting._quiet_seconds = 0.05

    async def go() -> None:
        async with waiting.open(DataState()) as source:
            taking = asyncio.create_task(source.take())
            while "no batch of 4 sequences" not in caplog.text:
                await asyncio.sleep(0.01)
            broker.put(sent("a"), sent("b"))
            await taking

    with caplog.at_level(logging.WARNING):
        run(asyncio.wait_for(go(), 20))


def test_groups_of_other_sizes_make_up_the_same_number_of_sequences() -> None:
    broker = Local()
    broker.put(sent("four", 0.0, 1.0, 0.0, 1.0), sent("a"), sent("b"))
    assert taken(broker, 2)[0] == [["four"], ["a", "b"]]


def test_a_broker_that_forgot_is_told_again() -> None:
    broker = filled(2)

    async def go() -> list[str]:
        trainer = Trainer(broker, step=1)
        async with trainer.source().open(DataState()) as source:
            await source.take()
            trainer.step = 2
            broker.store.reset()
            broker.on_empty = lambda: broker.put(sent("new"))
            return names((await source.take()).groups)

    assert run(go()) == ["new", "new"]
    assert [made.starting_step for made in broker.registered] == [1, 2]


@pytest.mark.parametrize("hangs", [False, True], ids=["the broker has nothing", "the broker does not answer"])
def test_where_nobody_can_sample_any_more_nothing_is_waited_for(hangs: bool) -> None:
    class Silent(Local):
        async def batch(self, **arguments: Any) -> TakenBatch | None:
            if hangs and self.polls:
                self.on_empty()
                await asyncio.Event().wait()
            return await super().batch(**arguments)

    broker = Silent()
    broker.put(sent("a"), sent("b"))
    trainer = Trainer(broker)

    def fail() -> None:
        trainer.failure = EngineError("engine.restarts allows 3 restarts")

    async def go() -> None:
        broker.on_empty = fail
        async with trainer.source().open(DataState()) as source:
            assert names((await source.take()).groups) == ["a", "b"]
            with pytest.raises(EngineError, match="allows 3 restarts"):
                await source.take()
            assert len(source.data_state().batches) == 1, "what was taken before is saved"
        assert [task for task in asyncio.all_tasks() if task.get_name() == "the next batch"] == []

    run(go())


def test_a_run_looks_at_its_own_engine(tmp_path: Path) -> None:
    config = from_options(
        {"model": "m", "steps": 1, "broker": "http://b:1", "max_lag": 1, "engine": "vllm", "sync": "broadcast"},
        ["sampling.top_k=5"],
        tmp_path / "r.yaml",
    ).config
    engine, template = VllmEngine.__new__(VllmEngine), SimpleNamespace(decode=None)
    engine.fleet = SimpleNamespace(failure=None)  # type: ignore[assignment]
    parts: dict[str, Any] = {"folder": tmp_path, "template": template, "trained": StepCounter(0), "telemetry": None}
    source = broker_source(config, context=64, vocabulary=9, engine=engine, **parts)
    assert source.config.sampling == Sampling(top_k=5)
    assert source.failure() is None
    engine.fleet.failure = EngineError("it is gone")
    assert source.failure() is engine.fleet.failure
    assert Engine.failure.fget(engine) is None, "one in this process cannot die alone"  # type: ignore[attr-defined]


def test_a_broker_that_goes_on_with_another_batch_size_is_an_error() -> None:
    with pytest.raises(BrokerError, match=r"batches of 64 sequences.*takes 4"):
        taken(Local(batch_size=64), 1)


@pytest.mark.parametrize("where", ["generation_params", "group_overrides", "overrides"])
@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"presence_penalty": -1},
     {"frequency_penalty": 0.5}, {"min_tokens": 3}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_groups_that_say_that_they_were_sampled_otherwise_are_set_aside(options: dict[str, Any], where: str) -> None:
    ((name, value),) = options.items()
    same = Local()
    same.put(
        sent("a"), sent("b", **{where: [options, {}] if where == "overrides" else {**options, "tandem_task": "b"}})
    )
    run_like_it = Sampling(**{name: value})
    assert taken(same, 1, sampling=run_like_it)[0] == [["a", "b"]], "groups that say nothing are taken as they are"
    other = Local()
    options_sent = {where: [{}, options] if where == "overrides" else options}
    other.put(*(sent(f"g{n}", **options_sent) for n in range(8)))
    own = getattr(Sampling(), name)
    with pytest.raises(Starved, match=rf"samples with {name} {value}, .* with {own:g}; .* sampling\.{name}"):
        taken(other, 1, max_dropped_batches=2)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"generation_params": {"top_p": -1e300}}, "samples with top_p -1e+300"),
        ({"generation_params": {"min_p": 10**400}}, "OverflowError"),
        ({"inference_logprobs": None}, "has no inference_logprobs"),
    ],
    ids=["impossible", "beyond a float", "no logprobs"],
)
def test_a_group_that_is_refused_is_set_aside_and_training_goes_on(
    changed: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Local()
    broker.put(sent("a"), sent("b", **changed), sent("c"), sent("d"))
    trainer = Trainer(broker)

    async def go() -> tuple[list[str], Mapping[str, float], tuple[str, ...]]:
        async with trainer.source().open(DataState()) as source:
            return names((await source.take()).groups), counted(source), source.data_state().batches

    batch, metrics, held = run(go())
    assert batch == ["a", "c"]
    assert metrics["groups/malformed"] == 1
    assert len(held) == 2, "what came is acknowledged with the checkpoint, and does not come again"
    assert "a group of the broker cannot be trained on and is set aside: " in caplog.text
    assert why in caplog.text


def test_a_broker_whose_groups_are_all_refused_ends_the_run_with_the_reason() -> None:
    broker = Local()
    broker.put(*(sent(f"g{n}", generation_params={"top_p": 0.5}) for n in range(8)))
    with pytest.raises(Starved, match=r"samples with top_p 0\.5"):
        taken(broker, 1, Trainer(broker), max_dropped_batches=2)


def test_what_is_no_number_says_nothing_of_sampling() -> None:
    broker = Local()
    params = {
        "top_p": None,
        "top_k": -1,
        "min_p": "0.1",
        "min_tokens": False,
        "repetition_penalty": 1,
        "temperature": 0.5,
    }
    broker.put(sent("a", generation_params=params), sent("b", generation_params=unrecorded_options(Sampling())))
    assert taken(broker, 1)[0] == [["a", "b"]]


# Drops


def test_what_cannot_be_trained_on_is_dropped_counted_and_replaced() -> None:
    broker = Local()
    broker.put(
        sent("zero_variance", 1.0, 1.0),
        sent("ok"),
        sent("half", masks=[[-100, 2, 3], [-100] * 3]),
        sent("more"),
    )
    trainer = Trainer(broker)

    async def go() -> tuple[list[str], Mapping[str, float]]:
        async with trainer.source().open(DataState()) as source:
            return names((await source.take()).groups), counted(source)

    batch, metrics = run(go())
    assert batch == ["ok", "more"]
    assert trainer.dropped == [("zero_variance", "zero_variance"), ("failed", "half")]
    assert metrics["groups/dropped_zero_variance"] == metrics["groups/dropped_failed"] == 1
    assert metrics["rollouts/untrained"] == metrics["rollouts/failed"] == 1
    assert metrics["tokens/generated"] == 14


def test_old_groups_are_dropped_by_their_own_version_or_the_brokers() -> None:
    broker = Local()
    trainer = Trainer(broker, step=5)

    async def go() -> list[str]:
        async with trainer.source(max_lag=2).open(DataState()) as source:
            assert await broker.batch(lease=1.0, policy=2) is None  # the policy step that it notes from now on
            broker.put(sent("noted 2"), sent("says 3", version=3))
            await broker.batch(lease=1.0, policy=4)
            broker.store.register(run_parameters(batch_size=4, max_token_len=64))  # that lease comes back
            await broker.batch(lease=1.0, policy=4)
            broker.store.register(run_parameters(batch_size=4, max_token_len=64))
            broker.put(sent("says 4", version=4), sent("says 1", version=1))
            return names((await source.take()).groups)

    assert run(go()) == ["says 3", "says 4"]
    assert trainer.dropped == [("stale", "noted 2"), ("stale", "says 1")]


def test_a_group_of_a_later_step_than_the_runs_own_is_named(caplog: pytest.LogCaptureFixture) -> None:
    broker = Local()
    broker.put(sent("a", version=7), sent("b", version=9))
    with caplog.at_level(logging.WARNING):
        batches, _ = taken(broker, 1, Trainer(broker, step=0))
    assert batches == [["a", "b"]]
    assert caplog.text.count("was sampled at step 7 and this run is at 0") == 1
    assert "sampled at step 9" not in caplog.text
    assert "GET /reset_data" in caplog.text


def test_a_broker_that_knows_leaves_old_groups_out_itself() -> None:
    broker = Local(drops=True)
    broker.put(*(sent(name, version=version) for name, version in (("old", 1), ("a", 3), ("older", 0), ("b", 4))))
    batches, trainer = taken(broker, 1, Trainer(broker, step=5))
    assert (batches, trainer.dropped) == ([["a", "b"]], [])
    assert broker.store.step == 6, "batches that were left out are no steps"


def test_a_group_that_waits_here_ages_too() -> None:
    broker = Local()
    broker.put(
        *(sent(name, version=0) for name in ("a", "b", "c", "d")), sent("zero_variance", 1.0, 1.0), sent("e", version=3)
    )
    broker.put(sent("f", version=3), sent("g", version=3))
    trainer = Trainer(broker)

    async def go() -> list[str]:
        async with trainer.source(max_lag=1, groups_per_step=1).open(DataState()) as source:
            await source.take()
            trainer.step = 3
            return names((await source.take()).groups)

    assert run(go()) == ["e"]
    assert {("stale", name) for name in "bcd"} <= set(trainer.dropped)


@pytest.mark.parametrize(
    ("bad", "reason", "advice"),
    [
        (sent("x", version=0), "stale", "raise max_lag"),
        (sent("x", 1.0, 1.0, version=9), "zero_variance", "answers to a task are all alike"),
        (sent("x", masks=[[-100] * 3] * 2, version=9), "failed", "every token is masked"),
    ],
)
def test_starved_says_why_and_what_to_do(bad: ScoredGroup, reason: str, advice: str) -> None:
    broker = Local(on_empty=lambda: broker.put(bad))
    with pytest.raises(Starved, match=reason) as caught:
        taken(broker, 1, Trainer(broker, step=9), max_dropped_batches=3)
    assert advice in str(caught.value)


def test_flat_groups_are_kept_if_the_recipe_says_so() -> None:
    broker = Local()
    broker.put(sent("zero_variance", 1.0, 1.0), sent("ok"))
    assert taken(broker, 1, zero_variance_groups="keep")[0] == [["zero_variance", "ok"]]


def test_given_advantages_need_no_siblings_and_no_rewards_that_differ() -> None:
    broker = Local()
    rows = [[0.0, 1.0, -1.0]] * 2
    broker.put(sent("zero_variance", 1.0, 1.0, advantages=rows), sent("ok"))
    assert taken(broker, 1, env_advantages=True)[0] == [["zero_variance", "ok"]]


def test_a_group_of_which_nothing_is_trained_teaches_nothing() -> None:
    broker = Local()
    zero = [{"set_advantage_to_zero": True}] * 2
    broker.put(sent("zero", overrides=zero), sent("half", overrides=[zero[0], {}]), sent("a"), sent("b"))
    batches, trainer = taken(broker, 1)
    assert batches == [["half", "a"]]
    assert trainer.dropped == [("zero_variance", "zero")]


def test_groups_without_logprobs_are_set_aside_unless_the_policy_computes_them() -> None:
    bare = [sent(f"g{n}", inference_logprobs=None) for n in range(8)]
    broker = Local()
    broker.put(*bare)
    with pytest.raises(Starved, match="missing_logprobs"):
        taken(broker, 1, max_dropped_batches=2)
    broker = Local()
    broker.put(*bare)
    assert taken(broker, 1, policy_logprobs=True)[0] == [["g0", "g1"]]


def test_what_is_ignored_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    broker = Local(malformed=("body.tokens: odd",))
    rows = [[0.0, 1.0, 1.0]] * 2
    broker.put(*(sent(f"g{n}", ref_logprobs=rows, advantages=rows) for n in range(4)))
    with caplog.at_level(logging.WARNING):
        taken(broker, 2)
    warnings = sorted({record.getMessage() for record in caplog.records})
    assert len(warnings) == 3
    assert "body.tokens: odd" in warnings[0]
    assert "send advantages" in warnings[1]
    assert "broker.env_advantages: true" in warnings[1]
    assert "send ref_logprobs" in warnings[2]


POISON = {
    "a score that cannot be squared": {"scores": [1e200, 0.0]},
    "a score beyond float32": {"scores": [1e39, 0.0]},
    "a logprob beyond float32": {"inference_logprobs": [[1.0, -1e39, -0.5]] * 2},
}


def stored(name: str, **changed: Any) -> GroupEntry:
    """A group as a broker with other bounds took it: it is in the queue, and comes with the next batch."""
    fields = {**msgspec.structs.asdict(sent(name)), **changed}
    return GroupEntry(id=name, env=None, size=2, version=0, payload=json.dumps(fields).encode())


@pytest.mark.parametrize("changed", POISON.values(), ids=POISON)
def test_poison_that_is_stored_is_set_aside_and_named_and_does_not_come_again(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def resumed(client: Client) -> tuple[list[str], Mapping[str, float]]:
        """A run that goes on from no checkpoint, and is killed before it saves one."""
        trainer = Trainer(TrainerClient(Connection(client.url)))
        async with trainer.source().open(DataState()) as source:
            return names((await source.take()).groups), counted(source)

    async def go() -> None:
        async with served() as client:
            for entry in (stored("p", **changed), stored("q", **changed), stored("ok"), stored("r", **changed)):
                client.broker.store.put(entry, 0.0)
            for name in ("more", "last"):
                client.broker.store.put(stored(name), 0.0)
            batch, metrics = await resumed(client)
            assert batch == ["ok", "more"]
            assert metrics["groups/malformed"] == 3
            assert (await resumed(client))[0] == ["ok", "more"]
            assert client.broker.store.counts["trained"] == 2

    with caplog.at_level(logging.WARNING):
        run(go())
    assert all(f"set aside: {name}: body." in caplog.text for name in "pqr")


def test_nothing_but_poison_ends_a_run_that_says_so() -> None:
    async def go() -> None:
        async with served() as client:
            for place in range(12):
                client.broker.store.put(stored(f"p{place}", scores=[1e200, 0.0]), 0.0)
            async with (
                Trainer(TrainerClient(Connection(client.url))).source(max_dropped_batches=2).open(DataState()) as source
            ):
                await source.take()

    with pytest.raises(Starved, match=r"6 groups in a row.*malformed.*p5: body\.scores\.0"):
        run(go())


# Exactly once


def test_a_batch_is_acknowledged_when_its_step_is_saved_and_not_before() -> None:
    broker = filled(6)

    async def go() -> None:
        async with Trainer(broker).source().open(DataState()) as source:
            await source.take()
            await source.take()
            assert broker.store.counts["trained"] == 0
            data_state = source.data_state()
            await source.take()
            await source.saved(data_state)
            assert broker.store.counts["trained"] == 4
            assert len(source.data_state().batches) == 1

    run(go())


def test_what_waits_in_a_checkpoint_needs_no_lease() -> None:
    broker = Local()
    broker.put(sent("zero_variance", 1.0, 1.0), sent("a"), sent("b"), sent("c"))

    async def first() -> DataState:
        async with Trainer(broker).source().open(DataState()) as source:
            assert names((await source.take()).groups) == ["a", "b"]
            await source.saved(source.data_state())
            return source.data_state()

    data_state = run(first())
    assert (names([group for _, group in data_state.ready]), data_state.batches) == (["c"], ())
    assert broker.store.counts["trained"] == 4
    broker.put(sent("d"), sent("e"))

    async def second() -> list[str]:
        async with Trainer(broker).source().open(data_state) as source:
            return names((await source.take()).groups)

    assert run(second()) == ["c", "d"]


def test_a_lease_that_ran_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled(2)

    async def go() -> None:
        async with Trainer(broker).source().open(DataState()) as source:
            await source.take()
            broker.now = 61.0
            again = broker.store.take(broker.now, lease=600.0)
            assert again is not None
            broker.store.acknowledge(again.id, broker.now)
            await source.saved(source.data_state())
            assert source.data_state().batches == ()

    with caplog.at_level(logging.WARNING):
        run(go())
    assert "were trained by another batch: a lease ran out, or a trainer registered meanwhile" in caplog.text
    assert "raise broker.lease_seconds" in caplog.text


def test_a_broker_that_was_started_anew_is_not_said_to_have_served_others(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled(2)

    async def go() -> None:
        async with Trainer(broker).source().open(DataState()) as source:
            await source.take()
            broker.store = filled(2).store
            await source.saved(source.data_state())

    with caplog.at_level(logging.WARNING):
        run(go())
    assert "never served" in caplog.text
    assert "give the broker --data" in caplog.text


@pytest.mark.parametrize("outage", [BrokerError("away"), Deadline("away", on="broker")], ids=["error", "deadline"])
def test_what_is_held_is_renewed_until_the_end_even_after_an_outage(
    monkeypatch: pytest.MonkeyPatch, outage: Exception
) -> None:
    """Time passes as it is slept through: five leases long, in which nobody else is served the batch."""
    broker = filled(2)
    broker.outage = outage
    wait, stolen = asyncio.sleep, []

    async def passing(seconds: float) -> None:
        if seconds and broker.polls:
            broker.now += seconds
            broker.away = 70 < broker.now < 90
            stolen.append(broker.store.take(broker.now, lease=600.0))
        await wait(0)

    monkeypatch.setattr(asyncio, "sleep", passing)

    async def go() -> None:
        async with Trainer(broker).source().open(DataState()) as source:
            await source.take()
            while broker.now < 300:
                await wait(0)
            assert set(stolen) == {None}
            await source.saved(source.data_state())
            assert broker.refused == []
            assert source.data_state().batches == ()
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "leases"] == []

    run(go())
    assert broker.renewals >= 13, "every third of a lease, but for the first and the last"


def test_a_step_has_the_sequences_of_a_batch_though_rollouts_are_several() -> None:
    broker = Local()
    overrides = {"tandem_task": "wide", "tandem_rollouts": [0, 0, 0, 1]}
    tokens = [[1, 2, 3], [8, 2, 3], [9, 2, 3], [1, 2, 3]]
    broker.put(sent("", 1.0, 1.0, 1.0, 0.0, tokens=tokens, group_overrides=overrides), sent("g0"), sent("g1"))
    batches, _ = taken(broker, 2)
    assert batches == [["wide"], ["g0", "g1"]]


def test_the_numbers_of_a_step_are_of_its_groups_though_more_had_arrived() -> None:
    """What took the place of a dropped group came with others, which wait for the next step."""
    broker = Local()
    broker.put(sent("zero_variance", 1.0, 1.0), sent("a"), sent("b", 0.0, 0.5), sent("c"), sent("d"), sent("e"))

    async def go() -> list[tuple[list[str], float, float]]:
        rows = []
        async with Trainer(broker).source().open(DataState()) as source:
            for _ in range(2):
                batch = names((await source.take()).groups)
                numbers = flatten(source.metrics())
                rows.append((batch, numbers["reward"], numbers["tokens/generated"]))
        return rows

    # Two tokens are sampled of each answer; the first step has the flat group too.
    assert run(go()) == [(["a", "b"], 3.5 / 6, 12.0), (["c", "d"], 0.5, 8.0)]


class EmptyHanded(Exception):
    """The broker has no batch, and nobody sends more."""


MOVES = st.lists(
    st.tuples(st.sampled_from(["take", "save", "kill", "kill between", "stop"]), st.integers(0, 3)), max_size=30
)


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(moves=MOVES, sizes=st.lists(st.sampled_from([2, 4]), min_size=12, max_size=40))
def test_no_interleaving_of_kills_and_saves_loses_or_doubles_a_group(
    moves: list[tuple[str, int]], sizes: list[int]
) -> None:
    """``kill between``: the checkpoint is on disk and the broker was not told."""

    def nothing_left() -> None:
        raise EmptyHanded

    broker = Local(on_empty=nothing_left)
    for n, size in enumerate(sizes):
        flat = n % 5 == 3
        broker.put(sent(f"g{n}", *(float(i % 2 and not flat) for i in range(size)), version=0))
    history: list[str] = []
    saved: tuple[DataState, int, int] = (DataState(), 0, 0)

    async def live(life: list[tuple[str, int]]) -> None:
        nonlocal saved
        data_state, step, kept = saved
        trainer = Trainer(broker, step=step)
        del history[kept:]
        async with trainer.source(max_lag=1000).open(data_state) as source:
            for move, _ in life:
                if move == "take":
                    try:
                        history.extend(names((await source.take()).groups))
                    except EmptyHanded:
                        return
                    trainer.step += 1
                elif move in ("save", "kill between", "stop"):
                    saved = (source.data_state(), trainer.step, len(history))
                    if move != "kill between":
                        await source.saved(saved[0])

    async def go() -> None:
        life: list[tuple[str, int]] = []
        for move in moves:
            life.append(move)
            if move[0] in ("kill", "kill between", "stop"):
                await live(life)
                life = []
        await live([*life, ("save", 0)])
        # To the end: whatever was not trained is still there.
        await live([("take", 0), ("save", 0)] * len(sizes))
        await live([("save", 0)])

    run(go())
    assert max(Counter(history).values(), default=1) == 1, "trained twice"
    waiting = Counter(names([group for _, group in saved[0].ready]))
    good = {f"g{n}" for n in range(len(sizes)) if n % 5 != 3}
    queued = good - set(history) - set(waiting)
    assert not set(history) & set(waiting)
    assert broker.store.status(0.0)["queued_groups"] >= len(queued), "lost"
    assert not broker.refused


# What a checkpoint and a record hold


def test_a_data_state_survives_json() -> None:
    broker = Local()
    rows = [[0.0, 1.0, -1.0]] * 2
    broker.put(sent("a", advantages=rows, inference_logprobs=None), sent("b"), sent("c", 1.0, 1.0), sent("d"))

    async def go() -> DataState:
        options = {"groups_per_step": 1, "env_advantages": True, "policy_logprobs": True}
        async with Trainer(broker).source(**options).open(DataState()) as source:
            await source.take()
            for _ in "bcd":
                source._receive(await source._next())
            return source.data_state()

    data_state = run(go())
    assert len(data_state.batches) == 4
    assert {group.id for _, group in data_state.ready} == {"b@e1", "d@e3"}
    state = TrainerState(
        step=3,
        version=PolicyVersion(step=3, digest="x"),
        tokens_seen=1,
        data_state=data_state,
        config_digest="y",
    )
    assert TrainerState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    ("trained", "numbers"),
    [((-1.0, -2.0), (-1.0, -2.0)), ((-1.234567, -1e-6), (-1.23457, -0.0)), ((-1.0,), (None, None))],
    ids=["all", "rounded", "not all were computed"],
)
def test_a_record_has_no_number_where_nobody_told_one(
    trained: tuple[float, ...], numbers: tuple[float | None, ...]
) -> None:
    wired = sent("a", inference_logprobs=None, advantages=[[0.0, 0.25, -1.0], [0.0] * 3])
    rules = Rules(policy_logprobs=True, env_advantages=True)
    group = group_from_wire(wired, id="a@0", version=0, rules=rules)
    batch = StepBatch(micro=(), groups=(group,), advantages={"a@0/0": -0.375}, num_loss_tokens=2)
    stats = StepStats(metrics={}, logprobs={"a@0/0": trained})

    class Pieces:
        def pieces(self, tokens: tuple[int, ...]) -> list[str]:
            return [str(token) for token in tokens]

    (one, _) = records(1, batch, stats, Pieces())  # type: ignore[arg-type]
    assert [(t.lp, t.tp, t.adv, t.m) for t in one["tokens"]] == [
        (None, numbers[0], 0.25, 1),
        (None, numbers[1], -1.0, 1),
    ]


# The same group again


def test_a_group_bears_the_brokers_own_name_whenever_it_comes() -> None:
    broker = filled(4)

    async def first(steps: int) -> list[str]:
        async with Trainer(broker).source().open(DataState()) as source:
            return [group.id for _ in range(steps) for group in (await source.take()).groups]

    killed = run(first(2))
    broker.put(*(sent(f"more{n}") for n in range(2)))
    assert run(first(2)) == killed == ["g0@e0", "g1@e1", "g2@e2", "g3@e3"]


def test_a_group_whose_lease_ran_out_is_not_trained_again_by_the_same_trainer(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled(2)

    async def go() -> list[list[str]]:
        async with Trainer(broker).source().open(DataState()) as source:
            batches = [names((await source.take()).groups)]
            broker.now += 61.0  # nobody renewed: the trainer stood still
            broker.on_empty = lambda: broker.put(sent("g2"), sent("g3"))
            batches.append(names((await source.take()).groups))
            data_state = source.data_state()
            assert len(data_state.batches) == 3
            assert not data_state.ready
            await source.saved(data_state)
            return batches

    assert run(go()) == [["g0", "g1"], ["g2", "g3"]]
    assert "came again while its first lease was held" in caplog.text
    report = broker.store.status(broker.now)
    assert report["counts"]["trained"] == 4
    assert (report["queued_groups"], report["leased_groups"]) == (0, 0)
