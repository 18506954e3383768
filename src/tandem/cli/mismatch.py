"""``tandem mismatch``: how far the trainer's logprobs are from the engine's, by version and by place in the turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.api.run import Run
from tandem.api.targets import recipe_of
from tandem.config.loading import RunConfig, load
from tandem.errors import ConfigError, TandemError
from tandem.observability.report import folder
from tandem.observability.report.folder import Row

PLACES: Mapping[str, tuple[int, float]] = {
    "all": (1, math.inf),
    "first": (1, 1),
    "2 to 8": (2, 8),
    "9 to 64": (9, 64),
    "65 to 512": (65, 512),
    "513 on": (513, math.inf),
}
"""Places in a turn, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCell:
    """The gap of the tokens of some version at some places of a turn."""

    version: int | None
    """Policy version stamped on them; None: any."""
    where: str
    """Which places."""
    tokens: int
    """How many."""
    mean: float
    """Trainer minus engine, nats."""
    rms: float
    """Root mean square, nats."""
    max: float
    """The widest, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Result of a mismatch analysis."""

    step: int
    """Optimizer step whose tokens were looked at; it trained the weights of the step before."""
    rollouts: int
    """Rollouts that have a gap."""
    without_gap: int
    """Rollouts of the step that have none: not trained, or without the engine's logprobs."""
    kl: float
    """KL(engine || trainer), estimated by k3."""
    table: tuple[GapCell, ...]
    """Of all tokens, and by version and by place in the turn."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token in its turn."""

    version: int
    """Policy version stamped on it."""
    place: int
    """Place in the turn, from 1."""
    gap: float
    """Trainer's logprob minus the engine's."""


def mismatch(run: Path, *, step: int | None) -> None:
    """Print how large the gap is and where.

    Args:
        run: the run's folder.
        step: optimizer step to look at; None: the last recorded.

    Raises:
        ConfigError: it is not a run's folder.
        TandemError: there is nothing to look at.
    """
    config, console = load(recipe_of(run)).config, Console()
    result = look(run, config, step=step)
    whole = result.table[0]
    lines = [
        f"step {result.step}, which trained version {result.step - 1}: {result.rollouts} rollouts, {config.dtype}",
        f"trainer minus engine, nats: mean {whole.mean:+.2g}, rms {whole.rms:.2g}, widest {whole.max:.2g}; "
        f"KL {result.kl:.2g}",
    ]
    if result.without_gap:
        lines.append(f"{result.without_gap} rollouts have no gap: not trained, or no logprobs of their sampler")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("version", "place in turn", "tokens", "mean", "rms", "widest"):
        table.add_column(column, justify="left" if column == "place in turn" else "right")
    for cell in result.table:
        version = "any" if cell.version is None else str(cell.version)
        figures = (f"{cell.mean:+.1e}", f"{cell.rms:.1e}", f"{cell.max:.1e}")
        table.add_row(version if cell.where == "all" else "", cell.where, str(cell.tokens), *figures)
    console.print()
    console.print(table)


def look(path: Path, config: RunConfig, *, step: int | None = None) -> Mismatch:
    """Look at one step of a run.

    Args:
        path: the run's folder.
        config: its recipe.
        step: optimizer step; None: the last recorded.

    Raises:
        ConfigError: a grammar had a say in what was sampled.
        TandemError: the step is not recorded, or nothing of it has a gap.
    """
    if config.sampling.regex:
        raise ConfigError("sampling.regex: the tokens that the grammar excluded are not recorded; see probe_gap")
    step = max(folder.load(path).rollout_steps, default=0) if step is None else step
    rows = Run(path).rollouts(step)
    by_rollout = [list(sampled_tokens(row)) for row in rows if _has_gap(row)]
    tokens = [token for each in by_rollout for token in each]
    if not tokens:
        raise TandemError(f"no token of step {step} has both logprobs: none was trained, or no sampler told any")
    gaps = [token.gap for token in tokens]
    return Mismatch(
        step=step,
        rollouts=len(by_rollout),
        without_gap=len(rows) - len(by_rollout),
        kl=math.fsum(math.expm1(gap) - gap for gap in gaps) / len(gaps),
        table=tuple(_table(tokens)),
    )


def _has_gap(row: Row) -> bool:
    tokens = row.get("tokens") or []
    return bool(tokens) and all(token.get("lp") is not None and token.get("tp") is not None for token in tokens)


def sampled_tokens(row: Row) -> Iterator[SampledToken]:
    """Every sampled token of a recorded rollout that has a gap."""
    versions = (version for version, count in row["stamps"] for _ in range(count))
    tokens = iter(row["tokens"])
    for length in row["turns"]:
        for place in range(1, length + 1):
            token = next(tokens)
            yield SampledToken(next(versions), place, token["tp"] - token["lp"])


def _table(tokens: Sequence[SampledToken]) -> Iterator[GapCell]:
    """A row for each place of each version, after those of all versions where there are several."""
    versions = sorted({token.version for token in tokens})
    for version in [None, *versions] if len(versions) > 1 else versions:
        of_version = [token for token in tokens if version in (None, token.version)]
        for where, (first, last) in PLACES.items():
            if gaps := [token.gap for token in of_version if first <= token.place <= last]:
                yield _cell(version, where, gaps)


def _cell(version: int | None, where: str, gaps: Sequence[float]) -> GapCell:
    mean = math.fsum(gaps) / len(gaps)
    rms = math.sqrt(math.fsum(gap * gap for gap in gaps) / len(gaps))
    widest = max(map(abs, gaps))
    return GapCell(version=version, where=where, tokens=len(gaps), mean=mean, rms=rms, max=widest)
