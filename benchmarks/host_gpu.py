"""What the host adds to a step of a real run, on one accelerator: short answers, graded answers, and a publish by part.

    python benchmarks/host_gpu.py --model SmolLM2-135M-Instruct --data gsm8k/train.jsonl
    python benchmarks/host_gpu.py --model .cache/smollm2 --data gsm8k/train.jsonl --python .venv-engine/bin/python \\
        --groups 2 --siblings 2 --tokens 8 --steps 3                              # on a CPU, to see that it works

One vLLM serves three runs, one after another, each of the loop of ``tandem train`` with ``sync: shared``:

- short: 64 x 8 answers of 4 tokens, a trivial reward: hardly anything but the host's work
- trivial: 64 x 8 answers to GSM8K of --tokens at most, the same reward
- graded: the same answers, math_verify and the format

Medians of a step's milliseconds without the first two: of the whole, of what is waited for, of a publish by part, and
of how long the engine stood still; and the trainer's processor time for each rollout: of all its threads (one that
waits for the device spins) and of its event loop, where requests, answers and grades are. The settings are run through
--rounds times in turns, and the last time counts: the first to meet a length compiles for it.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _versus import add_engine, aligned, append, timed_calls
from versus_trl import awaited, end_in_order, ended, environment, lines_of

from tandem.config import loading as recipes
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.metrics import flatten, merge
from tandem.observability.emit import Telemetry
from tandem.ports import free_port
from tandem.trainer import assemble as run
from tandem.trainer.checkpoint import Checkpoints
from tandem.trainer.step import Step
from tandem.weight_sync.transaction.trained import Trained

SKIPPED = 2
SETTINGS = ("short", "trivial", "graded")
PARTS = {"pause": "pause", "checksums": "sums there", "probe": "probe", "set_version": "stamp", "resume": "resume"}
"""What a publish asks of the engine, and what it is called here."""
ROWS = (
    "step", "wait", "forward_backward", "pack", "sync", "stood still", *PARTS.values(), "optimizer", "sums here",
    "scores here", "grading, summed over groups", "processor time of a rollout", "of which its event loop",
)  # fmt: skip


def recipe(args: argparse.Namespace, setting: str, engine: dict[str, Any], runs: str) -> dict[str, Any]:
    """What is run."""
    cuda = torch.cuda.is_available()
    rewards = {} if setting == "graded" else {"rewards": {"even": {"kind": "_versus:even"}}}
    return {
        "model": str(args.model),
        "steps": args.steps + SKIPPED,
        "env": {"kind": "gsm8k", "path": str(args.data)},
        **rewards,
        "groups_per_step": args.groups,
        "group_size": args.siblings,
        "sampling": {"max_tokens": 4 if setting == "short" else args.tokens},
        "zero_variance_groups": "keep",
        "context": max(512, 256 + args.tokens),
        "engine": {"kind": "vllm", **engine},
        "sync": {"kind": "shared"},
        "dtype": "bfloat16" if cuda else "float32",
        "optimizer": {"lr": 1e-6},
        "micro_batch_tokens": 16384 if cuda else 1024,
        "evaluate": {"tasks": 0},
        "loggers": [],
        "runs": runs,
    }


def one(args: argparse.Namespace) -> None:
    """A setting, in this process; its steps are lines of a file."""
    seconds: dict[str, float] = {}
    before, looped = time.process_time(), time.thread_time()
    loop, rollouts = threading.main_thread(), args.groups * args.siblings

    timed = partial(timed_calls, seconds)

    def emit_timed(self: Telemetry, step: int, parts: Any) -> Any:
        nonlocal before, looped
        parts = list(parts)
        numbers, now = flatten(merge(parts)), time.process_time()
        loop_now = time.clock_gettime(time.pthread_getcpuclockid(loop.ident or 0))
        row = {
            "step": numbers["seconds/step"],
            **{name: numbers.get(f"seconds/{name}", 0.0) for name in ("wait", "forward_backward", "pack", "sync")},
            "stood still": numbers.get("engine/paused_seconds", 0.0),
            "grading, summed over groups": numbers.get("seconds/grading", 0.0),
            "processor time of a rollout": (now - before) / rollouts,
            "of which its event loop": (loop_now - looped) / rollouts,
            **seconds,
        }
        before, looped = now, loop_now
        seconds.clear()
        with args.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return emit(self, step, parts)

    async def not_saved(self: Checkpoints, state: Any) -> bool:
        return False

    emit = Telemetry.emit
    changed: dict[tuple[Any, str], Any] = {
        **{(VllmEngine, method): timed(name, getattr(VllmEngine, method)) for method, name in PARTS.items()},
        (Step, "apply"): timed("optimizer", Step.apply),
        (Trained, "checksums"): timed("sums here", Trained.checksums),
        (Trained, "scores"): timed("scores here", Trained.scores),
        (Telemetry, "emit"): emit_timed,
        (Checkpoints, "save"): not_saved,
    }
    for (owner, name), value in changed.items():
        setattr(owner, name, value)
    with tempfile.TemporaryDirectory(prefix="host-run-") as runs:
        options = recipe(args, args.one, {"urls": [args.url]}, runs)
        asyncio.run(run.train(recipes.from_options(options, args.overrides, Path("host_gpu")).config, resume=None))


@contextlib.contextmanager
def served(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The engine of all three; its address."""
    port = free_port("127.0.0.1")
    where: dict[str, Any] = {"gpu_memory_utilization": args.utilization}
    if not torch.cuda.is_available():
        where = {"kv_cache_gb": 0.5, "enforce_eager": True}
    engine = {"max_num_seqs": args.groups * args.siblings, "port": port, "args": args.engine_args, **where}
    engine |= {"python": args.python} if args.python else {}
    file, log = folder / "engine.json", folder / "engine.log"
    file.write_text(json.dumps(recipe(args, "trivial", engine, str(folder))), encoding="utf-8")  # JSON is YAML
    url, begin = f"http://127.0.0.1:{port}", time.monotonic()
    with ended([sys.executable, "-m", "tandem", "serve", "engine", str(file)], environment(), log) as process:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                answer.read()
                break
            if process.poll() is not None or time.monotonic() - begin > args.engine_limit:
                shown = [line for path in folder.rglob("*.log") for line in lines_of(path)[-40:]]
                raise SystemExit("the engine did not start:\n" + "\n".join(shown))
            time.sleep(0.5)
        print(f"the engine was there after {time.monotonic() - begin:.0f} s", flush=True)
        yield url


