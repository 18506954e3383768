"""Everything that needs an accelerator, in one command, for a machine with one or more GPUs and no network.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --parts unit,memory,sync --out results
    python benchmarks/gpu.py --parts matrix --only "shared and full"

Needs an interpreter that has torch with CUDA, vLLM and the trainer's packages (vLLM may come by PYTHONPATH), and pytest
with pytest-timeout and hypothesis for the tests. Each part runs in processes of its own with a time limit, and ends in
one line: PASS, FAIL, or NOT RUN with the reason. In the parts where nothing may be skipped a skipped test is a failure.
Logs and results go to --out: PART.log, and gpu.jsonl. Options that are not known here go to the part's benchmark. Exits
1 unless every part that was asked for passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PYTEST = "-m pytest -q -rs --long --maxfail=6 --tb=short --durations=15 -o filterwarnings=default -p no:cacheprovider"
VLLM = "tests/integration/test_vllm.py"
UNIT = (
    "tests/unit/test_sharing.py tests/unit/test_merged.py tests/unit/test_checksums.py tests/unit/test_collective.py "
    "tests/contract/test_optimizers.py tests/unit/test_optimizers_narrow.py tests/unit/test_vllm_adapter.py "
    "tests/unit/test_vllm_receive.py"
)
STEP = (
    "tests/unit/test_varlen.py tests/unit/test_attention.py tests/unit/test_pending.py tests/unit/test_layers.py "
    "tests/unit/test_layers_whole.py tests/unit/test_float8.py tests/unit/test_logprobs.py "
    "tests/unit/test_rewards_model.py"
)
WAYS = ("shared and full", "shared and not full", "broadcast and full", "hotswap or broadcast and not full", "restart")
REFUSED = " and ".join(f"not ({way})" for way in WAYS)
MATRIX = (
    *(f'{VLLM} -k "({way}) and not tp2"' for way in (*WAYS, REFUSED)),
    'tests/integration/test_vllm_kill.py -k "killed_engine"',
    'tests/integration/test_vllm_kill.py -k "not killed_engine"',
    "tests/integration/test_vllm_http.py",
)


@dataclass(frozen=True)
class Part:
    """One thing to run."""

    about: str
    commands: tuple[str, ...]
    """Of this interpreter, with {out}, {shape} and {minutes}; several run beside each other. tests/ are pytest's."""
    limit: int
    """Seconds; about half of it is expected."""
    cards: int = 1
    may_skip: bool = True
    """Whether tests may be skipped."""


def sync(options: str) -> tuple[str, ...]:
    return (f"benchmarks/sync.py --shape {{shape}} --json {{out}}/sync.jsonl {options}",)


def timed(script: str, options: str) -> tuple[str, ...]:
    """A benchmark that ends by itself."""
    name = Path(script).stem
    return (f"benchmarks/{script} {options} --shape {{shape}} --minutes {{minutes}} --out {{out}}/{name}.jsonl",)


PARTS = {
    "unit": Part("CUDA unit tests: sharing, merged, checksums, collective, optimizers", (UNIT,), 300),
    "step": Part("CUDA tests of a step: attention kernel, no waits, compiled layers, fp8", (STEP,), 400),
    "memory": Part("the memory plan beside a step", ("benchmarks/memory.py --json {out}/memory.json",), 500),
    "matrix": Part("every way against vLLM, tiny model, with CUDA IPC", MATRIX, 535, may_skip=False),
    "cards": Part(
        "broadcast to an engine on other cards by NCCL",
        (f'{VLLM} -k "broadcast and not tp2"', f'{VLLM} -k "tp2"'),
        400,
        cards=2,
        may_skip=False,
    ),
    "asleep": Part("engines that sleep while a step is trained", (f'{VLLM} -k "asleep"',), 500, may_skip=False),
    "faults": Part("the fault bench", ("tests/long/faults.py --json {out}/faults.json",), 400),
    "sync": Part("plain engine, shared, merged", sync("--ways plain,shared,merged"), 500),
    "lora": Part("an adapter in memory, and by hot swap", sync("--ways shared-lora,hotswap"), 400),
    "swaps": Part(
        "1,000 hot swaps under load",
        sync("--ways swaps --requests 32 --tokens 64 --repeat 1 --swap-seconds 800"),
        1000,
    ),
    "broadcast": Part(
        "weights and adapter to an engine on a second card, NCCL",
        sync("--ways broadcast,broadcast-lora --devices 1 --publishes 30"),
        400,
        cards=2,
    ),
    "tp2": Part(
        "an engine over two cards beside the trainer's, fed by NCCL",
        sync("--ways broadcast,broadcast-lora --devices 1,2 --tensor-parallel 2 --publishes 30"),
        400,
        cards=3,
    ),
    "versus-tandem": Part("Tandem beside TRL: Tandem's settings", timed("versus_trl.py", "--halves tandem"), 550),
    "versus-trl": Part("Tandem beside TRL: TRL's settings", timed("versus_trl.py", "--halves trl"), 550),
    "overlap": Part("lag 1 beside lag 0 on one card", timed("overlap.py", "--settings shared0,shared1"), 400),
    "overlap-two": Part(
        "and with the engine on a card of its own", timed("overlap.py", "--settings shared0,broadcast1"), 550, cards=2
    ),
    "pairs": Part("ranks of two cards beside one card and TRL", timed("pairs.py", ""), 1150, cards=2),
    "sharded": Part(
        "a 7B shape, sharded weights, shared sequences",
        timed("pairs.py", "--settings seven,sharded,context"),
        1150,
        cards=2,
    ),
    "decoding": Part("what logprobs cost", ("benchmarks/decoding.py --shape {shape} --requests 32 128",), 300),
    "scaling": Part("a training step by length, shape, adapter", timed("step_gpu.py", "scaling"), 550),
    "profile": Part("the kernels of a training step", timed("step_gpu.py", "profile"), 200),
}


