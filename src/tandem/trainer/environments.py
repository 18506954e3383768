"""Environments of a run: their tasks, graders, environment runners and the rollout buffer that they fill."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.config.loading import RunConfig
from tandem.config.sources import EnvSource
from tandem.engines.base import Engine
from tandem.envs.base import Split
from tandem.envs.data import chats
from tandem.envs.data.rows import DataSource
from tandem.errors import ConfigError, EnvError, TandemError, defined_at, raised
from tandem.metrics import Value, merge
from tandem.observability import waits
from tandem.observability.answers import DroppedGroups
from tandem.observability.emit import Telemetry
from tandem.rewards.grading.workers import Graders
from tandem.rollout import template as rendering
from tandem.rollout.buffer import RolloutBuffer
from tandem.rollout.demonstrations import Demonstrator, WarmStartSource
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.measure import Solved
from tandem.rollout.mixture import MixtureSchedule
from tandem.rollout.source import RolloutSource
from tandem.rollout.task_sampler import EnvRunner, TaskOrder
from tandem.rollout.teacher import Score
from tandem.rollout.template import Template
from tandem.trainer import memory_plan as memory
from tandem.types import Rollout, Task

if TYPE_CHECKING:
    from tandem.model.policy import Policy

log = logging.getLogger(__name__)

Tasks = Mapping[str, Sequence[Task]]
"""Of one split, by the environment's name."""


def splits(config: RunConfig) -> tuple[Split, ...]:
    """Splits that this process reads."""
    train: tuple[Split, ...] = () if config.broker else ("train",)
    return (*train, "test") if config.sources and config.evaluate.tasks else train


def tasks(config: RunConfig, split: Split) -> Tasks:
    """Tasks of every environment.

    Raises:
        EnvError: one has none, or its data cannot be read.
    """
    by_name = {}
    for name, source in config.sources.items():
        with waits.blocking("trainer", f"{split} tasks", f"data of environment {name}", config.timeouts.wait_seconds):
            by_name[name] = tasks_of(name, source, split)
    return by_name


def replies(config: RunConfig, split: Split) -> Tasks:
    """Tasks of the warm start: those of its data, or of every environment; raises as ``tasks``."""
    options = config.warm_start
    if options is None or not options.data:
        return tasks(config, split) if options is not None and config.sources else {}
    source = DataSource(path=options.data, test_share=options.test_share)
    with waits.blocking("trainer", f"{split} replies", f"data of {options.data}", config.timeouts.wait_seconds):
        return {chats.NAME: chats.chats(source, split)}


def warm_steps(config: RunConfig) -> int:
    """Steps of the warm start, its epochs counted; its data are read in any case. Raises as ``tasks``."""
    options = config.warm_start
    if options is None or not (options.data or options.epochs):
        return config.warm_steps
    count = sum(map(len, replies(config, "train").values()))
    if options.epochs is None:
        return config.warm_steps
    return max(1, math.ceil(options.epochs * count / config.groups_per_step))


def counted(config: RunConfig) -> RunConfig:
    """The recipe with the epochs of its warm start as steps.

    Raises:
        ConfigError: nothing is trained after them, and the run is to go on.
        EnvError: as ``tasks``.
    """
    steps, options = warm_steps(config), config.warm_start
    if options is None or options.epochs is None:
        return config
    try:
        return replace(config, warm_start=replace(options, steps=steps, epochs=None))
    except ValueError as error:
        raise ConfigError(f"the warm start has {steps} of {config.steps} steps: {error}; or use tandem sft") from error


def tasks_of(name: str, source: EnvSource, split: Split) -> Sequence[Task]:
    """Tasks of one environment; raises as ``tasks``."""
    where = f"environment {name}: tasks({split!r}){defined_at(type(source.env).tasks)}"
    try:
        returned: Any = source.env.tasks(split)
        if not hasattr(returned, "__getitem__") or isinstance(returned, str | Mapping):
            raise EnvError(
                f"{where} returned {type(returned).__name__}; expected a sequence of Task, such as list(...) around it"
            )
        first = returned[0] if len(returned) else None
    except TandemError:
        raise
    except Exception as error:  # the boundary to the user's environment
        raise EnvError(f"environment {name}: tasks({split!r}) {raised(error)}") from error
    if first is None:
        raise EnvError(f"{name} has no {split} tasks; look at the options of {source.env.name}: tandem list envs")
    if not isinstance(first, Task):
        raise EnvError(f"{where} returned a sequence whose first entry is {type(first).__name__}; expected Task")
    return cast(Sequence[Task], returned)


