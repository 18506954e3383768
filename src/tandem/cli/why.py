"""``tandem why``: what a run is waiting for, which part has to deliver it, and the last event of each part."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.api.targets import recipe_of
from tandem.distributed.channel import COMMANDS, NEXT_COMMAND
from tandem.errors import command
from tandem.observability import json_lines, vitals, waits
from tandem.observability.board import duration
from tandem.observability.loggers.base import phase
from tandem.observability.report.summary import failed
from tandem.observability.waits import OpenWait
from tandem.printable import printable
from tandem.processes import alive_after
from tandem.types import Json

ANSWER_SECONDS = 4.0
"""Seconds in which a living interpreter writes the stacks it is asked for."""
SETTLED = 1.0
"""Seconds after which the stacks that a signal asked for are whole: they are written at once, in native code."""
_ENDS = ("run_done", "interrupted")
_TAIL_BYTES = 1 << 16
_ID = re.compile(r"[^\s(]*@\w+(/\d+)?(?=\)|$)")
"""A group's or rollout's id at the end of a party's name or of a reason, as 3+4@0/7 or 3+4@eval/7."""


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
    """alive | stuck | silent | gone; silent: on another host, where no process can be looked at."""
    headline: str
    """What it does, or what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run at a moment, from its folder alone."""

    state: str
    """A process's state as a follower has it, or failed | ended."""
    headline: str
    """One sentence on it."""
    waits: tuple[OpenWait, ...] = ()
    """Longest first."""
    chain: tuple[OpenWait, ...] = ()
    """From the longest wait to one whose awaited part waits for nothing: that part holds all up."""
    last: tuple[tuple[str, float, str], ...] = ()
    """Each part's last word: its name, seconds ago, what it said."""
    followers: tuple[FollowerState, ...] = ()
    """The other ranks, where there are several."""


def why(run: Path, *, stacks: bool) -> int:
    """Print which part waits for which; 0 unless the run failed, or a process of it is gone or stuck.

    Args:
        run: a run's folder.
        stacks: also have each of its ranks write where its threads and tasks stand.

    Raises:
        ConfigError: it is not a run's folder.
    """
    recipe_of(run)
    state = read(run, now=time.time())
    _print(Console(), state)
    if stacks:
        traces = _all_stacks(run, state)
        for rank in (0, *(follower.rank for follower in state.followers)):
            name = f"rank {rank}: " if state.followers else ""
            text = traces.get(rank) or "no stacks: it does not run"
            typer.echo(f"{name}{text}")
    healthy = state.state in ("alive", "ended") and all(follower.state == "alive" for follower in state.followers)
    return 0 if healthy else 1


def read(run: Path, *, now: float, events: Sequence[Mapping[str, Json]] | None = None) -> RunState:
    """Read a run's state from its folder.

    Args:
        run: the folder.
        now: seconds since 1970.
        events: those of the run, where they are read already.
    """
    events = list(json_lines.read(run / "events.jsonl")) if events is None else events
    signs = vitals.read(run)
    lead = _ended(run, events, now) if signs is None else _running(run, signs, max(0.0, now - signs["at"]))
    signs_of = {rank: vitals.read(run, rank) for rank in vitals.followers(run)}
    return dataclasses.replace(
        lead,
        last=tuple(_last_words(run, events, now)),
        followers=tuple(_follower(rank, its, max(0.0, now - its["at"])) for rank, its in signs_of.items() if its),
    )


def _ended(run: Path, events: Sequence[Mapping[str, Json]], now: float) -> RunState:
    """State of a run without a sign of life, by its events."""
    resume, last = f"go on with: {command('train', run)}", events[-1] if events else {}
    if last.get("event") in _ENDS:
        ago = duration(max(0.0, now - last["time"]))
        return RunState(state="ended", headline=f"{run} ended in order {ago} ago ({last['event']})")
    if (failure := failed(events)) is not None:
        ago, log = duration(max(0.0, now - failure[0])), run / "logs" / "run.log"
        head = f"{run} failed {ago} ago: {failure[1]} ({resume}; the traceback is in {log})"
        return RunState(state="failed", headline=head)
    return RunState(state="gone", headline=f"{run} is not running; the last words are below ({resume})")


def _running(run: Path, signs: Mapping[str, Json], age: float) -> RunState:
    """State of a run by its lead's sign of life, which is so many seconds old."""
    going = _waits(signs, age)
    links = waits.chain(going[0], going) if going else []
    chain = [wait for i, wait in enumerate(links) if (wait.owner, wait.on) not in {(x.owner, x.on) for x in links[:i]}]
    state, wrong = _liveness(signs, age)
    if wrong:
        remedy = {"stuck": "; see --stacks", "gone": f"; go on with: {command('train', run)}"}.get(state, "")
        head = f"{wrong}{remedy}"
    elif chain:
        last = chain[-1]
        head = f"is alive; all waits for {last.on}, since {duration(last.seconds)} ({last.reason})"
    else:
        phases = ", ".join(phase(name, {}) for name, _ in signs["doing"])
        head = "is alive and waits for nothing" + f"; it is at: {phases}" * bool(phases)
    head = f"{run}: process {signs['pid']} {head}"
    return RunState(state=state, headline=head, waits=tuple(going), chain=tuple(chain))


