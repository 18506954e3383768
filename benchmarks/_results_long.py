"""Of long runs: memory of every process by role, kills on the way, and where two runs begin to differ."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _results_folder import lines, steps

KILLS = (
    (0.15, "engine"),
    (0.35, "core"),
    (0.55, "trainer"),
    (0.75, "interrupt"),
)
"""Share of the steps after which something is killed: vLLM's HTTP server, the process of its scheduler, the trainer (by
SIGKILL, each of them), and the trainer once more by SIGTERM, at which it saves itself. The trainer is then resumed."""
EVERY = 5.0
"""Seconds between two looks at memory."""
FROM = 0.2
"""Share of a process' life that counts as its start: what is allocated by then is no leak."""
LIVED = 0.1
"""Least share of the run that a process must have lived for its memory to be judged."""


def engine_of(folder: Path) -> int | None:
    """Process id of the HTTP server of a run's engine; None while there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads((folder / "engine-0.json").read_text())["pid"])
    return None


def stat(pid: int) -> tuple[str, int] | None:
    """Name and parent of a process; None if it is not there, or dead."""
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/stat").read_text()
        name = text[text.index("(") + 1 : text.rindex(")")]
        state, parent = text.rpartition(")")[2].split()[:2]
        return None if state in "ZX" else (name, int(parent))
    return None


def family(roots: Sequence[int]) -> dict[int, str]:
    """Name of each living process among ``roots`` and what they have started."""
    known = {int(entry): fields for entry in os.listdir("/proc") if entry.isdigit() and (fields := stat(int(entry)))}
    chosen = {pid for pid in roots if pid in known}
    grew = True
    while grew:
        more = {pid for pid, (_, parent) in known.items() if parent in chosen} - chosen
        chosen |= more
        grew = bool(more)
    return {pid: known[pid][0] for pid in chosen}


def core_of(engine: int) -> int | None:
    """The process that runs vLLM's scheduler: a child of its HTTP server that is not multiprocessing's own."""
    for pid in sorted(family([engine])):
        fields = stat(pid)
        if fields and fields[1] == engine and b"resource_tracker" not in _command(pid):
            return pid
    return None


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def resident(pid: int) -> tuple[float, float] | None:
    """GB of a process' memory that is resident, and of these what is its own; None if it is gone."""
    with contextlib.suppress(OSError, KeyError):
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(rows["VmRSS"].split()[0]) / 1e6, int(rows["RssAnon"].split()[0]) / 1e6
    return None


def card_gb(device: str | None) -> float | None:
    """GB in use on a card, the first of several, by all processes; None without one."""
    with contextlib.suppress(Exception):  # no driver, or no such package: nothing is measured
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int((device or "0").partition("+")[0]))
        return round(float(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / 1e9, 3)
    return None


@dataclass
class Memory:
    """Looks at the memory of a run's processes now and then, and writes it down."""

    folder: Path
    file: Path
    device: str | None
    _last: float = 0.0

    def look(self, trainer: int) -> None:
        """Look, if it is time."""
        now = time.monotonic()
        if now - self._last < EVERY:
            return
        self._last = now
        engine = engine_of(self.folder)
        by_pid = {}
        for pid, name in family([trainer, *([engine] if engine else [])]).items():
            held = resident(pid)
            if held and b"resource_tracker" not in _command(pid):
                role = {trainer: "trainer", engine: "engine"}.get(pid, name)
                by_pid[str(pid)] = [role, round(held[0], 4), round(held[1], 4)]
        row = {"time": time.time(), "step": steps(self.folder), "card_gb": card_gb(self.device), "processes": by_pid}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def lives(file: Path, whole: int) -> list[dict[str, Any]]:
    """Memory of each process that lived long enough, after its start and at its end."""
    seen: dict[str, list[tuple[int, float, float]]] = {}
    roles, card = {}, []
    for row in lines(file):
        if row["card_gb"] is not None:
            card.append((row["step"], row["card_gb"], row["card_gb"]))
        for pid, (role, all_of_it, own) in row["processes"].items():
            roles[pid] = role
            seen.setdefault(pid, []).append((row["step"], all_of_it, own))
    process_lives = [{"role": roles[pid], **life} for pid, looks in seen.items() for life in _life(looks, whole)]
    return process_lives + [{"role": "card", **life} for life in _life(card, whole)]


def _life(looks: Sequence[tuple[int, float, float]], whole: int) -> Iterator[dict[str, Any]]:
    steps_seen = [step for step, *_ in looks]
    if not looks or steps_seen[-1] - steps_seen[0] < LIVED * whole:
        return
    at = steps_seen[0] + FROM * (steps_seen[-1] - steps_seen[0])
    settled = [look for look in looks if look[0] >= at]
    third = max(1, len(settled) // 10)
    begin, end = settled[:third], settled[-third:]
    means = [sum(look[i] for look in part) / len(part) for i in (1, 2) for part in (begin, end)]
    yield {
        "steps": [settled[0][0], settled[-1][0]],
        "gb": [round(means[0], 4), round(means[1], 4)],
        "own_gb": [round(means[2], 4), round(means[3], 4)],
        "growth": round(means[1] / means[0] - 1, 4) if means[0] else None,
    }


@dataclass
class Killer:
    """Kills processes of a run at certain steps; what it did is written down, so that it does nothing twice."""

    folder: Path
    file: Path
    whole: int
    expected: bool = False
    """Whether the trainer was killed and is to be resumed."""
    _done: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._done = lines(self.file)

    def look(self, trainer: int) -> None:
        """Kill, if it is time."""
        if len(self._done) == len(KILLS):
            return
        share, what = KILLS[len(self._done)]
        at = steps(self.folder)
        if at < share * self.whole:
            return
        engine = engine_of(self.folder)
        core = core_of(engine) if engine else None
        victim = {"engine": engine, "core": core}.get(what, trainer)
        if victim is None:  # it is just being started again
            return
        os.kill(victim, signal.SIGTERM if what == "interrupt" else signal.SIGKILL)
        self.expected = what in ("trainer", "interrupt")
        self._done.append({"what": what, "step": at, "pid": victim, "time": time.time()})
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(self._done[-1]) + "\n")


def digests(folder: Path) -> dict[int, str]:
    """Digest of the weights at each step that was published; of one that was made again the last."""
    return {e["step"]: e["digest"] for e in lines(folder / "events.jsonl") if e["event"] == "published"}


def answers(folder: Path, step: int) -> set[tuple[str, tuple[int, ...]]]:
    """What a step was trained on: each rollout, token by token."""
    rows = lines(folder / f"rollouts/{step:06d}.jsonl")
    return {(row["rollout"], tuple(token["id"] for token in row["tokens"])) for row in rows}


def same_answers(one: Path, other: Path) -> int:
    """The last step up to which two runs were trained on the same tokens; 0 if they never were."""
    last = min(steps(one), steps(other))
    return next((step - 1 for step in range(1, last + 1) if answers(one, step) != answers(other, step)), last)


def equal_until(one: Mapping[int, str], other: Mapping[int, str]) -> int:
    """The last step up to which two runs had the same weights, bit for bit; 0 if they never had."""
    last = 0
    for step in sorted(set(one) & set(other)):
        if one[step] != other[step]:
            break
        last = step
    return last
