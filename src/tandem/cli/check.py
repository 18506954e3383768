"""``tandem check``: everything that can go wrong before weights load, looked at before weights load.

With ``--attack`` also wrong answers that pay and right ones that do not, before a policy finds them; with
``--sample N`` the groups that a run would begin with are played, and those with a gradient counted.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from tandem import machine
from tandem.api.blocking import run_to_end
from tandem.config import registry as resolve
from tandem.config.build import RewardSpec
from tandem.config.loading import FP8, RunConfig
from tandem.engines.base import ReportsChecksums
from tandem.errors import ConfigError, RewardError, TandemError, redacted
from tandem.model.policy import load_config, load_tokenizer
from tandem.observability import progress
from tandem.observability.answers import change, shortened, shown, why
from tandem.observability.board import answer_lines
from tandem.rewards.base import Reward
from tandem.rewards.grading.calls import FunctionReward
from tandem.rewards.grading.workers import Graders
from tandem.rollout import template as rendering
from tandem.rollout.gold import GradedReplies, attack, distinct, failures_of, siblings
from tandem.rollout.mixture import MixtureSchedule
from tandem.rollout.source import Draw
from tandem.rollout.task_sampler import EnvRunner
from tandem.trainer import environments
from tandem.trainer import memory_plan as memory
from tandem.trainer.pairs import RankCounts
from tandem.trainer.ranks import layout
from tandem.types import Group, Task

CheckText = str | None
"""What a look found; None if what it needs is missing."""
Question = Callable[[], CheckText | Awaitable[CheckText]]

LITTLE = 0.25
"""Share of groups with signal below which most sampling is for nothing."""
ATTACKED = 16
"""Tasks whose rewards are attacked, of each environment."""


def check(config: RunConfig, tasks: int) -> int:
    """Print what was found; returns 0, or the exit code of the first problem."""
    return asyncio.run(_check(config, tasks))


async def _check(config: RunConfig, tasks: int) -> int:
    check = _RecipeCheck(layout.placed(environments.counted(config)), tasks)
    console = Console()
    problems: list[TandemError] = []
    warned = 0

    def tell(state: str, style: str, what: str, text: str) -> None:
        console.print(Text.assemble((f"{state:8} ", style), f"{what:13} {text}"))

    with graders_log() as check.log:
        for what, ask in check.questions().items():
            try:
                with console.status(Text(f"{what} ...")):
                    text = await pending if inspect.isawaitable(pending := ask()) else pending
            except TandemError as error:
                problems.append(error)
                tell("problem", "bold red", what, str(error))
            else:
                state = ("skipped", "yellow") if text is None else ("ok", "green")
                tell(*state, what, text or "what it needs is missing, see above")
            warned += len(check.warnings)
            while check.warnings:
                tell("warning", "yellow", what, check.warnings.pop(0))
    if check.plan:
        typer.echo(f"\nmemory:\n{check.plan}\n")
    if problems:
        console.print(f"{len(problems)} problem{'s' * (len(problems) > 1)}", style="bold red")
        return problems[0].exit_code
    console.print(f"ok, with {warned} warning{'s' * (warned > 1)}" if warned else "ok", style="green")
    return 0


class _RecipeCheck:
    """The things looked at, in order; each returns what it found, or None if an earlier one failed."""

    def __init__(self, config: RunConfig, most: int):
        self._config = config
        self._most = most
        self._tasks: dict[str, Sequence[Task]] = {}
        self._model: Any = None
        self._planner: memory.Planner | None = None
        self.log = Path()
        """Takes what rewards print."""
        self.plan = ""
        """The memory plan as text, once it is made."""
        self.warnings: list[str] = []
        """Warnings: likely mistakes that need not be any."""

    def questions(self) -> dict[str, Question]:
        """Questions by name."""
        config = self._config
        questions: tuple[tuple[str, Question, bool], ...] = (
            ("parts", self._parts, True),
            ("engine", self._engine, True),
            ("loggers", self._loggers, True),
            ("train tasks", self._train_tasks, config.plays),
            ("test tasks", self._test_tasks, config.plays and bool(config.evaluate.tasks)),
            ("gold answers", self._gold, config.plays),
            ("model", self._model_config, True),
            ("prompts", self._prompts, config.plays),
            ("memory", self._memory, True),
            ("disk", self._disk, True),
        )
        return {name: question for name, question, is_asked in questions if is_asked}

    def _parts(self) -> str:
        """Parts and ranks that must work together."""
        layout.check_config(self._config)
        layout.check_gpus(self._config, RankCounts.of(self._config))
        envs = [f"env {name}" for name in self._config.sources]
        several = (None, "envs", "rewards", "corrections", "loggers")
        named = [
            f"{field.name} {resolve.kind_of(field.metadata['category'], part)}"
            for field in resolve.options(RunConfig)
            if field.metadata.get("category") not in several and (part := getattr(self._config, field.name)) is not None
        ]
        brokers = [redacted(f"broker {self._config.broker.url}")] if self._config.broker else []
        return ", ".join([*envs, *named, *brokers])

    def _engine(self) -> str:
        """Whether this machine can have it."""
        return self._config.engine.check(folder=Path(self._config.runs) / (self._config.name or ""))

    def _loggers(self) -> str:
        """Libraries that loggers need."""
        for logger in self._config.loggers:
            logger.check()
        return ", ".join(["run folder", *(resolve.kind_of("loggers", logger) for logger in self._config.loggers)])

    def _train_tasks(self) -> str:
        """The data, of which the first tasks are kept for the other checks."""
        splits = environments.tasks(self._config, "train")
        self._tasks = {name: list(itertools.islice(tasks, self._most)) for name, tasks in splits.items()}
        return _of_each({name: f"{len(tasks):,}" for name, tasks in splits.items()})

    def _test_tasks(self) -> str | None:
        """Held-out data, where those to train on could be read."""
        wanted = self._config.evaluate.tasks
        if not self._tasks:
            return None

        sizes = {name: len(tasks) for name, tasks in environments.tasks(self._config, "test").items()}
        return _of_each({name: f"{min(size, wanted):,} of {size:,}" for name, size in sizes.items()})

    async def _gold(self) -> str | None:
        """Gold replies, wrong and empty ones, graded in the same processes that training grades in.

        Raises:
            RewardError: a gold reply did not get full marks, or an answer could not be graded.
        """
        if not self._tasks:
            return None
        async with environments.opened(self._config, self._config.sources, self.log) as opened:
            return _of_each({name: await self._gold_of(name, graders) for name, graders in opened.graders.items()})

    async def _gold_of(self, name: str, graders: Graders) -> str:
        source = self._config.sources[name]
        graded = await siblings(source.env, graders, self._tasks[name])
        require_right(name, graded)
        label = f"{name}: " if len(self._config.sources) > 1 else ""
        self.warnings += [label + warning for warning in warnings_of(source.rewards, graded)]
        known = sum(replies.right is not None for replies in graded)
        return f"{known} graded, each beside a wrong answer" if known else "no gold reply is known"

    def _model_config(self) -> str:
        """Configuration of the model; weights are not read.

        Raises:
            ConfigError: ranks, or an engine's processes, cannot share its attention heads, or its experts cannot be
                chosen.
        """
        self._model = load_config(self._config.model)
        layout.check_model_heads(self._config, self._model)
        layout.check_routers(self._config, self._model)
        self._planner = memory.Planner(self._config, self._model)
        counts = self._planner.modelled
        sizes = f"{counts.parameters:,} parameters, {counts.trainable:,} trained"
        sizes += (adapted := self._planner.modelled.adapted) and f" ({adapted})"
        choice = self._planner.modelled.choice
        return f"{self._config.model}: {self._model.model_type}, {sizes}; packing: {choice.packing}, {choice.why}"

    def _prompts(self) -> str | None:
        """Lengths of rendered prompts against the context.

        Raises:
            ConfigError: a prompt leaves no room for an answer.
        """
        if self._planner is None or not self._tasks:
            return None
        limit = memory.context(self._config, self._model)
        tokenizer = load_tokenizer(self._config.model, chat_template=self._config.chat_template)
        template = rendering.Template(tokenizer, self._config.chat_template_kwargs)
        longest = rendering.longest_prompt([task for some in self._tasks.values() for task in some], template, limit)
        self._planner.prompt_tokens = longest
        note = rendering.shortfall(longest, limit, self._config.sampling.max_tokens)
        return f"at most {longest} tokens of a context of {limit}{note and f', which {note}'}"

    def _memory(self) -> str | None:
        """The memory plan.

        Raises:
            DoesNotFit: it exceeds the machine.
        """
        planner, counts = self._planner, RankCounts.of(self._config)
        if planner is None:
            return None
        planner.plan(self._config).require()
        as_run = memory.with_gradients(planner, self._config)
        plan = planner.plan(as_run)
        self.plan = plan.table()
        if as_run != self._config:
            self.plan += f"\n  distributed.gradients: {as_run.distributed.gradients}, which is auto's choice here"
        if self._config.matmul == "fp8":
            self.plan += f"\n  {FP8}"
        if counts.world > 1 or ReportsChecksums in as_run.engine.capabilities:
            self.plan += f"\n\nlayout, at the peak:\n{layout.drawn(planner, as_run)}"
        if not plan.within(1 / (1 + memory.MARGIN)):
            self.warnings.append(f"the plan may be off by {memory.MARGIN:.0%}: this run may not fit")
        return f"about {machine.readable(plan.total)} at the peak of {machine.readable(plan.machine.free)} free"

    def _disk(self) -> str | None:
        """Room for checkpoints: a new one is whole before an old one goes.

        Raises:
            ConfigError: there is less.
        """
        if self._config.checkpoint.save == "none":
            return "nothing is saved (checkpoint: none)"
        if self._planner is None:
            return None
        folder, checkpoints = self._config.runs, self._config.checkpoint.keep + 1
        need, free = checkpoints * self._planner.checkpoint_bytes(self._config), machine.free_disk(Path(folder))
        room = f"{machine.readable(need)} for {checkpoints} checkpoints, {machine.readable(free)} free"
        if need > free:
            raise ConfigError(f"{room} in {folder}; free some, lower checkpoint.keep, or set runs to another disk")
        return room


def _of_each(texts: Mapping[str, str]) -> str:
    """What is said of each environment; of one alone without its name."""
    return "; ".join(texts.values() if len(texts) == 1 else (f"{name} {text}" for name, text in texts.items()))


_SHOWN = 4
"""Kinds of failures that are told."""


def require_right(name: str, graded: Sequence[GradedReplies]) -> None:
    """Refuse rewards of an environment that do not give its gold replies full marks, or cannot grade an answer.

    Raises:
        RewardError: one line for each kind of failure.
    """
    if failures := failures_of(graded):
        each = "; ".join(distinct(failures)[:_SHOWN])
        raise RewardError(f"{len(failures)} answers of {name}: {each}; mend the reward, or the environment's check()")


def warnings_of(rewards: Mapping[str, RewardSpec], graded: Sequence[GradedReplies]) -> Iterator[str]:
    """Warnings: likely mistakes that need not be any."""
    known = [(replies.right, replies.wrong) for replies in graded if replies.right]
    if not known:
        return
    for name, spec in rewards.items():
        right, wrong = ([r.rewards[name] for r in some if r and name in r.rewards] for some in zip(*known, strict=True))
        is_function = not isinstance(spec.reward, Reward) or isinstance(spec.reward, FunctionReward)
        if is_function and not any(right) and max(wrong, default=0.0) >= 0:
            yield f"{name} gives every gold reply 0 or None: does it find the answer in its columns?"
    if all(right.reward == wrong.reward for right, wrong in known):
        yield "a gold reply and a wrong one get the same reward in every task, which teaches nothing"


@contextmanager
def graders_log() -> Iterator[Path]:
    """Path of the file that takes what rewards print; it is named at the end, or removed where nothing was printed."""
    log = Path(tempfile.mkdtemp(prefix="tandem-check-")) / "graders.log"
    try:
        yield log
    finally:
        if log.exists() and log.stat().st_size:
            typer.echo(f"what rewards printed, and their tracebacks: {log}")
        else:
            shutil.rmtree(log.parent)


def check_attack(config: RunConfig) -> int:
    """Print which answers earn what they should not; returns 1 if any does, else 0.

    Raises:
        EnvError: an environment knows no gold reply.
    """
    with graders_log() as log:
        lines = run_to_end(_attacked(config, log))
        typer.echo("\n".join(lines) if lines else "attack: no wrong answer pays, and every right one does")
    return 1 if lines else 0


async def _attacked(config: RunConfig, log: Path) -> list[str]:
    lines: list[str] = []
    async with environments.opened(config, config.sources, log) as opened:
        for name, graders in opened.graders.items():
            lines += [f"{name}: {line}" for line in await attack(config.sources[name].env, graders, ATTACKED)]
    return lines


def check_sample(config: RunConfig, count: int) -> None:
    """Play and print; few groups with signal are a matter of judgement, and no error.

    Raises:
        ConfigError: the recipe has no tasks of its own.
    """
    if config.broker is not None:
        raise ConfigError("the recipe trains on a broker's groups, and --sample plays none of those; leave it out")
    with graders_log() as log:
        with progress.shown():
            groups, seconds = run_to_end(_played(config, count, log))
        for line in _sampled_lines(groups, seconds, config):
            typer.echo(line)


async def _played(config: RunConfig, count: int, log: Path) -> tuple[list[Group], float]:
    """The first ``count`` groups of a run, with the model as it is loaded, and the seconds that playing them took."""
    from tandem.trainer import assemble  # only now: nothing else of check needs the whole run

    async with assemble.playing(config, environments.tasks(config, "train"), None, log) as runners:
        begun = time.monotonic()
        groups = await _first_groups(config, runners, count)
        return groups, time.monotonic() - begun


async def _first_groups(config: RunConfig, runners: Sequence[EnvRunner], count: int) -> list[Group]:
    """Groups in the order in which a run plays them, a batch's worth at a time."""
    table = MixtureSchedule(runners, config.groups_per_step)
    names = list(itertools.islice(itertools.chain.from_iterable(map(table.batch, itertools.count())), count))
    by_name = {runner.name: runner for runner in runners}
    room = asyncio.Semaphore(config.groups_per_step)
    with progress.under_way("sampling", total=count, unit="groups") as played:

        async def play(index: int, name: str) -> Group:
            runner = by_name[name]
            task, id = runner.of(Draw(env=name, number=names[:index].count(name)))
            async with room:
                group = await runner.group_runner.run(
                    task, id=id, index=index, size=config.group_size, sampling=config.sampling
                )
            played.advance()
            return group

        return await asyncio.gather(*(play(index, name) for index, name in enumerate(names)))


