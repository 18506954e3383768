"""Every procedural task of reasoning-gym: made once, unique by question, split by the question's hash."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from tandem.envs.base import Environment, Split
from tandem.envs.data.split import Tasks, digest, opening, some, split_of
from tandem.errors import ConfigError, EnvError, bounded, message_of
from tandem.importing import library
from tandem.types import Json, Task

_GIVE_UP_AFTER = 500
"""Repeated questions in a row after which the task has no more."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Environment):
    """A task of reasoning-gym, such as chain_sum, letter_counting or gsm_symbolic."""

    default_rewards: ClassVar[Mapping[str, Json]] = {"reasoning_gym": 1.0}

    task: str
    """Its name in reasoning-gym."""
    config: dict[str, Json] = field(default_factory=dict)
    """Its options, such as {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1} of chain_sum."""
    size: int = bounded(1000, least=1)
    """Most questions, both splits together; fewer if the task has no more. They are made when the run starts."""
    test_share: float = bounded(0.2, below=1)
    """Share of questions held out."""
    seed: int = 0
    """Which questions are made."""
    instruction: str = ""
    """Added beneath every question; if it asks for <answer> tags, gold replies wear them too."""
    system: str = ""
    """System message; empty: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seed", "size"):
            if name in self.config:
                raise ConfigError(f"config must not set {name}: it is an option of the environment itself")

    def tasks(self, split: Split) -> Sequence[Task]:
        rows = [entry for entry in self._entries if split_of(entry["question"], self.test_share) == split]
        remedy = f"{self.task} gave {len(self._entries)} different questions: change size, test_share or config"
        return Tasks(some(rows, self.name, split, remedy), self._task)

    def check(self, task: Task) -> str | None:
        if task.meta["unsolved"]:
            return None
        return f"<answer>{task.answer}</answer>" if "<answer>" in self.instruction else task.answer

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        made = _create(self.task, self.config, self.seed, 4 * self.size + _GIVE_UP_AFTER)
        entries: dict[str, dict[str, Any]] = {}
        vain = 0
        for index in range(len(made)):
            entry = _entry(made, index, f"{self.seed}/{index}", self.task)
            vain = vain + 1 if entry["question"] in entries else 0
            entries.setdefault(entry["question"], entry)
            if len(entries) == self.size or vain == _GIVE_UP_AFTER:
                break
        return list(entries.values())

    def _task(self, entry: dict[str, Any]) -> Task:
        return Task(
            id=f"{self.task}/{digest(entry['question'])}",
            env=self.name,
            prompt=opening(entry["question"], self.system, self.instruction),
            answer="" if entry["answer"] is None else str(entry["answer"]),
            meta={
                "question": entry["question"],
                "task": self.task,
                "config": self.config,
                "metadata": entry["metadata"],
                "unsolved": entry["answer"] is None,
            },
        )


def _create(name: str, config: Mapping[str, Json], seed: int, size: int) -> Any:
    """Build the library's data set.

    Raises:
        EnvError: the library is missing, knows no such task, or refuses the configuration.
    """
    state = random.getstate()
    try:
        factory = library("reasoning_gym", "this environment", "reasoning-gym", EnvError).factory
    finally:
        random.setstate(state)  # some of its modules draw while they are imported
    if name not in (known := factory.DATASETS):
        raise EnvError(f"reasoning-gym has no task {name!r}; it has: {', '.join(sorted(known))}")
    try:
        return factory.create_dataset(name, **{**config, "seed": seed, "size": size})
    except Exception as error:  # each task validates in its own way, mostly by assert; the message carries it
        options = ", ".join(f for f in known[name][1].__dataclass_fields__ if f not in ("seed", "size"))
        raise EnvError(f"{name} refuses config {dict(config)}: {error}; its options: {options}") from error


def _entry(made: Any, index: int, seed: str, name: str) -> dict[str, Any]:
    """One question; some tasks draw from the global generator, so that is seeded meanwhile."""
    state = random.getstate()
    random.seed(seed)
    try:
        entry: dict[str, Any] = made[index]
    except Exception as error:  # a task that fails for some configurations; the message carries it
        raise EnvError(f"{name} failed to make question {index}: {message_of(error)}") from error
    finally:
        random.setstate(state)
    return entry
