"""Everything that needs an accelerator, in one command, for a machine with one or more H200s and no network.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --parts unit,kernel,sync --out results
    python benchmarks/gpu.py --parts matrix --only "shared and full"

Needs an interpreter that has torch with CUDA, vLLM and the trainer's packages (vLLM may come by PYTHONPATH), and pytest
with pytest-timeout and hypothesis for the tests. Each part runs in a process of its own, with a time limit of its own,
and ends in one line: PASS, FAIL, or NOT RUN with the reason. Tests that were skipped are listed with their reasons, and
in the parts where nothing may be skipped they count as failures. Logs and results go to --out (or $OUT): PART.log, and
gpu.jsonl with one line for each result. Exits 1 unless every part that was asked for passed.
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
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
PYTEST = "-q --long --maxfail=6 --tb=short --durations=15 -o filterwarnings=default -p no:cacheprovider"
TAIL = 60
"""Lines of a failed part's log that are shown."""
Command = Callable[[argparse.Namespace, Path], list[str]]
"""Makes a command line from the options and a folder for results."""


@dataclass(frozen=True)
class Part:
    """One thing to run."""

    about: str
    command: Command | dict[str, Command]
    """What to run; several by name run beside each other, --jobs at a time."""
    seconds: int
    """Expected."""
    limit: int
    """Ended after so many."""
    cards: int = 1
    tests: bool = False
    may_skip: bool = True
    """Whether tests may be skipped, with their reasons shown."""
    environment: dict[str, str] = field(default_factory=dict)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def suite(*files: str, chosen: str = "") -> Command:
    """pytest over files, in the tier of all tests; warnings of other versions of other packages are no errors here."""

    def command(args: argparse.Namespace, out: Path) -> list[str]:
        both = " and ".join(f"({expression})" for expression in (chosen, args.only) if expression)
        plain = f"{PYTEST} --junitxml={out / 'junit.xml'}".split()
        return python("-m", "pytest", *plain, *(["-k", both] if both else []), *[str(ROOT / file) for file in files])

    return command


def _matrix() -> dict[str, Command]:
    """The tests against a real vLLM that one card is enough for, in piles that run beside each other."""
    at = "tests/integration/"
    ways = {
        "shared": "shared and full",
        "adapter": "shared and not full",
        "broadcast": "broadcast and full",
        "others": "hotswap or broadcast and not full",
        "restart": "restart",
    }
    ways["refused"] = " and ".join(f"not ({way})" for way in ways.values())
    return {
        **{pile: suite(f"{at}test_vllm.py", chosen=f"({way}) and not tp2") for pile, way in ways.items()},
        "killed": suite(f"{at}test_vllm_kill.py", chosen="killed_engine"),
        "orphaned": suite(f"{at}test_vllm_kill.py", chosen="not killed_engine"),
        "http": suite(f"{at}test_vllm_http.py"),
    }


def sync(*arguments: str) -> Command:
    """The sync benchmark, on the shape asked for."""

    def command(args: argparse.Namespace, out: Path) -> list[str]:
        shape = [] if "--shape" in arguments else ["--shape", args.shape]
        return python(str(HERE / "sync.py"), *shape, "--json", str(out / "gpu.jsonl"), *arguments, *args.extra)

    return command


def faults(args: argparse.Namespace, out: Path) -> list[str]:
    return python(str(ROOT / "tests" / "long" / "faults.py"), "--json", str(out / "faults.json"))


def memory(args: argparse.Namespace, out: Path) -> list[str]:
    return python(str(HERE / "memory.py"), "--json", str(out / "memory.json"), *args.extra)


def versus(half: str) -> Command:
    """One half of the comparison with TRL."""

    def command(args: argparse.Namespace, out: Path) -> list[str]:
        what = ["--halves", half, "--shape", args.shape, "--out", str(out / "versus.jsonl")]
        return python(str(HERE / "versus_trl.py"), *what, "--minutes", str(args.minutes - 0.4), *args.extra)

    return command


def step(what: str) -> Command:
    """The step alone, without an engine."""

    def command(args: argparse.Namespace, out: Path) -> list[str]:
        flags = [what, "--shape", args.shape, "--out", str(out / f"{what}.jsonl"), "--minutes", str(args.minutes - 0.4)]
        return python(str(HERE / "step_gpu.py"), *flags, *args.extra)

    return command


