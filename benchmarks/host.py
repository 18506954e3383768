"""What a rollout costs the host: processor time of the trainer's event loop, its threads, graders and the engine.

    python benchmarks/host.py --python .venv-engine/bin/python --model .cache/smollm2 --data gsm8k/train.jsonl
    python benchmarks/host.py ... --reward math_verify --profile

The trainer's own loop, with everything on the way of a rollout but a model: feed, environment, chat template, HTTP
client, graders in processes of their own, packing, metrics, and the lines that are written down. Its engine is a
stand-in behind Tandem's own routes in a process of its own (``_host_engine.py``), so what it takes itself is the
engine's HTTP process' share. It has every answer at once, or with ``--spread`` one after another, as a real engine has
them. Nothing is computed or published.

Milliseconds of a processor for a rollout, medians over the steps after the first two. ``--profile``: every function's.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import asyncio
import contextlib
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from _versus import aligned
from torch import Tensor

from tandem.config import loading as recipes
from tandem.engines.base import ExportsWeights
from tandem.metrics import Sum
from tandem.model.policy import load_tokenizer
from tandem.pending import Pending, PendingMetrics
from tandem.ports import free_port
from tandem.trainer import assemble as run
from tandem.trainer.checkpoint import Checkpoints
from tandem.trainer.pack import Micro
from tandem.trainer.step import LocalWork, OldLogprobs
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.transaction.session import WeightSyncSession
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.checksums import Checksums
from tandem.weight_sync.verify.probe import Behaviour

HERE = Path(__file__).resolve().parent
SKIPPED = 2
"""Steps at the beginning that are left out."""


@dataclass(frozen=True, kw_only=True)
class Nowhere(WeightSync):
    """Weights that stay where they are: nothing is proven either."""

    payloads: ClassVar[frozenset[str]] = frozenset({"weights"})
    capability: ClassVar[type] = ExportsWeights
    pause: ClassVar[Literal["step", "transfer", "never"]] = "step"

    async def transfer(self, link: SyncContext, version: PolicyVersion) -> int:
        return 0


def by_turns(completions: Any, **_: Any) -> list[float]:
    """A trivial reward that is not the same for all siblings."""
    return [float(i % 2) for i, _ in enumerate(completions)]


def processor(pid: int) -> float:
    """Seconds of a processor that another process took."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children() -> list[int]:
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


class Rows:
    """A row for each step: what was taken since the one before."""

    def __init__(self, engine: int):
        self.rows: list[dict[str, float]] = []
        self._engine = engine
        self._before: dict[str, float] = {}

    def lap(self) -> None:
        """A step ends here."""
        graders = sum(processor(pid) for pid in children() if pid != self._engine)
        now = {
            "wall": time.perf_counter(),
            "its loop": time.thread_time(),
            "trainer": time.process_time(),
            "graders": graders,
            "engine": processor(self._engine),
        }
        if self._before:
            row = {name: now[name] - self._before[name] for name in now}
            row["its threads"] = row["trainer"] - row["its loop"]
            self.rows.append(row)
        self._before = now


def stubs(rows: Rows) -> dict[tuple[type, str], Any]:
    """No model, no publishing, no checkpoints: what stands in for which method of which class."""

    def micro(self: LocalWork, micro: Micro, known: OldLogprobs | None) -> tuple[PendingMetrics, Tensor, OldLogprobs]:
        logprobs_N = micro.batch.behavior_logprobs_N
        return (
            {"loss": Pending(Sum, torch.zeros(()))},
            logprobs_N,
            OldLogprobs(recomputed_logprobs_N=logprobs_N, ref_logprobs_N=None),
        )

    async def own_sums(self: Trained, *args: Any) -> tuple[Checksums, Checksums, dict[str, Checksums]]:
        own = await self.checksums()
        return own, own, {}

    async def no_proof(self: Behaviour, *args: Any) -> float:
        return 0.0

    async def not_saved(self: Checkpoints, state: Any) -> bool:
        return False

    commit = WeightSyncSession.commit

    @contextlib.asynccontextmanager
    async def lapped(self: WeightSyncSession, step: int, **more: Any) -> Any:
        async with commit(self, step, **more) as update:
            yield update
        rows.lap()

    return {
        (LocalWork, "micro"): micro,
        (LocalWork, "apply"): lambda self, lr, max_grad_norm: torch.tensor([0.0]),
        (Trained, "sums"): own_sums,
        (Behaviour, "ask"): no_proof,
        (Behaviour, "compare"): no_proof,
        (WeightSyncSession, "commit"): lapped,
        (Checkpoints, "save"): not_saved,
    }


