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
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read as torch loads: a process that is forked may have no other thread
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

sys.path.insert(0, str(Path(__file__).parents[1]))

from kills_processes import Child, adopt_orphans, load
from kills_soak import soaked
from kills_systems import until
from kills_trials import Lane, TrialResult

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


def trials(options: argparse.Namespace, model: Path) -> list[Callable[[Path], TrialResult]]:
    """What the command line asks for; each wants a folder."""
    if options.soak:
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


def tiny_model(folder: Path) -> Path:
    """Made by a process of its own: writing it begins threads, and who forks may have none."""

    def build() -> None:
        from conftest import build_tiny_model  # type: ignore[import-not-found]

        build_tiny_model(folder / "tiny", head_dim=32)

    folder.mkdir(parents=True, exist_ok=True)
    maker = Child("model", folder, lambda: build)
    maker.start()
    until(lambda: not maker.alive, "the model", 120)
    if maker.code:
        raise SystemExit(maker.log_tail())
    return folder / "tiny"


def main() -> int:
    """Run the trials and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each set-up")
    parser.add_argument("--set-ups", nargs="+", choices=("together", "apart"), default=["together", "apart"])
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--pace", type=float, default=3.0, help="most seconds from one restart to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of a real vLLM, for together")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which is then kept")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="random faults of all kinds for so long instead")
    options = parser.parse_args()
    adopt_orphans()
    load()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        model = tiny_model(folder)
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
