"""Sampling while training (max_lag 1) against doing one after the other.

    python benchmarks/overlap.py --python .venv-engine/bin/python             # on a CPU: cores split between the two
    python benchmarks/overlap.py --shape qwen2.5-3b                           # on a GPU: one card, shared
    python benchmarks/overlap.py --shape qwen2.5-3b --settings broadcast1     # two GPUs: the engine on the second

``shared0`` and ``shared1`` train with lag 0 and 1 on weights that are the engine's own, ``broadcast1`` sends them to an
engine on the second card. All have the same random model, prompts and answers of exactly so many tokens. On one card
start NVIDIA's MPS first (docs/guide/engines.md). Without a GPU the engine gets one half of the cores and the trainer
the other, so that generation alone is what a step with lag 0 waits for, and training alone is the rest.

    python benchmarks/overlap.py --settings shared0 --model .cache/smollm2 --turns 5 --groups 32 --tokens 64

With several turns the host is asked between them: in which share of a step the engine had no request, although the
batch was waited for, has a goal of its own. Exits 1 if a setting failed or a goal was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _versus import (
    HERE,
    Card,
    add_engine,
    add_work,
    end_in_order,
    engine_options,
    judged,
    read,
    table,
    work_of,
    work_options,
)
from versus_trl import Bench, served

ON_CPU = {"groups": 4, "siblings": 4, "tokens": 64, "prompt": 64, "steps": 9}
OF_MAX, OF_SHARED, OF_TWO = 1.1, 0.9, 0.6
"""Goals: lag 1 against the longer of the two halves, on a CPU; against lag 0, on a GPU; two cards against lag 0."""
OF_EMPTY = 0.05
"""Goal: the share of a step in which the engine has no request for want of the host."""
CUDA = torch.cuda.is_available()


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started in the block has these cores alone, and as many threads; no cores: as it is."""
    before, threads = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    if cores:
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def measure(bench: Bench, settings: Sequence[str]) -> None:
    cores = [] if CUDA else sorted(os.sched_getaffinity(0))
    theirs, ours = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    engine = engine_options(bench.args)
    engine["max_num_seqs"] *= 2  # of two batches

    def run(name: str, source: Sequence[str], overrides: Sequence[str]) -> None:
        lines = bench.logs / f"tandem-{name}.jsonl"
        command = [sys.executable, str(HERE / "_versus_tandem.py"), str(bench.model), str(lines), *source]
        with pinned(ours):
            bench.setting("tandem", name, [*command, *work_options(bench.work), *bench.args.override, *overrides])

    with contextlib.ExitStack() as stack:
        shared = [name for name in settings if name.startswith("shared")]
        if shared:
            with pinned(theirs):
                url = stack.enter_context(served(bench, engine))
        for name in shared:
            run(name, ["--url", url], [f"max_lag={name[-1]}"])
    if "broadcast1" in settings:
        own = {**engine, "devices": ["1"], "gpu_memory_utilization": 0.8} if CUDA else engine
        run("broadcast1", ["--engine", json.dumps(own)], ["sync={kind: broadcast, tolerance: 1.0}", "max_lag=1"])


def report(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Print what was found; whether every goal was reached."""
    seconds = {line["setting"]: line["seconds"] for line in lines if line.get("seconds")}
    print("\n" + table(lines))
    zero, one, two = (seconds.get(name) for name in ("shared0", "shared1", "broadcast1"))
    goals = []
    if zero and one and CUDA:
        goals.append(judged("lag 1 / lag 0", one / zero, OF_SHARED))
    elif zero and one:
        sampling = next(line["parts"]["sampling"] for line in lines if line["setting"] == "shared0")
        goals.append(judged("lag 1 / the longer of the two", one / max(sampling, zero - sampling), OF_MAX))
    if zero and two:
        goals.append(judged("two cards, lag 1 / one card, lag 0", two / zero, OF_TWO))
    for line in lines:
        if line.get("seconds") and line["setting"].startswith("shared"):
            share = line["empty"] / line["seconds"]
            goals.append(judged(f"{line['setting']}: engine without a request / step", share, OF_EMPTY))
    print("\n".join(text for text, _ in goals))
    return bool(seconds) and all(reached for _, reached in goals)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", help="of the model, see _models.SHAPES")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of random weights of that shape")
    parser.add_argument("--settings", default="shared0,shared1", help="comma-separated")
    parser.add_argument("--override", action="append", default=[], help="an override of every setting's recipe")
    add_engine(parser)
    parser.add_argument("--minutes", type=float, default=8.0, help="all of it")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of one setting")
    parser.add_argument("--engine-limit", type=float, default=240.0, help="seconds until the engine is there")
    parser.add_argument("--folder", type=Path, help="for the model")
    parser.add_argument("--out", type=Path, default=Path("overlap.jsonl"), help="results are appended")
    add_work(parser)
    parser.set_defaults(**({} if CUDA else ON_CPU))
    args = parser.parse_args()
    end_in_order()
    args.out = args.out.absolute()
    earlier = len(read(args.out))
    with tempfile.TemporaryDirectory(prefix="overlap-") as logs, Card() as card:
        bench = Bench(args, work_of(args), card, Path(logs))
        bench.make()
        measure(bench, args.settings.split(","))
    fine = report([line for line in read(args.out)[earlier:] if line.get("half") == "tandem"])
    return int(bool(bench.failed) or not fine)


if __name__ == "__main__":
    raise SystemExit(main())