def recipe(args: argparse.Namespace, model: Path, url: str, runs: str) -> dict[str, Any]:
    """What is run."""
    rewards = {} if args.reward == "math_verify" else {"rewards": {"even": {"kind": "host:by_turns"}}}
    return {
        "model": str(model),
        "steps": args.steps + SKIPPED,
        "env": {"kind": "gsm8k", "path": str(args.data)},
        **rewards,
        "groups_per_step": args.groups,
        "group_size": args.siblings,
        "sampling": {"max_tokens": args.tokens},
        "zero_variance_groups": "keep",
        "context": 4096,
        "engine": {"kind": "vllm", "urls": [url]},
        "sync": {"kind": "host:Nowhere"},
        "micro_batch_tokens": 16384,
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "runs": runs,
    }


def tiny(model: Path, folder: Path) -> Path:
    """A model of two thousand weights with another's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_tokenizer(str(model))
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    shape |= {"hidden_size": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=len(tokenizer), **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers(model: Path, data: Path, tokens: int, file: Path) -> None:
    """Solutions of the data set as token ids, whose end is kept."""
    tokenizer = load_tokenizer(str(model))
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:512]]
    ids = [tokenizer.encode(row["answer"], add_special_tokens=False)[-tokens:] for row in rows]
    file.write_text(json.dumps(ids), encoding="utf-8")


@contextlib.contextmanager
def engine(args: argparse.Namespace, file: Path) -> Iterator[tuple[str, int]]:
    """The stand-in: its address and process."""
    port = free_port("127.0.0.1")
    command = [args.python or sys.executable, str(HERE / "_host_engine.py"), str(port), str(file)]
    command += [str(args.tokens), str(args.spread)]
    path = [str(Path(run.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    python = args.python or "the interpreter of this script"
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                answer.read()
                break
            if process.poll() is not None:
                raise SystemExit(
                    f"the stand-in for an engine did not start with {python} (its error is above): name an interpreter "
                    "that has vLLM and uvicorn by --python, such as .venv-engine/bin/python"
                )
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def case(args: argparse.Namespace) -> list[dict[str, float]]:
    """One setting, in this process."""
    with tempfile.TemporaryDirectory(prefix="host-") as scratch:
        folder = Path(scratch)
        model = tiny(args.model, folder / "model")
        answers(args.model, args.data, args.tokens, folder / "answers.json")
        with engine(args, folder / "answers.json") as (url, pid):
            rows = Rows(pid)
            for (owner, name), value in stubs(rows).items():
                setattr(owner, name, value)
            loaded = recipes.from_options(recipe(args, model, url, str(folder)), args.overrides, Path("host"))
            profile = cProfile.Profile() if args.profile else None

            async def go() -> None:
                if profile is not None:
                    profile.enable()
                await run.train(loaded.config, resume=None)

            asyncio.run(go())
            if profile is not None:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return rows.rows[SKIPPED - 1 :]


def shown(by_case: Mapping[str, list[dict[str, float]]], rollouts: int) -> str:
    """Milliseconds for each rollout."""
    names = ["its loop", "its threads", "graders", "engine"]
    lines = [["ms of a processor for a rollout", *by_case], ["ms of wall time"]]
    for rows in by_case.values():
        lines[1].append(f"{1000 * statistics.median(row['wall'] for row in rows) / rollouts:.3f}")
    for name in names:
        each = [
            f"{1000 * statistics.median(r.get(name, 0.0) for r in rows) / rollouts:.3f}" for rows in by_case.values()
        ]
        lines.append([name, *each])
    return aligned(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2"), help="its tokenizer is used")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--python", help="interpreter that has vLLM and uvicorn; by default this one")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 128], help="of each answer; several are compared")
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--spread", type=float, default=0.0, help="seconds over which a step's answers come")
    parser.add_argument("--reward", choices=("trivial", "math_verify"), default="trivial")
    parser.add_argument("--profile", action="store_true", help="every function's time instead, which makes all slower")
    parser.add_argument("--json", type=Path, help="append results here")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    args = parser.parse_intermixed_args()
    by_case = {}
    if len(args.tokens) > 1:
        for tokens in args.tokens:  # each in a process of its own
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                command = [sys.executable, __file__, *sys.argv[1:], "--tokens", str(tokens), "--json", out.name]
                subprocess.run(command, check=True, stdout=None if args.profile else subprocess.DEVNULL)
                by_case[f"{tokens} tokens"] = json.loads(Path(out.name).read_text(encoding="utf-8"))
    else:
        args.tokens = args.tokens[0]
        by_case[f"{args.tokens} tokens"] = case(args)
        if args.json:
            args.json.write_text(json.dumps(by_case[f"{args.tokens} tokens"]), encoding="utf-8")
    print(shown(by_case, args.groups * args.siblings))


if __name__ == "__main__":
    main()