def _sampled_lines(groups: Sequence[Group], seconds: float, config: RunConfig) -> Iterator[str]:
    """The result in words."""
    signal = [group for group in groups if not group.zero_variance]
    without = [
        ("zero_variance" if len(group.scored) > 1 else "failed", group) for group in groups if group.zero_variance
    ]
    tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
    yield f"played {len(groups)} groups of {config.group_size} answers in {seconds:.0f} s, {tokens:,} tokens"
    share = len(signal) / len(groups)
    commonest = Counter(why(reason, group) for reason, group in without).most_common(4)
    rest = "".join(f"; {count} {'with ' * reason.startswith('every')}{reason}" for reason, count in commonest)
    yield f"  signal: {len(signal)} of {len(groups)} groups ({share:.0%}) have different rewards{rest}"
    yield from _reward_lines(groups)
    failed = [rollout.error.partition("\n")[0] for group in groups for rollout in group.rollouts if rollout.error]
    for error, count in Counter(failed).most_common(1):
        yield f"  {len(failed)} answers failed and have no reward; {count} of them: {shortened(error)}"
    if share < LITTLE:
        yield f"  change: {change(without, config.sampling.max_tokens)}"
    for group in (signal or groups)[:1]:
        best = max(group.rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward)
        yield from answer_lines(shown(best), "  the best answer of a group")


def _reward_lines(groups: Sequence[Group]) -> Iterator[str]:
    """What answers earn and how many are cut."""
    scored = [rollout for group in groups for rollout in group.scored]
    if scored:
        mean = math.fsum(rollout.reward or 0.0 for rollout in scored) / len(scored)
        cut = sum(rollout.truncated for rollout in scored) / len(scored)
        yield f"  reward {mean:.3g} on average; {cut:.0%} of the answers are cut at a length limit"
