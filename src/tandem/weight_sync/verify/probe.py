"""Verification that an engine samples by the published weights: logprobs of a probe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tandem.engines.base import PROBE_SAMPLES, Engine, ProbeResult
from tandem.errors import StaleWeights
from tandem.types import PolicyVersion
from tandem.weight_sync.verify.noise import FALSE_ALARMS, SUSPICION, LogprobComparison, Noise, likelihood, nearer, scale

if TYPE_CHECKING:
    from tandem.model.policy import Policy


Rollouts = Sequence[Sequence[int]]
"""Token ids of rollouts, prompts included."""

SHORT = 64
"""Tokens of a probe where the bytes of everything that is sampled from are compared."""
LONG = 256
"""Tokens of a probe where only logprobs tell: that requests are routed past an adapter, or what weights are held."""
MEASURED = 512
"""Tokens of an engine's first probe, which measures its rounding noise, and of one that is asked again."""
FIRST_SAMPLES, AGAIN_SAMPLES = 32, 16
"""Tokens that are sampled after an engine's first probe, and after each text of one that is asked again: many short
answers, since a long one may end in repetitions, of which every engine is sure."""
BEGINNINGS = 8
"""Beginnings of the text after which an engine that is asked again samples."""
TESTS = 8
"""Tests of one engine's answer, at most: all must be passed, so each has this share of the chance of a false alarm."""

BEFORE, FIRST, BARE = "the version before", "the first version published", "the model without its adapter"
"""Other weights that an engine may sample from by mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReading:
    """One engine's logprobs of one probe text, beside the trainer's."""

    name: str
    tokens: Sequence[int]
    scored: LogprobComparison
    """Of the text's tokens but the first; of none where the engine has no scoring of its own."""
    sampled: LogprobComparison | None
    """Of tokens that the engine sampled after it; None where it samples by the code that scores."""
    drawn: Sequence[int] = ()
    untempered: Sequence[float] = ()
    """The trainer's logprobs of these at temperature 1; empty where they were sampled at that."""
    others: Mapping[str, Sequence[float]]
    """The trainer's logprobs of the first of the text's tokens by other weights, by whose they are."""

    @property
    def answers(self) -> list[LogprobComparison]:
        """Comparisons of the scored and of the sampled text."""
        return [self.scored] if self.sampled is None else [self.scored, self.sampled]


class ProbeAnswers(NamedTuple):
    """What all engines answered to one probe."""

    tokens: Sequence[int]
    thorough: bool
    """It is the first since a start of the engine: longer, and held against other weights too."""
    restart_count: int
    """The engine's as it was asked; if it was started again since, it is not known yet."""
    probes: Sequence[ProbeResult]


NOTHING = LogprobComparison((), ())


