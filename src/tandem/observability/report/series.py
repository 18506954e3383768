"""Metrics as columns for the page, thinned where a screen could not show more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from tandem.observability.report.folder import RunFolder
from tandem.types import Json

MOST_POINTS = 1500
"""More steps than this are averaged in equal shares."""


def columns(run: RunFolder, most: int = MOST_POINTS) -> dict[str, Json]:
    """``{"steps": [...], "share": steps per point, "values": {name: [...]}, "odd": {name: [steps]}}``.

    A point stands for ``share`` steps and bears the last one's number: their mean, or the largest (smallest) where
    the name ends in ``max`` (``min``). A missing value is None. ``odd`` lists where a value was not finite.
    """
    rows = run.metrics
    share = max(1, -(-len(rows) // most))
    names = sorted({name for row in rows for name in row["metrics"]})
    chunks = [rows[i : i + share] for i in range(0, len(rows), share)]
    values = {name: [_join(name, [row["metrics"].get(name) for row in chunk]) for chunk in chunks] for name in names}
    odd = {name: [row["step"] for row in rows if row["metrics"].get(name, 0.0) is None] for name in names}
    return {
        "steps": [chunk[-1]["step"] for chunk in chunks],
        "share": share,
        "values": values,
        "odd": {name: steps for name, steps in odd.items() if steps},
    }


def short(value: float) -> float:
    """Six significant figures: what a page can show, at half the size."""
    return float(f"{value:.6g}")


def _join(name: str, values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    how: Callable[[Sequence[float]], float] = (
        max if name.endswith("/max") else min if name.endswith("/min") else statistics.fmean
    )
    return short(how(known))
