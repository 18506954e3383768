"""Ranks, engines apart from them, and the network between: each is killed or stopped, and named within 20 s.

Every engine is behind a proxy, by which alone ranks reach it; the network is lost with its process. A rank is lost at a
boundary of a command (``rank_lost.py``), the others at any moment. Each loss ends the run by name, which then goes on
from its checkpoint, or is recovered from by name. In the end the run must be bit for bit one that lost nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kills_account import equals, steps
from kills_engine import WITNESS
from kills_systems import TANDEM, System
from processes import Child, kill, marked, tiny_model, until
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.ports import free_port
from tandem.processes import Identity, alive_after

HERE = Path(__file__).parent
START_SECONDS = 120.0
"""Until a boundary or another step comes."""
END_SECONDS = 20.0
"""From a loss to the error that names it, and to the end of all other ranks where the run ends."""
BOUNDARIES = (
    "start", "join", "begin", "connect", "weights", "bind", "restore", "micros", "micros after", "apply", "apply after",
    "save", "save after", "end",
)  # fmt: skip
"""Where a rank is lost: before its part of it, or after that, when no other knows of it yet."""
IN_STEPS = ("micros", "apply", "save")
"""Boundaries that come in every step: ranks are lost in the second."""
UNCONNECTED = ("start", "join")
"""Boundaries before a rank has connected: a stop there is named only when the deadline of the start has passed."""
HOWS = (signal.SIGKILL, signal.SIGSTOP)
ENDED = (5, 6, 10, 13)
"""Exit codes of a run that ends by an engine, a publish, a deadline or a rank."""


def wide_model(folder: Path, **options: Any) -> Path:
    """A tiny random model whose matrices are large enough to be divided among ranks."""
    tiny = tiny_model(folder / "tiny", **options)
    plain = AutoModelForCausalLM.from_pretrained(tiny)
    plain.config.hidden_size, plain.config.intermediate_size = 128, 640
    torch.manual_seed(0)
    type(plain)(plain.config).float().save_pretrained(folder / "wide")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "wide")
    return folder / "wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Who is lost, and how."""

    kind: str
    """rank, engine or network."""
    number: int
    how: signal.Signals
    boundary: str = ""
    """Of a rank."""

    def __str__(self) -> str:
        return f"{self.how.name} of {self.kind} {self.number}" + (f" at {self.boundary}" if self.boundary else "")

    @property
    def order(self) -> str:
        """As ``rank_lost.py`` reads it."""
        command, _, moment = self.boundary.partition(" ")
        return f"{self.number} {command} {moment or 'before'} {2 if command in IN_STEPS else 1} {int(self.how)}"


