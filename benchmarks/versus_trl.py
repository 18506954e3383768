"""Tandem against TRL's GRPOTrainer, on one accelerator: the time of a step by part, and memory.

    python benchmarks/versus_trl.py --halves tandem,trl --out versus.jsonl
    python benchmarks/versus_trl.py --halves tandem --tandem "small micro_batch_tokens=4096" --out more.jsonl
    python benchmarks/versus_trl.py --table versus.jsonl more.jsonl
    python benchmarks/versus_trl.py --model SmolLM2-135M-Instruct --graded gsm8k/train.jsonl --tokens 1024 \\
        --groups 32 --halves tandem,trl                                          # real text, math_verify's grades
    python benchmarks/versus_trl.py --in-turns --cache 8 --shape qwen3.5-2b      # both loaded, one of them at work
    python benchmarks/versus_trl.py --shape tiny --python .venv-engine/bin/python --halves tandem \\
        --groups 2 --siblings 2 --tokens 8 --prompt 40 --steps 3                 # on a CPU, to see that it works

Both get the same random model, the same prompts, answers of exactly so many tokens, vLLM with the same options, and are
synchronous and on-policy. Tandem's weights are the engine's (``sync: shared``); TRL's engine is colocated. A setting is
a name and what it changes: dotted overrides of Tandem's recipe, or the settings of ``_versus_trl.py``. Each setting
runs in a process of its own, for --limit seconds at most; Tandem's settings share one engine, unless --own-engine.
With --in-turns both halves start at once, and TRL stands still from its first step on until all of Tandem's settings
are measured; "card" is then what both have taken.

A step is measured from its beginning to the next one's; medians, without the first two. Useful tokens are those of
prompts and answers, a shared prompt's once for each answer. "tensors" is the peak of torch's allocations in the
trainer's process, which for TRL has the engine in it, and for Tandem neither engine nor weights. "card" is the peak
of what all processes had taken of the card, looked at ten times a second, less what it was before.
Each result is a line of --out as soon as it is there. Exits 1 if a setting failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _models import made_apart
from _versus import (
    HERE,
    TAIL,
    Card,
    Work,
    add_engine,
    add_work,
    append,
    awaited,
    end_in_order,
    ended,
    engine_options,
    environment,
    last,
    lines_of,
    read,
    summary,
    table,
    work_of,
    work_options,
)

EIGHT_BITS = "optimizer.kind=adamw8bit optimizer.precision=stochastic optimizer.gradients=bfloat16"
TANDEM = (
    "fast micro_batch_tokens=12288 checkpointing=none",
    f"lean {EIGHT_BITS} micro_batch_tokens=4096 checkpointing=selective",
    f"leanest {EIGHT_BITS} micro_batch_tokens=4096 checkpointing=full",
)
TRL = ("default", "uncorrected correction=false", "float32 weights=float32")


class Bench:
    """What all settings share."""

    def __init__(self, args: argparse.Namespace, work: Work, card: Card, logs: Path):
        self.args, self.work, self.card, self.logs = args, work, card, logs
        self.deadline = time.monotonic() + 60 * args.minutes
        self.before = card.now() or 0.0
        self.model = Path()
        self.failed = 0
        self.trl: subprocess.Popen[bytes] | None = None
        """TRL's process, while it runs."""

    def left(self) -> float:
        """Seconds."""
        return float(self.deadline - time.monotonic())

    def make(self) -> None:
        """The model, by a process of its own unless it is there."""
        if self.args.model:
            self.model = self.args.model.absolute()
            return
        self.model = made_apart(self.args.shape, self.args.folder)

    def hold(self) -> None:
        """Wait for TRL's first step, and let it stand still from then on."""
        while self.trl is None or (self.trl.poll() is None and not self.trl_began()):
            if self.left() < 0:
                raise RuntimeError("TRL has made no step in time")
            time.sleep(0.5)
        self.signal_trl(signal.SIGSTOP)

    def trl_began(self) -> bool:
        """It has made a step."""
        return any(line["kind"] == "step" for file in self.logs.glob("trl-*.jsonl") for line in read(file))

    def signal_trl(self, number: int) -> None:
        if self.trl is not None and self.trl.poll() is None:
            os.killpg(self.trl.pid, number)

    def setting(self, half: str, text: str, command: list[str], *, limit: float | None = None) -> bool:
        """Run one, and note what it found; a run that was cut leaves the steps that it made. Whether it went well.

        ``limit``, in seconds, stands for --limit.
        """
        name = text.split()[0]
        limit = min(self.args.limit if limit is None else limit, self.left())
        print(f"-- {half} {text} (at most {limit:.0f} s)", flush=True)
        lines, log = self.logs / f"{half}-{name}.jsonl", self.logs / f"{half}-{name}.log"
        self.card.mark()
        begin = time.monotonic()
        with ended(command, environment(), log) as process:
            if half == "trl":
                self.trl = process
            code, stopped = awaited(process, limit)
        if half == "tandem":
            print("".join(f"   {line[:200]}\n" for line in lines_of(log) if "WARNING" in line), end="", flush=True)
        shape = self.args.model.name if self.args.model else self.args.shape
        record = {"half": half, "setting": name, "shape": shape, **summary(read(lines))}
        if code != 0:
            self.failed += 1
            record["error"] = "not done in time" if code is None else last(log)
            print("\n".join(f"   {line[:200]}" for line in lines_of(log)[-TAIL:]), flush=True)
        if self.card.peak is not None:
            record["card_gb"] = round(self.card.peak - self.before, 2)
        record["wall"] = round(time.monotonic() - begin, 1)
        append(self.args.out, **record)
        if "mismatch" in record:
            print("   mismatch of each step:", *(f"{kl:.2e}" for kl in record["mismatch"]), flush=True)
        print(f"   {record.get('seconds', float('nan')):.3f} s a step, {record['wall']:.0f} s in all", flush=True)
        if stopped:
            raise stopped
        return code == 0


