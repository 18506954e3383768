"""Kills and stops of a run's ranks at every boundary: does every other rank end by name, and is a step trained twice?

    python tests/long/rank_kills.py [--trials 60] [--ranks 3] [--at connect]

One run on a CPU (gloo, a tiny random model) is resumed again and again. In each trial one of its ranks sends SIGKILL or
SIGSTOP to itself (``rank_lost.py``) as it starts, as it joins, before or after its part of a command, or as the run
ends. All others have 20 seconds to end, with an error that names what was lost, and no process may be left. Trials go
through the boundaries in turn; in each round of them every boundary has another rank and the other signal, so that with
three ranks six rounds are all there is; ``--at`` has them go to one boundary alone. After the last trial the run trains
to its end, and so does the same run without any kill: both must have the same metrics in every step, once each, and the
same bits of weights.

Commands of vLLM's engines (``engine``, ``attach``, ``adapt``) do not occur with the embedded engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from processes import MARK, Child, kill, marked, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.config.tree import render
from tandem.errors import RankError
from tandem.processes import Identity, alive_after

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 20.0
"""From a kill to the end of all other ranks."""
CHILDREN_SECONDS = 2.0
"""From the end of all ranks to that of what they started."""
START_SECONDS = 180.0
"""Until a boundary comes."""
BOUNDARIES = (
    "start", "join", "begin", "connect", "weights", "bind", "restore", "micros", "micros after", "apply", "apply after",
    "save", "save after", "end",
)  # fmt: skip
"""Where a rank is lost: before its part of it, or after that, when no other knows of it yet."""
IN_STEPS = ("micros", "apply", "save")
"""Boundaries that come in every step: ranks are lost in the second."""
HOWS = (signal.SIGKILL, signal.SIGSTOP)
COMPARED = ("loss", "grad_norm", "reward", "entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One loss of a rank."""

    boundary: str
    rank: int
    how: signal.Signals

    @property
    def name(self) -> str:
        return f"{self.how.name} of rank {self.rank} at {self.boundary}"

    @property
    def words(self) -> str:
        """As ``rank_lost.py`` reads it."""
        command, _, moment = self.boundary.partition(" ")
        return f"{self.rank} {command} {moment or 'before'} {2 if command in IN_STEPS else 1} {int(self.how)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the other ranks."""

    trial: Trial
    seconds: float
    """From the loss to the end of the last of them."""
    named: bool | None
    """Whether an error named what was lost; None: the run was over."""

    @property
    def words(self) -> str:
        return {True: "named", False: "NOT NAMED", None: "run was over"}[self.named]


