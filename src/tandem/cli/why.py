"""``tandem why``: what a run is waiting for, which part has to deliver it, and the last event of each part."""

from __future__ import annotations

import calendar
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.api.targets import recipe_of
from tandem.cli import _why_ranks
from tandem.cli._why_ranks import FollowerState, Liveness
from tandem.errors import command
from tandem.observability import json_lines, vitals, waits
from tandem.observability.board import duration
from tandem.observability.loggers.base import phase
from tandem.observability.report.summary import failed
from tandem.printable import printable
from tandem.processes import alive_after
from tandem.types import Json

ANSWER_SECONDS = 4.0
"""Seconds in which a living interpreter writes the stacks it is asked for."""
SETTLED = 0.3
"""Seconds without another line after which the stacks that a signal asked for are whole: they come line by line."""
_ENDS = ("run_done", "interrupted")
_LINE = re.compile(r"(?P<time>\S+Z) (?P<level>[A-Z]+) +(?P<name>[\w.]+): (?P<text>.*)")
_TAIL_BYTES = 1 << 16
_ID = re.compile(r"\S*@\d+(/\d+)?(?=\)|$)")
"""A group's or rollout's id at the end of a party's name or of a reason, as 3+4@0/7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Waits that are alike: the same owner waits for the same party for the same reason."""

    owner: str
    """The part that waits."""
    on: str
    """The part that has to deliver."""
    reason: str
    """What for."""
    count: int
    """How many there are."""
    seconds: float
    """How long the longest has lasted."""
    left: float | None
    """Seconds until the first of their deadlines; None: they have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """One wait as a sign of life tells it."""

    number: int
    within: int | None
    owner: str
    on: str
    reason: str
    seconds: float
    left: float | None

    @classmethod
    def of(cls, place: int, row: Mapping[str, Json], age: float) -> _Sign:
        deadline = row["deadline"]
        return cls(
            number=row.get("number", -1 - place),
            within=row.get("within"),
            owner=row["owner"],
            on=row["on"],
            reason=row["reason"],
            seconds=row["seconds"] + age,
            left=None if deadline is None else deadline - row.get("moved", row["seconds"]) - age,
        )

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.owner, self.on, self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """State of a run at a moment, from its folder alone."""

    state: str
    """alive | stuck | stopped | silent | failed | gone | ended."""
    headline: str
    """One sentence on it."""
    waits: tuple[Waits, ...] = ()
    """Longest first."""
    chain: tuple[Waits, ...] = ()
    """From what waits longest to what waits for nothing: the last one's ``on`` holds all up."""
    doing: tuple[tuple[str, float], ...] = ()
    """What the process is doing, and seconds since it began."""
    last: tuple[tuple[str, float | None, str], ...] = ()
    """Each part's last word: its name, seconds ago if known, what it said."""
    followers: tuple[FollowerState, ...] = ()
    """The other ranks, where there are several."""

    @property
    def culprit(self) -> str | None:
        """The part that holds all up; None where none waits."""
        return self.chain[-1].on if self.chain else None


def why(run: Path, *, stacks: bool, as_json: bool) -> int:
    """Print which part waits for which; 0 unless the run failed, or a process of it is gone or stuck.

    Args:
        run: a run's folder.
        stacks: also have each of its ranks write where its threads and tasks stand.
        as_json: print JSON instead of tables.

    Raises:
        ConfigError: it is not a run's folder.
    """
    recipe_of(run)
    story = read(run, now=time.time())
    traces = _all_stacks(run, story) if stacks else {}
    if as_json:
        plain: dict[str, Json] = {"state": story.state, "headline": story.headline, "culprit": story.culprit}
        plain |= {name: [_plain(one) for one in getattr(story, name)] for name in ("waits", "chain")}
        plain |= {"doing": story.doing, "last": story.last, "stacks": traces.get(0)}
        plain["followers"] = [dataclasses.asdict(one) | {"stacks": traces.get(one.rank)} for one in story.followers]
        typer.echo(json.dumps(plain, indent=2))
    else:
        console = Console()
        _print(console, story)
        for rank in (0, *(one.rank for one in story.followers)) if stacks else ():
            name = f"rank {rank}: " if story.followers else ""
            text = traces.get(rank) or "no stacks: it does not run"
            console.print(f"{name}{text}", markup=False, highlight=False, soft_wrap=True)
    healthy = story.state in ("alive", "ended") and all(one.state == "alive" for one in story.followers)
    return 0 if healthy else 1


