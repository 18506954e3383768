"""A certificate: what was compared with what, how far apart the two are, and how far they may be."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass

from tandem.config.loading import RunConfig
from tandem.tools.certify.case import Case
from tandem.tools.certify.line import Line
from tandem.types import Json

__all__ = ["Certificate", "Line", "certify"]

RANKS = 2
"""Processes that compute one step together."""
OPTIONS = "every option matters"
"""The line about options that change nothing."""


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


def certify(config: RunConfig, *, real: bool = False, several: int = RANKS, inert: Collection[str] = ()) -> Certificate:
    """Look at the gradient of a recipe's own parts, and at what its optimizer makes of it.

    Args:
        config: the recipe.
        real: on its own model instead of a tiny one of its architecture.
        several: processes that compute one step together; below 2 that is not looked at.
        inert: options by dotted path that may change nothing.

    Raises:
        ConfigError: the model cannot be read.
        TandemError: one of several processes failed.
    """
    began = time.monotonic()
    with contextlib.closing(Case(config, real=real)) as case:
        lines, described = list(case.lines(several)), case.described
        if not real:
            never, on_policy = _rest(case, lines)
    if real:  # neither what an optimizer does nor which options are read depends on how large the model is
        with contextlib.closing(Case(config, real=False)) as case:
            never, on_policy = _rest(case, lines)
    lines.append(_options(never, inert))
    return Certificate(
        model=described, lines=tuple(lines), inert=never, inert_on_policy=on_policy, seconds=time.monotonic() - began
    )


def _rest(case: Case, lines: list[Line]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add what a tiny model shows as well; returns options that change nothing, ever and on-policy."""
    lines.extend(case.later())
    return case.inert()


def _options(never: Collection[str], named: Collection[str]) -> Line:
    """Options that change nothing fail, but for those that are named."""
    wrong = [name for name in never if name not in named]
    note = f"no value of {', '.join(wrong)} changes anything; --inert NAME accepts that" if wrong else ""
    return Line(
        name=OPTIONS,
        state="fail" if wrong else "pass",
        figure=float(len(wrong)),
        bound=0.0,
        compared_with="its other values",
        note=note,
    )
