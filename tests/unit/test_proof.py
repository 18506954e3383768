"""Behavioural proof of a publish: what rounding explains passes, and nothing else."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_engine import Scripted, scripted
from support.sync_sessions import open_session
from support.tiers import long_but
from support.tiny_policy import live_policy
from torch import Tensor

from tandem.engines.base import PROBE_SAMPLES, PROBE_TEMPERATURE, ProbeResult
from tandem.engines.embedded import engine as embedded
from tandem.engines.embedded.spec import Embedded
from tandem.errors import StaleWeights
from tandem.model.policy import Policy
from tandem.model.sampling import draw
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.types import PolicyVersion
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.verify.noise import FALSE_ALARMS, SUSPICION, LogprobComparison, Noise, drawn, nearer, scale
from tandem.weight_sync.verify.probe import PROBE, TESTS

START = PolicyVersion(step=0, digest="")
ALARM = FALSE_ALARMS / TESTS


@pytest.fixture
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model) as live:
        yield live


def answered(
    policy: Policy,
    model: Path,
    change: Callable[[ProbeResult], ProbeResult],
    *,
    after: int = 1,
    trainable: Trainable | None = None,
    update: Callable[[], None] = lambda: None,
    folder: Path | None = None,
    recent: Sequence[Sequence[int]] = (),
    **options: Any,
) -> tuple[float | None, list[str]]:
    """The gap that is found, and what the engine was asked, where it holds the right bytes and answers like this.

    Args:
        policy: the trainer's.
        model: folder that the engine starts on.
        change: what becomes of its answers from publish ``after`` on; 0 is the first.
        after: see change.
        trainable: what is trained.
        update: the optimizer's.
        folder: the run's.
        recent: rollouts.
        options: of the sync.
    """
    trainable, honest = trainable or Full(), [True]

    async def work() -> tuple[float | None, list[str]]:
        with scripted(model, trainable, probed=lambda probe: probe if honest[0] else change(probe)) as engine:
            try:
                honest[0] = after > 0
                async with open_session(
                    Shared(**options), policy, engine, START, trainable, folder or new_folder()
                ) as session:
                    for step in range(1, max(after, 1) + 1):
                        honest[0] = step < after
                        engine.events.clear()
                        async with session.commit(step, recent=recent) as commit:
                            await policy.compute(update)
                    assert commit.published is not None
                    return commit.published.probe_gap, engine.events
            except StaleWeights:
                assert engine.events[-1] == "stop"
                assert not engine.serves
                raise

    return asyncio.run(work())


def new_folder() -> Path:
    return Path(tempfile.mkdtemp())


def sampled(probe: ProbeResult, logprobs: Sequence[float]) -> ProbeResult:
    assert probe.sampled is not None
    return replace(probe, sampled=replace(probe.sampled, logprobs=tuple(logprobs)))


def scored(probe: ProbeResult, change: Callable[[int, float], float]) -> ProbeResult:
    return replace(probe, scored=tuple(change(i, x) for i, x in enumerate(probe.scored)))


def text_of(policy: Policy, probe: ProbeResult) -> list[int]:
    """The tokens that were scored: the beginning of the text, as long as no rollouts are asked about."""
    return list(policy.tokenizer.encode(PROBE)[: len(probe.scored) + 1])


def raw(policy: Policy, probe: ProbeResult) -> ProbeResult:
    """Logprobs of the distribution at temperature 1 of tokens that were drawn at 0.7."""
    assert probe.sampled is not None
    tokens = text_of(policy, probe)
    return sampled(probe, policy.score([*tokens, *probe.sampled.tokens])[len(tokens) - 1 :])


# An engine that is in order


def test_what_it_samples_is_compared_at_its_own_temperature(policy: Policy, tiny_model: Path) -> None:
    probes: list[ProbeResult] = []

    def noted(probe: ProbeResult) -> ProbeResult:
        probes.append(probe)
        return probe

    gap, _ = answered(policy, tiny_model, noted, after=0)
    assert gap is not None
    assert gap < 1e-4
    assert [probe.temperature for probe in probes] == [0.7, 0.7]


@pytest.mark.parametrize(("context", "first", "later"), [(512, (512 - 32 - 1, 32), (64, 4)), (24, (20, 4), (20, 4))])
def test_the_first_probe_measures_and_later_ones_are_short(
    policy: Policy,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: int,
    first: tuple[int, int],
    later: tuple[int, int],
) -> None:
    requests: list[tuple[int, int]] = []
    probe = Scripted.probe

    async def noted(self: Scripted, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> Sequence[ProbeResult]:
        requests.append((len(tokens), samples))
        return await probe(self, tokens, samples=samples)

    monkeypatch.setattr(Scripted, "probe", noted)
    monkeypatch.setattr(Scripted, "context", context)
    answered(policy, tiny_model, lambda probe: probe, after=3)
    assert requests == [first, later, later, later]


@pytest.mark.parametrize("dies", ["before it is asked", "once it has answered"])
def test_an_engine_that_was_started_again_is_measured_again(
    policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    lengths: list[int] = []
    probe = Scripted.probe

    async def noted(self: Scripted, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> Sequence[ProbeResult]:
        lengths.append(len(tokens))
        (result,) = await probe(self, tokens, samples=samples)
        if len(lengths) == 2 and dies == "once it has answered":
            self.die()
            await self.recover()
        return [replace(result, name=f"engine of process {self.restart_count}")]

    async def work() -> None:
        with scripted(tiny_model) as engine:
            async with open_session(Shared(), policy, engine, START, Full(), new_folder()) as session:
                for step in (1, 2, 3):
                    if step == 2 and dies == "before it is asked":
                        engine.die()
                    async with session.commit(step):
                        pass

    monkeypatch.setattr(Scripted, "probe", noted)
    asyncio.run(work())
    assert lengths == [512 - 32 - 1, 64, 512 - 32 - 1, 64]


@pytest.mark.slow
@pytest.mark.parametrize("lie", [lambda x: [x[0] - 0.01, *x[1:]], lambda x: [*x[:-1], x[-1] + 0.01]])
def test_one_token_that_is_off_is_asked_about_again_and_ends_nothing(
    policy: Policy, tiny_model: Path, lie: Callable[[Sequence[float]], list[float]]
) -> None:
    gap, events = answered(policy, tiny_model, lambda probe: sampled(probe, lie(probe.sampled.logprobs)))  # type: ignore[union-attr]
    assert gap == pytest.approx(0.01, abs=1e-4)
    assert events.count("probe") == 1 + 1 + 7


@pytest.mark.slow
def test_recent_rollouts_are_asked_about_too(policy: Policy, tiny_model: Path) -> None:
    _, events = answered(
        policy,
        tiny_model,
        lambda probe: sampled(probe, [x + 0.01 * (i == 0) for i, x in enumerate(probe.sampled.logprobs)]),  # type: ignore[union-attr]
        recent=[list(range(40)), [7, 8, 9] * 200],
    )
    assert events.count("probe") == 1 + 1 + 2 + 7


# Engines that are not


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 3])
def test_logprobs_that_leave_the_temperature_out_are_seen(policy: Policy, tiny_model: Path, after: int) -> None:
    """Scored at temperature 1 all is well; those of sampled tokens are of another distribution than was drawn from."""
    with pytest.raises(StaleWeights, match="leaves the temperature out of its logprobs"):
        answered(policy, tiny_model, lambda probe: raw(policy, probe), after=after)


@pytest.mark.parametrize("after", [0, 2])
def test_the_embedded_engine_may_not_leave_the_temperature_out_either(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, after: int, tmp_path: Path
) -> None:
    """It scores by the trainer's own pass, so what it samples is all that can show it."""

    def raw(logits_NV: Tensor, uniform_N: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        tokens_N, _ = draw(logits_NV, uniform_N, **options)
        return tokens_N, (logits_NV * PROBE_TEMPERATURE).log_softmax(-1).gather(1, tokens_N[:, None])[:, 0]

    async def work() -> list[float | None]:
        gaps = []
        async with (
            Embedded().open(policy, context=1024) as engine,
            open_session(Shared(), policy, engine, START, Full(), tmp_path) as session,
        ):
            for step in range(1, 4):
                if step > after:
                    monkeypatch.setattr(embedded, "draw", raw)
                async with session.commit(step) as commit:
                    pass
                assert commit.published is not None
                gaps.append(commit.published.probe_gap)
        return gaps

    with pytest.raises(StaleWeights, match="leaves the temperature out of its logprobs"):
        asyncio.run(work())
    monkeypatch.setattr(embedded, "draw", draw)
    after = 3
    assert all(gap is not None and gap < 1e-4 for gap in asyncio.run(work()))


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
def test_every_sampled_token_off_is_seen(policy: Policy, tiny_model: Path, after: int) -> None:
    def lied(probe: ProbeResult) -> ProbeResult:
        assert probe.sampled is not None
        return sampled(probe, [x + 0.01 * (-1) ** i for i, x in enumerate(probe.sampled.logprobs)])

    with pytest.raises(StaleWeights, match=r"tokens sampled after a probe differ from the trainer's .* nats a logit"):
        answered(policy, tiny_model, lied, after=after)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [lambda logprobs: logprobs[1:], lambda logprobs: [*logprobs[:-1], math.nan], lambda logprobs: [-math.inf] * 4],
    ids=["length", "no number", "infinite"],
)
def test_what_is_no_number_is_refused_at_once(
    policy: Policy, tiny_model: Path, lie: Callable[[Sequence[float]], list[float]], tmp_path: Path
) -> None:
    with pytest.raises(StaleWeights, match="some of its logprobs are not finite"):
        answered(policy, tiny_model, lambda p: sampled(p, lie(p.sampled.logprobs)), folder=tmp_path)  # type: ignore[union-attr]
    for after in (0, 1):
        with pytest.raises(StaleWeights, match="some of its logprobs are not finite"):
            answered(policy, tiny_model, lambda p: replace(p, scored=tuple(lie(p.scored))), after=after)