@contextlib.contextmanager
def kept(medians: dict[str, dict[str, float]], file: Path | None) -> Iterator[None]:
    """Append what was measured in the block to a file, also where the block is ended by a signal."""
    try:
        yield
    finally:
        if file and medians:
            append(file, **medians)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="most of an answer to GSM8K")
    parser.add_argument("--steps", type=int, default=12, help="that are measured")
    parser.add_argument("--rounds", type=int, default=2, help="through all settings, of which the last counts")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of one setting")
    parser.add_argument("--engine-limit", type=float, default=400.0, help="seconds until the engine is there")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--json", type=Path, help="append the medians here")
    add_engine(parser)
    parser.add_argument("--one", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    args = parser.parse_intermixed_args()
    if args.one:
        one(args)
        return 0
    end_in_order()
    medians: dict[str, dict[str, float]] = {}
    with (
        kept(medians, args.json),
        tempfile.TemporaryDirectory(prefix="host-gpu-") as scratch,
        served(args, Path(scratch)) as url,
    ):
        for number, setting in itertools.product(range(args.rounds), args.settings):
            lines, log = (Path(scratch) / f"{setting}-{number}.{end}" for end in ("jsonl", "log"))
            options = [*sys.argv[1:], "--one", setting, "--url", url, "--lines", str(lines)]
            with ended([sys.executable, __file__, *options], environment(), log) as process:
                _, stopped = awaited(process, args.limit)
            rows = [json.loads(line) for line in lines_of(lines)][SKIPPED:]
            if not rows:
                print(f"{setting} made no step in time:\n" + "\n".join(lines_of(log)[-40:]), flush=True)
            else:
                medians[setting] = {name: 1000 * statistics.median(row.get(name, 0.0) for row in rows) for name in ROWS}
                print(f"{setting}: {len(rows)} steps of {medians[setting]['step']:.0f} ms", flush=True)
            if stopped:
                raise stopped
    table = [["ms, medians", *medians], *([name, *(f"{of[name]:.2f}" for of in medians.values())] for name in ROWS)]
    print(aligned(table))
    if {"trivial", "graded"} <= medians.keys():
        print(f"graded against trivial: {medians['graded']['step'] / medians['trivial']['step']:.3f} (goal <= 1.15)")
    return int(medians.keys() != set(args.settings))


if __name__ == "__main__":
    raise SystemExit(main())
