"""What the tests against a real vLLM share: its options on this machine, a recipe, and runs looked at from outside.

On a CPU the engine has an environment of its own, ``.venv-engine`` or what TANDEM_ENGINE_PYTHON names. Where CUDA and
vLLM are in this very interpreter, the engine runs on it: with CUDA graphs, in bfloat16, its weights shared by CUDA IPC.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.processes import start

REPOSITORY = Path(__file__).parents[2]
CUDA = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
DTYPE = "bfloat16" if CUDA else "float32"
# Torch has read it; what it compiles for vLLM with the instruction set lowered is no valid C++.
os.environ.pop("ATEN_CPU_CAPABILITY", None)
HEAD_DIM = 64 if CUDA else 32
"""Of the tiny models: what vLLM's attention takes at least."""
GAP = 0.3 if CUDA else 1e-4
"""Most by which a logprob may differ between engine and trainer on the same weights."""
KL = 1e-3 if CUDA else 1e-8
"""The same of ``kl_behavior``."""

NO_WHEEL = not CUDA and (sys.platform, platform.machine()) != ("linux", "x86_64")
needs_engine = pytest.mark.skipif(
    NO_WHEEL, reason=f"vLLM for CPUs has no wheel for {sys.platform} on {platform.machine()}, and there is no CUDA here"
)


def engine_python() -> str | None:
    """The interpreter that has vLLM; None is this one."""
    if CUDA:
        return None
    path = Path(os.environ.get("TANDEM_ENGINE_PYTHON") or REPOSITORY / ".venv-engine/bin/python")
    if not path.exists():
        pytest.fail(f"{path} is missing: make the engine's environment by: bash scripts/setup", pytrace=False)
    return str(path)


def engine(**changes: Any) -> dict[str, Any]:
    """Options of a small engine on this machine."""
    # On a GPU with CUDA graphs, but without compilation, which would take most of the time of each start; and with so
    # little memory that several tests can run beside each other.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    here: dict[str, Any] = (
        {"gpu_memory_utilization": 0.05, "kv_cache_gb": 1.0, "args": {"compilation_config": graphs}}
        if CUDA
        else {
            "kv_cache_gb": 0.25,
            "enforce_eager": True,
            # Without a process for the worker beside that of the engine, whose start takes a third of the time.
            "args": {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"},
        }
    )
    # A test must not wait for minutes where something hangs, and leave no engine behind for long.
    waits = {"start_seconds": 240.0, "request_seconds": 60.0, "control_seconds": 60.0, "linger_seconds": 60.0}
    return {"kind": "vllm", "python": engine_python(), "max_num_seqs": 32, **here, **waits, **changes}


def recipe(model: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """Options of a run in which every step has a gradient."""
    return {
        "model": str(model),
        "runs": str(runs),
        "name": "run",
        "steps": 3,
        "context": 256,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"learns.shaping:letters": 1.0},
        "groups_per_step": 4,
        "group_size": 4,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 12},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "dtype": DTYPE,
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 1, "keep": 10},
        "loggers": [],
        "threads": 1,
        "engine": engine(),
        **changes,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file with one on each line; text in them may hold what ``splitlines`` takes for ends of lines."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """A run's numbers by step; each step is there once."""
    rows = lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: row["metrics"] for row in rows}