def overlap(settings: str) -> Command:
    """Steps at lag 0 and 1."""

    def command(args: argparse.Namespace, out: Path) -> list[str]:
        flags = ["--shape", args.shape, "--settings", settings, "--minutes", str(args.minutes - 0.4)]
        return python(str(HERE / "overlap.py"), *flags, "--out", str(out / "overlap.jsonl"), *args.extra)

    return command


def pairs(settings: str) -> Command:
    """Ranks on two cards."""

    def command(args: argparse.Namespace, out: Path) -> list[str]:
        flags = ["--shape", args.shape, "--settings", settings, "--minutes", str(args.minutes - 0.4)]
        return python(str(HERE / "pairs.py"), *flags, "--out", str(out / "pairs.jsonl"), *args.extra)

    return command


def decoding(args: argparse.Namespace, out: Path) -> list[str]:
    return python(str(HERE / "decoding.py"), "--shape", args.shape, "--requests", "32", "128", "--profile", *args.extra)


def itself(job: str) -> Command:
    def command(args: argparse.Namespace, out: Path) -> list[str]:
        return python(str(HERE / "gpu.py"), "--job", job, "--out", str(out))

    return command


UNIT = (
    "tests/unit/test_sharing.py",
    "tests/unit/test_merged.py",
    "tests/unit/test_checksums.py",
    "tests/unit/test_collective.py",
    "tests/contract/test_optimizers.py",
    "tests/unit/test_optimizers_narrow.py",
    "tests/unit/test_vllm_adapter.py",
    "tests/unit/test_vllm_receive.py",
)
STEP = (
    "tests/unit/test_varlen.py",
    "tests/unit/test_attention.py",
    "tests/unit/test_pending.py",
    "tests/unit/test_layers.py",
    "tests/unit/test_layers_whole.py",
    "tests/unit/test_float8.py",
    "tests/unit/test_logprobs.py",
    "tests/unit/test_rewards_model.py",
)
PARTS: dict[str, Part] = {
    "unit": Part(
        "CUDA unit tests: sharing, merged, checksums, collective, optimizers", suite(*UNIT), 120, 300, tests=True
    ),
    "step": Part(
        "CUDA tests of a step: attention kernel, no waits, compiled layers, fp8", suite(*STEP), 200, 400, tests=True
    ),
    "memory": Part("the memory plan beside what a step takes", memory, 240, 500),
    "kernel": Part("bandwidth of the checksum kernel", itself("kernel"), 25, 120),
    "matrix": Part(
        "every way against vLLM, tiny model, with CUDA IPC",
        _matrix(),
        300,
        535,
        tests=True,
        may_skip=False,
    ),
    "cards": Part(
        "broadcast to an engine on a card of its own by NCCL, and to one over two cards (NCCL from three cards on)",
        {
            "one": suite("tests/integration/test_vllm.py", chosen="broadcast and not tp2"),
            "two": suite("tests/integration/test_vllm.py", chosen="tp2"),
        },
        200,
        400,
        cards=2,
        tests=True,
        may_skip=False,
    ),
    "sync": Part("plain engine, shared, merged", sync("--ways", "plain,shared,merged"), 330, 500),
    "lora": Part("an adapter in memory, and by hot swap", sync("--ways", "shared-lora,hotswap"), 240, 400),
    "swaps": Part(
        "1,000 hot swaps under load",
        sync("--ways", "swaps", "--requests", "32", "--tokens", "64", "--repeat", "1", "--swap-seconds", "800"),
        700,
        1000,
    ),
    "faults": Part("the fault bench", faults, 240, 400),
    "broadcast": Part(
        "weights and adapter to an engine on a second card, NCCL",
        sync("--ways", "broadcast,broadcast-lora", "--devices", "1", "--publishes", "30"),
        240,
        400,
        cards=2,
    ),
    "tp2-gloo": Part(
        "an engine over both cards, fed by gloo: NCCL refuses two ranks on one card",
        sync(
            "--ways", "broadcast", "--devices", "0,1", "--tensor-parallel", "2", "--backend", "gloo", "--publishes", "5"
        ),
        180,
        400,
        cards=2,
    ),
    "tp2": Part(
        "an engine over two cards beside the trainer's, fed by NCCL",
        sync("--ways", "broadcast,broadcast-lora", "--devices", "1,2", "--tensor-parallel", "2", "--publishes", "30"),
        240,
        400,
        cards=3,
    ),
    "versus-tandem": Part("Tandem's half of the comparison with TRL, a few settings", versus("tandem"), 420, 550),
    "versus-trl": Part("TRL's half", versus("trl"), 420, 550),
    "overlap": Part("lag 1 beside lag 0 on one card", overlap("shared0,shared1"), 260, 400),
    "overlap-two": Part(
        "the same, and lag 1 with the engine on a card of its own",
        overlap("shared0,shared1,broadcast1"),
        450,
        550,
        cards=2,
    ),
    "pairs": Part(
        "two ranks, each with an engine on its card, beside one card and beside TRL with FSDP2 and colocated vLLM",
        pairs("pairs,pairs-half,one,trl"),
        500,
        560,
        cards=2,
    ),
    "sharded": Part(
        "a 7B shape on two cards, sharded weights with an engine over both, and sequences that two cards share",
        pairs("seven,sharded,context"),
        480,
        560,
        cards=2,
    ),
    "asleep": Part(
        "engines that sleep while a step is trained",
        suite("tests/integration/test_vllm.py", chosen="asleep"),
        300,
        500,
        tests=True,
        may_skip=False,
    ),
    "decoding": Part("what logprobs cost while vLLM decodes, with a profile", decoding, 160, 300),
    "scaling": Part("a training step by length, shape, adapter, compilation, checkpointing", step("scaling"), 420, 550),
    "profile": Part("where each millisecond of a training step goes", step("profile"), 90, 200),
}


