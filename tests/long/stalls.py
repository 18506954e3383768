"""Stalls runs in many ways and shows that each is told, who is to blame, and that the run recovers or ends.

    .venv/bin/python tests/long/stalls.py [NAME ...] [--at-once 2] [--json FILE] [--folder FOLDER]

Each case is a run of its own on a tiny model, with deadlines of seconds. Told within ten seconds of its deadline, ended
with the right exit code, no process left behind, and, with the stall taken away, the same run goes on to its last step:
otherwise this exits with 1. Runs on a CPU, needs no vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from processes import MARK, Child, kill, marked, tiny_model
from stalls_cases import CASES, END, FULL, GRADING, LOOP, WAIT, Case

from tandem.ports import free_port

HERE = Path(__file__).parent
COMMON = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
}
"""Environment of all cases."""
SLACK = 10.0
"""Seconds after its deadline within which a stall has to be told."""
LIMIT = 150.0
"""Seconds after which a run is killed: it hangs in silence."""

RECIPE: dict[str, Any] = {
    "steps": 2,
    "groups_per_step": 2,
    "group_size": 2,
    "env": "arithmetic",
    "zero_variance_groups": "keep",
    "sampling": {"max_tokens": 4},
    "dtype": "float32",
    "compile": False,
    "threads": 1,
    "evaluate": {"tasks": 0},
    "checkpoint": {"every": 1},
    "grading": {"timeout_seconds": GRADING},
    "loggers": [],
    "timeouts": {"wait_seconds": WAIT, "loop_seconds": LOOP, "end_seconds": END},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one case."""

    name: str
    """Of the case."""
    named: bool
    """Who is to blame was said, in time."""
    late: float | None
    """Seconds after the deadline; None if nobody said it."""
    code: int | None
    """Exit code; None if the run hung and was killed."""
    ended: bool
    """As it should be."""
    orphans: int
    """Processes left behind."""
    resumed: bool
    """Without the stall it went on to its end."""
    evidence: str
    """The line that names who is to blame, or the end of what was said."""

    @property
    def right(self) -> bool:
        """All of it."""
        return self.named and self.ended and not self.orphans and self.resumed


class Place:
    """A folder for one case, and everything that is started in it."""

    def __init__(self, folder: Path, case: Case, model: Path):
        self.folder, self.case = folder, case
        self.port = free_port()
        self.mark = folder / "mark"
        self.tag = uuid.uuid4().hex
        python = folder / "python"
        folder.mkdir(parents=True)
        looked = '[ "$1" = -c ] && echo True && exit'  # whether it has vLLM
        python.write_text(f'#!/bin/sh\n{looked}\nexec {sys.executable} {HERE / "stalls_server.py"} "$@"\n')
        python.chmod(0o755)
        recipe = RECIPE | {"model": str(model), "runs": str(folder), "name": "run"} | _filled(case.recipe, self)
        recipe = {name: value for name, value in recipe.items() if value is not None}
        if "broker" in recipe:
            del recipe["grading"], recipe["evaluate"]
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def environment(self, *, stalls: bool, tag: str) -> dict[str, str]:
        stall = {"STALL": self.case.name if stalls else "", "STALL_MARK": str(self.mark), MARK: tag}
        return {**os.environ, **COMMON, **stall}

    @contextmanager
    def helped(self, *, stalls: bool) -> Iterator[None]:
        """With the case's server, if it has one."""
        if not self.case.helper:
            yield
            return
        words = [str(HERE / "stalls_server.py"), self.case.helper, str(self.port)]
        server = Child("helper", self.folder, lambda: words, self.environment(stalls=stalls, tag="helper"))
        server.start()
        try:
            _until(lambda: _listens(self.port) or not server.alive, LIMIT)
            yield
        finally:
            server.kill()

    def train(self, target: Path, *, stalls: bool) -> tuple[int | None, list[tuple[float, str]]]:
        """Run it; exit code, None if it was killed, and each line that it wrote, with the time."""
        case, words = self.case, ["-m", "tandem", "train", str(target)]
        env = self.environment(stalls=stalls, tag=self.tag)
        run = Child(f"out-{uuid.uuid4().hex}", self.folder, lambda: words, env)
        run.start()
        if stalls and case.limit:
            resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (case.limit, case.limit))
        timed_lines: list[tuple[float, str]] = []

        def over() -> bool:
            ended = not run.alive
            lines = run.log.read_text(errors="replace").splitlines()
            timed_lines.extend((time.time(), line) for line in lines[len(timed_lines) :])
            return ended

        if stalls and case.stop:
            _until(lambda: (self.run / "vitals.json").exists() or over(), LIMIT)
            os.kill(run.pid, signal.SIGSTOP)
            time.sleep(case.stop)
            os.kill(run.pid, signal.SIGCONT)
        _until(over, LIMIT)
        code = run.code
        run.kill()
        return code, timed_lines

    def orphans(self) -> int:
        """Processes of the run that outlive it by more than a grader's grace; they are killed."""
        _until(lambda: not marked(self.tag), 4)
        left = marked(self.tag)
        for process in left:
            kill(process)
        return len(left)


