"""Sampling while training (max_lag 1) against doing one after the other, and what a step waits for besides.

    python benchmarks/overlap.py --python .venv-engine/bin/python             # on a CPU: cores split between the two
    python benchmarks/overlap.py --shape qwen2.5-3b                           # on a GPU: one card, shared
    python benchmarks/overlap.py --shape qwen2.5-3b --settings broadcast1     # two GPUs: the engine on the second

Settings: ``shared0`` and ``shared1`` train with lag 0 and 1 on weights that are the engine's own; ``broadcast1`` sends
them to an engine on the second card. Each runs in a process of its own for --limit seconds at most; those that share
have one engine between them. All are given the same random model, the same prompts and answers of exactly so many
tokens; steps are measured from beginning to beginning, medians without the first two. On one card start NVIDIA's MPS
first (docs/guide/engines.md), or the two take turns on it.

Where there is no GPU, the engine gets one half of the cores and the trainer the other, for every setting. Generation
alone is then what a step with lag 0 waits for its answers, and training alone the rest of that step, the publish
included: neither has more cores in one setting than in the other.

``lock``, ``poll`` and so on are the longest of any measured step, see ``_overlap_run.py``. Exits 1 if a setting failed
or a goal was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _models
from _versus import (
    SKIPPED,
    Card,
    add_engine,
    add_work,
    aligned,
    append,
    engine_options,
    judged,
    read,
    shown,
    work_of,
    work_options,
)
from versus_trl import Bench, end_in_order, served

HERE = Path(__file__).resolve().parent
SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
"""A model whose sampling and training take some seconds each on one core."""
ON_CPU = {"groups": 4, "siblings": 4, "tokens": 64, "prompt": 64, "steps": 9}
OF_MAX, OF_SHARED, OF_TWO, WAIT = 1.1, 0.9, 0.6, 0.050
"""Goals: lag 1 against the longer of the two halves, on a CPU; against lag 0, on a GPU; on two GPUs against lag 0 on
one; and the longest wait for a lock or a poll, in seconds."""
WAITS = ("lock", "poll", "handed", "loop", "idle")
PARTS = ("sampling", "forward+backward", "optimizer", "publish", "rest")


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started in the block has these cores alone, and as many threads; no cores: as it is."""
    if not cores:
        yield
        return
    before, threads = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


