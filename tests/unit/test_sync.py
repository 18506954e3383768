"""Proof of a publish: a fault planted anywhere leaves the engine paused, and says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from tiny import live_policy, logprobs_of, reference
from torch import Tensor

from tandem.engines.base import CanLend, Engine, Health
from tandem.engines.embedded import Embedded
from tandem.engines.fake import Fake
from tandem.errors import StaleWeights, TornWeights, UnsupportedPair
from tandem.policy.policy import Policy
from tandem.sync._proof import Checksums, checksums, digest, gap
from tandem.sync.base import PROBE, Link, WeightSync
from tandem.sync.shared import Shared
from tandem.trains.full import Full
from tandem.trains.lora import Lora
from tandem.types import Completion, PolicyVersion, Sampling

START = PolicyVersion(step=0, digest="")


@pytest.fixture
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model) as live:
        yield live


@dataclass
class Watched(Engine):
    """The embedded engine; notes what is asked of it, and can be made to lie."""

    inner: Any
    events: list[str] = field(default_factory=list)
    lend: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    scored: Callable[[list[float]], list[float]] = lambda logprobs: logprobs

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        return await self.inner.generate(prompt, sampling, key)  # type: ignore[no-any-return]

    async def score(self, tokens: Sequence[int]) -> list[float]:
        self.events.append("score")
        return self.scored(await self.inner.score(tokens))

    def version(self) -> PolicyVersion:
        return self.inner.version()  # type: ignore[no-any-return]

    async def stamp(self, version: PolicyVersion) -> None:
        self.events.append("stamp")
        await self.inner.stamp(version)

    async def pause(self) -> None:
        self.events.append("pause")
        await self.inner.pause()

    async def resume(self) -> None:
        self.events.append("resume")
        await self.inner.resume()

    async def health(self) -> Health:
        return await self.inner.health()  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self.inner.close()

    @property
    def context(self) -> int:
        return self.inner.context  # type: ignore[no-any-return]

    def lent(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.inner.lent():
            yield name, self.lend(name, tensor)


@dataclass(frozen=True, kw_only=True)
class Copied(WeightSync):
    """A way that copies: ``held`` is what the engine is said to hold; ``fault`` changes it on arrival."""

    carries: ClassVar[frozenset[str]] = frozenset({"full"})
    port: ClassVar[type] = CanLend
    pause: ClassVar[Literal["step", "move", "never"]] = "move"

    held: dict[str, Tensor] = field(default_factory=dict)
    fault: Callable[[dict[str, Tensor]], None] = lambda held: None
    events: list[str] = field(default_factory=list)

    async def move(self, link: Link, version: PolicyVersion) -> int:
        self.events.append("move")
        self.held.update({name: tensor.clone() for name, tensor in link.source})
        self.fault(self.held)
        return sum(tensor.nbytes for tensor in self.held.values())

    async def engine_checksums(self, link: Link, mine: Checksums) -> Checksums:
        self.events.append("compare")
        return checksums(self.held.items())


@dataclass(frozen=True, kw_only=True)
class CopiedAtRest(Copied):
    pause: ClassVar[Literal["step", "move", "never"]] = "step"


@dataclass(frozen=True, kw_only=True)
class CopiedLive(Copied):
    pause: ClassVar[Literal["step", "move", "never"]] = "never"


def run(policy: Policy, work: Callable[[Watched], Coroutine[Any, Any, Any]], **lies: Any) -> Any:
    async def main() -> Any:
        async with Embedded(max_rows=2).open(policy, context=128) as inner:
            return await asyncio.wait_for(work(Watched(inner, **lies)), 30)

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
            async with sync.open(policy, engine, start, Full().source(policy.model)):
                raise AssertionError("it must not open")
        assert type(caught.value) is kind
        assert await is_paused(engine)
        assert "stamp" not in engine.events
        assert "resume" not in engine.events
        return str(caught.value)

    return run(policy, work, **lies)  # type: ignore[no-any-return]


def test_an_honest_engine_is_published_to(policy: Policy) -> None:
    async def work(engine: Watched) -> None:
        source = Full().source(policy.model)
        async with Shared().open(policy, engine, START, source) as link:
            first = engine.version()
            assert (first.step, first.digest) == (0, digest(checksums(source)))
            async with link.commit(1) as handoff:
                with torch.no_grad():
                    policy.head.weight[3, 5] += 0.25
            assert handoff.published is not None
            assert handoff.published.bytes == 0
            assert handoff.published.probe_gap is not None
            assert handoff.published.probe_gap < 1e-4
            assert engine.version() == handoff.published.version
            assert engine.version().step == 1
            assert engine.version().digest != first.digest
            assert not await is_paused(engine)
            done = await engine.generate([7], Sampling(max_tokens=3), 0)
            assert set(done.versions) == {1}

    run(policy, work)


def test_an_adapter_is_published(tiny_model: Path) -> None:
    trains = Lora(rank=2)
    with live_policy(tiny_model, trains=trains) as policy:

        async def work(engine: Watched) -> None:
            async with Shared().open(policy, engine, START, trains.source(policy.model)) as link:
                async with link.commit(1):
                    pass
                assert engine.version().step == 1

        run(policy, work)


def test_another_tensor_than_the_trainers_is_refused(policy: Policy) -> None:
    """Equal bytes are not enough for shared: the next optimizer step would not reach them."""
    name = "model.layers.1.mlp.up_proj.weight"
    said = refused(policy, Shared(), UnsupportedPair, lend=lambda n, t: t.clone() if n == name else t)
    assert name in said


def test_one_changed_tensor_is_torn(policy: Policy) -> None:
    def flip(held: dict[str, Tensor]) -> None:
        bits = held["model.layers.0.self_attn.q_proj.weight"].view(torch.int32)
        bits[3, 4] ^= 1  # the last bit of one number

    assert "q_proj" in refused(policy, Copied(fault=flip), TornWeights)


def test_a_tensor_that_never_arrived_is_torn(policy: Policy) -> None:
    def lose(held: dict[str, Tensor]) -> None:
        del held["model.norm.weight"]

    assert "norm" in refused(policy, Copied(fault=lose), TornWeights)


def test_all_changed_tensors_are_stale(policy: Policy) -> None:
    def old(held: dict[str, Tensor]) -> None:
        for tensor in held.values():
            tensor.mul_(1.5)

    refused(policy, Copied(fault=old), StaleWeights)


def test_a_resumed_digest_must_be_that_of_the_weights(policy: Policy) -> None:
    said = refused(policy, Shared(), StaleWeights, start=PolicyVersion(step=3, digest="0123456789abcdef"))
    assert "0123456789abcdef" in said
    right = digest(checksums(Full().source(policy.model)))

    async def work(engine: Watched) -> PolicyVersion:
        start = PolicyVersion(step=3, digest=right)
        async with Shared().open(policy, engine, start, Full().source(policy.model)):
            return engine.version()

    assert run(policy, work).step == 3


def test_an_engine_at_another_temperature_is_stale(policy: Policy, tiny_model: Path) -> None:
    tokens = policy.tokenizer.encode(PROBE)[:64]
    with torch.no_grad():
        warm = logprobs_of(reference(tiny_model), tokens[:1], tokens[1:], Sampling(temperature=1.02)).tolist()
    assert "nats" in refused(policy, Shared(), StaleWeights, scored=lambda logprobs: warm)


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), float("-inf")])
def test_a_probe_that_is_no_number_is_stale(policy: Policy, lie: float) -> None:
    refused(policy, Shared(), StaleWeights, scored=lambda logprobs: [*logprobs[:-1], lie])


def test_a_probe_of_another_length_is_stale(policy: Policy) -> None:
    refused(policy, Shared(), StaleWeights, scored=lambda logprobs: logprobs[:-1])


def test_an_engine_that_samples_from_older_weights_is_stale(policy: Policy) -> None:
    """Its bytes are right (they were copied), but what it computes with is not what it holds."""
    kept: list[list[float]] = []

    def first_only(logprobs: list[float]) -> list[float]:
        kept.append(logprobs)
        return kept[0]

    async def work(engine: Watched) -> None:
        async with Shared().open(policy, engine, START, Full().source(policy.model)) as link:
            commit = link.commit(1)
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
        async with sync.open(policy, engine, START, Full().source(policy.model)) as link:
            return (await link.publish(START)).probe_gap

    found = run(policy, work, scored=lambda logprobs: [x + 0.5 for x in logprobs])
    assert found == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    ("sync", "order"),
    [
        (CopiedAtRest, ["pause", "optimizer", "move", "compare", "score", "stamp", "resume"]),
        (Copied, ["optimizer", "pause", "move", "compare", "score", "stamp", "resume"]),
        (CopiedLive, ["optimizer", "move", "compare", "score", "stamp", "resume"]),
    ],
)
def test_the_order_of_a_commit(policy: Policy, sync: type[Copied], order: list[str]) -> None:
    events: list[str] = []

    async def work(engine: Watched) -> None:
        async with sync(events=events).open(policy, engine, START, Full().source(policy.model)) as link:
            events.clear()
            async with link.commit(1) as handoff:
                events.append("optimizer")
                assert handoff.published is None
            assert handoff.published is not None
            assert handoff.published.bytes == sum(t.nbytes for _, t in Full().source(policy.model))

    run(policy, work, events=events)
    assert events == order


def test_an_engine_that_never_rests_is_not_paused_for_nothing(policy: Policy) -> None:
    async def work(engine: Watched) -> Any:
        async with CopiedLive().open(policy, engine, START, Full().source(policy.model)) as link:
            return await link.publish(START), engine.events

    published, events = run(policy, work)
    assert published.paused == 0.0
    assert "pause" not in events


@pytest.mark.parametrize("sync", [CopiedAtRest, Shared])
def test_an_optimizer_that_fails_leaves_the_engine_paused(policy: Policy, sync: type[WeightSync]) -> None:
    async def work(engine: Watched) -> None:
        async with sync().open(policy, engine, START, Full().source(policy.model)) as link:
            with pytest.raises(ZeroDivisionError):
                async with link.commit(1):
                    raise ZeroDivisionError("half of the weights are written")
            assert await is_paused(engine)
            assert engine.version().step == 0

    run(policy, work)


def test_proof_every_n_publishes_and_always_at_first(policy: Policy) -> None:
    async def work(engine: Watched) -> list[bool]:
        async with Shared(prove_every=3).open(policy, engine, START, Full().source(policy.model)) as link:
            proven = ["score" in engine.events]
            for step in range(1, 7):
                async with link.commit(step) as handoff:
                    pass
                assert handoff.published is not None
                proven.append(handoff.published.probe_gap is not None)
                assert ("probe_gap" in handoff.metrics()) == proven[-1]
                assert engine.version().digest, "the digest is taken every time"
            return proven

    assert run(policy, work) == [True, False, False, True, False, False, True]


def test_pairs_that_cannot_work_are_named_before_anything_is_loaded() -> None:
    Shared().check(trains="full", engine=Embedded())
    Shared().check(trains="lora", engine=Embedded())
    with pytest.raises(UnsupportedPair, match=r"CanLend.*fake"):
        Shared().check(trains="full", engine=Fake())
    with pytest.raises(UnsupportedPair, match=r"cannot carry trains: lora; it carries full"):
        Copied().check(trains="lora", engine=Embedded())


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


def test_gap() -> None:
    assert gap([-1.0, -2.0], [-1.5, -2.25]) == 0.5
    assert gap([], []) == 0.0
    assert gap([-1.0], []) == float("inf")
    assert gap([float("nan")], [-1.0]) == float("inf")
    assert gap([float("-inf")], [float("-inf")]) == float("inf")
