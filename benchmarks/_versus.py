"""What the comparisons share: the work, its stopwatches, processes that end, and tables."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEAK_FLOPS = 989e12
"""Of an H200 in bfloat16, dense, by its datasheet: multiplications and additions a second."""
HERE = Path(__file__).resolve().parent
TAIL = 40
"""Lines of a failed process' log that are shown."""
TEMPLATE = 19
"""Tokens that the chat template of ``_models`` puts around one message of a user."""
GO_ON = "Go on."
"""What the user says between two turns."""
INSTRUCTION = "Think in a few short steps. Then end with one last line: '#### ' and the answer as a number."
"""Beneath each question of the graded work."""
QUESTION = 512
"""Room for one, in tokens."""
SKIPPED = 2
"""Steps at the beginning that are left out: kernels are compiled, optimizer states made."""


@dataclass(frozen=True)
class Work:
    """One step's work, and how often."""

    groups: int = 16
    """Prompts of a step."""
    siblings: int = 8
    """Completions of each."""
    tokens: int = 256
    """Of each completion, exactly; with ``tail`` at most."""
    prompt: int = 96
    """Tokens of each prompt, the chat template included."""
    steps: int = 7
    """Measured from beginning to beginning; the first two are left out."""
    turns: int = 1
    """Completions of a conversation, one after another; TRL's half has one."""
    graded: str = ""
    """GSM8K's train.jsonl: its questions, answers that end where they do and have ``tokens`` at most, and math_verify's
    grades. Empty: made-up prompts, answers of exactly so many tokens, and a reward that costs nothing."""

    tail: float = 0.0
    """Lengths are lognormal: their median is a sixteenth of ``tokens``, and this the standard deviation of their
    logarithm (Tandem's half alone)."""

    reward: str = "verified"
    """Of graded answers; ``drawn`` costs as much, and two groups in five are equal."""

    @property
    def useful(self) -> int:
        """Tokens of a step, those of a shared prompt once for each completion."""
        return self.groups * self.siblings * (self.prompt + self.tokens)

    @property
    def context(self) -> int:
        """Most tokens of a sequence, for the engine; a publish is probed with a text of its own."""
        if self.graded:
            return QUESTION + self.tokens
        return max(256, -(-(self.prompt + self.turns * (self.tokens + TEMPLATE + len(GO_ON))) // 64) * 64)

    def lengths(self) -> Iterator[int]:
        """Of one completion after another."""
        chance = random.Random(0)
        while True:
            drawn = self.tokens / 16 * math.exp(chance.gauss(0.0, self.tail)) if self.tail else self.tokens
            yield min(self.tokens, max(1, round(drawn)))

    def prompts(self) -> list[str]:
        """Messages of a user, no two alike, enough for one step more than is measured."""
        if self.prompt <= TEMPLATE:
            raise SystemExit(f"--prompt must be above {TEMPLATE}, the tokens of the chat template; got {self.prompt}")
        letters = random.Random(0)
        size = self.prompt - TEMPLATE
        return [
            "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=size))
            for _ in range((self.steps + 1) * self.groups)
        ]

    def questions(self) -> list[dict[str, str]]:
        """Prompt and answer of the graded work, enough for one step more than is measured."""
        lines = Path(self.graded).read_text(encoding="utf-8").splitlines()[: (self.steps + 1) * self.groups]
        rows = [json.loads(line) for line in lines]
        return [
            {"prompt": f"{row['question']}\n{INSTRUCTION}", "answer": row["answer"].rpartition("####")[2].strip()}
            for row in rows
        ]


def _texts(completions: Sequence[Any]) -> list[str]:
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def verified(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last line after #### equals the answer, by math_verify as its documentation calls it."""
    from math_verify import parse, verify

    lines = [text.rpartition("####")[2].strip().partition("\n")[0] for text in _texts(completions)]
    return [float(verify(parse(f"${gold}$"), parse(line))) for gold, line in zip(answer, lines, strict=True)]


def drawn(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """A coin for each answer after ``verified``, but none for two tasks in five."""
    verified(completions, answer)
    coins, tasks = ([zlib.crc32(text.encode()) for text in texts] for texts in (_texts(completions), answer))
    return [float(coin % 2 and task % 5 > 1) for coin, task in zip(coins, tasks, strict=True)]


def even(completions: Sequence[Any], **_: Any) -> list[float]:
    """Share of the characters whose code is even: cheap, and hardly ever the same for two answers."""
    return [sum(ord(char) % 2 == 0 for char in text) / max(1, len(text)) for text in _texts(completions)]


def add_work(parser: Any) -> None:
    """Options of every script that does the work."""
    for name, value in vars(Work()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)


def add_engine(parser: Any) -> None:
    """Options of every script that starts Tandem's engine."""
    parser.add_argument(
        "--utilization", type=float, default=0.3, help="gpu_memory_utilization of an engine that shares"
    )
    parser.add_argument("--cache", type=float, help="GB for its keys and values, where others fill the card meanwhile")
    parser.add_argument("--python", help="interpreter that has vLLM, for Tandem's engine; by default this one")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more options of Tandem's vLLM, as JSON")


def engine_options(args: Any) -> dict[str, Any]:
    """Of Tandem's vLLM: those that TRL gives to its own."""
    import torch

    cuda, work = torch.cuda.is_available(), work_of(args)
    where = {"gpu_memory_utilization": args.utilization} if cuda else {"kv_cache_gb": 0.25, "enforce_eager": True}
    if args.cache:
        where["kv_cache_gb"] = args.cache
    more = {"python": args.python} if args.python else {}
    batched = {"max_num_batched_tokens": 4096, **args.engine_args}
    return {"max_num_seqs": work.groups * work.siblings, **where, "args": batched, **more}


def work_of(args: Any) -> Work:
    return Work(**{name: getattr(args, name) for name in vars(Work())})


def work_options(work: Work) -> list[str]:
    """Its options on a command line."""
    return [text for name, value in vars(work).items() for text in (f"--{name}", str(value))]


def append(file: Path, **data: Any) -> None:
    """One JSON line; what was written stays if the process is ended."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(data) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none if it is not there. A line that was cut is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def multiplied(model: Any) -> int:
    """Parameters that each token is multiplied with: all but an input embedding that is no output embedding too."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    count: int = sum(p.numel() for p in model.parameters())
    return count if head.weight is embedding.weight else count - int(embedding.weight.numel())


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gb(*, reset: bool = False) -> float | None:
    """Most memory that this process' tensors took on the card since the last reset; None without a card."""
    import torch

    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_allocated() / 1e9
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return round(peak, 3)


class Parts:
    """Seconds by name, from one lap to the next; a lap is a line of ``file``."""

    def __init__(self, file: Path):
        self.file = file
        self.laps = -1
        self._seconds: dict[str, float] = {}
        self._noted: dict[str, Any] = {}
        self._begun = 0.0

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def get(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The block's time, what it has started on the card included."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self.add(name, time.perf_counter() - begin)

    def note(self, **noted: Any) -> None:
        """What else the line of this lap will say."""
        self._noted |= noted

    def lap(self) -> None:
        """A step ends here and the next begins; the first call begins the first."""
        now = time.perf_counter()
        if self.laps >= 0:
            seconds = now - self._begun
            parts = {**self._seconds, "rest": seconds - sum(self._seconds.values())}
            append(self.file, kind="step", seconds=seconds, parts=parts, peak_gb=peak_gb(reset=True), **self._noted)
        self.laps += 1
        self._seconds.clear()
        self._noted.clear()
        self._begun = now


@dataclass
class Card:
    """Memory in use on a card, by all processes, looked at ten times a second; nothing where there is none."""

    every: float = 0.1
    """Seconds between two looks."""
    index: int = 0
    """Which one, of those that CUDA_VISIBLE_DEVICES lets this process see."""
    peak: float | None = None
    """GB, since the last ``mark``."""
    _over: threading.Event = field(default_factory=threading.Event)
    _look: Any = None

    def __enter__(self) -> Card:
        with contextlib.suppress(Exception):  # no driver, or no such package: nothing is measured
            pynvml = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            name = visible(self.index)
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            self._look = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9
            self.mark()
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def now(self) -> float | None:
        """GB in use."""
        return None if self._look is None else float(self._look())

    def mark(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now()

    def _run(self) -> None:
        while not self._over.wait(self.every):
            self.peak = max(self.peak or 0.0, self.now() or 0.0)


def visible(index: int) -> str:
    """What the driver calls a device of this process: a number among all of the host, or a UUID."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[index] if index < len(names) and names[index] else str(index)


def summary(lines: Sequence[Mapping[str, Any]], skipped: int = SKIPPED) -> dict[str, Any]:
    """One setting's steps as one record: medians over the steps after those left out; empty if there are none."""
    about = {key: value for line in lines if line["kind"] == "about" for key, value in line.items() if key != "kind"}
    every = [line for line in lines if line["kind"] == "step"]
    steps = every[skipped:]
    if not steps:
        return about
    parts = {name: statistics.median(s["parts"].get(name, 0.0) for s in steps) for s in steps for name in s["parts"]}
    record = {**about, "steps": len(steps), "seconds": statistics.median(s["seconds"] for s in steps)}
    record |= {"seconds_each": [round(s["seconds"], 3) for s in every], "parts": parts}
    tokens = statistics.median(s["tokens"] for s in steps)
    trained = parts.get("forward+backward", 0.0)
    if trained and "parameters" in about:
        record["mfu_percent"] = 100 * 6 * about["parameters"] * tokens / trained / PEAK_FLOPS
    peaks = [s["peak_gb"] for s in every if s["peak_gb"] is not None]
    if mismatch := [s["mismatch"] for s in every if s.get("mismatch") is not None]:
        record["mismatch"] = mismatch  # KL of the engine's distribution to the trainer's, step by step
    record |= {key: statistics.median(s.get(key, 0.0) for s in steps) for key in ("still", "empty")}
    return {**record, "tokens": tokens, "tensors_gb": max(peaks, default=None)}


ORDER = ("sampling", "pack", "scoring", "forward+backward", "optimizer", "publish", "rest")


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Every setting on a line: where its milliseconds go, its memory, and what failed."""
    rows = [["ms of a step", "step", *ORDER, "MFU %", "tensors GB", "card GB"]]
    for r in records:
        if r.get("seconds"):
            parts = [f"{1000 * r['parts'].get(part, 0.0):.0f}" for part in ORDER]
            rest = [number(r.get(key), 1) for key in ("mfu_percent", "tensors_gb", "card_gb")]
            rows.append([f"{r['half']} {r['setting']}", f"{1000 * r['seconds']:.0f}", *parts, *rest])
    failed = [f"FAILED {r['half']} {r['setting']}: {r['error']}" for r in records if r.get("error")]
    return "\n".join([aligned(rows) if rows[1:] else "nothing was measured", *failed])


def judged(what: str, value: float, goal: float, unit: str = "", *, least: bool = False) -> tuple[str, bool]:
    """A figure beside its goal, which is the most that it may be, or the least; and whether it is reached."""
    reached = value >= goal if least else value <= goal
    sign, verdict = ">=" if least else "<=", "reached" if reached else "MISSED"
    return f"{what}: {value:.3f}{unit} (goal {sign} {goal:g}{unit}, {verdict})", reached


def number(value: float | None, digits: int) -> str:
    """As text; a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as text, the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def environment() -> dict[str, str]:
    """Of every process: Tandem and what lies here can be imported, and nothing asks the network."""
    path = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def ended(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a group of its own, asked to end with the block and then made to, with what it has started."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, process_group=0)
    try:
        yield process
    finally:
        for kind, patience in ((signal.SIGTERM, 8), (signal.SIGKILL, 4)):
            if process.poll() is None:
                process.send_signal(kind)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def awaited(process: subprocess.Popen[bytes], limit: float) -> tuple[int | None, SystemExit | None]:
    """Its exit status, None if it was not done in time; and what ended the waiting, to raise once all is written."""
    try:
        return process.wait(max(1.0, limit)), None
    except subprocess.TimeoutExpired:
        return None, None
    except SystemExit as stopped:
        return None, stopped


def end_in_order() -> None:
    """Let SIGTERM end this process as Ctrl-C does: what it has started ends with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit("ended by a signal; what was measured is written")

    signal.signal(signal.SIGTERM, end)


def lines_of(log: Path) -> list[str]:
    """A log's; none if there is no log yet."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []


def last(log: Path) -> str:
    """A log's last words."""
    return next((line.strip()[:300] for line in reversed(lines_of(log)) if line.strip()), "it said nothing")
