"""Followers of a run with several ranks, as ``tandem why`` tells of them: what each executes, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.distributed.channel import COMMANDS, NEXT_COMMAND
from tandem.observability import vitals
from tandem.observability.board import duration
from tandem.processes import alive_after, is_stopped
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Whether the process of a sign of life goes on."""

    state: str
    """alive | stuck | stopped | silent | gone; silent: of another host, where no process can be looked at."""
    text: str = ""
    """What is wrong, after the name of the process."""

    @classmethod
    def of(cls, signs: Mapping[str, Json], age: float) -> Liveness:
        """That of signs which are so many seconds old."""
        ago = f"the last sign of life was {duration(age)} ago"
        if not vitals.is_here(signs):
            if age <= vitals.STALE:
                return cls._of_loop(signs)
            return cls(state="silent", text=f"{ago}: it is gone or stopped, or its host {signs['host']} is not reached")
        if not alive_after(signs["pid"], signs["started"]):
            return cls(state="gone", text=f"is gone without a word (killed, or out of memory?); {ago}")
        if is_stopped(signs["pid"], signs["started"]):
            return cls(state="stopped", text=f"is stopped (SIGSTOP, Ctrl-Z or a debugger); {ago}")
        if age > vitals.STALE:
            return cls(state="stuck", text=f"runs, but {ago}: something in it holds the interpreter")
        return cls._of_loop(signs)

    @classmethod
    def _of_loop(cls, signs: Mapping[str, Json]) -> Liveness:
        loop = signs.get("loop")
        if loop is None or loop <= vitals.STALE:
            return cls(state="alive")
        text = f"runs, but its event loop has stood still for {duration(loop)}: a call that does not return"
        return cls(state="stuck", text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerState:
    """What one follower does."""

    rank: int
    """Its number."""
    host: str
    """Where it runs."""
    pid: int
    """Its process there."""
    state: str
    """As ``Liveness`` has it."""
    headline: str
    """What it does, or what is wrong with it."""
    command: str | None
    """What it executes; None: it waits for the lead's next command, or has not begun."""
    seconds: float | None
    """Since it began that, or began to wait for the next."""
    waits: tuple[tuple[str, str, float], ...]
    """On which part it waits, for what, and for how many seconds; longest first."""


def read(run: Path, now: float) -> tuple[FollowerState, ...]:
    """The followers of which there are signs of life in a run's folder."""
    each = ((rank, vitals.read(run, rank)) for rank in vitals.followers(run))
    return tuple(_state(rank, signs, max(0.0, now - signs["at"])) for rank, signs in each if signs is not None)


def _state(rank: int, signs: Mapping[str, Json], age: float) -> FollowerState:
    liveness = Liveness.of(signs, age)
    if liveness.state == "gone":
        age = 0.0  # what it did has ended with it
    rows: Sequence[Mapping[str, Json]] = sorted(signs["waits"], key=lambda row: -row["seconds"])
    waits = tuple((row["on"], row["reason"], round(row["seconds"] + age, 3)) for row in rows)
    spans = [(name.removeprefix(COMMANDS), since) for name, since in signs["doing"] if name.startswith(COMMANDS)]
    command, since = spans[0] if spans else (None, None)
    if command is None:
        since = next((row["seconds"] for row in rows if row["reason"] == NEXT_COMMAND), None)
    seconds = None if since is None else round(since + age, 3)
    doing = _doing(command, seconds, waits)
    return FollowerState(
        rank=rank,
        host=signs.get("host", ""),
        pid=signs["pid"],
        state=liveness.state,
        headline=doing if liveness.state == "alive" else f"{liveness.text}; it was {doing}",
        command=command,
        seconds=seconds,
        waits=waits,
    )


def _doing(command: str | None, seconds: float | None, waits: Sequence[tuple[str, str, float]]) -> str:
    """What it executes and waits for, in words."""
    since = "" if seconds is None else f" for {duration(seconds)}"
    if command is None:
        return f"idle{since}: waiting for rank 0's next command"
    inner = "; ".join(f"waiting for {on} ({reason}), for {duration(waited)}" for on, reason, waited in waits[:2])
    return f"in command {command!r}{since}; {inner or 'waiting for nothing'}"


def show(console: Console, followers: Sequence[FollowerState]) -> None:
    """Print a line for each follower."""
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "process", "", "what it does"):
        table.add_column(heading, justify="right" if heading == "rank" else "left")
    for one in followers:
        state = Text(one.state, "green" if one.state == "alive" else "red")
        table.add_row(str(one.rank), Text(f"{one.pid} on {one.host}"), state, Text(one.headline))
    console.print()
    console.print(table)
