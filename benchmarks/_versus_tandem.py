"""Tandem's half of ``versus_trl.py``: one run of its own loop, a stopwatch around its parts.

    python benchmarks/_versus_tandem.py MODEL LINES.jsonl [--url http://...] [key=value ...]

Engine: vLLM at ``--url``, or started by the run. ``key=value`` are a recipe's dotted overrides. Each step is a line of
LINES.jsonl as soon as it is over. The loop is the one of ``tandem train``; what differs is that answers do not end at
an end token, unless they are graded, that nothing is saved, and that a memory plan that refuses is told and overruled.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import asyncio
import contextlib
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _versus import GO_ON, INSTRUCTION, Parts, Work, add_work, append, multiplied, peak_gb, synchronize, work_of

from tandem.config import loading as recipes
from tandem.engines.vllm import protocol
from tandem.envs.base import Chat, Environment, Split
from tandem.errors import DoesNotFit
from tandem.model.policy import Policy
from tandem.rollout.buffer import RolloutBuffer
from tandem.trainer import assemble as run
from tandem.trainer.memory_plan import MemoryPlan
from tandem.trainer.pack import Packer
from tandem.trainer.step import Step
from tandem.types import Message, Task
from tandem.weight_sync.transaction.session import Commit, WeightSyncSession


@dataclass(frozen=True, kw_only=True)
class Prompts(Environment):
    """The made-up prompts of a comparison's work."""

    groups: int = 16
    """Prompts of a step."""
    prompt: int = 96
    """Tokens of each, the chat template included."""
    steps: int = 7
    """Steps that they are enough for."""
    turns: int = 1
    """Completions of a conversation."""

    def tasks(self, split: Split) -> Sequence[Task]:
        texts = Work(groups=self.groups, prompt=self.prompt, steps=self.steps).prompts()
        return [
            Task(id=str(i), env=self.name, prompt=(Message(role="user", content=text),), answer="")
            for i, text in enumerate(texts)
        ]

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        await chat.reply()
        for _ in range(1, self.turns):
            chat.add(Message(role="user", content=GO_ON))
            await chat.reply()
        return {}

    def check(self, task: Task) -> None:
        return None


