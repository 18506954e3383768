"""``tandem check``: everything that can go wrong before weights load, looked at before weights load."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem import machine, memory, resolve
from tandem.config import RunConfig, load
from tandem.engines.base import CanAttest, CanLend
from tandem.envs.base import Split
from tandem.errors import ConfigError, RewardError, TandemError
from tandem.recipe.sources import Source
from tandem.types import Rollout, Task

_SHOWN = 3
"""Failures shown of many alike."""

_TURNS = "it and the trainer take turns on the card, and steps are shorter if NVIDIA's MPS runs (docs/engines.md)"


def check(recipe: Path, overrides: Sequence[str], tasks: int) -> int:
    """Print what was found; returns 0, or the exit code of the first problem.

    Raises:
        ConfigError: the recipe itself is wrong.
    """
    loaded = load(recipe, overrides)
    look = _Look(loaded.config, tasks, loaded.given)
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

    def __init__(self, config: RunConfig, most: int, given: Collection[str]):
        self._config = config
        self._given = given
        self._most = most
        self._tasks: dict[str, Sequence[Task]] = {}
        self._model: Any = None
        self._planner: memory.Planner | None = None
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
            "engine": self._engine,
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
        slots = {"advantage": "advantages", "loss": "losses", "optimizer": "optimizers"}
        slots |= {"trains": "trains", "engine": "engines", "sync": "sync"}
        envs = [_environment(name, source) for name, source in self._config.sources.items()]
        named = [f"{name} {resolve.kind_of(slot, getattr(self._config, name))}" for name, slot in slots.items()]
        return ", ".join([*envs, *named, *([f"broker {self._config.broker.url}"] if self._config.broker else [])])

    def _engine(self) -> str:
        """Whether this machine can have it."""
        config = self._config
        found = config.engine.check(trains=config.trains, folder=Path(config.runs) / (config.name or ""))
        lent = CanAttest in config.engine.ports and config.sync.port is CanLend
        return f"{found}; {_TURNS}" if lent and config.most_lag and machine.in_turns() else found

    def _sinks(self) -> str:
        """Libraries that sinks need."""
        for sink in self._config.sinks:
            sink.check()
        return ", ".join(["run folder", *(resolve.kind_of("sinks", sink) for sink in self._config.sinks)])

    def _train_tasks(self) -> str:
        """The data, of which the first tasks are kept for the other checks."""
        found = self._read("train")
        self._tasks = {name: list(islice(tasks, self._most)) for name, tasks in found.items()}
        return _of_each({name: f"{len(tasks):,}" for name, tasks in found.items()})

    def _test_tasks(self) -> str:
        """Held-out data."""
        wanted = self._config.evaluate.tasks

        def told(count: int) -> str:
            few = f", fewer than evaluate.tasks ({wanted}): all of them are used" if count < wanted else ""
            return f"{count:,}{few}"

        return _of_each({name: told(len(tasks)) for name, tasks in self._read("test").items()})

    def _read(self, split: Split) -> Mapping[str, Sequence[Task]]:
        from tandem.trainer import players

        return players.tasks(self._config, split)

    async def _gold(self) -> str:
        """Gold replies, graded in the same processes that training grades in.

        Raises:
            RewardError: one did not get full marks.
        """
        sources = self._config.sources
        return _of_each({name: await self._gold_of(name, source) for name, source in sources.items()})

    async def _gold_of(self, name: str, source: Source) -> str:
        from tandem.rewards._workers import Graders
        from tandem.rollout.gold import check_environment, gold_rollout

        env, grading, tasks = source.env, self._config.grading, self._tasks[name]
        specs = {reward: (spec.reward, spec.weight) for reward, spec in source.rewards.items()}
        async with Graders(specs, workers=grading.workers or 1, timeout=grading.timeout) as graders:
            failures = await check_environment(env, graders, len(tasks))
            if failures:
                first = "; ".join(str(failure) for failure in failures[:_SHOWN])
                raise RewardError(
                    f"{len(failures)} gold replies of {name} did not get full marks: {first}; mend the reward, or what "
                    "the environment's check() replies"
                )
            replies = [(task, env.check(task)) for task in tasks]
            known = [gold_rollout(task, reply) for task, reply in replies if reply is not None]
            graded = [(await graders.grade([rollout]))[0] for rollout in known]
            if not graded:
                return "the environment knows none: its rewards are not proven"
            return f"{len(graded)} graded: {', '.join(_gold_values(graders.full_marks, graded))}"

    def _model_config(self) -> str:
        """Configuration of the model; weights are not read."""
        from tandem.policy.policy import load_config

        self._model = load_config(self._config.model)
        self._planner = memory.planner(self._config, self._model)
        counts = self._planner.modelled.counts
        told = f"{counts.parameters:,} parameters, {counts.trainable:,} trained"
        return f"{self._config.model}: {self._model.model_type}, {told}"

    def _prompts(self) -> str | None:
        """Lengths of rendered prompts against the context.

        Raises:
            ConfigError: a prompt leaves no room for an answer.
        """
        if self._planner is None or not self._tasks:
            return None
        from tandem.policy.policy import load_tokenizer
        from tandem.rollout import chat, prompts

        limit = memory.context(self._config, self._model)
        tokenizer = load_tokenizer(self._config.model, chat_template=self._config.chat_template)
        template = chat.Template(tokenizer, self._config.chat_template_kwargs)
        longest = prompts.longest([task for some in self._tasks.values() for task in some], template, limit)
        self._planner = dataclasses.replace(self._planner, prompt_tokens=longest)
        room, wanted = limit - longest, self._config.sampling.max_tokens
        note = f", which leaves {room} for answers, fewer than sampling.max_tokens ({wanted})" if room < wanted else ""
        return f"at most {longest} tokens of a context of {limit}{note}"

    def _memory(self) -> str | None:
        """The memory plan.

        Raises:
            DoesNotFit: it exceeds the machine.
        """
        planner = self._planner
        if planner is None:
            return None
        chosen: tuple[str, ...] = ()
        if self._config.memory == "fit":
            fitted = memory.fit(planner, self._config, self._given)
            self._config, plan, chosen = fitted.config, fitted.plan, fitted.told
        else:
            plan = planner.plan(self._config)
            plan.require()
        self.plan = "\n".join([plan.table(), *(f"  {line}" for line in chosen)])
        return f"about {machine.readable(plan.total)} at the peak of {machine.readable(plan.machine.free)} free"

    def _disk(self) -> str | None:
        """Room for checkpoints: a new one is whole before an old one goes.

        Raises:
            ConfigError: there is less.
        """
        if self._planner is None:
            return None
        folder, kept = self._config.runs, self._config.checkpoint.keep + 1
        need, free = kept * self._planner.checkpoint_bytes(self._config), machine.free_disk(Path(folder))
        told = f"{machine.readable(need)} for {kept} checkpoints, {machine.readable(free)} free"
        if need > free:
            raise ConfigError(f"{told} in {folder}; free some, lower checkpoint.keep, or set runs to another disk")
        return told


def _environment(name: str, source: Source) -> str:
    """An environment in words; the kind is left out where it is the name."""
    kind = resolve.kind_of("envs", source.env)
    return f"env {name}" + (f" ({kind})" if kind != name else "")


def _of_each(told: Mapping[str, str]) -> str:
    """What is said of each environment; of one alone without its name."""
    return "; ".join(told.values() if len(told) == 1 else (f"{name} {text}" for name, text in told.items()))


def _gold_values(full_marks: Mapping[str, float | None], graded: Sequence[Rollout]) -> Iterator[str]:
    """What each reward gave gold replies; only a person can judge one that does not say what full marks are."""
    for name, full in full_marks.items():
        values = [rollout.rewards[name] for rollout in graded if name in rollout.rewards]
        if full is not None:
            yield f"{name} gives full marks"
        else:
            yield f"{name} gives {sum(values) / len(values):.3g} on average" if values else f"{name} gives nothing"
