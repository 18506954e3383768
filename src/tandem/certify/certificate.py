"""A certificate: every check of a recipe's gradient, and the options that change nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tandem import config as recipes
from tandem import run
from tandem.certify import models, options, ranks, reference
from tandem.certify.gradients import MOVES, Gradient, Live, Setup, distance, norm
from tandem.certify.made_up import Author
from tandem.certify.variations import VARIATIONS, Variation, compiled
from tandem.config import RunConfig
from tandem.errors import ConfigError
from tandem.policy._compile import missing
from tandem.trainer.pack import Packer
from tandem.types import Group, Json

SAME = 1e-6
"""Largest distance of gradients that must be the same, in float32."""
EXACT = 1e-5
"""Largest distance of the float32 gradient from the float64 formulas: logprobs are exact to some 1e-6."""
REAL = 100.0
"""What both are multiplied by for a whole model: rounding adds up over its layers, to 3e-5 over the 30 of SmolLM2."""
RANKS = 2
"""Processes that compute one step together."""
OTHERWISE = 1e-9
"""Gradients farther apart than this are different: the same computation gives the same bits."""
MOVES_REAL = 0.01
"""Share of their deviation by which a trained model's weights are moved: it must stay what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One check."""

    name: str
    """Of what."""
    state: Literal["pass", "fail", "skipped"]
    """How it went."""
    figure: float | None = None
    """The largest distance found."""
    bound: float | None = None
    """The largest that passes."""
    relative_to: str = ""
    """What the figure is divided by."""
    note: str = ""
    """What else is to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was found."""

    model: str
    """What the gradient is of."""
    lines: tuple[Line, ...]
    """Every check."""
    inert: tuple[str, ...]
    """Options of the objective that change nothing on any of the made-up answers."""
    inert_on_policy: tuple[str, ...]
    """Those that change nothing where the sampler is the policy itself; empty unless the recipe is on-policy."""
    seconds: float
    """What it took."""

    @property
    def passed(self) -> bool:
        """True if nothing failed."""
        return all(line.state != "fail" for line in self.lines)

    def as_json(self) -> Json:
        """Plain data."""
        return {"passed": self.passed, **dataclasses.asdict(self)}


def certify(config: RunConfig, *, real: bool = False, several: int = RANKS) -> Certificate:
    """Look at the gradient of a recipe's own parts.

    Args:
        config: the recipe.
        real: on its own model instead of a tiny one of its architecture.
        several: processes that compute one step together; below 2 that is not looked at.

    Raises:
        ConfigError: the model cannot be read.
        TandemError: one of several processes failed.
    """
    began = time.monotonic()
    with contextlib.closing(Case(config, real=real)) as case:
        lines, described = tuple(case.lines(several)), case.described
        inert, on_policy = ((), ()) if real else case.inert()
    if real:  # which options are read does not depend on how large the model is
        with contextlib.closing(Case(config, real=False)) as case:
            inert, on_policy = case.inert()
    return Certificate(
        model=described, lines=lines, inert=inert, inert_on_policy=on_policy, seconds=time.monotonic() - began
    )