# What runs in this file


def kernel(out: Path) -> int:
    """Checksums of as many bytes as a 3B model has, contiguous and in slices of fused tensors, against a copy."""
    import torch

    from tandem.transport.checksums import ChecksumTally, Shard

    torch.manual_seed(0)
    fused = [torch.randn(2 * 11008, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(36)]
    whole = [torch.randn(11008, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(36)]
    slices = [(f"{i}.{j}", t[j * 11008 : (j + 1) * 11008]) for i, t in enumerate(fused) for j in range(2)]
    columns = [(f"{i}.{j}", t[:, j * 2048 : (j + 1) * 2048]) for i, t in enumerate(whole) for j in range(2)]
    cases = {
        "contiguous": [(str(i), t) for i, t in enumerate(whole)],
        "row slices": slices,
        "column slices": columns,
        "float32": [(str(i), t.float()) for i, t in enumerate(whole[:18])],
    }
    worst = float("inf")
    for name, named in cases.items():
        size = sum(t.nbytes for _, t in named)
        tally = ChecksumTally(Shard(key, t) for key, t in named)
        here = tally.take()
        there = ChecksumTally(Shard(key, t.cpu()) for key, t in named[:2]).take()
        assert all(here[key] == value for key, value in there.items()), f"{name}: CPU and CUDA disagree"
        tally.take()
        seconds = _best(tally.take)
        fresh = _best(lambda named=named: ChecksumTally(Shard(key, t) for key, t in named).take())  # type: ignore[misc]
        worst = min(worst, size / seconds / 1e12)
        _result(
            out,
            "kernel",
            case=name,
            GB=round(size / 1e9, 3),
            ms=round(1000 * seconds, 3),
            ms_with_preparation=round(1000 * fresh, 3),
            TB_per_s=round(size / seconds / 1e12, 3),
        )
    target = torch.empty_like(whole[0])

    def copy() -> None:
        for tensor in whole:
            target.copy_(tensor)
        torch.cuda.synchronize()

    size = sum(t.nbytes for t in whole)
    _result(out, "kernel", case="device copy (read and written)", TB_per_s=round(2 * size / _best(copy) / 1e12, 3))
    if worst < 1.5:
        print(f"FAIL: {worst:.2f} TB/s; 1.5 are asked for")
    return int(worst < 1.5)


def _best(function: Callable[[], Any], times: int = 10) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def _result(out: Path, part: str, **data: Any) -> None:
    line = json.dumps({"part": part, **data})
    print("  ", line, flush=True)
    with (out / "gpu.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


# Running parts


def cards() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run(name: str, args: argparse.Namespace, out: Path, limit: float) -> tuple[str, str]:
    """One part; its verdict and what is to be said of it."""
    part, begin = PARTS[name], time.monotonic()
    commands = part.command if isinstance(part.command, dict) else {"": part.command}
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = {
            pile: pool.submit(_process, command, args, out, f"{name}-{pile}".strip("-"), begin + limit)
            for pile, command in commands.items()
        }
        codes = {pile: future.result() for pile, future in ended.items()}
    summary = f"{time.monotonic() - begin:.0f} s"
    skips = 0
    if part.tests:
        for pile in commands:
            counted, skipped = _counted(out / f"{name}-{pile}".strip("-") / "junit.xml")
            summary += f"{',' if not pile else f' | {pile}'} {counted}"
            skips += len(skipped)
            for test, reason in skipped:
                print(f"     skipped: {test}: {reason}", flush=True)
    if not part.may_skip and skips:
        return "FAIL", f"{summary}; here nothing may be skipped"
    if None in codes.values():
        return "FAIL", f"{summary}; not done in time"
    # 5 is pytest's: nothing was chosen, which --only does to all piles but one.
    bad = {code for code in codes.values() if code and not (code == 5 and args.only)}
    return ("FAIL" if bad or not any(code == 0 for code in codes.values()) else "PASS"), summary


def _process(command: Command, args: argparse.Namespace, out: Path, name: str, deadline: float) -> int | None:
    """Exit status of one process of a part, with its log and a folder of its own; None: it was not done in time."""
    folder, code = out / name, None
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OUT": str(folder)}
    with (out / f"{name}.log").open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command(args, folder), cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            time.sleep(10)  # its engines see within seconds that it is gone, and give their memory back
        finally:
            _end(process)
    with _writing:
        for results in folder.glob("*.jsonl"):
            with (out / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(results.read_text(encoding="utf-8"))
    return code


_writing = threading.Lock()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever the part left in its session; engines have sessions of their own and end with their trainer."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _counted(junit: Path) -> tuple[str, list[tuple[str, str]]]:
    if not junit.exists():
        return "no report of tests", []
    cases = list(ET.parse(junit).getroot().iter("testcase"))  # written by pytest a moment ago
    by_outcome: dict[str, list[Any]] = {
        kind: [c for c in cases if c.find(kind) is not None] for kind in ("skipped", "failure", "error")
    }
    skipped = [(c.get("name", ""), c.find("skipped").get("message", "")) for c in by_outcome["skipped"]]
    bad = len(by_outcome["failure"]) + len(by_outcome["error"])
    return f"{len(cases) - len(skipped) - bad} passed, {bad} failed, {len(skipped)} skipped", skipped


def show(name: str, out: Path, verdict: str) -> None:
    """A failed part's last words, or a benchmark's tables."""
    for log in sorted({*out.glob(f"{name}.log"), *out.glob(f"{name}-*.log")}):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in lines if "leaked" not in line and "Route: " not in line]
        tail = TAIL if verdict != "PASS" else 20 if PARTS[name].tests else 3 * TAIL
        print(f"     == {log.name}")
        for line in lines[-tail:]:
            print(f"     {line[:220]}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; by default all")
    parser.add_argument("--list", action="store_true", help="tell the parts and how long they take")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-")))
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins or goes on after that")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 4) // 3), help="tests beside each other")
    parser.add_argument("--shape", default="qwen2.5-3b", help="of the sync benchmarks")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--job", choices=("kernel",), help=argparse.SUPPRESS)
    args, extra = parser.parse_known_args()
    args.extra = extra  # for the benchmark that a part runs
    args.out.mkdir(parents=True, exist_ok=True)
    if args.job:
        return kernel(args.out)
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:<13} {part.cards} card{'s' * (part.cards > 1):<2} about {part.seconds:>4} s   {part.about}")
        return 0
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"there is no part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}")
    have, deadline, verdicts = cards(), time.monotonic() + 60 * args.minutes, []
    for name in wanted:
        part, left = PARTS[name], deadline - time.monotonic()
        if part.cards > have:
            verdict, summary = "NOT RUN", f"needs {part.cards} card(s), here are {have}"
        elif left < min(60, part.seconds):
            verdict, summary = (
                "NOT RUN",
                f"about {part.seconds} s, and {max(left, 0):.0f} s are left of --minutes {args.minutes:g}",
            )
        else:
            print(f"---- {name}: {part.about} (about {part.seconds} s)", flush=True)
            verdict, summary = run(name, args, args.out, min(part.limit, left))
            show(name, args.out, verdict)
        print(f"{verdict:<8} {name}: {summary}", flush=True)
        verdicts.append({"part": name, "verdict": verdict, "said": summary})
        with (args.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdicts[-1]) + "\n")
    print("\n" + "\n".join(f"{v['verdict']:<8} {v['part']:<13} {v['said']}" for v in verdicts))
    return int(any(v["verdict"] != "PASS" for v in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
