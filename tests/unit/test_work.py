"""An environment at work: options and Atropos' flags, how much is played, engines that run elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_broker import FakeBroker, quick, run, until
from support.fake_engine import END, FakeEngine
from support.rollouts import make_group, make_rollout

from tandem.config.loading import RunConfig
from tandem.errors import ConfigError, Deadline, EngineError
from tandem.observability import waits
from tandem.rollout.task_sampler import TaskOrder
from tandem.types import Group, Message, Sampling, Task
from tandem_broker import recipe as recipes
from tandem_broker.client import Connection, EnvClient
from tandem_broker.commands import work
from tandem_broker.commands.work import play_by_flags
from tandem_broker.producer import IN_A_ROW, Producer
from tandem_broker.protocol.messages import EnvRegistration, EnvStatus, Info
from tandem_broker.remote_engine import RemoteEngine

PLACES = ["broker=http://b:1", "engine=http://e:2/v1"]


# Options


def test_options_alone_are_enough() -> None:
    config = recipes.load(None, ["model=m", "env=arithmetic", *PLACES])
    assert (config.broker.url, config.engine.urls) == ("http://b:1", ("http://e:2/v1",))
    assert config.env.name == "arithmetic"
    assert config.rewards, "the environment's own"
    several = recipes.load(None, ["model=m", "env=arithmetic", PLACES[0], "engine=[http://e:1, http://e:2]"])
    assert several.engine.urls == ("http://e:1", "http://e:2")
    named = recipes.load(None, ["model=m", "env=arithmetic", *PLACES, "engine.model=x", "broker.key_variable=K"])
    assert (named.engine.model, named.broker.key_variable) == ("x", "K")


def test_a_recipe_for_training_is_taken_as_it_is(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: m\nsteps: 3\nname: a run\nenv: {kind: arithmetic, max_number: 7}\ngroup_size: 6\nmax_lag: 2\n"
        "loss: {kind: grpo, clip_high: 0.3}\nengine: {kind: vllm, gpu_memory_utilization: 0.4}\n"
        "broker: {url: 'http://b:1', lease_seconds: 9}\nrewards: {number: 2.0}\nsampling: {temperature: 0.8}\n"
        "timeouts: {loop_seconds: 9}\n"
    )
    config = recipes.load(recipe, [PLACES[1]])
    assert (config.group_size, config.sampling.temperature, config.rewards["number"].weight) == (6, 0.8, 2.0)
    assert (config.broker.url, config.engine.urls) == ("http://b:1", ("http://e:2/v1",))
    assert config.known_as is None
    assert config.timeouts.loop_seconds == 9
    recipe.write_text(recipe.read_text().replace("vllm, gpu", "vllm, urls: ['http://e:9'], gpu"))
    assert recipes.load(recipe, []).engine.urls == ("http://e:9",)
    recipe.write_text(recipe.read_text() + "grup_size: 3\n")
    with pytest.raises(ConfigError, match="did you mean 'group_size'"):
        recipes.load(recipe, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=m", "env=arithmetic", PLACES[0]], "missing 'engine'"),
        (["model=m", *PLACES], "missing 'env'"),
        (["model=m", "env=arithmetic", "broker=b:1", PLACES[1]], "http://"),
        (["model=m", "env=arithmetic", *PLACES, "n=0"], "n must be at least 1"),
        (["model=m", "env=arithmetic", *PLACES, "ahead=0.5"], "ahead must be at least 1"),
        (["model=m", "env=arithmetic", *PLACES, "min_share=2"], "min_share must be at least 0 and at most 1"),
        (["model=m", "env=arithmetic", *PLACES, "group_size=1"], "at least 2"),
        (["model=m", "env=arithmetic", *PLACES, "truncated_penalty=2"], "truncated_penalty changes nothing"),
        (["model=m", "env=arithmetic", *PLACES, "loss.clip_high=0.3"], "'loss' is an option of the trainer alone"),
        (["model=m", "env=arithmetic", *PLACES, "dtype=bfloat16"], "'dtype' is an option of the trainer alone"),
        (["model=m", "env=arithmetic", *PLACES, "group_sise=4"], "did you mean 'group_size'"),
    ],
)
def test_mistakes_are_found_at_once(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes.load(None, words)
    with pytest.raises(ConfigError, match="there is no recipe nowhere"):
        recipes.load(Path("nowhere.yaml"), words)


def test_shared_options_have_the_recipes_defaults() -> None:
    """The same recipe means the same to both sides."""
    ours, theirs = (vars_of(cls) for cls in (recipes.Work, RunConfig))
    for name in (
        "group_size",
        "truncated",
        "truncated_penalty",
        "zero_variance_groups",
        "context",
        "seed",
        "chat_template",
    ):
        assert ours[name] == theirs[name], name


def vars_of(cls: Any) -> dict[str, Any]:
    return {name: field.default for name, field in cls.__dataclass_fields__.items()}


# Atropos' flags


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("nope", {}, "there is no 'nope' in envs"),
        ("arithmetic", {"env.group_size": ["1"]}, "group_size must be at least 2"),
    ],
)
def test_mistakes_in_flags_are_told_before_an_engine_is_waited_for(
    name: str, flags: dict[str, list[str]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_broker.commands.work.served_model", lambda url, key: pytest.fail("waited"))
    with pytest.raises(ConfigError, match=message):
        play_by_flags(name, "serve", flags, [])


# How much is played


PLAYED = {"model": "m", "env": "arithmetic", "broker": "http://b:1", "engine": "http://e:1", "n": 3, "group_size": 2}


class FakeWorker:
    """Plays at once, or when it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.rewards: Sequence[float | None] = (0.0, 1.0)
        self.error: Exception | None = None
        self.names: list[str] = []
        self.slow: set[str] = set()
        self.under_way = 0

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        self.names.append(id)
        self.under_way += 1
        gate = asyncio.Event() if task.id in self.slow else self.gate
        try:
            await waits.wait(gate.wait(), owner=f"rollouts group {id}", reason="to go on", on="a gate")
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        turns = [([1, 2], [7], [-0.5])]
        answers = [make_rollout(f"{id}/{i}", turns, reward) for i, reward in enumerate(self.rewards)]
        return replace(make_group(id, answers), index=index)