class Behaviour:
    """Probe of every publish: compares the engines' logprobs with those of the published weights.

    A probe is scored by engine and trainer, and so are a few tokens that the engine samples after it. Where noise
    explains an answer badly (``noise.py``), more is asked: a longer text, more samples, recent rollouts. Only an
    engine whose answer to these cannot be explained either is refused.

    Args:
        trained: the session's ``Trained``, which scores.
        policy: that is published.
        trainable: the recipe's.
        tolerance: the sync's, nats; 0 is the usual one.
        folder: the run's, for evidence.
    """

    def __init__(self, trained: Any, policy: Policy, trainable: Any, tolerance: float, folder: Path):
        self.tokens: list[int] = []
        self.recent: Rollouts = ()
        """A few that were trained on just now."""
        self._policy = policy
        self._trained = trained
        self._trainable = trainable
        usual = 0.3 if policy.dtype.itemsize < 4 else 1e-3 if policy.device.type == "cpu" else 0.02
        self._allowed = tolerance or usual
        self._floor = usual / 20  # what an engine that happened to be exact is not held to
        self._folder = folder / "proofs"
        self._noise: dict[int, Noise] = {}
        self._restart_count = -1
        self._known: dict[str, Sequence[float]] = {}

    async def ask(self, engine: Engine) -> ProbeAnswers:
        """Put the probe to an engine, which samples from now on by the weights that it holds."""
        restart_count = engine.restart_count
        thorough = self._restart_count != restart_count
        tokens = self._text(engine) if thorough else self.tokens
        most = min(FIRST_SAMPLES, engine.context - len(tokens)) if thorough else PROBE_SAMPLES
        probes = await engine.probe(tokens, samples=most)
        return ProbeAnswers(tokens=tokens, thorough=thorough, restart_count=restart_count, probes=probes)

    async def compare(self, engine: Engine, version: PolicyVersion, answers: ProbeAnswers) -> float:
        """Largest difference of a logprob, in nats, over all engines. Call it once the bytes were compared.

        Args:
            engine: that was asked; more is asked of it where that is in doubt.
            version: that it is to hold.
            answers: to the probe.

        Raises:
            StaleWeights: it answers otherwise than these weights do.
        """
        self._restart_count = answers.restart_count
        tokens = answers.tokens
        readings: list[ProbeReading] = []
        for probe in answers.probes:
            if probe.cached:
                raise StaleWeights(
                    f"{probe.name} took {probe.cached} tokens of a prompt from its prefix cache right after a publish: "
                    "their keys and values are of older weights"
                )
            readings.append(await self._read(tokens, probe, thorough=answers.thorough))
        for index, reading in enumerate(readings):
            noise, new = self._noise.setdefault(index, Noise(self._floor)), reading.answers
            if not noise.seen:
                noise.learn([new.pop(0)])  # what it samples is held against that already
            if self._doubt([reading], noise, SUSPICION) or suspicious(reading, noise):
                again = await self._again(engine, index, reading)
                if doubt := self._doubt(again, noise, FALSE_ALARMS / TESTS / len(readings)):
                    raise StaleWeights(self._refusal(version, doubt, noise, [reading, *again]))
                new += chain.from_iterable(reading.answers for reading in again)
            noise.learn(new)
        # What these weights say of the probe, to tell later ones from them.
        self._known[BEFORE] = readings[0].scored.trainer[: len(self.tokens) - 1]
        self._known.setdefault(FIRST, self._known[BEFORE])
        return max(answer.worst() for reading in readings for answer in reading.answers)

    def _text(self, engine: Engine) -> list[int]:
        """The longer text that begins with the probe."""
        text: list[int] = self._policy.tokenizer.encode(PROBE, verbose=False)  # which may be longer than a context
        room = engine.context - FIRST_SAMPLES - 1
        routed = self._trainable.payload == "adapter" or not engine.sums_bytes
        short = max(1, min(SHORT, engine.context - PROBE_SAMPLES))
        self.tokens = text[: LONG if routed and room >= LONG else short]
        return text[: max(len(self.tokens), min(MEASURED, room))]

    async def _again(self, engine: Engine, index: int, doubted: ProbeReading) -> list[ProbeReading]:
        """More answers of an engine whose answer is in doubt."""
        if not all(answer.finite for answer in doubted.answers):
            return [doubted]
        text, most, readings = self._text(engine), engine.context - AGAIN_SAMPLES, list[ProbeReading]()
        begun = [text[: len(text) * part // BEGINNINGS] for part in range(1, BEGINNINGS)]
        for tokens in (text, *(list(tokens[:most]) for tokens in self.recent), *begun):
            probe = (await engine.probe(tokens, samples=AGAIN_SAMPLES))[index]
            reading = await self._read(tokens, probe, thorough=tokens not in begun)
            # The whole text's tokens were scored already: each counts once.
            readings.append(replace(reading, scored=NOTHING, others={}) if tokens in begun else reading)
        return readings

    async def _read(self, tokens: Sequence[int], probe: ProbeResult, *, thorough: bool) -> ProbeReading:
        """The trainer's own logprobs, in one pass, beside a probe's; by a thorough reading also of other weights."""
        drawn, at = probe.sampled.tokens if probe.sampled else (), len(tokens) - 1
        own_logprobs, tempered = await self._trained.scores([*tokens, *drawn], 1.0, probe.temperature)
        scored = NOTHING if probe.scored is None else LogprobComparison(tuple(probe.scored), tuple(own_logprobs[:at]))
        scores = scored is not NOTHING
        others = dict(self._known) if scores and list(tokens[: len(self.tokens)]) == self.tokens else {}
        if scores and thorough and (bare := await self._trained.bare_scores(tokens)):
            others[BARE] = bare
            self._known.setdefault(BARE, bare[: len(self.tokens) - 1])
        return ProbeReading(
            name=probe.name,
            tokens=tokens,
            scored=scored,
            sampled=LogprobComparison(probe.sampled.logprobs, tuple(tempered[at:]), probe.temperature)
            if probe.sampled
            else None,
            drawn=drawn,
            untempered=own_logprobs[at:] if probe.temperature != 1 else (),
            others=others,
        )

    def _doubt(self, readings: Sequence[ProbeReading], noise: Noise, chance: float) -> str:
        """Why answers cannot be those of these weights: chance alone gives such ones less often than ``chance``."""
        if not all(answer.finite for reading in readings for answer in reading.answers):
            if not all(math.isfinite(p) for reading in readings for answer in reading.answers for p in answer.trainer):
                return "some of the trainer's own logprobs are not finite: see its weights and the tokens sampled"
            return "some of its logprobs are not finite, or there are too few of them"
        for other, answer, other_logprobs in _hypotheses(readings):
            if (p := nearer(answer, other_logprobs, noise.scale)) < chance:
                return f"it answers a probe as {other} does (chance below {max(p, 1e-300):.0e}), and samples from that"
        for what, answer in _answers(readings):
            error = scale(answer.residuals())
            if (p := noise.excess(answer)) < chance:
                return (
                    f"its logprobs of {what} differ from the trainer's by more than rounding: errors of {error:.2g} "
                    f"nats a logit, where {noise.scale:.2g} were measured (chance below {max(p, 1e-300):.0e})"
                )
            if error > self._allowed:
                return (
                    f"its logprobs of {what} differ from the trainer's by errors of {error:.3g} nats a logit (allowed "
                    f"{self._allowed:g}). If this model is that noisy (deep ones with random weights are), set "
                    "sync.tolerance above that"
                )
        return ""

    def _refusal(self, version: PolicyVersion, doubt: str, noise: Noise, readings: Sequence[ProbeReading]) -> str:
        """What is told, with the evidence written down."""
        name = readings[0].name
        file = self._folder / f"{version.step:06d}.json"
        evidence = {
            "step": version.step,
            "digest": version.digest,
            "engine": name,
            "why": doubt,
            "noise_scale": noise.scale,
            "residuals_measured": len(noise.seen),
            "answers": list(readings),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(msgspec.json.encode(evidence))  # which writes null for what is no number
            evidence_at = f"every logprob of it is in {file}"
        except OSError as error:
            evidence_at = f"the evidence cannot be written to {file}: {error}"
        tokens = sum(len(a.engine) for reading in readings for a in reading.answers)
        return (
            f"version {version.step} was moved, but {name} does not sample from these weights as they are: {doubt}. "
            f"It was asked {len(readings)} times, about {tokens} tokens; {evidence_at}"
        )


def _answers(readings: Sequence[ProbeReading]) -> Iterator[tuple[str, LogprobComparison]]:
    """All of what an engine answered, by what was asked."""
    yield "a probe", _joined([reading.scored for reading in readings])
    if sampled := [reading.sampled for reading in readings if reading.sampled is not None]:
        yield "tokens sampled after a probe", _joined(sampled)


def suspicious(reading: ProbeReading, noise: Noise) -> bool:
    """True if samples look as if their logprobs left out the temperature; with few samples this may be chance."""
    if reading.sampled is None or not reading.untempered:
        return False
    return likelihood(reading.sampled, reading.untempered, noise.scale) < SUSPICION


def _hypotheses(readings: Sequence[ProbeReading]) -> Iterator[tuple[str, LogprobComparison, list[float]]]:
    """All of what it answered where it is known what other weights say, and that."""
    for other in dict.fromkeys(name for reading in readings for name in reading.others):
        known = [(reading.scored, reading.others[other]) for reading in readings if other in reading.others]
        begun = [LogprobComparison(a.engine[: len(o)], a.trainer[: len(o)], a.temperature) for a, o in known]
        yield other, _joined(begun), [value for _, o in known for value in o]
    hot = [(reading.sampled, reading.untempered) for reading in readings if reading.sampled and reading.untempered]
    if hot:
        logprobs = [value for _, untempered in hot for value in untempered]
        yield "an engine that leaves the temperature out of its logprobs", _joined([a for a, _ in hot]), logprobs


def _joined(answers: Sequence[LogprobComparison]) -> LogprobComparison:
    engine = tuple(chain.from_iterable(a.engine for a in answers))
    return LogprobComparison(engine, tuple(chain.from_iterable(a.trainer for a in answers)), answers[0].temperature)


PROBE = resources.files(__package__).joinpath("probe.txt").read_text(encoding="utf-8")
"""About 700 tokens of a large vocabulary; its beginning is what an engine is asked after every publish."""
