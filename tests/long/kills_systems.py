"""The two set-ups that are killed: everything in the trainer's process, or every part in one of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kills_account import Account, Expected, foreign, played, remember, resumes, saved, steps, watch
from kills_engine import package
from processes import MARK, Broken, Child, until

from tandem.ports import free_port
from tandem.processes import Identity, alive_after

REWARD = '''
import os, time
from pathlib import Path

def odd(completions, **columns):
    """Right half of the time, so that some groups are flat; a file says how it is to misbehave, once."""
    fault = Path(__file__).with_name("fault")
    try:
        kind = fault.read_text()
        fault.unlink()
    except FileNotFoundError:
        kind = ""
    if kind == "hang":
        time.sleep(3600)
    elif kind == "crash":
        os._exit(3)
    return [float(sum(completion[-1]["content"].encode()) % 2) for completion in completions]
'''
ENVIRONMENT = {"max_number": 60}
WORKERS = 2
TANDEM = ("-m", "tandem")
WAITS = {"request_seconds": 60.0, "control_seconds": 60.0}
"""Of an engine: nothing here takes as long."""


@dataclass
class System:
    """A run and all that it needs, in a folder of its own."""

    place: Path
    lag: int
    steps: int
    model: Path
    seed: int = 0
    """Of the run."""
    groups: int = 3
    size: int = 3
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine; by default it is the stand-in."""
    environment: dict[str, str] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        (self.place / "marks.py").write_text(REWARD)
        paths = [str(self.place), *package(self.place / "stand-in")]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths), MARK: str(self.place), **self.environment}
        self.children["trainer"] = Child("trainer", self.place, self._train, self.environment)

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.place / "runs" / "run"

    @property
    def trainer(self) -> Child:
        """The process that decides when it is over."""
        return self.children["trainer"]

    @property
    def expected(self) -> Expected:
        """What must come out."""
        return Expected(self.steps, self.groups, self.size, self.lag, ENVIRONMENT, self.seed)

    def recipe(self) -> dict[str, Any]:
        """Of the trainer."""
        return {
            "model": str(self.model),
            "name": "run",
            "runs": "runs",
            "steps": self.steps,
            "env": {"kind": "arithmetic", **ENVIRONMENT},
            "rewards": {"marks:odd": 1.0},
            "groups_per_step": self.groups,
            "group_size": self.size,
            "max_lag": self.lag,
            "context": 128,
            "dtype": "float32",
            "sampling": {"max_tokens": 6},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
            "evaluate": {"tasks": 0},
            "checkpoint": {"every": 2, "keep": 2},
            "grading": {"timeout_seconds": 3.0},
            "sync": "shared",
            "engine": self.engine_options(),
            "loggers": [],
            "threads": 1,
            "seed": self.seed,
        }

    def engine_options(self) -> dict[str, Any]:
        """One that the trainer starts."""
        ours = {"start_seconds": 120.0, "linger_seconds": 60.0, "restarts": 10_000}
        return {"kind": "vllm", "seeded": True, **WAITS, **ours, **self.engine}

    def _train(self) -> list[str]:
        if (self.folder / "config.yaml").exists():
            if saved(self.folder):
                remember(self.folder)
            return [*TANDEM, "train", "runs/run"]
        # Killed before its folder had a recipe: there is nothing yet to go on with.
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.place / "recipe.yaml").write_text(yaml.safe_dump(self.recipe()))
        return [*TANDEM, "train", "recipe.yaml"]

    def start(self) -> None:
        """Start every part."""
        for child in self.children.values():
            child.start()

    def victims(self) -> dict[str, Identity]:
        """What runs now and can be killed, by what it is."""
        running = {name: process for name, child in self.children.items() if (process := child.identity)}
        if engine := self._engine():
            running["engine"] = engine
        return running

    def _engine(self) -> Identity | None:
        """The process that the trainer's record names."""
        try:
            record = json.loads((self.folder / "engine-0.json").read_text())
        except (OSError, ValueError):
            return None
        engine = Identity(record["pid"], record["started"])
        return engine if alive_after(*engine) else None

    def restart(self, victim: str) -> None:
        """Start what was killed; the trainer sees to its own engine."""
        if victim in self.children:
            self.children[victim].start()

    def fallen(self) -> list[str]:
        """Parts that ended by themselves, though nobody killed them."""
        return [name for name, child in self.children.items() if not child.alive and child.code not in (None, -9, 0)]

    def end_of(self, name: str) -> str:
        """How a part ended."""
        child = self.children[name]
        return f"the {name} ended by itself with code {child.code}:\n{child.log_tail()}"

    def progress(self) -> tuple[int, int]:
        """Steps written down, and the newest checkpoint."""
        return steps(self.folder), saved(self.folder)

    def resumes(self) -> int:
        """How often the trainer went on."""
        return resumes(self.folder)

    def finish(self) -> None:
        """The trainer is done: end what does not end by itself."""

    def account(self) -> Account:
        """What was trained, and whether it is what should have been."""
        return played(self.folder, self.expected)

    def logs(self) -> str:
        """The end of what everybody said."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self._logs())

    def _logs(self) -> list[Path]:
        return sorted({*self.place.glob("*.log"), *self.folder.glob("logs/*.log")})


@dataclass
class Apart(System):
    """Trainer, engine, broker and environments, each a process of its own."""

    ports: tuple[int, int] = (0, 0)
    lease_seconds: float = 600.0

    def __post_init__(self) -> None:
        self.ports = free_port(), free_port()
        super().__post_init__()
        trainer = self.children.pop("trainer")
        self.children["broker"] = Child("broker", self.place, self._broker, self.environment)
        self.children["engine"] = Child("engine", self.place, self._serve, self.environment)
        for n in range(WORKERS):
            self.children[f"worker {n}"] = Child(f"worker-{n}", self.place, self._work, self.environment)
        self.children["trainer"] = trainer

    def broker_url(self) -> str:
        """Where the broker is found."""
        return f"http://127.0.0.1:{self.ports[0]}"

    def engine_url(self) -> str:
        """Where the engine is found."""
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def ledger(self) -> Path:
        """The broker's folder."""
        return self.place / "ledger"

    def recipe(self) -> dict[str, Any]:
        """The trainer plays nothing, so it has no rewards."""
        options = super().recipe()
        del options["env"], options["rewards"], options["evaluate"], options["grading"]
        return {
            **options,
            "broker": {"url": self.broker_url(), "lease_seconds": self.lease_seconds},
        }

    def engine_options(self) -> dict[str, Any]:
        """One that runs already."""
        return {
            "kind": "vllm",
            "urls": [self.engine_url()],
            "start_seconds": 120.0,
            "request_seconds": 60.0,
            "control_seconds": 60.0,
        }

    def start(self) -> None:
        """The broker first, whose ledger is to be watched."""
        self.children["broker"].start()
        until(self._broker_answers, "the broker", 60)
        watch(self.ledger)
        for child in self.children.values():
            if not child.alive:
                child.start()

    def _broker_answers(self) -> bool:
        if not self.children["broker"].alive:
            raise Broken(f"the broker ended: {self.children['broker'].log_tail()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0]}/info", timeout=5):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def _broker(self) -> list[str]:
        return [*TANDEM, "serve", "broker", "--port", str(self.ports[0]), "--data", "ledger"]

    def _serve(self) -> list[str]:
        options = ["--model", str(self.model), "--port", str(self.ports[1]), "--max-model-len", "128"]
        return ["-m", "vllm.entrypoints.openai.api_server", *options]

    def _work(self) -> list[str]:
        """Environments pause when two batches wait, so that few groups are too old."""
        words = [
            f"model={self.model}", f"broker={self.broker_url()}", f"engine={self.engine_url()}",
            "env=arithmetic", f"group_size={self.size}",
            "rewards={marks:odd: 1.0}", "sampling.max_tokens=6", "n=2", "ahead=2", "zero_variance_groups=keep",
            "context=128", "grading.timeout_seconds=3",
        ]  # fmt: skip
        words += [f"env.{name}={value}" for name, value in ENVIRONMENT.items()]
        return [*TANDEM, "work", *words]

    def finish(self) -> None:
        """Environments end when the trainer has what it wanted; broker and engine serve on."""
        workers = [child for name, child in self.children.items() if name.startswith("worker")]
        until(lambda: not any(child.alive for child in workers), "the end of the environments", 60)
        for name in ("broker", "engine"):
            child = self.children[name]
            if child.alive:
                os.kill(child.pid, 15)
                if child.wait(30) not in (0, -15):
                    raise Broken(f"the {name} ended with code {child.code}: {child.log_tail()}")

    def account(self) -> Account:
        """By the broker's ledger."""
        return foreign(self.folder, self.expected, self.ledger)


def kind(victim: str) -> str:
    """What the table calls it."""
    return victim.partition(" ")[0]


def choose(chance: random.Random, victims: Mapping[str, Any]) -> str:
    """One of the victims, each kind as likely as the others."""
    which = chance.choice(sorted({kind(name) for name in victims}))
    return chance.choice(sorted(name for name in victims if kind(name) == which))