def producer(broker: FakeBroker, **played: Any) -> Producer:
    spec = EnvRegistration(max_token_length=64, desired_name="made", weight=1.0, group_size=2)
    tasks = [Task(id=str(i), env="e", prompt=(Message(role="user", content="?"),), answer="") for i in range(5)]
    return Producer(
        worker=FakeWorker(),  # type: ignore[arg-type]
        tasks=TaskOrder(name="e", label="", tasks=tasks, seed=0),
        client=EnvClient(Connection(broker.url, retry=quick()), spec, key="k", poll=0.01),
        config=recipes.from_options({**PLAYED, **played}, [], "here"),
        poll_seconds=0.01,
    )


def worker_of(made: Producer) -> Any:
    return made.worker


async def started(made: Producer, stop: asyncio.Event) -> None:
    async with made.client:
        await made.run(stop)


def test_pauses_while_enough_is_queued_and_throws_nothing_away() -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made, stop = producer(broker), asyncio.Event()
            worker = worker_of(made)
            worker.gate.clear()
            working = asyncio.create_task(started(made, stop))
            await until(lambda: worker.under_way == 3)
            broker.queue = 12  # three batches of four groups
            worker.gate.set()
            await until(lambda: len(broker.groups) == 3)
            before = len(broker.seen)
            await until(lambda: len(broker.seen) > before + 5)
            assert len(broker.groups) == 3, "nothing new, and what was under way arrived"
            broker.queue = 11
            await until(lambda: len(broker.groups) > 3)
            stop.set()
            await working
            assert made.tally.groups["dropped"] == 0

    run(go())