def trl(bench: Bench) -> None:
    """TRL's settings, one after another."""
    for text in bench.args.trl or TRL:
        if bench.left() < bench.args.least:
            return left_out(bench, "trl", text)
        name, *chosen = text.split()
        lines = bench.logs / f"trl-{name}.jsonl"
        command = [bench.args.trl_python or sys.executable, str(HERE / "_versus_trl.py"), str(bench.model), str(lines)]
        command += ["--utilization", str(bench.args.utilization), *work_options(bench.work), *chosen]
        limit = bench.left() if bench.args.in_turns else None  # it stands still for most of it
        bench.setting("trl", text, command, limit=limit)


def tandem(bench: Bench) -> None:
    """Tandem's settings, one after another on one engine."""
    engine = engine_options(bench.args)
    with contextlib.ExitStack() as stack:
        url = None if bench.args.own_engine else stack.enter_context(served(bench, engine))
        for text in bench.args.tandem or TANDEM:
            if bench.left() < bench.args.least:
                return left_out(bench, "tandem", text)
            name, *overrides = text.split()
            lines = bench.logs / f"tandem-{name}.jsonl"
            command = [sys.executable, str(HERE / "_versus_tandem.py"), str(bench.model), str(lines)]
            command += ["--url", url] if url else ["--engine", json.dumps(engine)]
            command += [*work_options(bench.work), *bench.args.override, *overrides]
            if bench.args.in_turns:
                bench.hold()
            bench.setting("tandem", text, command)


def left_out(bench: Bench, half: str, text: str) -> None:
    bench.failed += 1
    append(bench.args.out, half=half, setting=text.split()[0], error="no time was left for it")