def measure(case: Case, folder: Path, model: Path) -> Outcome:
    """Let it stall, then go on without."""
    place = Place(folder, case, model)
    target = place.folder / "recipe.yaml"
    with place.helped(stalls=True):
        if case.spoil:
            short = yaml.safe_load(target.read_text()) | {"steps": 1}
            (folder / "short.yaml").write_text(yaml.safe_dump(short))
            place.train(folder / "short.yaml", stalls=False)
            _spoil(place.run, case.spoil)
            target = place.run
            recipe = place.run / "config.yaml"
            recipe.write_text(recipe.read_text().replace("steps: 1\n", "steps: 2\n"))
        begun = time.time()
        code, timed_lines = place.train(target, stalls=True)
    timed_lines = sorted([*timed_lines, *_events(place.run)])
    orphans = place.orphans()
    if case.begins and place.mark.exists():
        begun = float(place.mark.read_text())
    blame = next(((at, line) for at, line in timed_lines if case.named and re.search(case.named, line)), None)
    late = None if blame is None else blame[0] - begun - case.deadline
    if not case.begins:
        late = 0.0 if blame else late
    if case.spoil:
        _mend(place.run)
    ready = (place.run / "config.yaml").exists()
    again, more = (0, []) if code == 0 else _go_on(place, place.run if ready else place.folder / "recipe.yaml")
    (folder / "said.txt").write_text("\n".join(f"{at:.2f} {line}" for at, line in [*timed_lines, *more]))
    named = not case.named or (late is not None and late <= SLACK and (place.mark.exists() or not case.begins))
    evidence = blame[1] if blame else " / ".join(line for _, line in timed_lines[-2:])
    return Outcome(
        name=case.name, named=named, late=late, code=code, ended=code == case.code, orphans=orphans,
        resumed=again == 0, evidence=evidence[:400],
    )  # fmt: skip


def _go_on(place: Place, target: Path) -> tuple[int | None, list[tuple[float, str]]]:
    if place.case.name == "chat template loops":
        target = place.folder / "mended.yaml"
        recipe = yaml.safe_load((place.folder / "recipe.yaml").read_text())
        target.write_text(yaml.safe_dump({name: v for name, v in recipe.items() if name != "chat_template"}))
        shutil.rmtree(place.run, ignore_errors=True)
    with place.helped(stalls=False):
        return place.train(target, stalls=False)


def _filled(recipe: Any, place: Place) -> Any:
    """The recipe with this place's port and interpreter."""
    if isinstance(recipe, Mapping):
        return {name: _filled(value, place) for name, value in recipe.items()}
    if isinstance(recipe, list):
        return [_filled(value, place) for value in recipe]
    if isinstance(recipe, str):
        return recipe.replace("{port}", str(place.port)).replace("{python}", str(place.folder / "python"))
    return recipe


def _events(run: Path) -> list[tuple[float, str]]:
    """Waits and stalls that a run wrote down."""
    events = run / "events.jsonl"
    if not events.is_file():
        return []
    records = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
    return [
        (
            event["time"],
            f"event {event['event']}: {event.get('owner')} waited for {event.get('on')} ({event['reason']})",
        )
        for event in records
        if event["event"] == "wait" and event["state"] == "deadline"
    ]


def _spoil(run: Path, how: str) -> None:
    events = run / "events.jsonl"
    events.rename(run / "events.kept")
    if how == "events-full":  # of all that it writes this file alone has reached the limit
        row = json.dumps({"time": 0.0, "event": "group_dropped", "reason": "x" * 1000}) + "\n"
        events.write_text(row * (FULL // len(row) + 1))
    else:
        os.mkfifo(events)


def _mend(run: Path) -> None:
    (run / "events.jsonl").unlink()
    (run / "events.kept").rename(run / "events.jsonl")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(done: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


def show(outcome: Outcome) -> None:
    """One line of the table."""
    late = "   -  " if outcome.late is None else f"{outcome.late:+5.1f} s"
    mend = "goes on" if outcome.resumed else "does NOT go on"
    code = "hung" if outcome.code is None else f"exit {outcome.code}"
    left = f"{outcome.orphans} LEFT" if outcome.orphans else "none left"
    verdict = "right" if outcome.right else "WRONG"
    print(
        f"{verdict}  {outcome.name:<38} {late:>8}  {code:<8} {left:<9} {mend:<14} {outcome.evidence[:150]}", flush=True
    )


def main() -> None:
    """Run the cases, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; by default all")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.names or case.name in options.names]
    root = options.folder or Path(tempfile.mkdtemp(prefix="tandem-stalls-"))
    model = tiny_model(root / "tiny")
    outcomes = []
    with ThreadPoolExecutor(options.at_once) as pool:
        folders = (root / re.sub(r"\W+", "-", case.name).strip("-") for case in chosen)
        runs = [pool.submit(measure, case, folder, model) for case, folder in zip(chosen, folders, strict=True)]
        for run in runs:
            outcomes.append(run.result())
            show(outcomes[-1])
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
    wrong = [outcome.name for outcome in outcomes if not outcome.right]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} right" + (f"; wrong: {', '.join(wrong)}" if wrong else ""))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