def losses(ranks: int, *, apart: int) -> Iterator[Loss]:
    """Every boundary in turn, each time with another rank and signal; between them ``apart`` engines and networks."""
    others = [Loss(kind=k, number=n, how=how) for how in HOWS for n in range(apart) for k in ("engine", "network")]
    for turn in range(2 * ranks):
        for place, boundary in enumerate(BOUNDARIES):
            rank = (place + turn) % ranks
            how = HOWS[(place // ranks + turn // ranks + turn % ranks) % 2]
            if boundary in UNCONNECTED:
                how = signal.SIGKILL
            if boundary != "start" or rank:  # the lead has no other ranks before it starts them
                yield Loss(kind="rank", number=rank, how=how, boundary=boundary)
            if others:
                yield others[(len(BOUNDARIES) * turn + place) % len(others)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run that lost something."""

    loss: Loss
    named: float
    """Seconds until an error named it; infinite if none did."""
    then: str
    """How the run ended, or that it went on."""
    line: str
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.loss!s:<42}{self.named:>6.1f} s  {self.then:<14} {self.line.strip()[:110]} {self.wrong}"


@dataclass
class Ranks(System):
    """Several ranks and, where ``apart`` is not 0, so many engines that they reach through proxies."""

    ranks: int = 2
    apart: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    """Options of the recipe."""
    sampled: Path | None = None
    """A file for what engines sample, token by token with a sum of the weights that it is of."""
    lost: str = ""
    """The loss that the next start is to have."""
    ports: list[tuple[int, int]] = field(default_factory=list)
    limit: float = END_SECONDS

    def __post_init__(self) -> None:
        if self.sampled is not None:
            self.environment = {WITNESS: str(self.sampled)}
        super().__post_init__()
        self.ports = [(free_port(), free_port()) for _ in range(self.apart)]
        trainer = self.children.pop("trainer")
        for number, ports in enumerate(self.ports):
            proxy, engine = partial(self._proxy, ports), partial(self._serve, ports[1])
            self.children[f"network {number}"] = Child(f"network-{number}", self.place, proxy, self.environment)
            self.children[f"engine {number}"] = Child(f"engine-{number}", self.place, engine, self.environment)
        self.children["trainer"] = trainer

    def recipe(self) -> dict[str, Any]:
        ours = {"ranks": self.ranks, "checkpoint": {"every": 1, "keep": 2}}
        sync = {"kind": "broadcast", "timeout_seconds": 8.0, "bucket_mb": 1} if self.apart else "shared"
        return {**super().recipe(), **ours, "micro_batch_tokens": 30, "sync": sync, **self.changes}

    def engine_options(self) -> dict[str, Any]:
        if not self.apart:
            return {"kind": "embedded"}
        urls = [f"http://127.0.0.1:{near}" for near, _ in self.ports]
        waits = {"start_seconds": 120.0, "request_seconds": 8.0, "control_seconds": 8.0}
        return {"kind": "vllm", "seeded": True, "urls": urls, **waits}

    def _proxy(self, ports: tuple[int, int]) -> list[str]:
        return [str(HERE / "kills_soak.py"), json.dumps([ports])]

    def _serve(self, port: int) -> list[str]:
        options = ["--model", str(self.model), "--port", str(port), "--max-model-len", "128"]
        return ["-m", "vllm.entrypoints.openai.api_server", *options]

    def _train(self) -> list[str]:
        words = super()._train()[len(TANDEM) :]
        program = [str(HERE / "rank_lost.py")] if self.lost else TANDEM
        return [*program, *words, f"steps={self.steps}"]

    def trained(self, to: int) -> None:
        """Train to a step, undisturbed."""
        self.steps, self.lost = to, ""
        self.go_on()
        assert self.trainer.wait(START_SECONDS + 2.0 * to) == 0, self.logs()

    def go_on(self) -> None:
        """Start what does not run; of what an earlier trainer still says nothing is taken for this one's."""
        self.trainer.environment = {**self.environment, "RANK_LOST": self.lost}
        for child in self.children.values():
            if not child.alive:
                child.start()

    def loses(self, loss: Loss) -> Outcome:
        """Have the run lose something; it is whole again when this returns."""
        (self.place / "lost").unlink(missing_ok=True)
        of_rank = loss.kind == "rank"
        if of_rank and self.trainer.alive:
            self._end()
        self.lost = loss.order if of_rank else ""
        self.steps = steps(self.folder) + 2 if loss.boundary == "end" else 1_000_000
        before = self._sizes()
        resumed = steps(self.folder)
        self.go_on()
        if of_rank:
            self._until((self.place / "lost").exists, f"{loss}")
            since = float((self.place / "lost").read_text())
        else:
            self._until(lambda: steps(self.folder) > resumed, "a step")
            time.sleep(random.Random(f"{loss} {resumed}").uniform(0.0, 0.5))
            since, before = time.monotonic(), self._sizes()
            os.kill(self.children[f"{loss.kind} {loss.number}"].pid, loss.how)
        return self._ended(loss, since, before) if of_rank else self._recovered(loss, since, before)

    def _until(self, condition: Any, what: str) -> None:
        until(lambda: condition() or not self.trainer.alive, what, START_SECONDS)
        assert condition(), f"the run ended before {what}:\n{self.logs()}"

    def _end(self) -> None:
        os.kill(self.trainer.pid, signal.SIGINT)
        self.trainer.wait(60)

    def _ended(self, loss: Loss, since: float, before: dict[Path, int]) -> Outcome:
        """The run ends without the rank, and says whom it lost."""
        ranks = self._processes_of_ranks()
        others = [process for process, rank in ranks.items() if rank != loss.number]
        with suppress(Exception):
            until(lambda: not any(alive_after(*each) for each in others), "", since + 2 * self.limit - time.monotonic())
        seconds = time.monotonic() - since
        for process in ranks:
            kill(process)  # one that is stopped
        code = self.trainer.wait(self.limit)
        over = loss.boundary == "end" and loss.number > 0
        word = f"rank {loss.number} (pid " if loss.number else "lost the lead, rank 0"
        line = next((line for line in self._logged(before) if word in line), "")
        wrong = "" if seconds <= self.limit else f"others ended after {seconds:.1f} s"
        if over and (code or steps(self.folder) != self.steps):
            wrong = f"the run did not end in order, but with {code}"
        elif not over and (not line or (loss.number and code != 13)):
            wrong = f"it ended with {code}, and no error names what was lost"
        time.sleep(0.5)  # what ranks had started ends with them
        if left := [v[""] for p, v in marked(self.place).items() if p not in self._apart()]:
            wrong += f"; left running: {left}"
            for process in marked(self.place):
                if process not in self._apart():
                    kill(process)
        return Outcome(loss=loss, named=seconds, then=f"ended with {code}", line=line, wrong=wrong)

    def _recovered(self, loss: Loss, since: float, before: dict[Path, int]) -> Outcome:
        """The run says which engine is lost, and goes on when it is back, or ends."""
        url = self.engine_options()["urls"][loss.number]
        line, at = "", steps(self.folder)
        while not line and time.monotonic() < since + self.limit:
            line = next((line for line in self._logged(before) if url in line), "")
            time.sleep(0.02)
        seconds = time.monotonic() - since
        lost = self.children[f"{loss.kind} {loss.number}"]
        if loss.kind == "network" and loss.how is signal.SIGSTOP:
            os.kill(lost.pid, signal.SIGCONT)
        else:
            lost.kill()
            lost.start()
        with suppress(Exception):
            until(lambda: steps(self.folder) > at + 1 or not self.trainer.alive, "", START_SECONDS)
        code, wrong = self.trainer.code, "" if line else f"nobody named it within {self.limit:g} s"
        if self.trainer.alive and steps(self.folder) <= at + 1:
            wrong = f"it does not go on:\n{self.logs()}"
        elif code is not None and code not in ENDED:
            wrong = f"it ended with {code}:\n{self.logs()}"
        return Outcome(
            loss=loss, named=seconds, then="went on" if code is None else f"ended with {code}", line=line, wrong=wrong
        )

    def _apart(self) -> set[Identity | None]:
        return {child.identity for child in self.children.values() if child is not self.trainer}

    def _processes_of_ranks(self) -> dict[Identity, int]:
        return {p: int(v.get("RANK", 0)) for p, v in marked(self.place).items() if "rank_lost.py" in v[""]}

    def _sizes(self) -> dict[Path, int]:
        return {log: log.stat().st_size for log in self._logs()}

    def _logged(self, before: dict[Path, int]) -> list[str]:
        """Lines that ranks have logged since."""
        logs = [log for log in self._logs() if not log.name.startswith(("engine", "network"))]
        texts = [log.read_bytes()[before.get(log, 0) :].decode(errors="replace") for log in logs]
        return [line for text in texts for line in text.splitlines()]

    def compared(self) -> list[str]:
        """Train on for two steps and compare all of it with a run that lost nothing."""
        self.trained(to=steps(self.folder) + 2)
        account, place = self.account(), self.place.with_name("undisturbed")
        other = type(self)(
            place, self.lag, self.steps, self.model, ranks=self.ranks, apart=self.apart, changes=self.changes
        )
        try:
            other.trained(to=self.steps)
        finally:
            other.stop()
        doubled = [f"{account.doubled} groups were trained twice"] if account.doubled else []
        lost = [f"lost {sorted(account.lost)[:10]}"] if account.lost else []
        return [*doubled, *lost, *account.wrong, *equals(self.folder, other.folder)]

    def stop(self) -> None:
        """End all of it."""
        for child in self.children.values():
            child.kill()
        for process in marked(self.place):
            kill(process)
