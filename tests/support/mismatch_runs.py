"""Tiny runs of two turns, and what an engine with a fault would have told of their tokens: float64, by transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config import loading as config
from tandem.envs.base import Chat, Environment, Split
from tandem.trainer import assemble as run
from tandem.types import Message, Sampling, Task

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class TwoTurns(Environment):
    """Says the same thing in between, however the policy answered."""

    def tasks(self, split: Split) -> Sequence[Task]:
        prompts = [(Message(role="user", content=f"count from {i}"),) for i in range(16)]
        return [Task(id=str(i), env=self.name, prompt=prompt, answer="") for i, prompt in enumerate(prompts)]

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        await chat.reply()
        chat.add(Message(role="user", content="and on"))
        await chat.reply()
        return {}

    def check(self, task: Task) -> None:
        return None


def trained(model: Path, runs: Path, name: str, **changes: Any) -> Path:
    """Folder of a run with a checkpoint of every step."""
    options: dict[str, Any] = {
        "model": str(model),
        "runs": str(runs),
        "name": name,
        "steps": STEPS,
        "env": {"kind": "support.mismatch_runs:TwoTurns"},
        "rewards": {"learns.shaping:letters": 1.0},
        "groups_per_step": 2,
        "group_size": 4,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 1, "keep": STEPS},
        "loggers": [],
        "threads": 1,
    }
    return asyncio.run(run.train(config.from_options({**options, **changes}, [], Path("test")).config, resume=None))


Rows = list[dict[str, Any]]
Engine = Callable[[Sequence[int], Sequence[int], Sampling], Sequence[float]]
"""Prompt, sampled ids and what was asked for, to the logprobs that an engine tells."""


def rows(folder: Path, step: int) -> Rows:
    lines = (folder / "rollouts" / f"{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def altered(folder: Path, to: Path, step: int, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the run in which every rollout of a step was changed."""
    shutil.copytree(folder, to)
    changed = rows(folder, step)
    for row in changed:
        change(row)
    text = "".join(f"{json.dumps(row)}\n" for row in changed)
    (to / "rollouts" / f"{step:06d}.jsonl").write_text(text, encoding="utf-8")
    return to


def turns(row: Mapping[str, Any]) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Ids before each turn, and its tokens."""
    out, ids, at = [], list[int](), 0
    for count, (kept, added) in zip(row["turns"], row["prompts"], strict=True):
        prompt, tokens = [*ids[:kept], *added], row["tokens"][at : at + count]
        out.append((prompt, tokens))
        ids, at = [*prompt, *(token["id"] for token in tokens)], at + count
    return out


def told_by(engine: Engine, sampling: Sampling) -> Callable[[dict[str, Any]], None]:
    """A change of rollouts: the engine's logprobs are another engine's."""

    def change(row: dict[str, Any]) -> None:
        for prompt, tokens in turns(row):
            logprobs = engine(prompt, [token["id"] for token in tokens], sampling)
            for token, logprob in zip(tokens, logprobs, strict=True):
                token["lp"] = round(float(logprob), 5)

    return change


def exact(weights: Path, *, temperature: bool = True) -> Engine:
    """An engine that computes by a model folder; without ``temperature`` it leaves that out of its logprobs."""
    from dataclasses import replace

    import torch
    from support.tiny_policy import logprobs_of, reference

    model = reference(weights, torch.float64)

    def logprobs(prompt: Sequence[int], sampled: Sequence[int], sampling: Sampling) -> Sequence[float]:
        with torch.no_grad():
            applied = sampling if temperature else replace(sampling, temperature=1.0)
            return logprobs_of(model, prompt, sampled, applied).tolist()  # type: ignore[no-any-return]

    return logprobs
