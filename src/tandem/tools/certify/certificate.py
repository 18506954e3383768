"""A certificate: what was compared with what, how far apart the two are, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
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


def judged(name: str, figures: Sequence[float], bound: float, compared_with: str, note: str = "") -> CertificateLine:
    """A check that passes if no distance is above the bound; one that is not a number fails."""
    return CertificateLine(
        name=name,
        state="pass" if all(figure <= bound for figure in figures) else "fail",
        figure=max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure),
        bound=bound,
        compared_with=compared_with,
        note=note,
    )


def skipped(name: str, why: str) -> CertificateLine:
    """A check that cannot be made."""
    return CertificateLine(name=name, state="skipped", note=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Result of all comparisons for a recipe."""

    model: str
    """What the gradient is of."""
    lines: tuple[CertificateLine, ...]
    """Every check."""
    seconds: float
    """What it took."""

    @property
    def passed(self) -> bool:
        """True if nothing failed."""
        return all(line.state != "fail" for line in self.lines)