def trials(ranks: int) -> Iterator[Trial]:
    """Every boundary in turn, each time with another rank and signal."""
    for turn in range(2 * ranks):
        for place, boundary in enumerate(BOUNDARIES):
            rank = (place + turn) % ranks
            how = HOWS[(place + turn + (turn // ranks if ranks % 2 == 0 else 0)) % 2]
            if boundary != "start" or rank:  # the lead has no other ranks before it starts them
                yield Trial(boundary=boundary, rank=rank, how=how)


@dataclass
class Account:
    """What the trials showed."""

    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def wide_model(folder: Path, **options: Any) -> Path:
    """A tiny random model whose matrices are large enough to be divided among ranks."""
    tiny = tiny_model(folder / "tiny", **options)
    plain = AutoModelForCausalLM.from_pretrained(tiny)
    plain.config.hidden_size, plain.config.intermediate_size = 128, 640
    torch.manual_seed(0)
    type(plain)(plain.config).float().save_pretrained(folder / "wide")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "wide")
    return folder / "wide"


def recipe(folder: Path, model: Path, name: str, ranks: int) -> Path:
    options = {
        "model": str(model), "runs": str(folder / "runs"), "name": name, "steps": 1_000_000, "dtype": "float32",
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "groups_per_step": 2, "group_size": 4, "zero_variance_groups": "keep", "sampling": {"max_tokens": 6},
        "optimizer": {"kind": "adamw", "lr": 1e-3}, "micro_batch_tokens": 30, "threads": 1, "ranks": ranks,
        "evaluate": {"tasks": 0}, "checkpoint": {"every": 1, "keep": 2}, "loggers": [],
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(render(options), encoding="utf-8")
    return path


@contextlib.contextmanager
def training(folder: Path, target: Path, *overrides: str, lost: Mapping[str, str] | None = None) -> Iterator[Child]:
    """The lead of a run under way, with the variables of a rank that will be lost."""
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **(lost or {})}
    program = ["-m", "tandem"] if lost is None else [str(ROOT / "tests/long/rank_lost.py")]
    (folder / "lead.log").unlink(missing_ok=True)
    lead = Child("lead", folder, lambda: [*program, "train", str(target), *overrides], env)
    lead.start()
    try:
        yield lead
    finally:
        lead.kill()


def ranks_of(mark: Path) -> dict[Identity, int | None]:
    """Processes of a trial, and the rank of those that are one."""
    return {
        process: int(variables.get("RANK", 0)) if "rank_lost.py" in variables[""] else None
        for process, variables in marked(mark).items()
    }


def steps(run: Path) -> list[int]:
    """Steps that are written down, in order."""
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def lose(folder: Path, trial: Trial, account: Account, limit: float) -> Outcome | None:
    """Resume the run, lose one rank, and see how the others end."""
    run, mark = folder / "runs/run", folder / "mark"
    mark.unlink(missing_ok=True)
    logs = [run / f"logs/rank-{rank}.log" for rank in range(1, 32)]
    sizes = {log: log.stat().st_size for log in logs if log.exists()}
    until = max(steps(run)) + 2 if trial.boundary == "end" else 1_000_000
    variables = {"RANK_LOST": trial.words, MARK: str(mark)}
    with training(folder, run, f"steps={until}", lost=variables) as lead:
        deadline = time.monotonic() + START_SECONDS
        while not mark.exists():
            if not lead.alive or time.monotonic() > deadline:
                account.wrong.append(f"{trial.name}: that boundary did not come:\n{lead.log_tail(2000)}")
                return None
            time.sleep(0.02)
        since, all_of_it = float(mark.read_text()), ranks_of(mark)
        lost = [one for one, rank in all_of_it.items() if rank == trial.rank]
        others = [one for one, rank in all_of_it.items() if rank not in (None, trial.rank)]
        while any(alive_after(*other) for other in others) and time.monotonic() < since + 3 * limit:
            time.sleep(0.02)
        seconds = time.monotonic() - since
        for process in lost:
            kill(process)  # one that is stopped; its own children, such as graders, end with it
        deadline = time.monotonic() + CHILDREN_SECONDS
        while (
            left := [one for one in all_of_it | ranks_of(mark) if alive_after(*one)]
        ) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in left:
            kill(process)
        code = lead.wait(limit)
    texts = [log.read_bytes()[sizes.get(log, 0) :].decode(errors="replace") for log in logs if log.exists()]
    output = (folder / "lead.log").read_text() if trial.rank else "".join(texts)
    named = (
        f"rank {trial.rank} (pid " in output and "was lost" in output
        if trial.rank
        else "lost the lead, rank 0" in output
    )
    over = trial.boundary == "end" and trial.rank > 0
    outcome = Outcome(trial=trial, seconds=seconds, named=None if over else named)
    if seconds > limit:
        account.wrong.append(f"{trial.name}: the others ended after {seconds:.1f} s")
    if outcome.named is False:
        account.wrong.append(f"{trial.name}: no error names what was lost:\n{output[-2000:]}")
    if trial.rank and not over and code != RankError.exit_code:
        account.wrong.append(f"{trial.name}: the lead ended with {code}:\n{output[-2000:]}")
    if over and (code or max(steps(run)) != until):
        account.wrong.append(f"{trial.name}: the run did not end in order, but with {code}")
    if left:
        account.wrong.append(f"{trial.name}: {len(left)} processes are left")
    return outcome


def compare(folder: Path, model: Path, ranks: int, account: Account) -> None:
    """Train the killed run and an undisturbed one to the same step, and compare every step of both."""
    run, last = folder / "runs" / "run", max(steps(folder / "runs" / "run")) + 2
    for target in (run, recipe(folder, model, "undisturbed", ranks)):
        with training(folder, target, f"steps={last}") as lead:
            if lead.wait(START_SECONDS + 2.0 * last):
                account.wrong.append(f"{target} did not end: {lead.log_tail(2000)}")
                return
    runs = [run, folder / "runs" / "undisturbed"]
    rows = [[json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in runs]
    if [row["step"] for row in rows[0]] != list(range(1, last + 1)):
        account.wrong.append(f"steps of the killed run: {[row['step'] for row in rows[0]]}")
    for mine, theirs in zip(*rows, strict=False):
        for name in COMPARED:
            if mine["metrics"].get(name) != theirs["metrics"].get(name):
                account.wrong.append(f"step {mine['step']}: {name} is not what it is without kills")
    weights = [load_file(next((r / f"checkpoints/{last:06d}/model").glob("*.safetensors"))) for r in runs]
    differing = [name for name in weights[1] if not weights[0][name].equal(weights[1][name])]
    if differing:
        account.wrong.append(f"weights differ after step {last}: {differing}")
    print(f"{last} steps with and without kills compared", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each trial, in the order of the boundaries."""
    rows = [("boundary", "rank", "signal", "seconds", "named")]
    for one in sorted(outcomes, key=lambda one: (BOUNDARIES.index(one.trial.boundary), one.trial.rank, one.trial.how)):
        trial = one.trial
        rows.append((trial.boundary, str(trial.rank), trial.how.name, f"{one.seconds:.1f}", one.words))
    return "\n".join("{:<14}{:>4}  {:<9}{:>7}  {}".format(*row) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=END_SECONDS, help="limit of an end; more on a busy machine")
    parser.add_argument("--at", choices=BOUNDARIES, help="this boundary alone")
    args = parser.parse_args()
    wanted = [trial for trial in trials(args.ranks) if args.at in (None, trial.boundary)]
    account = Account()
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as scratch:
        folder = Path(scratch)
        model = wide_model(folder / "model")
        with training(folder, recipe(folder, model, "run", args.ranks), "steps=2") as lead:
            if lead.wait(START_SECONDS):
                raise SystemExit(f"the run trains nothing:\n{lead.log_tail()}")
        for trial in islice(cycle(wanted), args.trials):
            if (outcome := lose(folder, trial, account, args.seconds)) is not None:
                account.outcomes.append(outcome)
                at = f"{outcome.seconds:.1f} s, {outcome.words}, step {max(steps(folder / 'runs/run'))}"
                print(f"{trial.name}: {at}", flush=True)
        compare(folder, model, args.ranks, account)
    print(table(account.outcomes))
    longest = max((outcome.seconds for outcome in account.outcomes), default=0.0)
    print(f"{len(account.outcomes)} trials; to the end {longest:.1f} s at most, {len(account.wrong)} wrong")
    print("\n".join(account.wrong))
    return int(bool(account.wrong))


if __name__ == "__main__":
    sys.exit(main())
