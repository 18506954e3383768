"""Trials: systems that are killed until they have been killed often enough, and what they trained."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kills_account import equals
from kills_processes import children, end
from kills_systems import Apart, Broken, System, choose, kind

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
        victims[name].kill(self.chance.choice([0.0, self.chance.uniform(0.0, 0.6)]))
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
    if left := children():
        result.wrong += [f"{system.place}: left running: {line}" for line in left.values() if result.fine]
        end(list(left))