class Case:
    """A recipe's parts, a model and groups.

    Args:
        config: the recipe.
        real: its own model instead of a tiny one of its architecture.

    Raises:
        ConfigError: the model cannot be read.
    """

    def __init__(self, config: RunConfig, *, real: bool):
        self.config, self._slack = config, REAL if real else 1.0
        model = models.certified(config, real=real)
        self._exact = models.Exact(model)
        names = [meta.name for meta in config.trains.source(model).manifest()]
        self._setup = Setup(
            model=model,
            trains=config.trains,
            changing=tuple(names),
            objective=run.objective(config),
            sampling=config.sampling,
            updates=config.updates,
            moves=MOVES_REAL if real else MOVES,
        )
        self._weights = {
            env: {name: spec.weight for name, spec in source.rewards.items()} for env, source in config.sources.items()
        }
        self._live = Live(self._setup)
        ends = self._live.policy.end_tokens
        self._formula = reference.formula(recipes.as_json(config), self._weights, ends)
        count = sum(parameter.numel() for parameter in model.parameters())
        kind = self._live.policy.config.model_type
        self.described = f"{config.model if real else f'a tiny {kind}'}, {count:,} parameters, float32 on the CPU"
        author = Author(
            sampling=config.sampling,
            vocabulary=self._live.policy.head.weight.shape[0],
            weights=self._weights,
            foreign=config.broker is not None,
            given=config.broker is not None and config.broker.given_advantages,
        )
        self._place(0)
        own = functools.cache(self._own)  # both have the same tokens
        self.groups, self._on_policy = author.groups(own), author.groups(own, on_policy=True)

    def close(self) -> None:
        """End its thread."""
        self._live.close()

    def _place(self, update: int) -> models.Exact:
        self._live.place(update)
        self._exact.take(self._setup.model)
        return self._exact

    def _own(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> list[float]:
        """The policy's logprobs, by the formulas."""
        ids = (*prompt, *tokens)
        one = reference.Spoken(
            ids=ids,
            at=tuple(range(len(prompt), len(ids))),
            begins=(len(prompt),) * len(tokens),
            told=(0.0,) * len(tokens),
            advantages=(0.0,) * len(tokens),
            temperature=temperature,
        )
        with torch.no_grad():
            return reference.logprobs(self._exact, one, self._formula).tolist()

    def _pack(self, config: RunConfig) -> Packer:
        return run.packer(config, self._live.policy)

    def lines(self, several: int) -> Iterator[Line]:
        """Every check; ``several``: as of ``certify``."""
        pack = self._pack(self.config)
        base, _ = self._live.gradients(pack(self.groups, version=0))
        size = norm(base)
        sound = math.isfinite(size) and size > 0
        yield Line(
            name="the gradient is there", state="pass" if sound else "fail", figure=size, relative_to="its own norm"
        )
        for name, variation in VARIATIONS.items():
            try:
                self._can(variation)
                found = variation(self._live, pack, self.groups)
            except ConfigError as error:
                yield Line(name=name, state="skipped", note=str(error))
                continue
            yield self._judged(name, found, base, SAME, "the recipe's own micro-batches", len(found))
        if several > 1:
            cut = dataclasses.replace(pack, budget=40)(self.groups, version=0)
            self._live.place(-1)  # what the other processes are given is the model as loaded
            ways = [ranks.gradients(self._setup, cut, several)]
            yield self._judged(f"{several} processes, gradients summed", ways, base, SAME, "one process", 1)
        yield self._against_formulas(base)

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

    def _against_formulas(self, base: Sequence[Gradient]) -> Line:
        name = "float64 formulas, one sequence at a time"
        if unknown := self._formula.unknown():
            told = f"no formula is known here for {', '.join(unknown)}"
            return Line(name=name, state="skipped", note=told)
        expected = reference.gradients(self._place, self.groups, self._formula)
        return self._judged(name, [base], expected, EXACT, "the formulas' gradient", 1)

    def _judged(
        self, name: str, found: Sequence[Sequence[Gradient]], to: Sequence[Gradient], bound: float, what: str, ways: int
    ) -> Line:
        figures = [distance(each, to) for each in found]
        bound = bound * self._slack
        # Written so that a figure which is not a number fails.
        passed = all(figure <= bound for figure in figures)
        return Line(
            name=name,
            state="pass" if passed else "fail",
            figure=max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure),
            bound=bound,
            relative_to=f"norm of {what}",
            note=f"{ways} ways" if ways > 1 else "",
        )

    def inert(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Options that change nothing; and those that change nothing while the recipe is on-policy, if it is."""
        config, on_policy = self.config, list[str]()
        never = options.inert(config, self._differs(self.groups))
        if not config.max_lag and config.updates == 1 and config.broker is None:
            on_policy = [name for name in options.inert(config, self._differs(self._on_policy)) if name not in never]
        return tuple(never), tuple(on_policy)

    def _differs(self, groups: Sequence[Group]) -> Callable[[RunConfig], bool]:
        """Whether another recipe's step on the groups is another."""

        def seen(config: RunConfig) -> tuple[list[Gradient], tuple[list[int], Mapping[str, torch.Tensor]]]:
            self._setup.objective, self._setup.updates = run.objective(config), config.updates
            found, _ = self._live.gradients(self._pack(config)(groups, version=0))
            return found, self._live.follows(config.steps)

        base, (due, moved) = seen(self.config)

        def differs(config: RunConfig) -> bool:
            found, (due_now, moved_now) = seen(config)
            if due_now != due or not distance(found, base) <= OTHERWISE:
                return True
            return bool(moved) and not distance([moved_now], [moved]) <= OTHERWISE

        return differs
