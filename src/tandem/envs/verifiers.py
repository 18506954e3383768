"""Environments of the verifiers package, played by itself in the interpreter that has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from tandem.envs._package import Package
from tandem.envs.base import Chat, Environment, Split
from tandem.envs.data.split import Tasks, digest, some, split_of
from tandem.errors import bounded
from tandem.types import Json, Message, Rollout, Task


@dataclass(frozen=True, kw_only=True)
class Verifiers(Environment):
    """Any installed environment of verifiers: its data, its rollouts and its rubric.

    Its rubric's reward, weights included, is the reward ``environment``; each function of it is a metric.
    """

    default_rewards: ClassVar[Mapping[str, Json]] = {"environment": 1.0}

    id: str
    """Name of the environment, as ``vf.load_environment`` takes it, or of a taskset of verifiers 0.4."""
    args: dict[str, Json] = field(default_factory=dict)
    """What else ``vf.load_environment`` is given; of 0.4, what a file of its own has under ``env``."""
    python: str = ""
    """Interpreter that has verifiers and the environment; empty: this one."""
    test_share: float = bounded(0.2, below=1)
    """Share of rows held out where the environment has no evaluation data of its own."""
    timeout_seconds: float = bounded(600.0, above=0)
    """How long one task may take."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Rows of the environment's data, which is loaded now.

        Raises:
            EnvError: it cannot be loaded, or the split has no row.
        """
        read = self._package.read("rows", split=split)
        places: Sequence[int] = range(len(read["rows"]))
        if read["shared"]:
            places = [n for n in places if split_of(_question(read, n), self.test_share) == split]
        remedy = "change test_share, or args"
        return Tasks(some(places, f"{self.name} ({self.id})", split, remedy), lambda n: self._task(read, n))

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        async with chat.serve() as url:
            row = {"split": task.meta["split"], "row": task.meta["row"]}
            owner, play = f"rollout {chat.id}", {"key": chat.id, "url": url, **row}
            outcome = await self._package.answer(self.timeout_seconds, owner, "play", **play)
        if outcome is None:
            return {}
        if len(outcome["turn_rewards"]) == len(chat.turns):
            for turn, reward in enumerate(outcome["turn_rewards"]):
                chat.mark(turn, reward=reward)
        return _metrics(outcome)

    async def finish(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        together = [r.id for r in rollouts if r.status == "ok" and "reward" not in r.metrics]
        if not together:
            return rollouts
        owner = f"rollouts group {together[0].rpartition('/')[0]}"
        outcomes = await self._package.answer(self.timeout_seconds, owner, "score", keys=together)
        scores = {id: _metrics(outcome) for id, outcome in zip(together, outcomes, strict=True)}
        return [replace(r, metrics={**r.metrics, **scores.get(r.id, {})}) for r in rollouts]

    def check(self, task: Task) -> None:
        """None: only the environment knows what it takes for right."""

    @cached_property
    def _package(self) -> Package:
        return Package(self.python, "verifiers", self.id, id=self.id, args=self.args)

    def _task(self, read: Json, place: int) -> Task:
        row, split = read["rows"][place], read["of"]
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        messages = tuple(Message(role=each["role"], content=_text(each.get("content"))) for each in prompt)
        extra = {name: value for name, value in row.items() if name not in ("prompt", "answer", "split", "row")}
        return Task(
            id=f"{split}/{place}/{digest(_question(read, place))}",
            env=self.name,
            prompt=messages,
            answer=str(row.get("answer") or ""),
            meta={**extra, "split": split, "row": place},
        )


def _question(read: Json, place: int) -> str:
    """What tells a row from others: its prompt, which the tasks of a game may share, and what else differs."""
    row, differ = read["rows"][place], read["differ"]
    return json.dumps([row["prompt"], *map(row.get, differ)] if differ else row["prompt"], sort_keys=True)


def _text(content: Json) -> str:
    parts = content if isinstance(content, list) else [content or ""]
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def _metrics(outcome: Mapping[str, Json]) -> dict[str, float]:
    """Numbers of the environment; that of its rubric is ``reward``, which is what the reward environment takes."""
    return {**outcome["metrics"], "reward": outcome["reward"]}