def read(run: Path, *, now: float) -> Story:
    """Read a run's state from its folder.

    Args:
        run: the folder.
        now: seconds since 1970.
    """
    return dataclasses.replace(_of_lead(run, now), followers=_why_ranks.read(run, now))


def _of_lead(run: Path, now: float) -> Story:
    signs = vitals.read(run)
    events = list(json_lines.read(run / "events.jsonl"))
    last = tuple(_last_words(run, events, now))
    if signs is None:
        ending = next((event for event in reversed(events) if event.get("event") in _ENDS), None)
        if ending is not None and ending is events[-1]:
            ago = duration(max(0.0, now - ending.get("time", now)))
            return Story(state="ended", headline=f"{run} ended in order {ago} ago ({ending['event']})", last=last)
        if (failure := failed(events)) is not None:
            ago = duration(max(0.0, now - failure[0]))
            head = f"{run} failed {ago} ago: {failure[1]} (go on with: {command('train', run)}; the traceback is in "
            return Story(state="failed", headline=f"{head}{run / 'logs' / 'run.log'})", last=last)
        head = f"{run} is not running; the last words are below (go on with: {command('train', run)})"
        return Story(state="gone", headline=head, last=last)
    age = max(0.0, now - signs["at"])
    rows = [_Sign.of(place, sign, age) for place, sign in enumerate(signs["waits"])]
    going = sorted(rows, key=lambda sign: -sign.seconds)
    alike = _alike(going)
    chain = waits.chain(going[0], going) if going else ()
    story = Story(
        state="alive",
        headline="",
        waits=tuple(alike.values()),
        chain=tuple(dict.fromkeys(alike[sign.kind] for sign in chain)),
        doing=tuple((name, seconds + age) for name, seconds in signs["doing"]),
        last=last,
    )
    return _judged(story, run, signs, age)


def _judged(story: Story, run: Path, signs: Mapping[str, Json], age: float) -> Story:
    """The story with its state and headline."""
    who = f"{run}: process {signs['pid']}"
    liveness = Liveness.of(signs, age)
    if liveness.state != "alive":
        then = "; see --stacks" if liveness.state == "stuck" else ""
        then = f"; go on with: {command('train', run)}" if liveness.state == "gone" else then
        return dataclasses.replace(story, state=liveness.state, headline=f"{who} {liveness.text}{then}")
    if story.culprit is not None:
        longest = story.chain[-1]
        head = f"{who} is alive; all waits for {longest.on}, since {duration(longest.seconds)} ({longest.reason})"
        return dataclasses.replace(story, headline=head)
    doing = ", ".join(phase(name, {}) for name, _ in story.doing)
    return dataclasses.replace(
        story, headline=f"{who} is alive and waits for nothing" + f"; it is at: {doing}" * bool(doing)
    )


def _alike(going: Sequence[_Sign]) -> dict[tuple[str, str, str], Waits]:
    """Waits put together by owner, party and reason, longest first."""
    piles: dict[tuple[str, str, str], list[_Sign]] = {}
    for sign in sorted(going, key=lambda sign: -sign.seconds):
        piles.setdefault(sign.kind, []).append(sign)
    return {
        kind: Waits(
            owner=kind[0],
            on=kind[1],
            reason=kind[2],
            count=len(pile),
            seconds=pile[0].seconds,
            left=min((sign.left for sign in pile if sign.left is not None), default=None),
        )
        for kind, pile in piles.items()
    }


def _folded(each: Sequence[Waits]) -> Iterator[Waits]:
    """Waits that differ by nothing but the group or rollout put together, so that those of a step fit a screen."""
    piles: dict[tuple[str, str, str], list[Waits]] = {}
    for one in each:
        piles.setdefault((_ID.sub("…", one.owner), _ID.sub("…", one.on), _ID.sub("…", one.reason)), []).append(one)
    for (owner, on, reason), pile in piles.items():
        if len(pile) == 1:
            yield pile[0]
            continue
        yield Waits(
            owner=owner,
            on=on,
            reason=reason,
            count=sum(one.count for one in pile),
            seconds=max(one.seconds for one in pile),
            left=min((one.left for one in pile if one.left is not None), default=None),
        )


