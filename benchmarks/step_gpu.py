"""A training step alone, without an engine: how its time and memory scale, and where each millisecond goes.

    python benchmarks/step_gpu.py scaling --out scaling.jsonl
    python benchmarks/step_gpu.py profile --case "default"                       # torch's table of kernels
    python benchmarks/step_gpu.py scaling --shape tiny --larger tiny --tokens 512 --lengths 32,64 --times 2  # on a CPU

The loop is that of ``tandem train`` with made-up groups in the place of sampled ones. A case is a name and dotted
overrides of the recipe; ``lengths`` among them measures every length at equal tokens, besides the comparison's own
batch (16 prompts of 96 tokens, 8 answers of 256 each), or with ``only`` without it, and ``larger`` takes the larger
shape. Each case runs in a process of its own, for --limit seconds at most. Time is that of forward and backward, the
median without each batch's first time; MFU counts useful tokens, those of a shared prompt once for each answer.
Results are lines of --out as soon as they are there. Exits 1 if a case failed.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _models import made_apart
from _step_batches import Shape, of_length
from _versus import (
    HERE,
    PEAK_FLOPS,
    TAIL,
    add_work,
    aligned,
    append,
    awaited,
    end_in_order,
    ended,
    environment,
    last,
    lines_of,
    number,
    read,
    synchronize,
    work_of,
    work_options,
)

CASES = (
    "compiled lengths compile=true",
    "lora compile=true trainable.kind=lora trainable.rank=32 trainable.alpha=64",
    "larger larger compile=true",
    "eager compile=false",
    "selective compile=true checkpointing=selective",
    "full compile=true checkpointing=full",
    "fp8 compile=true matmul=fp8",
)
OWN = "comparison"
"""The batch of the comparison with TRL."""


def child(args: argparse.Namespace) -> int:
    """One case: every batch so many times, and once more to end the last."""
    import asyncio

    from _step_batches import MadeUp
    from _versus import Parts
    from _versus_tandem import instrument, options
    from transformers import AutoConfig

    from tandem.config import loading as recipes
    from tandem.trainer import assemble as run
    from tandem.trainer import environments

    shapes = [Shape(**shape) for shape in args.shapes]
    vocabulary = AutoConfig.from_pretrained(args.model).vocab_size
    parts = Parts(args.lines)
    with tempfile.TemporaryDirectory(prefix="step-run-") as runs:
        recipe = options(work_of(args), args.model, {}, runs)
        recipe |= {"steps": len(shapes) * args.times + 1, "engine": "embedded", "context": None}
        recipe["sampling"] = {"max_tokens": max(shape.answer for shape in shapes)}
        recipe["optimizer"] = {"kind": "adamw8bit", "precision": "stochastic"}  # the larger shape fits too
        loaded = recipes.from_options(recipe, args.overrides, Path("step_gpu"))
        made = MadeUp([*shapes, shapes[-1]], args.times, vocabulary)
        environments.rollout_source = lambda *_, **__: made
        instrument(parts, args.lines, work_of(args))
        if args.profile:
            profiled(len(shapes) * args.times, args.profile)  # the last time of the last batch
        asyncio.run(run.train(loaded.config, resume=None))
    return 0


def profiled(at: int, file: Path) -> None:
    """Write torch's table of what the step ``at`` (from 1) runs, forward and backward, by its time on the device."""
    import torch

    from tandem.trainer.step import Step

    train, seen = Step.forward_backward, 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = {torch.profiler.ProfilerActivity.CPU, getattr(torch.profiler.ProfilerActivity, device.upper())}
    profiler = torch.profiler.profile(activities=kinds)

    # On the thread that computes: the profiler sees the one that it was started on.
    async def watched(self: Step, batch: Any, queued: Any = lambda: None) -> Any:
        nonlocal seen
        seen += 1
        if seen != at:
            return await train(self, batch, queued)
        await self.work.policy.compute(profiler.start)
        stats = await train(self, batch, queued)
        await self.work.policy.compute(synchronize)
        await self.work.policy.compute(profiler.stop)
        averages = profiler.key_averages()
        file.write_text(averages.table(sort_by=f"self_{device}_time_total", row_limit=30), encoding="utf-8")
        return stats

    Step.forward_backward = watched  # type: ignore[assignment, method-assign]


