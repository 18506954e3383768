"""``tandem check``: everything that can go wrong before weights load, looked at before weights load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem import machine, memory, resolve
from tandem.config import RunConfig, load
from tandem.envs.base import Split
from tandem.errors import ConfigError, EnvError, RewardError, TandemError
from tandem.types import Rollout, Task

_SHOWN = 3
"""Failures shown of many alike."""


def check(recipe: Path, overrides: Sequence[str], tasks: int) -> int:
    """Print what was found; returns 0, or the exit code of the first problem.

    Raises:
        ConfigError: the recipe itself is wrong.
    """
    look = _Look(load(recipe, overrides).config, tasks)
    table = Table(box=None, show_header=False, pad_edge=False)
    problems: list[TandemError] = []
    for what, ask in look.all().items():
        try:
            found = ask()
        except TandemError as error:
            problems.append(error)
            table.add_row(Text("problem", "bold red"), what, Text(str(error)))
        else:
            state = Text("skipped", "yellow") if found is None else Text("ok", "green")
            table.add_row(state, what, Text(found or "what it needs is missing, see above"))
    console = Console()
    console.print(table)
    if look.plan:
        typer.echo(f"\nmemory:\n{look.plan}\n")
    if problems:
        console.print(f"{len(problems)} problem{'s' * (len(problems) > 1)}", style="bold red")
        return problems[0].exit_code
    console.print("ok", style="green")
    return 0


class _Look:
    """The things looked at, in order; each returns what it found, or None if an earlier one failed."""

    def __init__(self, config: RunConfig, most: int):
        self._config = config
        self._most = most
        self._tasks: Sequence[Task] = ()
        self._model: Any = None
        self._longest = memory.TYPICAL_PROMPT
        self.plan = ""
        """The memory plan as text, once it is made."""

    def all(self) -> dict[str, Callable[[], str | None]]:
        """Questions by name."""
        config = self._config
        plays = config.plays
        held_out = {"test tasks": self._test_tasks} if plays and config.evaluate.tasks else {}
        tasks: dict[str, Callable[[], str | None]] = {
            "train tasks": self._train_tasks,
            **held_out,
            "gold answers": lambda: asyncio.run(self._gold()) if self._tasks else None,
        }
        return {
            "parts": self._parts,
            "sinks": self._sinks,
            **(tasks if plays else {}),
            "model": self._model_config,
            **({"prompts": self._prompts} if plays else {}),
            "memory": self._memory,
            "disk": self._disk,
        }

    def _parts(self) -> str:
        """Pairs of parts that must work together."""
        from tandem import run

        run.check_pairs(self._config)
        slots = {"env": "envs", "advantage": "advantages", "loss": "losses", "optimizer": "optimizers"}
        slots |= {"trains": "trains", "engine": "engines", "sync": "sync"}
        parts = {name: getattr(self._config, name) for name in slots}
        named = [f"{name} {resolve.kind_of(slots[name], part)}" for name, part in parts.items() if part is not None]
        return ", ".join([*named, *([f"broker {self._config.broker.url}"] if self._config.broker else [])])

    def _sinks(self) -> str:
        """Libraries that sinks need."""
        for sink in self._config.sinks:
            sink.check()
        return ", ".join(["run folder", *(resolve.kind_of("sinks", sink) for sink in self._config.sinks)])

    def _train_tasks(self) -> str:
        """The data, of which the first tasks are kept for the other checks."""
        tasks = self._read("train")
        self._tasks = list(islice(tasks, self._most))
        return f"{len(tasks):,}"

    def _test_tasks(self) -> str:
        """Held-out data."""
        count, wanted = len(self._read("test")), self._config.evaluate.tasks
        return f"{count:,}" + (
            f", fewer than evaluate.tasks ({wanted}): all of them are used" if count < wanted else ""
        )

    def _read(self, split: Split) -> Sequence[Task]:
        env = self._config.env
        assert env is not None
        tasks = env.tasks(split)
        if not len(tasks):
            raise EnvError(f"{env.name} has no {split} tasks; look at its options: tandem list envs")
        return tasks

    async def _gold(self) -> str:
        """Gold replies, graded in the same processes that training grades in.

        Raises:
            RewardError: one did not get full marks.
        """
        from tandem.rewards._workers import Graders
        from tandem.rollout.gold import check_environment, gold_rollout

        env, grading = self._config.env, self._config.grading
        assert env is not None
        specs = {name: (spec.reward, spec.weight) for name, spec in self._config.rewards.items()}
        async with Graders(specs, workers=grading.workers, timeout=grading.timeout) as graders:
            failures = await check_environment(env, graders, len(self._tasks))
            if failures:
                first = "; ".join(str(failure) for failure in failures[:_SHOWN])
                raise RewardError(
                    f"{len(failures)} gold replies did not get full marks: {first}; mend the reward, or what the "
                    "environment's check() replies"
                )
            replies = [(task, env.check(task)) for task in self._tasks]
            known = [gold_rollout(task, reply) for task, reply in replies if reply is not None]
            graded = [(await graders.grade([rollout]))[0] for rollout in known]
            if not graded:
                return "the environment knows none: its rewards are not proven"
            return f"{len(graded)} graded: {', '.join(_gold_values(graders.full_marks, graded))}"

    def _model_config(self) -> str:
        """Configuration of the model; weights are not read."""
        from tandem.policy.policy import load_config

        self._model = load_config(self._config.model)
        total, trained, _ = memory.count(self._config, self._model)
        return f"{self._config.model}: {self._model.model_type}, {total:,} parameters, {trained:,} trained"

    def _prompts(self) -> str | None:
        """Lengths of rendered prompts against the context.

        Raises:
            ConfigError: a prompt leaves no room for an answer.
        """
        if self._model is None or not self._tasks:
            return None
        from tandem.policy.policy import load_tokenizer
        from tandem.rollout import chat, prompts

        limit = memory.context(self._config, self._model)
        tokenizer = load_tokenizer(self._config.model, chat_template=self._config.chat_template)
        template = chat.Template(tokenizer, self._config.chat_template_kwargs)
        self._longest = prompts.longest(self._tasks, template, limit)
        room, wanted = limit - self._longest, self._config.sampling.max_tokens
        note = f", which leaves {room} for answers, fewer than sampling.max_tokens ({wanted})" if room < wanted else ""
        return f"at most {self._longest} tokens of a context of {limit}{note}"

    def _memory(self) -> str | None:
        """The memory plan.

        Raises:
            DoesNotFit: it exceeds the machine.
        """
        if self._model is None:
            return None
        plan = memory.plan(self._config, self._model, prompt_tokens=self._longest)
        plan.require()
        self.plan = plan.table()
        return f"about {machine.readable(plan.total)} at the peak of {machine.readable(plan.machine.free)} free"

    def _disk(self) -> str | None:
        """Room for checkpoints: a new one is whole before an old one goes.

        Raises:
            ConfigError: there is less.
        """
        if self._model is None:
            return None
        folder, kept = self._config.runs, self._config.checkpoint.keep + 1
        need, free = kept * memory.checkpoint_bytes(self._config, self._model), machine.free_disk(Path(folder))
        told = f"{machine.readable(need)} for {kept} checkpoints, {machine.readable(free)} free"
        if need > free:
            raise ConfigError(f"{told} in {folder}; free some, lower checkpoint.keep, or set runs to another disk")
        return told


def _gold_values(full_marks: Mapping[str, float | None], graded: Sequence[Rollout]) -> Iterator[str]:
    """What each reward gave gold replies; only a person can judge one that does not say what full marks are."""
    for name, full in full_marks.items():
        values = [rollout.rewards[name] for rollout in graded if name in rollout.rewards]
        if full is not None:
            yield f"{name} gives full marks"
        else:
            yield f"{name} gives {sum(values) / len(values):.3g} on average" if values else f"{name} gives nothing"