def run(name: str, args: argparse.Namespace, limit: float) -> tuple[str, str]:
    """One part; its verdict and what is to be told of it."""
    part, begin = PARTS[name], time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        logs = [args.out / f"{name}{f'-{i}' if i else ''}.log" for i in range(len(part.commands))]
        waiting = [pool.submit(process, *each, args, begin + limit) for each in zip(part.commands, logs, strict=True)]
        codes = [one.result() for one in waiting]
    summary = f"{time.monotonic() - begin:.0f} s"
    text = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    counts = [
        re.findall(r"^=*\s*(\d+ (?:passed|failed|skipped|error|deselected).*?) in ", one, re.MULTILINE) for one in text
    ]
    summary = " | ".join([summary, *(lines[-1] for lines in counts if lines)])
    for log, one, code in zip(logs, text, codes, strict=True):
        tail = [line[:220] for line in one.splitlines()][-180 if code == 0 else -60 :]
        print("\n     ".join([f"     == {log.name}", *tail]), flush=True)
    # 5 is pytest's: nothing was chosen, which --only does to all commands but one.
    bad = [code for code in codes if code and not (code == 5 and args.only)]
    skipped = not part.may_skip and any("skipped" in lines[-1] for lines in counts if lines)
    return ("FAIL" if bad or skipped or 0 not in codes else "PASS"), summary


def process(command: str, log: Path, args: argparse.Namespace, deadline: float) -> int:
    """Exit status of one command, with its log; 124: it was not done in time."""
    minutes = max(0.5, (deadline - time.monotonic() - 25) / 60)
    words = shlex.split(command.format(out=args.out, shape=args.shape, minutes=f"{minutes:.1f}"))
    if command.startswith("tests/") and not command.startswith("tests/long"):
        if args.only:
            words = (
                [*words, "-k", args.only] if "-k" not in words else [*words[:-1], f"({words[-1]}) and ({args.only})"]
            )
        words = [*PYTEST.split(), *words]
    else:
        words += args.extra
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return child.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            time.sleep(10)  # its engines see within seconds that it is gone, and give their memory back
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; by default all")
    parser.add_argument("--list", action="store_true", help="tell the parts and their limits")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-")))
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins or goes on after that")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 4) // 3), help="tests beside each other")
    parser.add_argument("--shape", default="qwen2.5-3b", help="of the benchmarks")
    parser.add_argument("--only", default="", help="pytest's -k")
    args, extra = parser.parse_known_args()
    args.extra = extra  # for the benchmark that a part runs
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:<13} {part.cards} card{'s' * (part.cards > 1):<2} at most {part.limit:>5} s   {part.about}")
        return 0
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"there is no part {min(unknown)!r}; choose from {', '.join(PARTS)}")
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    have, deadline, verdicts = torch.cuda.device_count(), time.monotonic() + 60 * args.minutes, []
    for name in wanted:
        part, left = PARTS[name], deadline - time.monotonic()
        if part.cards > have:
            verdict, summary = "NOT RUN", f"needs {part.cards} cards, here are {have}"
        elif left < 60:
            verdict, summary = "NOT RUN", f"{max(left, 0):.0f} s are left of --minutes {args.minutes:g}"
        else:
            print(f"---- {name}: {part.about} (at most {min(part.limit, left):.0f} s)", flush=True)
            verdict, summary = run(name, args, min(part.limit, left))
        print(f"{verdict:<8} {name}: {summary}", flush=True)
        verdicts.append({"part": name, "verdict": verdict, "said": summary})
        with (args.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdicts[-1]) + "\n")
    print("\n" + "\n".join(f"{v['verdict']:<8} {v['part']:<13} {v['said']}" for v in verdicts))
    return int(any(v["verdict"] != "PASS" for v in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