def test_ends_at_the_trainers_last_step_and_drops_the_rest() -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made = producer(broker)
            worker_of(made).gate.clear()
            working = asyncio.create_task(started(made, asyncio.Event()))
            await until(lambda: worker_of(made).under_way == 3)
            broker.step = broker.num_steps
            await working
            assert made.tally.groups["dropped"] == 3
            assert worker_of(made).under_way == 0

    run(go())


def test_a_stop_finishes_what_is_under_way_or_drops_it_in_time() -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made, stop = producer(broker), asyncio.Event()
            made.drain_seconds = 0.05
            worker_of(made).gate.clear()
            working = asyncio.create_task(started(made, stop))
            await until(lambda: worker_of(made).under_way == 3)
            stop.set()
            await working
            assert made.tally.groups == {"dropped": 3}
            assert broker.groups == []

    run(go())


@pytest.mark.parametrize(("rewards", "fate"), [((1.0, 1.0), "zero_variance"), ((None, 1.0), "failed")])
def test_groups_that_teach_nothing_are_not_handed_in(rewards: Any, fate: str) -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made, stop = producer(broker), asyncio.Event()
            worker_of(made).rewards = rewards
            working = asyncio.create_task(started(made, stop))
            await until(lambda: made.tally.groups[fate] >= 3)
            stop.set()
            await working
            assert broker.groups == []

    run(go())


@pytest.mark.parametrize("error", [EngineError("the engine says no"), ValueError("a bug")])
def test_what_ails_every_group_ends_the_work(error: Exception) -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made = producer(broker)
            worker_of(made).error = error
            with pytest.raises(type(error), match=str(error)):
                await started(made, asyncio.Event())

    run(go())