def halves() -> tuple[list[int], list[int]]:
    """Cores of the engine and of the trainer; none each where a GPU does the work, and nothing is to be split."""
    cores = sorted(os.sched_getaffinity(0))
    if on_gpu():
        return [], []
    if len(cores) < 2:
        raise SystemExit("one core cannot be split between engine and trainer: run this on two or more")
    return cores[: len(cores) // 2], cores[len(cores) // 2 :]


def run(bench: Bench, name: str, source: Sequence[str], overrides: Sequence[str], cores: Sequence[int]) -> None:
    lines = bench.logs / f"overlap-{name}.jsonl"
    command = [sys.executable, str(HERE / "_overlap_run.py"), str(bench.model), str(lines), *source]
    command += [*work_options(bench.work), *bench.args.override, *overrides]
    with pinned(cores):
        bench.setting("overlap", name, command)
    steps = [line for line in read(lines) if line["kind"] == "step"][SKIPPED:]
    waits_by_step = [line.get("waits", {}) for line in steps]
    nothing = {"seconds": 0.0, "where": ""}
    waits = {
        kind: max((each.get(kind, nothing) for each in waits_by_step), key=_seconds, default=nothing) for kind in WAITS
    }
    processor = statistics.median([line["processor"] for line in steps] or [0.0])
    append(bench.args.out, half="waits", setting=name, processor=processor, **waits)


def _seconds(wait: Mapping[str, Any]) -> float:
    return float(wait["seconds"])


def measure(bench: Bench, settings: Sequence[str]) -> None:
    engine = engine_options(bench.args)
    engine["max_num_seqs"] *= 2  # of two batches
    theirs, ours = halves()
    shared = [name for name in settings if name.startswith("shared")]
    if shared:
        with contextlib.ExitStack() as stack:
            with pinned(theirs):
                url = stack.enter_context(served(bench, engine))
            for name in shared:
                run(bench, name, ["--url", url], [f"max_lag={name[-1]}"], ours)
    if "broadcast1" in settings:
        own = {**engine, "devices": ["1"], "gpu_memory_utilization": 0.8} if on_gpu() else engine
        sync = "{kind: broadcast, tolerance: 1.0}"
        run(bench, "broadcast1", ["--engine", json.dumps(own)], [f"sync={sync}", "max_lag=1"], ours)


def report(lines: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """One table, and what it says of the goals; False if one was missed."""
    by_setting = {line["setting"]: line for line in lines if line.get("half") == "overlap"}
    waits = {line["setting"]: line for line in lines if line.get("half") == "waits"}
    rows = [["ms", "step", *PARTS, "processor", *(f"longest {kind}" for kind in WAITS)]]
    for name, of in by_setting.items():
        if of.get("seconds") and name in waits:
            cells = [of["seconds"], *(of["parts"].get(part, 0.0) for part in PARTS), waits[name]["processor"]]
            rows.append([name, *(f"{1000 * v:.0f}" for v in (*cells, *(_seconds(waits[name][k]) for k in WAITS)))])
    text, fine = [aligned(rows)], all(not of.get("error") and of.get("seconds") for of in by_setting.values())
    text += [f"FAILED {name}: {of['error']}" for name, of in by_setting.items() if of.get("error")]

    def judge(what: str, value: float, goal: float, unit: str = "") -> None:
        nonlocal fine
        line, reached = judged(what, value, goal, unit)
        fine = fine and reached
        text.append(line)

    zero, one, two = (by_setting.get(name, {}).get("seconds") for name in ("shared0", "shared1", "broadcast1"))
    if zero:
        generation = by_setting["shared0"]["parts"].get("sampling", 0.0)
        training = zero - generation
        text.append(
            f"alone: generation {generation:.3f} s, training {training:.3f} s, one after the other {zero:.3f} s"
        )
        if one and on_gpu():
            judge("lag 1 / lag 0", one / zero, OF_SHARED)
        elif one:
            text.append(f"lag 1 / lag 0: {one / zero:.3f}")
            judge("lag 1 / the longer of the two", one / max(generation, training), OF_MAX)
        if two:
            judge("two cards, lag 1 / one card, lag 0", two / zero, OF_TWO)
    for kind in ("lock", "poll"):
        longest = max((w[kind] for w in waits.values()), key=_seconds, default={"seconds": 0.0, "where": ""})
        judge(f"longest {kind} of a step {longest['where']}".rstrip(), _seconds(longest), WAIT, " s")
    return "\n".join(text), fine and bool(by_setting)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", help="of the model: small, or one of _models.SHAPES")
    parser.add_argument("--settings", default="shared0,shared1", help="comma-separated")
    parser.add_argument("--override", action="append", default=[], help="an override of every setting's recipe")
    add_engine(parser)
    parser.add_argument("--minutes", type=float, default=8.0, help="all of it")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of one setting")
    parser.add_argument("--engine-limit", type=float, default=240.0, help="seconds until the engine is there")
    parser.add_argument("--folder", type=Path, help="for the model")
    parser.add_argument("--out", type=Path, default=Path("overlap.jsonl"), help="results are appended")
    parser.add_argument("--table", type=Path, nargs="+", help="show what these files hold together, and do nothing")
    add_work(parser)
    if not on_gpu():
        parser.set_defaults(**ON_CPU)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.table:
        return shown(args.table, report)
    end_in_order()
    args.out = args.out.absolute()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = len(read(args.out))
    with tempfile.TemporaryDirectory(prefix="overlap-") as logs, Card() as card:
        bench = Bench(args, work_of(args), card, Path(logs))
        try:
            make(bench)
            measure(bench, args.settings.split(","))
        except RuntimeError as error:
            append(args.out, half="overlap", setting="all", error=str(error))
        text, fine = report(read(args.out)[earlier:])
        print("\n" + text)
    return int(not fine)


def make(bench: Bench) -> None:
    """The model: small here, others by a process of their own."""
    if bench.args.shape != "small":
        return bench.make()
    from _versus_model import made

    _models.SHAPES["small"] = SMALL
    bench.model = made("small", bench.args.folder)


if __name__ == "__main__":
    raise SystemExit(main())