def _follower(rank: int, signs: Mapping[str, Json], age: float) -> FollowerState:
    state, wrong = _liveness(signs, age)
    age = 0.0 if state == "gone" else age  # what it did has ended with it
    going = _waits(signs, age)
    spans = [(name.removeprefix(COMMANDS), since + age) for name, since in signs["doing"] if name.startswith(COMMANDS)]
    if spans:
        inner = "; ".join(f"waiting for {wait.on} ({wait.reason}), for {duration(wait.seconds)}" for wait in going[:2])
        doing = f"in command {spans[0][0]!r} for {duration(spans[0][1])}; {inner or 'waiting for nothing'}"
    else:
        since = "".join(f" for {duration(wait.seconds)}" for wait in going if wait.reason == NEXT_COMMAND)
        doing = f"idle{since}: waiting for rank 0's next command"
    head = f"{wrong}; it was {doing}" if wrong else doing
    return FollowerState(rank=rank, host=signs.get("host", ""), pid=signs["pid"], state=state, headline=head)


def _liveness(signs: Mapping[str, Json], age: float) -> tuple[str, str]:
    """A process's state, and what is wrong with it; empty if it is alive."""
    ago, loop = f"the last sign of life was {duration(age)} ago", signs.get("loop")
    if vitals.is_here(signs):
        if not alive_after(signs["pid"], signs["started"]):
            return "gone", f"is gone without a word (killed, or out of memory?); {ago}"
        if age > vitals.STALE:
            return "stuck", f"runs, but {ago}: it is stopped (Ctrl-Z), or something in it holds the interpreter"
    elif age > vitals.STALE:
        return "silent", f"{ago}: it is gone or stopped, or its host {signs['host']} is not reached"
    if loop is not None and loop > vitals.STALE:
        return "stuck", f"runs, but its event loop has stood still for {duration(loop)}: a call that does not return"
    return "alive", ""


def _waits(signs: Mapping[str, Json], age: float) -> list[OpenWait]:
    """Waits of a sign of life that is so many seconds old, longest first."""
    return [
        dataclasses.replace(wait, seconds=round(wait.seconds + age, 3), left=wait.left and round(wait.left - age, 3))
        for wait in sorted((OpenWait(**row) for row in signs["waits"]), key=lambda wait: -wait.seconds)
    ]


def _last_words(run: Path, events: Sequence[Mapping[str, Json]], now: float) -> Iterator[tuple[str, float, str]]:
    """The last line of every log, and the last event."""
    for path in sorted((run / "logs").glob("*.log")):
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        if line := next((line for line in reversed(lines) if line.strip()), ""):
            yield path.name, max(0.0, now - path.stat().st_mtime), line
    for event in events[-1:]:
        fields = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
        yield "events", max(0.0, now - event.get("time", now)), f"{event.get('event')} {fields}".strip()


def _all_stacks(run: Path, state: RunState) -> dict[int, str | None]:
    """Stacks of every rank that may answer, all asked at once."""
    states = {0: state.state} | {follower.rank: follower.state for follower in state.followers}
    ranks = [rank for rank, its in states.items() if its in ("alive", "stuck")]
    with ThreadPoolExecutor(len(states)) as pool:
        return dict(zip(ranks, pool.map(lambda rank: _stacks(run, rank), ranks), strict=True))


def _stacks(run: Path, rank: int = 0) -> str | None:
    """Ask for stacks, by a signal where the interpreter does not answer; the text that came, or None."""
    path, request = vitals.stacks(run, rank), vitals.request(run, rank)
    begin = path.stat().st_size if path.exists() else 0
    request.touch()
    until = time.monotonic() + ANSWER_SECONDS
    while request.exists() and time.monotonic() < until:
        time.sleep(0.05)
    if request.exists():
        request.unlink(missing_ok=True)
        signs = vitals.read(run, rank)
        if signs is None or not vitals.is_here(signs) or not alive_after(signs["pid"], signs["started"]):
            return None
        os.kill(signs["pid"], vitals.SIGNAL)
        time.sleep(SETTLED)
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").strip() or None


def _print(console: Console, state: RunState) -> None:
    style = {"alive": "green", "ended": "dim"}.get(state.state, "red")
    console.print(Text.assemble((state.state, style), "  ", (state.headline, "bold")))
    if len(state.chain) > 1:
        console.print(Text("  " + " \u2190 ".join([state.chain[0].owner, *(wait.on for wait in state.chain)])))
    _print_table(console, ("who waits", "for whom", "what for", "since", "deadline in"), rows(state.waits))
    ranks = [(f"{each.rank}", f"{each.pid} on {each.host}", each.state, each.headline) for each in state.followers]
    _print_table(console, ("rank", "process", "", "what it does"), ranks)
    words = [(part, f"{duration(ago)} ago", printable(text[:300])) for part, ago, text in state.last]
    _print_table(console, ("part", "", "its last word"), words)


def rows(each: Sequence[OpenWait]) -> list[tuple[str, ...]]:
    """A row for all waits that differ by nothing but the group or rollout, so that those of a step fit a screen."""
    alike: dict[tuple[str, ...], list[OpenWait]] = {}
    for wait in each:
        alike.setdefault(tuple(_ID.sub("…", text) for text in (wait.owner, wait.on, wait.reason)), []).append(wait)
    out: list[tuple[str, ...]] = []
    for (who, on, reason), some in alike.items():
        left = min((wait.left for wait in some if wait.left is not None), default=None)
        deadline = "never" if left is None else duration(max(0.0, left))
        out.append((f"{who} ({len(some)})" if len(some) > 1 else who, on, reason, duration(some[0].seconds), deadline))
    return out


def _print_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        table = Table(*headings, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(table)
