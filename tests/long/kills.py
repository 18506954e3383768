"""Kills a system at random moments and compares what it trained with what it should have: exactly once?

    .venv/bin/python tests/long/kills.py [--kills 100] [--set-ups together apart] [--seed 0]
    .venv/bin/python tests/long/kills.py --soak MINUTES [--seed 0]

``together``: one process trains, plays and scores, and has started an engine. ``apart``: trainer, broker, two
environments and engine are processes of their own. Victims get SIGKILL, half of them some time after a SIGSTOP. Half
of the kills of ``together`` befall an on-policy run, which must then be bit for bit one that nobody interrupted. What
was trained is read from the run's folder and held against its cursor and the broker's ledger. Exits with 1 if a group
is lost or trained twice, or anything else is not as it should be.

The engine is Tandem's own without vLLM (``kills_engine``); ``--vllm PYTHON`` takes a real one for ``together``,
whose logprobs differ in their last bits with what else is sampled: then the tokens are compared and not the weights.
``--soak`` is ``apart`` in bad weather of every kind (``kills_soak``), on one core.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

from kills_account import equals
from kills_systems import Apart, System, choose, kind
from processes import Broken, kill, marked, tiny_model

LAGS = {"together": (0, 2), "apart": (1, 3)}
"""What max_lag is of either half of the kills; with a broker it cannot be 0."""
VLLM = {
    "kv_cache_gb": 0.25,
    "enforce_eager": True,
    "max_num_seqs": 32,
    "start_seconds": 240.0,
    "args": {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"},
}
"""A real one on a CPU; its worker in the process of its scheduler, whose start takes long enough."""
QUIET_SECONDS = 240.0
"""A system that nobody disturbs must get on within this time."""


@dataclass
class TrialResult:
    """What the trials of one lane showed."""

    name: str
    kills: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    lost: int = 0
    doubled: int = 0
    resumes: int = 0
    runs: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Nothing was lost, doubled or otherwise wrong."""
        return not (self.lost or self.doubled or self.wrong)


@dataclass
class Killer:
    """Kills parts of a system at random moments, starts them again, and sees that it goes on."""

    chance: random.Random
    kills: int
    """How many are left."""
    pace: float
    """Most seconds from one restart to the next kill."""
    done: Counter[str] = field(default_factory=Counter)

    @property
    def more(self) -> bool:
        """Whether there is more to come."""
        return self.kills > 0

    def run(self, system: System) -> None:
        """From the start of a run to its end.

        Raises:
            Broken: a part ended that nobody killed, or nothing gets on.
        """
        system.start()
        progress, since, moment = system.progress(), time.monotonic(), self._next()
        while system.trainer.alive or system.trainer.code != 0:
            self.tend(system)
            if fallen := [name for name in system.fallen() if not self.excuses(system, name)]:
                raise Broken("\n".join(map(system.end_of, fallen)))
            now = time.monotonic()
            if (latest := system.progress()) != progress:
                progress, since = latest, now
                moment = moment or now + self.chance.uniform(0.0, self.pace / 4)
            if now - since > QUIET_SECONDS:
                raise Broken(f"nothing has happened for {QUIET_SECONDS:g} s at step {progress[0]}")
            if self.more and moment and now >= moment:
                self.strike(system)
                since, moment = time.monotonic(), self._next()
            time.sleep(0.005)
        system.finish()

    def _next(self) -> float:
        """When: a third soon after a start, when there is much that can be half done, else (0) after the next step."""
        return time.monotonic() + self.chance.uniform(0.0, self.pace) if self.chance.random() < 1 / 3 else 0.0

    def tend(self, system: System) -> None:
        """Called again and again while a run goes on."""

    def excuses(self, system: System, name: str) -> bool:
        """Whether a part may have ended by itself."""
        return False

    def strike(self, system: System) -> None:
        """Kill a part and start it again."""
        victims = system.victims()
        if not victims:
            return
        name = choose(self.chance, victims)
        kill(victims[name], self.chance.choice([0.0, self.chance.uniform(0.0, 0.6)]))
        self.kills -= 1
        self.done[kind(name)] += 1
        time.sleep(self.chance.choice([0.0, self.chance.uniform(0.0, 0.5)]))
        system.restart(name)