class Looks:
    """Seconds in which a batch was waited for and an engine had no request, looked at a hundred times a second."""

    EVERY = 0.01

    def __init__(self, url: str):
        self.url = url
        self.seconds = 0.0
        self.waited = False
        """A batch is waited for now."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        before = time.perf_counter()
        while True:
            time.sleep(self.EVERY)
            if not self.waited:  # nor does a look take time from what is measured then
                before = time.perf_counter()
                continue
            with urllib.request.urlopen(f"{self.url}/health") as answer:
                requests = json.load(answer)
            now = time.perf_counter()
            if not requests["running"] + requests["waiting"]:
                self.seconds += now - before
            before = now

    def taken(self) -> float:
        """Those since the last call."""
        if not self._thread.is_alive():
            raise RuntimeError(f"{self.url}/health did not answer; the error is above")
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def options(work: Work, model: Path, engine: dict[str, Any], runs: str) -> dict[str, Any]:
    """The recipe, before overrides."""
    cuda = torch.cuda.is_available()
    env: dict[str, Any] = {"kind": "_versus_tandem:Prompts"}
    env |= {"groups": work.groups, "prompt": work.prompt, "steps": work.steps, "turns": work.turns}
    if work.graded:
        env = {"kind": "gsm8k", "path": str(Path(work.graded).absolute()), "instruction": INSTRUCTION}
    graded = {"drawn": {"kind": "_versus:drawn"}} if work.reward == "drawn" else {"math_verify": 1.0}
    return {
        "model": str(model),
        "steps": work.steps + 1,  # the last ends the last but one
        "env": env,
        "rewards": graded if work.graded else {"even": {"kind": "_versus:even"}},
        "groups_per_step": work.groups,
        "group_size": work.siblings,
        "sampling": {"max_tokens": work.tokens},
        "zero_variance_groups": "keep",
        "context": work.context,
        "engine": {"kind": "vllm", **engine},
        # Random models are noisy between two implementations; what is published is proven by its bytes all the same.
        "sync": {"kind": "shared", "tolerance": 1.0},
        "dtype": "bfloat16" if cuda else "float32",
        "micro_batch_tokens": 8192 if cuda else 1024,
        "evaluate": {"tasks": 0},
        "checkpoint": "none",
        "loggers": [],
        "runs": runs,
    }


def instrument(parts: Parts, lines: Path, work: Work, looks: Looks | None = None) -> None:
    """A stopwatch around the parts of the loop, and the differences to a run that are told above."""
    take, pack, commit = RolloutBuffer.take, Packer.__call__, WeightSyncSession.commit
    train, apply = Step.forward_backward, Step.apply
    completion_request, lengths = protocol.completion_request, work.lengths()

    async def timed_take(self: RolloutBuffer) -> Any:
        with parts.timed("sampling"):
            if looks is None:
                return await take(self)
            looks.waited = True
            batch = await take(self)
            looks.waited = False
            parts.note(empty=looks.taken())
            return batch

    def timed_pack(self: Packer, groups: Any, *, version: int) -> Any:
        with parts.timed("pack"):
            return pack(self, groups, version=version)

    async def timed_train(self: Step, batch: Any, *queued: Any) -> Any:
        rollouts = [r for group in batch.groups for r in group.scored]
        tokens = sum(len(t.prompt) + len(t.completion.tokens) for r in rollouts for t in r.turns)
        if parts.laps < 0:
            count = multiplied(self.work.policy.causal)
            append(lines, kind="about", parameters=count, loaded_gb=peak_gb(reset=True))
        parts.lap()
        computed = sum(len(m.tokens_T) for m in batch.micro)
        parts.note(tokens=tokens, computed=computed, micro_batches=len(batch.micro), batch=batch.groups[0].env)
        with parts.timed("forward+backward"):
            stats = await train(self, batch, *queued)
            await self.work.policy.compute(synchronize)
            return stats

    async def timed_apply(self: Step, *args: Any, **kwargs: Any) -> Any:
        with parts.timed("optimizer"):
            metrics = await apply(self, *args, **kwargs)
            await self.work.policy.compute(synchronize)
            return metrics

    def of_length(*args: Any, limit: int, **more: Any) -> Any:
        return completion_request(*args, limit=min(limit, next(lengths)), **more)

    @contextlib.asynccontextmanager
    async def timed_commit(self: WeightSyncSession, step: int, **more: Any) -> AsyncIterator[Commit]:
        before = parts.get("optimizer")
        with parts.timed("publish"):
            async with commit(self, step, **more) as update:
                yield update
        parts.add("publish", before - parts.get("optimizer"))  # which ran inside

    changed: dict[tuple[Any, str], Any] = {
        (RolloutBuffer, "take"): timed_take,
        (Packer, "__call__"): timed_pack,
        (Step, "forward_backward"): timed_train,
        (Step, "apply"): timed_apply,
        (WeightSyncSession, "commit"): timed_commit,
        (MemoryPlan, "require"): _warning_only(MemoryPlan.require),
        (protocol, "completion_request"): of_length,
    }
    if not work.graded:
        changed[Policy, "end_tokens"] = property(lambda self: frozenset())
    for (kind, name), value in changed.items():
        setattr(kind, name, value)


def _warning_only(require: Any) -> Any:
    def check_plan(plan: MemoryPlan) -> None:
        print(plan.table(), flush=True)
        try:
            require(plan)
        except DoesNotFit as error:
            print(f"overruled: {error}", flush=True)

    return check_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("lines", type=Path, help="JSON lines of the steps")
    parser.add_argument("--url", help="a vLLM that runs already; by default the run starts one")
    parser.add_argument("--engine", type=json.loads, default={}, help="options of the engine that is started, as JSON")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the recipe")
    add_work(parser)
    args = parser.parse_intermixed_args()
    work = work_of(args)
    parts = Parts(args.lines)

    def on_step(step: int, metrics: Mapping[str, Any]) -> None:
        parts.note(still=float(metrics.get("engine/paused_seconds", 0.0)), mismatch=metrics.get("kl_behavior"))

    with tempfile.TemporaryDirectory(prefix="versus-run-") as runs:
        engine = {"urls": [args.url]} if args.url else args.engine
        loaded = recipes.from_options(options(work, args.model, engine, runs), args.overrides, Path("versus_trl"))
        append(args.lines, kind="about", overrides=args.overrides)
        instrument(parts, args.lines, work, Looks(args.url) if args.url else None)
        asyncio.run(run.train(loaded.config, resume=None, on_step=on_step))


if __name__ == "__main__":
    main()