def published(folder: Path) -> dict[int, dict[str, Any]]:
    """A run's publishes by step; each is there once."""
    events = [event for event in lines(folder / "events.jsonl") if event["event"] == "published"]
    assert len({event["step"] for event in events}) == len(events)
    return {event["step"]: event for event in events}


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Every trained rollout, in order."""
    return [row for path in sorted((folder / "rollouts").glob("*.jsonl")) for row in lines(path)]


def groups_once(folder: Path, *, each: int) -> None:
    """Every group was trained in one step, whole, and every step had as many as the recipe says."""
    steps: dict[str, set[int]] = {}
    for row in rollouts(folder):
        steps.setdefault(row["group"], set()).add(row["step"])
    assert all(len(trained) == 1 for trained in steps.values()), "a group was trained twice"
    assert len({row["rollout"] for row in rollouts(folder)}) == len(rollouts(folder))
    for step in metrics(folder):
        assert len([group for group, trained in steps.items() if trained == {step}]) == each


def same_logprobs(folder: Path) -> None:
    """Tokens that were sampled by the very policy they were trained on had its logprobs."""
    compared = far = 0
    for row in rollouts(folder):
        if row["versions"] == [row["step"] - 1] * 2:
            trained = [token for token in row["tokens"] if token["tp"] is not None]  # not where the advantage is 0
            assert len(trained) in (0, len(row["tokens"]))
            compared += len(trained)
            far += sum(abs(token["lp"] - token["tp"]) > GAP for token in trained)
    assert compared
    assert far <= (compared // 100 if CUDA else 0)  # in bfloat16 an unlikely token may be off by more


@dataclass(frozen=True)
class Left:
    """The record of a running engine, as a run's folder has it."""

    pid: int
    url: str
    key: str
    family: list[list[Any]]

    @classmethod
    def of(cls, folder: Path) -> Left:
        record = json.loads((folder / "engine-0.json").read_text())
        return cls(pid=record["pid"], url=record["url"], key=record["key"], family=record["family"])

    def core(self) -> int:
        """The process beside the HTTP server's that runs the scheduler."""
        return self._child_of(self.pid)

    def worker(self) -> int:
        """The process beside the scheduler's that has the model, where it has one of its own."""
        return self._child_of(self.core())

    def _child_of(self, parent: int) -> int:
        children = [
            pid for pid, _ in self.family if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        (child,) = [pid for pid in children if _parent(pid) == parent]
        return child

    def ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """One HTTP call."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Authorization": f"Bearer {self.key}"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            response: dict[str, Any] = json.loads(answer.read())
        return response

    def greedy(self, tokens: list[int], number: int = 24) -> dict[str, Any]:
        """The likeliest continuation."""
        ids = {"prompt_token_ids": tokens}
        request = {"prompt": ids, "max_tokens": number, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        return self.ask("/generate", request)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Wait for something to happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.02)


SLOW = '''
import time

def letters(completions, **columns):
    """As in shaping, but it takes its time, so that a run can be ended in the middle of a step."""
    time.sleep(0.1)
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in texts]
'''


@contextmanager
def serving(place: Path, environment: Mapping[str, str] = os.environ) -> Iterator[subprocess.Popen[str]]:
    """``tandem serve engine recipe.yaml`` in a folder while the block lasts; what it says goes to said.txt there."""
    log = place / "said.txt"
    log.touch()
    process = start(["serve", "engine", "recipe.yaml"], cwd=place, out=log, environment=environment)

    def up() -> bool:
        assert process.poll() is None, log.read_text()
        return "Ctrl-C ends it" in log.read_text()

    try:
        until(up, "the start of the engine", 240)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Trainer:
    """``tandem train`` in a process of its own, in a folder of its own."""

    def __init__(self, place: Path, target: str, *overrides: str):
        self.place, self.folder = place, place / "runs" / "run"
        self._log = place / "said.txt"
        self.process = start(["train", target, *overrides], cwd=place, out=self._log)

    @classmethod
    def fresh(cls, place: Path, model: Path, **changes: Any) -> Trainer:
        """A run of several steps whose rewards are slow, and of which anything may be killed."""
        place.mkdir(parents=True, exist_ok=True)
        (place / "marks.py").write_text(SLOW)
        slow = {"rewards": {"marks:letters": 1.0}, "sampling": {"max_tokens": 64}, "engine": engine()}
        options = recipe(model, Path("runs"), **{**slow, **changes})
        (place / "recipe.yaml").write_text(yaml.safe_dump(options))
        return cls(place, "recipe.yaml")

    def output(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 120) -> None:
        def looked() -> Any:
            assert self.process.poll() is None, f"it ended before {what}: {self.output()}"
            return condition()

        until(looked, what, seconds)

    def steps(self) -> int:
        return len(lines(self.folder / "metrics.jsonl"))

    def sampling(self, after: int) -> Left:
        """Wait until requests are in flight after some steps, the last of which is saved; the engine they are in."""
        self.until(lambda: self.steps() >= after, f"step {after}", seconds=400)  # an engine may be started for each
        self.until(self._samples, "sampling")
        return Left.of(self.folder)

    def _samples(self) -> bool:
        with suppress(OSError):  # by sync: restart, between two engines
            return self.saved() and Left.of(self.folder).ask("/health")["running"] > 0
        return False

    def saved(self) -> bool:
        """Whether the last step has its checkpoint."""
        return (self.folder / f"checkpoints/{self.steps():06d}").is_dir()

    def ended(self, code: int = 0, seconds: float = 180) -> None:
        """Wait for its end."""
        assert self.process.wait(timeout=seconds) == code, self.output()
        assert "Traceback" not in self.output()

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def kill_between_publishes(self, after: int) -> tuple[Left, int]:
        """``kill -9`` while requests are in flight, the last step is saved, and no publish is under way, in which an
        engine would rather stop than serve what it holds; the engine, and the step that it serves."""
        while True:
            left = self.sampling(after)
            self.process.send_signal(signal.SIGSTOP)
            try:
                time.sleep(0.2)  # what it had sent by then arrives
                info = left.ask("/bridge/info")
                if self.saved() and (info["state"], info["step"]) == ("serving", self.steps()):
                    self.kill()
                    return left, info["step"]
            except OSError:
                pass  # the engine is being ended, by sync: restart
            finally:
                if self.process.poll() is None:
                    self.process.send_signal(signal.SIGCONT)

    def clean(self) -> None:
        """End what a failed test left running: the trainer, and the engine by its record."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if (self.folder / "engine-0.json").exists():
            left = Left.of(self.folder)
            if alive(left.pid):
                os.killpg(left.pid, signal.SIGKILL)  # it leads a session of its own


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The model of a checkpoint, of all its files."""
    files = (run / "checkpoints" / f"{step:06d}" / "model").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