@dataclass(frozen=True)
class Lane:
    """One way to set a system up, killed again and again."""

    set_up: str
    lag: int
    kills: int
    steps: int
    pace: float
    model: Path
    engine: dict[str, object] = field(default_factory=dict)

    def system(self, place: Path) -> System:
        """A fresh one."""
        made = Apart if self.set_up == "apart" else System
        return made(place, lag=self.lag, steps=self.steps, model=self.model, engine=self.engine)

    def trial(self, folder: Path, seed: int) -> TrialResult:
        """Runs until there were enough kills; where it must be, each is compared with one that had none."""
        result = TrialResult(f"{self.set_up}, max_lag {self.lag}")
        begun = time.monotonic()
        reference = self._reference(folder, result) if self.set_up == "together" and self.lag == 0 else None
        killer = Killer(random.Random(f"{seed}/{result.name}"), self.kills, self.pace)
        while killer.more and result.fine:
            result.runs += 1
            system = self.system(folder / f"run-{result.runs}")
            run_once(system, killer, result)
            if reference is not None and result.fine:
                result.wrong += equals(system.folder, reference, bits=not self.engine)
        result.kills, result.seconds = killer.done, time.monotonic() - begun
        return result

    def _reference(self, folder: Path, result: TrialResult) -> Path:
        system = self.system(folder / "uninterrupted")
        run_once(system, Killer(random.Random(0), 0, 1.0), result)
        result.trained = 0
        return system.folder


def run_once(system: System, killer: Killer, result: TrialResult) -> None:
    """One run and what came of it; nothing that belonged to it may be left."""
    try:
        killer.run(system)
        account = system.account()
    except Broken as error:
        result.wrong.append(f"{system.place}: {error}\n{system.logs()}")
    else:
        result.trained += len(account.trained)
        result.lost += len(account.lost)
        result.doubled += account.doubled
        result.wrong += [f"{system.place}: {what}" for what in account.wrong]
        if account.lost:
            result.wrong.append(f"{system.place}: lost {', '.join(sorted(account.lost)[:10])}")
    result.resumes += system.resumes()
    left = marked(system.place)
    result.wrong += [f"{system.place}: left running: {variables['']}" for variables in left.values() if result.fine]
    for process in left:
        kill(process)


def trials(options: argparse.Namespace, model: Path) -> list[Callable[[Path], TrialResult]]:
    """What the command line asks for; each wants a folder."""
    if options.soak:
        from kills_soak import soaked

        return [lambda folder: soaked(folder, model, 60 * options.soak, options.seed)]
    half, engine = options.kills // 2, {"python": options.vllm, **VLLM} if options.vllm else {}
    return [
        partial(Lane(set_up, lag, kills, options.steps, options.pace, model, engine).trial, seed=options.seed)
        for set_up in options.set_ups
        for lag, kills in zip(LAGS[set_up], (half, options.kills - half), strict=True)
        if kills
    ]


def table(results: list[TrialResult]) -> str:
    """The table."""
    known = ("trainer", "engine", "worker", "broker")
    victims = [*known, *sorted({name for one in results for name in one.kills} - set(known))]
    rows = [["killed", *victims, "runs", "resumes", "groups trained", "lost", "doubled", "seconds"]]
    for one in results:
        counts = [one.kills[victim] for victim in victims]
        rest = [one.runs, one.resumes, one.trained, one.lost, one.doubled, round(one.seconds)]
        rows.append([one.name, *map(str, counts + rest)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    """Run the trials and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each set-up")
    parser.add_argument("--set-ups", nargs="+", choices=("together", "apart"), default=["together", "apart"])
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--pace", type=float, default=10.0, help="most seconds from one restart to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of a real vLLM, for together")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which is then kept")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="random faults of all kinds for so long instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        model = tiny_model(folder / "tiny", head_dim=32)
        results = []
        for number, trial in enumerate(trials(options, model)):
            results.append(trial(folder / f"lane-{number}"))
            print(table(results[-1:]), flush=True)
            for what in results[-1].wrong:
                print(what, file=sys.stderr, flush=True)
    print(table(results))
    return 0 if all(one.fine for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