def test_a_group_that_takes_too_long_is_dropped_and_its_story_told(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made, stop = producer(broker, group_seconds=0.05), asyncio.Event()
            worker_of(made).gate.clear()
            working = asyncio.create_task(started(made, stop))
            await until(lambda: made.tally.groups["failed"] >= 3)
            worker_of(made).gate.set()
            await until(lambda: len(broker.groups) > 3)
            stop.set()
            await working

    run(go())
    message = next(record.getMessage() for record in caplog.records if "is lost" in record.getMessage())
    assert "tandem work made waited " in message
    assert "tandem work made <- rollouts group " in message
    assert message.endswith(" <- a gate; group_seconds is 0.05")


def test_groups_that_take_too_long_again_and_again_end_the_work() -> None:
    """Those that were under way together are one sign of trouble, and what comes through meanwhile is none."""

    async def go() -> None:
        async with FakeBroker(ours=True) as broker:
            made = producer(broker, group_seconds=0.05)
            worker_of(made).gate.clear()
            with pytest.raises(Deadline, match=r"<- a gate; group_seconds is 0\.05"):
                await started(made, asyncio.Event())
            # The first late group of the last wave ends the work, with or without the others of that wave.
            assert (IN_A_ROW - 1) * made.config.n < made.tally.groups["failed"] <= IN_A_ROW * made.config.n

    async def mixed() -> None:
        async with FakeBroker(ours=True) as broker:
            made, stop = producer(broker, group_seconds=0.05), asyncio.Event()
            worker_of(made).slow = {"0", "1"}
            working = asyncio.create_task(started(made, stop))
            await until(lambda: made.tally.groups["failed"] >= 3 * IN_A_ROW)
            stop.set()
            await working

    run(go())
    run(mixed())


@pytest.mark.parametrize("ours", [True, False], ids=["tandem", "atropos"])
def test_what_the_broker_puts_off_for_too_long_is_handed_in_again(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue for hours is no reason to lose a group; Atropos' broker may have it already."""
    keys: list[str] = []

    async def go() -> None:
        async with FakeBroker(ours=ours) as broker:
            made, stop = producer(broker, n=1), asyncio.Event()
            submit = made.client.submit

            async def late(group: Group, key: str, params: Any) -> Any:
                keys.append(key)
                if len(keys) < 3:
                    raise Deadline("client waited 3600 s for broker", on=broker.url)
                return await submit(group, key, params)

            monkeypatch.setattr(made.client, "submit", late)
            working = asyncio.create_task(started(made, stop))
            await until(lambda: broker.groups)
            stop.set()
            await working
            assert len(set(keys[:3])) == (1 if ours else 3)
            assert made.tally.groups["lost"] == (0 if ours else 2)

    run(go())


def test_the_work_is_watched_as_a_run_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Stuck:
        client = producer(FakeBroker(ours=True)).client

        async def run(self, stop: asyncio.Event) -> None:
            await waits.wait(stop.wait(), owner="rollouts group 3", reason="rewards", on="a grader of somebody's own")

    @asynccontextmanager
    async def parts(config: Any, tallies: Any) -> AsyncIterator[list[Any]]:
        yield [Stuck()]

    monkeypatch.setattr(work, "_producers", parts)
    words = ["model=m", "env=arithmetic", *PLACES, "timeouts.wait_seconds=0.2"]
    with pytest.raises(Deadline, match=r"rollouts group 3 waited \d+\.\d s for a grader of somebody's own.*is 0\.2 s"):
        asyncio.run(work.run(recipes.load(None, words), {}))
    assert "it is given up" in capsys.readouterr().err


def test_every_epoch_plays_every_task_once_in_an_order_of_its_own() -> None:
    async def go() -> list[str]:
        async with FakeBroker(ours=True) as broker:
            made, stop = producer(broker, n=1), asyncio.Event()
            working = asyncio.create_task(started(made, stop))
            await until(lambda: len(worker_of(made).names) >= 10)
            stop.set()
            await working
            return list(worker_of(made).names[:10])

    names = [name.rpartition("/")[2] for name in run(go())]
    epochs = [[name.partition("@") for name in part] for part in (names[:5], names[5:])]
    assert [sorted(task for task, _, _ in epoch) for epoch in epochs] == [list("01234")] * 2
    assert [{visit for _, _, visit in epoch} for epoch in epochs] == [{"0"}, {"1"}]
    assert names[:5] != [f"{task}@0" for task, _, _ in epochs[1]]


@pytest.mark.parametrize(
    ("share", "status", "wanted"),
    [
        (None, {"queue_size": 0}, 9),  # three batches of 8 / 2 groups, but n is 9
        (None, {"queue_size": 7}, 5),
        (None, {"queue_size": 12}, 0),
        (None, {"queue_size": 99}, 0),
        (None, {"queue_size": 0, "env_weight": 0.33}, 3),
        (None, {"queue_size": 0, "env_weight": 0.01}, 1),
        (None, {"queue_size": 0, "unallocated_fraction": 0.5}, 6),
        (0.5, {"queue_size": 99, "self_queue_size": 4}, 2),  # its own share is filled though the queue is full
        (0.5, {"queue_size": 0, "self_queue_size": 0, "unallocated_fraction": 0.0}, 6),
    ],
)
def test_how_much_is_wanted(share: float | None, status: dict[str, Any], wanted: int) -> None:
    spec = EnvRegistration(max_token_length=64, desired_name="e", weight=1.0, group_size=2, min_batch_allocation=share)
    made = producer(FakeBroker(ours=True), n=9)
    made.client = EnvClient(Connection("http://b:1"), spec, key="k")
    assert made.wanted(EnvStatus(current_step=0, **status)) == 0, "the size of a batch is not known yet"
    made._info = Info(batch_size=8, max_token_len=64)
    assert made.wanted(EnvStatus(current_step=0, **status)) == wanted


# Engines elsewhere


def sample(engine: RemoteEngine, max_tokens: int = 16, prompt: Sequence[int] = (1, 2)) -> Any:
    return engine.generate(prompt, Sampling(max_tokens=max_tokens), 1)


@asynccontextmanager
async def remote(fake: FakeEngine, ends: Sequence[int] = (), **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine([fake.url], "m", context=100, ends=ends, retry=quick(**options))
    async with engine.opened():
        yield engine


@pytest.mark.parametrize(("dialect", "version"), [("tandem", 7), ("atropos", -1), ("openai", -1)])
def test_every_kind_of_engine_is_understood(dialect: Any, version: int) -> None:
    async def go() -> None:
        async with FakeEngine(dialect) as fake, remote(fake, [END]) as engine:
            fake.version = 7
            completion = await sample(engine)
            assert completion.tokens == (98, 99, 100, END)
            assert completion.logprobs == (-0.5,) * 4
            assert (set(completion.versions), completion.finish) == ({version}, "stop")
            assert fake.requests[0]["stop_token_ids"] == [END]
            assert (await sample(engine, 2)).finish == "length"
            assert engine.tells_versions is (dialect == "tandem")

    run(go())


@pytest.mark.parametrize("dialect", ["tandem", "atropos", "openai"])
def test_every_kind_of_engine_is_asked_for_the_same_sampling(dialect: Any) -> None:
    options = {"temperature": 0.5, "top_k": 9, "repetition_penalty": 1.2, "presence_penalty": 0.1, "min_tokens": 40}
    off = {"top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0}

    async def go() -> None:
        async with FakeEngine(dialect) as fake, remote(fake, [END]) as engine:
            await engine.generate([1, 2], Sampling(**options, max_tokens=64, stop_token_ids=(77,)), 1)
            request = fake.requests[0]
            assert {name: request[name] for name in options} == options
            assert request["stop_token_ids"] == [END, 77]
            # Stock vLLM would fill in what the model's generation_config.json recommends.
            assert {name: request[name] for name in off} == off
            await engine.generate([1] * 80, Sampling(**options, max_tokens=64), 1)
            assert (fake.requests[1]["max_tokens"], fake.requests[1]["min_tokens"]) == (20, 20), "the context ends it"

    run(go())


def test_an_engines_own_limit_counts() -> None:
    async def go() -> None:
        async with FakeEngine("atropos") as fake:
            fake.context = 20
            async with remote(fake) as engine:
                assert engine.context == 20
                await sample(engine, 100, prompt=range(12))
                assert fake.requests[0]["max_tokens"] == 8
                engine.limit(10)
                with pytest.raises(EngineError, match="leaves no room"):
                    await sample(engine, prompt=range(12))

    run(go())


@pytest.mark.parametrize("fault", ["cut", 503, 502, 429])
def test_requests_are_asked_again(fault: Any) -> None:
    async def go() -> None:
        async with FakeEngine("tandem") as fake, remote(fake) as engine:
            fake.faults.extend([fault] * 5)
            assert (await sample(engine)).finish == "stop"

    run(go())


def test_patience_ends_when_all_are_away() -> None:
    async def go() -> None:
        async with (
            FakeEngine("tandem") as fake,
            remote(fake, give_up_seconds=0.05) as engine,
        ):
            await fake.down()
            with pytest.raises(EngineError, match="is it running"):
                await sample(engine)
            await fake.up()

    run(go())


def test_text_alone_cannot_be_trained_on() -> None:
    class TextOnly(FakeEngine):
        async def _sample(self, request: Any) -> Any:
            from aiohttp import web

            return web.json_response({"choices": [{"finish_reason": "stop", "logprobs": None, "text": "hi"}]})

    async def go() -> None:
        async with TextOnly("openai") as fake, remote(fake) as engine:
            with pytest.raises(EngineError, match="must answer with token_ids and logprobs"):
                await sample(engine)

    run(go())