@contextlib.contextmanager
def served(bench: Bench, engine: dict[str, Any]) -> Iterator[str]:
    """The engine alone, by ``tandem serve engine``; its address."""
    from _versus_tandem import options

    from tandem.ports import free_port

    port = free_port("127.0.0.1")
    recipe = bench.logs / "engine.yaml"
    plain = options(bench.work, bench.model, {**engine, "port": port}, str(bench.logs))
    recipe.write_text(json.dumps(plain), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "tandem", "serve", "engine", str(recipe)]
    log, url, begin = bench.logs / "engine.log", f"http://127.0.0.1:{port}", time.monotonic()
    limit = min(bench.args.engine_limit, bench.left())
    print(f"-- the engine (at most {limit:.0f} s)", flush=True)
    with ended(command, environment(), log) as process:
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() - begin > limit:
                shown = [line for file in (*bench.logs.rglob("*.log"),) for line in lines_of(file)[-TAIL:]]
                print("\n".join(shown), flush=True)
                raise RuntimeError("the engine did not start; its log is above")
            time.sleep(0.5)
        while f"serving at {url}" not in log.read_text(errors="replace"):  # it lends its weights first
            if process.poll() is not None or bench.left() < 0:
                raise RuntimeError(f"the engine lends nothing: {last(log)}")
            time.sleep(0.1)
        append(bench.args.out, half="engine", setting="served", start_seconds=round(time.monotonic() - begin, 1))
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


HALVES = {"tandem": tandem, "trl": trl}


def attempt(bench: Bench, half: str) -> None:
    """One half; where it fails the other one is still worth measuring."""
    try:
        HALVES[half](bench)
    except RuntimeError as error:
        bench.failed += 1
        append(bench.args.out, half=half, setting="all", error=str(error))


def in_turns(bench: Bench) -> None:
    """Both halves, TRL's in a thread."""
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(attempt, bench, "trl")
        try:
            attempt(bench, "tandem")
        except BaseException:
            bench.signal_trl(signal.SIGKILL)
            raise
        bench.signal_trl(signal.SIGCONT)
        beside.result()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, nargs="+", help="show what these files hold together, and do nothing")
    parser.add_argument("--halves", default="tandem,trl", help="comma-separated, in this order")
    parser.add_argument("--shape", default="qwen2.5-3b", help="of the model")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of random weights of that shape")
    parser.add_argument("--tandem", action="append", help="a setting: name and overrides; again for another")
    parser.add_argument("--override", action="append", default=[], help="an override of every setting of Tandem's")
    parser.add_argument("--trl", action="append", help="a setting: name and key=value; again for another")
    parser.add_argument("--in-turns", action="store_true", help="both halves at once, one of which stands still")
    parser.add_argument("--own-engine", action="store_true", help="every setting of Tandem's starts its own engine")
    add_engine(parser)
    parser.add_argument("--trl-python", help="interpreter that has TRL; by default this one")
    parser.add_argument("--minutes", type=float, default=9.0, help="all of it")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one setting")
    parser.add_argument("--engine-limit", type=float, default=300.0, help="seconds until the engine is there")
    parser.add_argument("--least", type=float, default=45.0, help="no setting begins with fewer seconds left")
    parser.add_argument("--folder", type=Path, help="for the model")
    parser.add_argument("--out", type=Path, default=Path("versus.jsonl"), help="results are appended")
    add_work(parser)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.table:
        print(table([line for file in args.table for line in read(file) if line.get("half") in HALVES]))
        return 0
    if unknown := set(args.halves.split(",")) - set(HALVES):
        raise SystemExit(f"there is no half {min(unknown)!r}; choose from {', '.join(HALVES)}")
    if args.in_turns and set(args.halves.split(",")) != set(HALVES):
        raise SystemExit(f"--in-turns needs both halves; leave --halves {args.halves} out")
    end_in_order()
    args.out = args.out.absolute()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = len(read(args.out))
    with tempfile.TemporaryDirectory(prefix="versus-") as logs, Card() as card:
        bench = Bench(args, work_of(args), card, Path(logs))
        bench.make()
        if args.in_turns:
            in_turns(bench)
        else:
            for half in args.halves.split(","):
                attempt(bench, half)
        print("\n" + table([line for line in read(args.out)[earlier:] if line.get("half") in HALVES]))
    return int(bool(bench.failed))


if __name__ == "__main__":
    raise SystemExit(main())
