"""``certify``: a recipe's own parts on made-up groups, and every check of what they compute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.errors import ConfigError, UnsupportedPair
from tandem.model.compilation import missing
from tandem.optimizers.base import Optimizer
from tandem.tools.certify import formulas, optimizer_steps, parts
from tandem.tools.certify.certificate import Certificate, CertificateLine, judged, skipped
from tandem.tools.certify.formulas import SampledSequence, formula, part
from tandem.tools.certify.gradients import (
    CertifiedPolicy,
    Gradient,
    differing,
    distance,
    norm,
    setup_of,
)
from tandem.tools.certify.inert_options import PARTS, every_option_line, inert_options
from tandem.tools.certify.made_up import Author, certified
from tandem.tools.certify.plain import KINDS, Options
from tandem.tools.certify.ranks import RankedPolicy, check_certified
from tandem.tools.certify.variations import VARIATIONS, Variation, compiled
from tandem.trainer import assemble as run
from tandem.trainer.pack import Packer, StepBatch
from tandem.types import Group

SAME = 1e-6
"""Largest distance of gradients that must be the same, in float32."""
EXACT = 1e-5
"""Largest distance of float32 from the float64 formulas: logprobs are exact to some 1e-6."""
REAL = 100.0
"""What both are multiplied by for a whole model: rounding adds up over its layers, to 3e-5 over the 30 of SmolLM2."""
SMALL = 40
"""Tokens of a micro-batch, where a step is to have several."""
PENALTY = 1e-4
"""Largest distance of a penalty, which is of the difference of logprobs that are nearly alike."""
RATES = 1000
"""Steps of which the learning rate is looked at, at most."""
RATE_EXACT = 1e-12
"""Largest distance of a learning rate, which is a float64 on both sides."""
OTHERWISE = 1e-9
"""Gradients farther apart than this are different: the same computation gives the same bits."""
RANKS = 2
"""Processes that compute one step together."""

FORMULAS = "whole gradient by formulas"
FOLLOWS = "reference as it follows"
RATE = "learning rates"


class Case:
    """A recipe's parts, a model and groups.

    Args:
        config: the recipe.
        real: its own model instead of a tiny one of its architecture.
        ranks: processes that compute every step together; 1: this one.

    Raises:
        ConfigError: the model cannot be read.
        UnsupportedPair: so many ranks cannot divide the recipe's step.
        RankError: one of them did not come, or failed.
    """

    def __init__(self, config: RunConfig, *, real: bool, ranks: int = 1):
        self.config, self._slack, self._real, self._num_ranks = config, REAL if real else 1.0, real, ranks
        model, self._exact = certified(config, real=real)
        self._setup = setup_of(config, model, real=real)
        weights = {
            env: {name: spec.weight for name, spec in source.rewards.items()} for env, source in config.sources.items()
        }
        self._live = CertifiedPolicy(self._setup)
        self._plain = recipes.as_json(config)
        self._formula = formula(self._plain, weights, self._live.policy.end_tokens)
        count = sum(parameter.numel() for parameter in model.parameters())
        kind = self._live.policy.config.model_type
        self.described = f"{config.model if real else f'a tiny {kind}'}, {count:,} parameters, float32 on the CPU"
        author = Author(
            sampling=config.sampling,
            vocabulary=self._live.policy.head.weight.shape[0],
            ends=self._formula.ends,
            weights=weights,
            from_broker=config.broker is not None,
            env_advantages=config.broker is not None and config.broker.env_advantages,
        )
        self._exact.put(self._exact.held(self._live.placed(0)))
        own = functools.cache(self._own)  # both have the same tokens
        self.groups, self._on_policy = author.groups(own), author.groups(own, on_policy=True)
        self._ranked: RankedPolicy | None = None
        self._stepped = self._live if ranks == 1 else self._on_ranks(ranks)

    def close(self) -> None:
        """End its threads and processes."""
        if self._ranked is not None:
            self._ranked.close()
        self._live.close()

    def _on_ranks(self, world: int) -> RankedPolicy:
        """So many ranks, started once."""
        if self._ranked is None:
            self._live.place(-1)  # theirs begin with the model as loaded
            self._ranked = RankedPolicy(self._setup, self.config, world, real=self._real)
        return self._ranked

    def _own(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> list[float]:
        """The policy's logprobs, by the formulas."""
        ids = (*prompt, *tokens)
        one = SampledSequence(
            rollout="",
            ids=ids,
            at=tuple(range(len(prompt), len(ids))),
            begins=(len(prompt),) * len(tokens),
            sampler_logprobs=(0.0,) * len(tokens),
            advantages=(0.0,) * len(tokens),
            temperature=temperature,
        )
        if not tokens:
            return []
        with torch.no_grad():
            return formulas.logprobs(self._exact, one, self._formula).tolist()

    def _pack(self, config: RunConfig, ranks: int = 1) -> Packer:
        # Ranks that share a micro-batch count as one, also where all is computed here.
        return run.packer(config, self._live.policy, ranks=max(ranks, config.distributed.context_parallel))

    def lines(self, several: int) -> Iterator[CertificateLine]:
        """What the gradient is; ``several``: as of ``certify``."""
        pack = self._pack(self.config, self._num_ranks)
        base = self._stepped.gradients(pack(self.groups, version=0))
        size = norm(base)
        sound = math.isfinite(size) and size > 0
        yield CertificateLine(
            name="the gradient is there", state="pass" if sound else "fail", figure=size, compared_with="0"
        )
        for name, variation in VARIATIONS.items():
            try:
                self._can(variation)
                variants = variation(self._stepped, pack, self.groups)
            except ConfigError as error:
                yield skipped(name, str(error))
                continue
            yield self._judged(name, variants, base, SAME, "the recipe's own way", len(variants))
        if several > 1:
            yield from self._of_processes(several, base)
        yield from self._against_formulas(base, pack(self.groups, version=0))

    def _of_processes(self, several: int, base: Sequence[Gradient]) -> Iterator[CertificateLine]:
        """Several ranks' gradient beside that of one process, and the weights that each of them has then."""
        name = f"{several} processes"
        try:
            check_certified(self.config, several)
        except UnsupportedPair as error:
            yield skipped(name, str(error))
            return
        ranked = self._on_ranks(several)
        small = dataclasses.replace(self._pack(self.config, several), budget=SMALL)
        own = ranked.gradients(small(self.groups, version=0))
        if self._stepped is ranked:
            base = self._live.gradients(self._pack(self.config)(self.groups, version=0))
        yield self._judged(name, [own], base, SAME, "one process", 1)
        yield judged(f"weights of {name}", [ranked.differing()], 0.0, "the lead's, bit for bit")

    def later(self) -> Iterator[CertificateLine]:
        """What comes after the gradient: where a reference goes, and what the optimizer does."""
        pack = self._pack(self.config, self._num_ranks)
        if self._formula.reference is not None:
            yield self._followed(pack)
        batch = dataclasses.replace(pack, budget=SMALL)(self.groups, version=0)
        yield from self._applied(batch, self._stepped.gradients(batch)[0])

    def _can(self, variation: Variation) -> None:
        """Compiling takes ten times as long as all else, so it is done where the run will do it.

        Raises:
            ConfigError: it will not, or this machine cannot.
        """
        wanted = self.config.compile
        if variation is compiled and (wanted is False or (wanted == "auto" and not torch.cuda.is_available())):
            raise ConfigError(f"compile: {str(wanted).lower()} compiles nothing on this machine")
        if variation is compiled and (lacks := missing(torch.device("cpu"))):
            raise ConfigError(f"there is no {lacks}")

    def _unknown(self) -> list[str]:
        """Parts that no formula is known for."""
        kind = self._exact.kind
        return formulas.unknown(self._formula) + ([] if kind in KINDS else [f"trainable {kind}"])

    def _against_formulas(self, base: Sequence[Gradient], batch: StepBatch) -> Iterator[CertificateLine]:
        """Part by part, and the whole gradient."""
        if unknown := self._unknown():
            yield skipped(FORMULAS, f"no formula is known here for {', '.join(unknown)}")
            return
        known = self._formula
        wanted = parts.expected(self._exact, self._live.placed, self.groups, known)
        trained = frozenset(base[0]) ^ self._exact.names
        first = f"first of {len(trained)}: {min(trained)}" if trained else ""
        yield judged("weights that are trained", [len(trained)], 0.0, "the recipe", first)
        for one in parts.findings(self._live, batch, wanted, known):
            bound = {"none": 0.0, "float32": EXACT, "difference": PENALTY}[one.rounding] * self._slack
            what = "the recipe" if one.rounding == "none" else "float64 formula"
            yield judged(one.name, [one.figure], bound, what, one.note)
        expected = formulas.gradients(self._exact, self._live.placed, [(1, self.groups)], known)
        yield self._judged(FORMULAS, [base], expected, EXACT, "float64, one sequence at a time", 1)

    def _later(self) -> list[tuple[int, list[Group]]]:
        """Steps before and after a reference follows, twice, and their groups: those of which only the penalty is."""
        every = self._formula.reference[1].get("every", 1) if self._formula.reference else 1
        numbers = sorted({every, every + 1, 2 * every, 2 * every + 1})
        return [(number, [_without_advantage(self.groups[i % 2])]) for i, number in enumerate(numbers)]

    def _walked(self, live: CertifiedPolicy, pack: Packer) -> list[Gradient]:
        """The penalty's gradient in each of those steps."""
        return live.walk([(number, pack(groups, version=0)) for number, groups in self._later()])

    def _followed(self, pack: Packer) -> CertificateLine:
        if unknown := self._unknown():
            return skipped(FOLLOWS, f"no formula is known here for {', '.join(unknown)}")
        expected = formulas.gradients(self._exact, self._live.placed, self._later(), self._formula)
        numbers = ", ".join(str(number) for number, _ in self._later())
        line = self._judged(FOLLOWS, [self._walked(self._stepped, pack)], expected, PENALTY, "float64 formula", 1)
        return dataclasses.replace(line, note=f"steps {numbers}{f'; {line.note}' if line.note else ''}")

    def _applied(self, batch: StepBatch, gradient: Gradient) -> Iterator[CertificateLine]:
        """What the recipe's own optimizer does with a batch of this gradient."""
        kind, known = part(self._plain["optimizer"])
        if kind not in optimizer_steps.RULES:
            yield skipped(optimizer_steps.TWO_STEPS, f"no formula is known here for optimizer {kind}")
            return
        own, total = self.config.optimizer, self.config.steps
        off = [abs(own.rate(step, total) - optimizer_steps.rate(known, step, total)) for step in _some(total)]
        yield judged(RATE, [max(off) / (own.lr or 1.0)], RATE_EXACT, "formula", f"{total:,} steps")
        self._live.place(-1)
        alone = functools.partial(optimizer_steps.updates, self._setup, begin=self._live.placed(0))
        ranked = self._ranked if self._stepped is self._ranked else None
        yield from optimizer_steps.lines(
            alone if ranked is None else ranked.updates,
            own,
            (kind, known),
            batch,
            norm([gradient]),
            total=total,
            bound=EXACT * self._slack,
        )
        if ranked is not None:
            name = f"weights of {ranked.world} processes after two steps"
            yield judged(name, [ranked.differing()], 0.0, "the lead's, bit for bit")
        if self.config.dtype == "bfloat16":
            yield from self._narrow(ranked, (kind, known), gradient)

    def _narrow(
        self, ranked: RankedPolicy | None, known: tuple[str, Options], gradient: Gradient
    ) -> Iterator[CertificateLine]:
        own, begin = self.config.optimizer, self._live.placed(0)
        if ranked is None:
            moved = optimizer_steps.narrow_weights(own, known[0], begin, gradient)
            yield from optimizer_steps.narrow_lines(own, known, begin, gradient, moved)
            return
        moved = ranked.narrow_of_all(gradient)
        yield from optimizer_steps.narrow_lines(own, known, begin, gradient, moved, micros=ranked.world)

    def _judged(
        self,
        name: str,
        variants: Sequence[Sequence[Gradient]],
        to: Sequence[Gradient],
        bound: float,
        what: str,
        ways: int,
    ) -> CertificateLine:
        notes = ([f"{ways} ways"] if ways > 1 else []) + [
            note for note in {differing(one, to) for one in variants} if note
        ]
        figures = [distance(each, to) for each in variants]
        return judged(name, figures, bound * self._slack, what, "; ".join(notes))

    def inert(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Options that change nothing; and those that change nothing while the recipe is on-policy, if it is."""
        config, on_policy = self.config, list[str]()
        never = inert_options(config, self._differs(self.groups))
        if not config.max_lag and config.updates_per_batch == 1 and config.broker is None:
            others = inert_options(config, self._differs(self._on_policy), PARTS)
            on_policy = [name for name in others if name not in never]
        return tuple(never), tuple(on_policy)

    def _differs(self, groups: Sequence[Group]) -> Callable[[RunConfig], bool]:
        """Whether another recipe's step on the groups is another, where its reference goes, or its optimizer."""
        own = self.config
        pack, base = self._as(own), self._live.gradients(self._as(own)(groups, version=0))
        walked = [] if own.reference is None else self._walked(self._live, pack)
        few = pack(groups[:1], version=0)
        size = norm(self._live.gradients(few))

        def other(actual: Sequence[Gradient], expected: Sequence[Gradient]) -> bool:
            return not distance(actual, expected) <= OTHERWISE

        @functools.cache
        def moved(optimizer: Optimizer) -> list[Gradient]:
            self._as(own)
            self._live.place(-1)
            steps = optimizer_steps.two(few, own.optimizer, size)
            made, _ = optimizer_steps.updates(
                self._setup,
                optimizer_steps.visible(optimizer),
                steps,
                own.steps,
                begin=self._live.placed(0),
            )
            return [one.moved for one in made]

        def differs(config: RunConfig) -> bool:
            if config.optimizer != own.optimizer:
                rates = [[one.optimizer.rate(step, own.steps) for step in _some(own.steps)] for one in (config, own)]
                return rates[0] != rates[1] or other(moved(config.optimizer), moved(own.optimizer))
            pack = self._as(config)
            if other(self._live.gradients(pack(groups, version=0)), base):
                return True
            return config.reference != own.reference and other(self._walked(self._live, pack), walked)

        return differs

    def _as(self, config: RunConfig) -> Packer:
        """Compute by another recipe's objective from now on; what packs for it."""
        self._setup.objective, self._setup.updates = run.objective(config), config.updates_per_batch
        self._setup.sampling = config.sampling
        return self._pack(config)


def _some(total: int) -> range:
    """Steps of a run of which the learning rate is looked at."""
    return range(1, total + 1, max(1, total // RATES))


def _without_advantage(group: Group) -> Group:
    """The same, of which no answer is better than another."""
    return dataclasses.replace(
        group, rollouts=tuple(dataclasses.replace(r, advantages=(0.0,) * r.num_tokens) for r in group.rollouts)
    )


def certify(
    config: RunConfig, *, real: bool = False, several: int | None = None, inert: Collection[str] = ()
) -> Certificate:
    """Look at the gradient of a recipe's own parts, and at what its optimizer makes of it.

    A recipe with ``ranks`` of 2 or more has every step computed by as many, but for options that change nothing.

    Args:
        config: the recipe.
        real: on its own model instead of a tiny one of its architecture.
        several: processes that compute one step together, beside one; below 2 none do. None: the recipe's ranks, or 2.
        inert: options by dotted path that are accepted although they change nothing.

    Raises:
        ConfigError: the model cannot be read.
        UnsupportedPair: the recipe's ranks cannot divide its step.
        RankError: one of several processes did not come, or failed.
    """
    began = time.monotonic()
    own = config.ranks if isinstance(config.ranks, int) else 1
    if several is None:
        several = own if own > 1 else RANKS
    num_ranks = own if several > 1 else 1
    if num_ranks > 1:
        check_certified(config, num_ranks)
    with contextlib.closing(Case(config, real=real, ranks=num_ranks)) as case:
        lines, described = list(case.lines(several)), case.described
        if not real:
            lines += case.later()
            never, on_policy = case.inert()
    if real:  # neither what an optimizer does nor which options are read depends on how large the model is
        with contextlib.closing(Case(config, real=False, ranks=num_ranks)) as case:
            lines += case.later()
            never, on_policy = case.inert()
    lines.append(every_option_line(never, inert))
    return Certificate(
        model=described, lines=tuple(lines), inert=never, inert_on_policy=on_policy, seconds=time.monotonic() - began
    )