def test_a_sampled_token_that_the_model_does_not_have_is_no_lookup(policy: Policy, tiny_model: Path) -> None:
    """A GPU would end the process over it, and the run would end without a reason."""

    def garbage(probe: ProbeResult) -> ProbeResult:
        assert probe.sampled is not None
        tokens = (*probe.sampled.tokens[:-1], policy.head.weight.shape[0])
        return replace(probe, sampled=replace(probe.sampled, tokens=tokens))

    with pytest.raises(StaleWeights, match="the trainer's own logprobs are not finite"):
        answered(policy, tiny_model, garbage)
    assert all(math.isnan(value) for value in policy.score([1, -1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens",
    [
        lambda i, x: x + 0.002 * (-1) ** i,
        lambda i, x: x if i % 2 else x - 0.01,
        lambda i, x: x * 1.01,
    ],
    ids=["all", "half", "scaled"],
)
def test_scores_of_other_weights_are_seen(
    policy: Policy, tiny_model: Path, tokens: Callable[[int, float], float]
) -> None:
    with pytest.raises(StaleWeights, match="its logprobs of a probe differ from the trainer's by more than rounding"):
        answered(policy, tiny_model, lambda probe: scored(probe, tokens))


@pytest.mark.slow
def test_noise_above_the_tolerance_is_refused_and_the_recipe_may_allow_it(policy: Policy, tiny_model: Path) -> None:
    def noisy(probe: ProbeResult) -> ProbeResult:
        return scored(probe, lambda i, x: x + 0.5 * (-1) ** i)

    gap, _ = answered(policy, tiny_model, noisy, after=0, tolerance=1.0)
    assert gap == pytest.approx(0.5, abs=1e-4)
    with pytest.raises(StaleWeights, match=r"errors of 0\.7\d* nats a logit \(allowed 0\.001\).*set sync\.tolerance"):
        answered(policy, tiny_model, noisy, after=0)


@pytest.mark.slow
def test_a_failed_proof_leaves_its_evidence(policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(StaleWeights, match=r"It was asked 9 times.*000001\.json") as caught:
        answered(policy, tiny_model, lambda probe: scored(probe, lambda i, x: x * 1.1), folder=tmp_path)
    kept = json.loads((tmp_path / "proofs" / "000001.json").read_text())
    assert kept["why"] in str(caught.value)
    first, again, *beginnings = kept["answers"]
    assert (len(first["tokens"]), len(again["tokens"]), len(beginnings)) == (64, 512 - 32 - 1, 7)
    assert len(first["scored"]["engine"]) == len(first["scored"]["trainer"]) == 63


def grow(trainable: Trainable, policy: Policy) -> Callable[[], None]:
    """An optimizer whose steps are large enough to be seen."""

    def update() -> None:
        with torch.no_grad():
            for _, parameter in trainable.parameters(policy.model):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)

    return update


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behind", "description"),
    [(2, "the first version published"), (1, "the version before")],
    ids=["from the first", "by one"],
)
def test_an_engine_that_stayed_behind_is_seen_within_the_tolerance(
    tiny_model: Path, behind: int, description: str
) -> None:
    """It answers as it did some publishes ago; the noise that is allowed would hide that."""
    trainable, answers = Lora(rank=4, alpha=8), list[ProbeResult]()

    async def work(policy: Policy) -> None:
        def noted(answer: ProbeResult) -> ProbeResult:
            answers.append(answer)
            return answer

        def stale(probe: ProbeResult) -> ProbeResult:
            old = answers[-behind]
            return replace(probe, scored=(*old.scored, *probe.scored)[: len(probe.scored)])

        with scripted(tiny_model, trainable, probed=noted) as engine:
            await policy.compute(grow(trainable, policy))  # as a resumed run has it: not the bare model
            async with open_session(Shared(tolerance=50.0), policy, engine, START, trainable, new_folder()) as session:
                session._behaviour._noise[0].floor = 0.05  # as bfloat16 has it
                async with session.commit(1):
                    await policy.compute(grow(trainable, policy))
                engine.probed = stale
                with pytest.raises(StaleWeights, match=f"answers a probe as {description} does"):
                    async with session.commit(2):
                        await policy.compute(grow(trainable, policy))

    with live_policy(tiny_model, trainable=trainable) as policy:
        asyncio.run(work(policy))


@pytest.mark.slow
def test_an_engine_that_leaves_the_adapter_out_is_seen(tiny_model: Path) -> None:
    trainable = Lora(rank=4, alpha=8)
    with live_policy(tiny_model, trainable=trainable) as policy:

        def bare(probe: ProbeResult) -> ProbeResult:
            tokens = text_of(policy, probe)
            off = trainable.untrained(policy.model)
            assert off is not None
            with off:
                return replace(probe, scored=tuple(policy.score(tokens)))

        with pytest.raises(StaleWeights, match="answers a probe as the model without its adapter does"):
            answered(policy, tiny_model, bare, after=2, trainable=trainable, update=grow(trainable, policy))


@pytest.mark.slow
def test_each_of_several_engines_is_probed(policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Scripted.probe

    async def both(self: Scripted, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> list[ProbeResult]:
        (one,) = await probe(self, tokens, samples=samples)
        return [one, replace(scored(one, lambda i, x: x - 0.01), name="engine two")]

    monkeypatch.setattr(Scripted, "probe", both)
    with pytest.raises(StaleWeights, match="but engine two does not sample from these weights"):
        answered(policy, tiny_model, lambda probe: probe)


def test_a_probe_from_a_prefix_cache_is_refused(policy: Policy, tiny_model: Path) -> None:
    """Right by chance or not: keys and values that were computed before the publish are of older weights."""
    with pytest.raises(StaleWeights, match="engine one took 16 tokens of a prompt from its prefix cache"):
        answered(policy, tiny_model, lambda probe: replace(probe, cached=16))


# What chance does, by its definition


@pytest.mark.parametrize(
    ("old", "new", "m", "k"), [(3, 2, 1, 1), (3, 2, 1, 2), (4, 3, 2, 2), (5, 4, 3, 1), (4, 2, 4, 2)]
)
def test_the_chance_of_large_values_counted_out(old: int, new: int, m: int, k: int) -> None:
    """Over all orders in which ``old`` measured values and ``new`` ones may come, each as likely as any other."""
    from itertools import combinations

    hits = total = 0
    for places in combinations(range(old + new), new):  # ranks of the new values, 0 the largest
        measured = sorted(set(range(old + new)) - set(places))
        hits += sum(place < measured[m - 1] for place in places) >= k
        total += 1
    assert drawn(old, new, m, k) == pytest.approx(hits / total, rel=1e-12)


def test_the_chance_of_large_values_at_its_ends() -> None:
    assert drawn(100, 50, 2, 0) == 1.0
    assert drawn(100, 50, 2, 51) == 0.0
    assert drawn(2048, 0, 41, 1) == 0.0
    assert drawn(10, 2000, 1, 1999) == pytest.approx(drawn(10, 2000, 1, 2000), rel=0.02)


def noisy(values: Sequence[float], size: float, seed: int) -> list[float]:
    noise = torch.randn(len(values), generator=torch.Generator().manual_seed(seed)) * size
    return [value + float(n) for value, n in zip(values, noise, strict=True)]


def test_residuals_are_errors_of_a_logit() -> None:
    """Against the definition: one logit of many is off by a little, at a temperature."""
    torch.manual_seed(0)
    logits = torch.randn(50, dtype=torch.float64)
    for temperature in (1.0, 0.7):
        for token in (int(logits.argmax()), 7, int(logits.argmin())):
            bump = torch.zeros(50, dtype=torch.float64)
            bump[token] = 1e-6
            mine = float(torch.log_softmax(logits / temperature, 0)[token])
            engine = float(torch.log_softmax((logits + bump) / temperature, 0)[token])
            (residual,) = LogprobComparison((engine,), (mine,), temperature).residuals()
            assert residual == pytest.approx(1e-6, rel=1e-3)


def test_the_scale_is_robust() -> None:
    values = noisy([0.0] * 1001, 0.08, 0)
    assert scale(values) == pytest.approx(0.08, rel=0.1)
    assert scale([*values[:-50], *[50.0] * 50]) == pytest.approx(0.08, rel=0.15)
    assert scale([]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tails", "growth"),
    [
        ("normal", 1.0),
        ("heavy", 1.5),
        pytest.param("normal", 1.5, marks=pytest.mark.long),
        pytest.param("heavy", 1.0, marks=pytest.mark.long),
    ],
)
def test_noise_is_rarely_doubted_and_never_refused(growth: float, tails: str) -> None:
    """Also where it is half as large again as it was measured, and where it has outliers as rounding has them."""

    def noise(n: int, size: float, seed: int) -> list[float]:
        plain = noisy([0.0] * n, size, seed)
        return [4 * x if tails == "heavy" and i % 50 == 0 else x for i, x in enumerate(plain)]

    true = [-3.0 * ((7 * i) % 11 + 1) / 11 for i in range(512)]
    doubts = refused = 0
    for seed in range(200):
        known = Noise(floor=0.001)
        known.learn([answer_of(true, noise(512, 0.08, 2 * seed))])
        for tokens in (4, 63, 512):
            p = known.excess(answer_of(true[:tokens], noise(tokens, 0.08 * growth, 2 * seed + 1)))
            doubts += p < SUSPICION
            refused += p < ALARM
    assert refused == 0
    assert doubts <= 0.1 * 600 or growth > 1


def answer_of(trainer: Sequence[float], residuals: Sequence[float]) -> LogprobComparison:
    """An engine whose logits are off by these."""
    exact = LogprobComparison(tuple(trainer), tuple(trainer))
    engine = tuple(t + r * f for t, r, f in zip(trainer, residuals, exact.scales(), strict=True))
    return LogprobComparison(engine, tuple(trainer))


@pytest.mark.slow
@pytest.mark.parametrize("effect", long_but([0.0, 1e-4, 0.01, 0.03, 0.1], 0.0, 0.03))
@pytest.mark.parametrize(
    ("rounded", "heavy"),
    [
        ("the engine alone", False),
        ("all three", True),
        pytest.param("the engine alone", True, marks=pytest.mark.long),
        pytest.param("all three", False, marks=pytest.mark.long),
    ],
)
def test_noise_is_mistaken_for_no_other_weights(effect: float, rounded: str, heavy: bool) -> None:
    """Also where a few tokens have most of the noise, and of the difference between two versions; and where what the
    trainer computes is as rounded as what the engine does, so that what both compare with is off the same way."""
    size = [20.0 if heavy and i < 3 else 1.0 for i in range(120)]
    least = 1.0
    for seed in range(400):

        def sized(values: list[float], scale: float, draw: int, seed: int = seed) -> list[float]:
            noise = noisy([0.0] * len(size), scale, 10 * seed + draw)
            return [value + s * n for value, s, n in zip(values, size, noise, strict=True)]

        true = [-abs(x) for x in noisy([-2.0] * len(size), 1.0, 10 * seed)]
        other, engine = sized(true, effect, 1), sized(true, 0.02, 2)
        if rounded == "all three":
            true, other = sized(true, 0.02, 3), sized(other, 0.02, 4)
        least = min(least, nearer(LogprobComparison(tuple(engine), tuple(true)), other, 0.02))
    assert least > 1e-4  # of 400; what refuses is below 1e-9


@pytest.mark.parametrize("which", ["one", "another"])
def test_other_weights_that_are_apart_by_the_noise_are_seen(which: str) -> None:
    mine = [-abs(x) for x in noisy([-2.0] * 256, 1.0, 0)]
    others = {name: noisy(mine, 0.08, seed) for name, seed in (("one", 1), ("another", 2))}
    engine = noisy(others[which], 0.04, 3)
    p_values = {
        name: nearer(LogprobComparison(tuple(engine), tuple(mine)), other, 0.04) for name, other in others.items()
    }
    assert {name for name, p in p_values.items() if p < ALARM} == {which}
    honest = noisy(mine, 0.04, 4)
    assert all(
        nearer(LogprobComparison(tuple(honest), tuple(mine)), other, 0.04) > SUSPICION for other in others.values()
    )


@settings(max_examples=200, deadline=None)
@given(
    apart=st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)),
    noise=st.sampled_from([5e-5, 1e-3, 0.09]),
    heavy=st.booleans(),
    tokens=st.sampled_from([4, 63, 255, 511]),
    seed=st.integers(0, 2**16),
)
def test_an_engine_equal_to_one_side_bit_for_bit_is_told_by_distance_alone(
    apart: float, noise: float, heavy: bool, tokens: int, seed: int
) -> None:
    """Two passes over the same weights differ by rounding, and an engine may round exactly as either does."""
    mine = [-abs(x) for x in noisy([-2.0] * tokens, 1.0, seed)]
    step = noisy([0.0] * tokens, apart, seed + 1)
    if heavy:
        step = [4 * x if i % 50 == 0 else x for i, x in enumerate(step)]
    other = [t + x * f for t, x, f in zip(mine, step, answer_of(mine, step).scales(), strict=True)]
    size = math.sqrt(math.fsum(x * x for x in step) / tokens)
    as_published = LogprobComparison(tuple(mine), tuple(mine))
    as_other = LogprobComparison(tuple(other), tuple(mine))
    assert nearer(as_published, other, noise) == 1.0
    if size < math.sqrt(2) * noise:
        assert nearer(as_other, other, noise) == 1.0
    elif size > 3 * noise and tokens >= 255:
        assert nearer(as_other, other, noise) < ALARM


def test_the_same_weights_are_nobody_elses() -> None:
    mine = noisy([-2.0] * 64, 0.5, 0)
    assert nearer(LogprobComparison(tuple(mine), tuple(mine)), mine, 0.01) == 1.0
    assert nearer(LogprobComparison(tuple(noisy(mine, 0.01, 1)), tuple(mine)), mine, 0.01) == 1.0