def _last_words(run: Path, events: Sequence[Mapping[str, Json]], now: float) -> Iterator[tuple[str, float | None, str]]:
    """The last line of every part of the trainer in its log, and of every other log."""
    last: dict[str, tuple[float | None, str]] = {}
    for line in _tail(run / "logs" / "run.log"):
        if match := _LINE.match(line):
            part = ".".join(match["name"].split(".")[:2]).removeprefix("tandem.")
            last[part] = (_ago(match["time"], now), match["text"])
    yield from ((part, ago, text) for part, (ago, text) in sorted(last.items()))
    for path in sorted((run / "logs").glob("*.log")):
        lines = [line for line in _tail(path) if line.strip()]
        if path.name != "run.log" and lines:
            yield path.name, max(0.0, now - path.stat().st_mtime), lines[-1]
    for event in events[-1:]:
        fields = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
        yield "events", max(0.0, now - event.get("time", now)), f"{event.get('event')} {fields}".strip()


def _tail(path: Path) -> list[str]:
    """The last lines of a log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _ago(timestamp: str, now: float) -> float | None:
    try:
        return max(0.0, now - calendar.timegm(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def _all_stacks(run: Path, story: Story) -> dict[int, str | None]:
    """Stacks of every rank that may answer, all asked at once."""
    states = {0: story.state} | {one.rank: one.state for one in story.followers}
    ranks = [rank for rank, state in states.items() if state in ("alive", "stuck")]
    with ThreadPoolExecutor(len(states)) as pool:
        return dict(zip(ranks, pool.map(lambda rank: _stacks(run, rank), ranks), strict=True))


def _stacks(run: Path, rank: int = 0) -> str | None:
    """Ask for stacks, by a signal where the interpreter does not answer; the text that came, or None."""
    path, request = vitals.stacks(run, rank), vitals.request(run, rank)
    begin = path.stat().st_size if path.exists() else 0
    request.touch()
    if not _until(lambda: not request.exists()):
        request.unlink(missing_ok=True)
        signs = vitals.read(run, rank)
        if signs is None or not vitals.is_here(signs) or not alive_after(signs["pid"], signs["started"]):
            return None
        os.kill(signs["pid"], vitals.SIGNAL)
        _until(_whole(path, begin))
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").strip() or None


def _whole(path: Path, begin: int) -> Callable[[], bool]:
    """Whether a file has grown beyond ``begin``, and grows no more."""
    size, since = begin, time.monotonic()

    def done() -> bool:
        nonlocal size, since
        if (now := path.stat().st_size) != size:
            size, since = now, time.monotonic()
        return size > begin and time.monotonic() - since > SETTLED

    return done


def _until(done: Callable[[], bool]) -> bool:
    """Look until something is so, for as long as there is patience."""
    end = time.monotonic() + ANSWER_SECONDS
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _print(console: Console, story: Story) -> None:
    style = {"alive": "green", "ended": "dim"}.get(story.state, "red")
    console.print(Text.assemble((story.state, style), "  ", (story.headline, "bold")))
    if len(story.chain) > 1:
        links = " \u2190 ".join([story.chain[0].owner, *(wait.on for wait in story.chain)])
        console.print(f"  {links}", markup=False, highlight=False)
    if story.waits:
        table = Table(box=None, pad_edge=False)
        for heading in ("who waits", "for whom", "what for", "since", "deadline in"):
            table.add_column(heading, justify="right" if heading in ("since", "deadline in") else "left")
        for wait in _folded(story.waits):
            who = wait.owner if wait.count == 1 else f"{wait.owner} ({wait.count})"
            left = "never" if wait.left is None else duration(max(0.0, wait.left))
            table.add_row(Text(who), Text(wait.on), Text(wait.reason), duration(wait.seconds), left)
        console.print()
        console.print(table)
    if story.followers:
        _why_ranks.show(console, story.followers)
    if story.last:
        table = Table(box=None, pad_edge=False)
        for heading in ("part", "", "its last word"):
            table.add_column(heading, justify="right" if not heading else "left")
        for part, ago, text in story.last:
            table.add_row(Text(part), "" if ago is None else f"{duration(ago)} ago", Text(printable(text[:300])))
        console.print()
        console.print(table)


def _plain(wait: Waits) -> dict[str, Json]:
    """As JSON; numbers that differ from call to call are cut to milliseconds."""
    plain = dataclasses.asdict(wait)
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in plain.items()}