def longest_prompt(config: RunConfig, model: Any, tasks: Tasks) -> int:
    """Tokens of the longest of the first prompts; a warning if it leaves too little room for an answer.

    Raises:
        ConfigError: it leaves none.
    """
    if not tasks:
        return memory.TYPICAL_PROMPT
    from tandem.model.policy import load_tokenizer  # which needs torch

    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    template = Template(tokenizer, config.chat_template_kwargs)
    first = [task for some in tasks.values() for task in islice(some, rendering.FIRST_PROMPTS)]
    context = memory.context(config, model)
    longest = rendering.longest_prompt(first, template, context)
    if note := rendering.shortfall(longest, context, config.sampling.max_tokens):
        log.warning("a prompt of %d tokens in a context of %d %s", longest, context, note)
    return longest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironments:
    """The environments that are played in this process; none where a broker serves all rollouts."""

    config: RunConfig
    graders: Mapping[str, Graders]
    """Open, by the environment's name."""

    def metrics(self) -> Mapping[str, Value]:
        """What the graders counted since the last call."""
        return merge([graders.metrics() for graders in self.graders.values()])

    def runners(
        self, engine: Engine, template: Template, tasks: Tasks, teacher: Score | None = None
    ) -> list[EnvRunner]:
        """Environment runners with the tasks of each, whose answers a teacher may judge."""
        return [
            EnvRunner(
                name=name,
                label=f"{name}/" if name in self.config.envs else "",
                group_runner=GroupRunner(
                    name=name,
                    env=self.config.sources[name].env,
                    engine=engine,
                    graders=graders,
                    template=template,
                    seed=self.config.seed,
                    teacher=teacher,
                    truncated=self.config.truncated,
                    truncated_penalty=self.config.truncated_penalty,
                ),
                tasks=tasks[name],
                solved=_solved(self.config.sources[name], graders),
                seed=self.config.seed,
                weight=self.config.sources[name].weight,
                min_share=self.config.sources[name].min_share,
            )
            for name, graders in self.graders.items()
            if name in tasks
        ]


@asynccontextmanager
async def opened(
    config: RunConfig, played: Mapping[str, EnvSource], log: Path | None
) -> AsyncIterator[RunEnvironments]:
    """Graders of the environments that are played here; what they print goes to ``log``, or to our own stderr."""
    async with AsyncExitStack() as stack:
        graders = {
            name: Graders(
                {reward: (spec.reward, spec.weight) for reward, spec in source.rewards.items()},
                workers=config.grading.processes(config.groups_per_step * config.group_size),
                timeout=config.grading.timeout_seconds,
                log=log,
                steps=config.steps,
            )
            for name, source in played.items()
        }
        for each in graders.values():
            await stack.enter_async_context(each)
        yield RunEnvironments(config=config, graders=graders)


def _solved(source: EnvSource, graders: Graders) -> Solved:
    """Right answers by the environment's first reward; 1.0 where it does not say what full marks are."""
    first = next(iter(source.rewards))
    full = graders.full_marks[first]
    return Solved(reward=first, full_marks=1.0 if full is None else full)


@dataclass(slots=True)
class StepCounter:
    """The policy step that training has reached; lag is measured from it."""

    step: int
    """Optimizer steps taken."""

    def advance(self, step: int) -> None:
        """Another step was taken."""
        self.step = step

    def current(self) -> int:
        """Optimizer steps taken."""
        return self.step


def warm_started(
    config: RunConfig, template: Template, policy: Policy, runners: Sequence[EnvRunner], source: RolloutSource
) -> RolloutSource:
    """The source with a warm start's demonstrations before it, if the recipe has one."""
    if not config.warm_steps:
        return source
    places, orders = config.groups_per_step, dict[str, TaskOrder]()
    if config.demonstrates:
        train = replies(config, "train")[chats.NAME]
        orders[chats.NAME] = TaskOrder(name=chats.NAME, label=f"{chats.NAME}/", tasks=train, seed=config.seed)
    else:
        orders |= {runner.name: runner for runner in runners}
    return WarmStartSource(
        steps=config.warm_steps,
        orders=orders,
        places=(lambda _: [chats.NAME] * places) if config.demonstrates else MixtureSchedule(runners, places).batch,
        demonstrated=Demonstrator(template=template, context=memory.context(config, policy.config)),
        after=source,
    )


def held_out_replies(
    config: RunConfig, template: Template, policy: Policy, runners: Sequence[EnvRunner]
) -> Sequence[Rollout]:
    """Demonstrations that are held out: of the first test rows, or test tasks."""
    if config.warm_start is None:
        return ()
    pairs: list[tuple[EnvRunner | None, Task]] = [(runner, task) for runner in runners for task in runner.tasks]
    if config.demonstrates:
        pairs = [(None, task) for task in replies(config, "test")[chats.NAME][: config.evaluate.tasks]]
    demonstrate = Demonstrator(template=template, context=memory.context(config, policy.config))
    rollouts = (demonstrate(order, task, f"{task.id}@eval/0") for order, task in pairs)
    return [rollout for rollout in rollouts if rollout is not None]


def rollout_source(
    config: RunConfig,
    folder: Path,
    policy: Policy,
    engine: Engine,
    runners: Sequence[EnvRunner],
    trained: StepCounter,
    telemetry: Telemetry,
) -> RolloutSource:
    """Where groups come from: a broker if the recipe names one, else what is played here."""
    if config.broker is None:
        return RolloutBuffer(
            runners=runners,
            config=config,
            version=trained.current,
            on_drop=dropped(config, trained, telemetry),
            on_event=lambda name, fields: telemetry.event(name, **fields),
        )
    # A run without a broker loads nothing of it.
    source: RolloutSource = entry_points(group="tandem.rollout_sources")["broker"].load()(
        config,
        folder=folder,
        context=memory.context(config, policy.config),
        vocabulary=policy.head.weight.shape[0],
        template=Template(policy.tokenizer, config.chat_template_kwargs),
        trained=trained,
        telemetry=telemetry,
        engine=engine,
    )
    return source


def dropped(config: RunConfig, trained: StepCounter, telemetry: Telemetry) -> DroppedGroups:
    """Reports groups that are left out of training."""
    size, most = config.groups_per_step, config.sampling.max_tokens
    return DroppedGroups(telemetry=telemetry, version=trained.current, groups_per_step=size, max_tokens=most)
