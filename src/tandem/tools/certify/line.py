"""One check of a certificate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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
    compared_with: str = ""
    """What the figure is the distance from, as a share of its norm; where the bound is 0, so many differ."""
    note: str = ""
    """What else is to be told."""


def judged(name: str, figures: Sequence[float], bound: float, compared_with: str, note: str = "") -> Line:
    """A check that passes if no distance is above the bound; one that is not a number fails."""
    return Line(
        name=name,
        state="pass" if all(figure <= bound for figure in figures) else "fail",
        figure=max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure),
        bound=bound,
        compared_with=compared_with,
        note=note,
    )


def skipped(name: str, why: str) -> Line:
    """A check that cannot be made."""
    return Line(name=name, state="skipped", note=why)