def case(args: argparse.Namespace, text: str, deadline: float) -> tuple[list[dict[str, Any]], str]:
    """One case in a process of its own: what it found for each batch, and what went wrong, if anything."""
    name, *words = text.split()
    overrides = [word for word in words if "=" in word]
    if unknown := set(words) - set(overrides) - {"lengths", "only", "larger"}:
        raise SystemExit(f"a case has overrides, lengths, only and larger, not {min(unknown)!r}")
    work = work_of(args)
    shapes = [] if "only" in words else [Shape(OWN, work.groups, work.siblings, work.prompt, work.tokens)]
    if "lengths" in words:
        shapes += [of_length(int(length), args.equal) for length in args.lengths.split(",")]
    if not shapes:
        raise SystemExit(f"the case {name!r} measures nothing: only goes with lengths")
    limit = min(args.limit, deadline - time.monotonic())
    print(f"-- {text} (at most {limit:.0f} s)", flush=True)
    with tempfile.TemporaryDirectory(prefix="step-") as scratch:
        folder = Path(scratch)
        lines, log = folder / "lines.jsonl", folder / "log"
        shape = args.larger if "larger" in words else args.shape
        model = made_apart(shape, args.folder)
        command = [sys.executable, str(HERE / "step_gpu.py"), "child", "--model", str(model), "--lines", str(lines)]
        command += ["--shapes", json.dumps([asdict(s) for s in shapes]), "--times", str(args.times)]
        command += [*work_options(work), *(["--profile", str(folder / "profile")] if args.what == "profile" else [])]
        with ended([*command, *args.override, *overrides], environment(), log) as process:
            code, stopped = awaited(process, limit)
        records = [{"case": name, "shape": shape, **record} for record in by_batch(read(lines))]
        error = "" if code == 0 else "not done in time" if code is None else last(log)
        print("".join(f"   {line[:200]}\n" for line in lines_of(log) if "WARNING" in line), end="", flush=True)
        if error:
            print("\n".join(f"   {line[:200]}" for line in lines_of(log)[-TAIL:]), flush=True)
        if (folder / "profile").exists():
            print((folder / "profile").read_text(encoding="utf-8"), flush=True)
    for record in records:
        append(args.out, **record)
    if stopped:
        raise stopped
    return records, error


def by_batch(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A record for each kind of batch, in the order in which they came."""
    about = {key: value for line in lines if line["kind"] == "about" for key, value in line.items() if key != "kind"}
    steps = [line for line in lines if line["kind"] == "step"]
    records = []
    for batch in dict.fromkeys(step["batch"] for step in steps):
        mine = [step for step in steps if step["batch"] == batch]
        mine = mine[1:] or mine
        seconds = statistics.median(step["parts"]["forward+backward"] for step in mine)
        tokens = mine[0]["tokens"]
        records.append(
            {
                "batch": batch,
                "seconds": seconds,
                "optimizer_seconds": statistics.median(step["parts"]["optimizer"] for step in mine),
                "times": len(mine),
                "tokens": tokens,
                "computed": mine[0]["computed"],
                "micro_batches": mine[0]["micro_batches"],
                "tokens_per_second": tokens / seconds,
                "mfu_percent": 100 * 6 * about["parameters"] * tokens / seconds / PEAK_FLOPS,
                "parameters": about["parameters"],
                "peak_gb": max((s["peak_gb"] for s in mine if s["peak_gb"] is not None), default=None),
            }
        )
    return records


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Each case and batch, against the first case's own batch; lengths against the shortest."""
    rows = [["case", "shape", "batch", "ms", "optimizer", "tokens/s", "MFU %", "peak GB", "time"]]
    done = [r for r in records if r.get("seconds")]
    first = next((r for r in done if r["batch"] == OWN), None)
    for r in done:
        base = first
        if r["batch"] != OWN:
            base = next(b for b in done if b["case"] == r["case"] and b["batch"] != OWN)
        times = f"{r['seconds'] / base['seconds']:.3f}x" if base else "-"
        speed, mfu, peak = number(r["tokens_per_second"], 0), number(r["mfu_percent"], 1), number(r["peak_gb"], 1)
        ms = [f"{1000 * r[key]:.0f}" for key in ("seconds", "optimizer_seconds")]
        rows.append([r["case"], r["shape"], r["batch"], *ms, speed, mfu, peak, times])
    return aligned(rows) if done else "nothing was measured"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scaling", "profile", "child"))
    parser.add_argument("--shape", default="qwen2.5-3b")
    parser.add_argument("--larger", default="qwen2.5-7b", help="the shape of cases that say so")
    parser.add_argument("--case", action="append", help="name and overrides; again for another")
    parser.add_argument("--override", action="append", default=[], help="an override of every case")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--equal", type=int, default=49152, help="tokens of a batch of one length")
    parser.add_argument("--times", type=int, default=4, help="of each batch; the first is left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="all of it")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds of one case")
    parser.add_argument("--least", type=float, default=40.0, help="no case begins with fewer seconds left")
    parser.add_argument("--folder", type=Path, help="for the model")
    parser.add_argument("--out", type=Path, default=Path("step.jsonl"), help="results are appended")
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shapes", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    add_work(parser)
    return parser.parse_intermixed_args()


def main() -> int:
    args = arguments()
    if args.what == "child":
        return child(args)
    end_in_order()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    deadline, records, failed = time.monotonic() + 60 * args.minutes, [], []
    for text in args.case or (CASES if args.what == "scaling" else ("default",)):
        case_records, error = (
            case(args, text, deadline) if deadline - time.monotonic() > args.least else ([], "no time left")
        )
        records += case_records
        if error:
            failed.append(f"FAILED {text}: {error}")
            append(args.out, case=text.split()[0], error=error)
    print("\n" + table(records))
    print("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
