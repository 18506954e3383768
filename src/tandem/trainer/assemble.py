"""The composition root: a ``RunConfig`` becomes live parts, and only here."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tandem import machine
from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.distributed.placement import Placement
from tandem.engines.base import Engine, ReportsChecksums
from tandem.envs.base import Split
from tandem.errors import ConfigError
from tandem.model.policy import Policy, load_config, load_model, load_tokenizer
from tandem.observability import progress, vitals, waits, watchdog
from tandem.observability.alarms import AlarmWatch
from tandem.observability.emit import OnStep, Telemetry
from tandem.observability.loggers.base import RunInfo
from tandem.rollout.gold import require_full_marks
from tandem.rollout.task_sampler import EnvRunner
from tandem.rollout.teacher import Score, ServedTeacher
from tandem.rollout.template import Template
from tandem.trainer import environments, loop, run_folder
from tandem.trainer import memory_plan as memory
from tandem.trainer.checkpoint import Checkpoints, restore_weights, staging_of
from tandem.trainer.evaluate import Evaluator, held_out
from tandem.trainer.pack import Packer
from tandem.trainer.pairs import RankCounts, check_pairs, is_cut
from tandem.trainer.ranks import layout
from tandem.trainer.record import records
from tandem.trainer.run_folder import RunLock
from tandem.trainer.state import TrainerState, checkpoints_in
from tandem.trainer.step import Step
from tandem.trainer.world import (
    World,
    engine_requirements,
    live_policy,
    model_of,
    rank_device,
    reference_of,
    started_on_ours,
)
from tandem.types import Json, PolicyVersion
from tandem.weight_sync.transaction.session import WeightSyncSession

log = logging.getLogger(__name__)


async def train(
    config: RunConfig, *, resume: Path | None, on_step: OnStep | None = None, stop: asyncio.Event | None = None
) -> Path:
    """Start a run, or go on with the one in ``resume``; returns its folder.

    Args:
        config: the recipe.
        resume: the folder of a run to go on with.
        on_step: called after every step with its number and metrics; what it raises ends the run.
        stop: ends the run in order once it is set, as a signal does.

    Raises:
        KeyboardInterrupt: stopped by a signal; everything is saved, and its text says how to go on.
        Deadline: a wait passed its deadline; the message names both parts.
        TandemError: anything else that ended it.
    """
    placement = Placement.from_environment(os.environ)
    if placement is not None and not placement.is_lead:
        from tandem.trainer.ranks.follow import follow

        return await follow(config, placement)
    with watchdog.watching(config.timeouts) as dog, closing(RunLock()) as lock:
        if resume:
            lock.take(resume)
        return await _train(config, placement, dog, lock, resume, on_step, stop or asyncio.Event())


async def _train(
    config: RunConfig,
    placement: Placement | None,
    dog: watchdog.Watchdog,
    lock: RunLock,
    resume: Path | None,
    on_step: OnStep | None,
    stop: asyncio.Event,
) -> Path:
    recipe, config = config, layout.placed(environments.counted(config))
    counts = RankCounts.of(config)
    layout.check_config(config)
    if placement is not None:
        layout.check_ranks(config, counts.world, placement)
    layout.check_gpus(config, counts)
    config.engine.check(folder=resume or Path(config.runs) / (config.name or ""))
    tasks = {split: environments.tasks(config, split) for split in environments.splits(config)}
    with waits.blocking("trainer", "its shape, prompts and memory", model_of(config), config.timeouts.wait_seconds):
        model = load_config(config.model)
        layout.check_model_heads(config, model)
        layout.check_routers(config, model)
        longest = environments.longest_prompt(config, model, tasks.get("train", {}))
        planner = memory.Planner(config, model, prompt_tokens=longest, resumed=resume)
        planner.plan(config).require()
        if (choice := planner.modelled.choice).packing == "plain" and config.packing == "auto":
            log.warning("each answer is computed with its prompt again (packing: plain): %s", choice.why)
        as_divided = memory.with_gradients(planner, config)
    folder = dog.folder = resume or run_folder.new_folder(recipe)
    lock.take(folder)
    with run_folder.reporting(folder), memory.explained(config), vitals.shown(folder):
        step = max(checkpoints_in(folder / "checkpoints"), default=0)
        if resume:
            run_folder.write_recipe(recipe, folder)  # what this resume changed holds for the next one too
            for change in run_folder.code_changes(config, folder):
                log.warning("%s: the run goes on with it as it is; for the run that was begun, put it back", change)
        info = RunInfo(
            name=folder.name, folder=folder, steps=config.steps, config=recipes.as_json(config), resumed_step=step
        )
        alarms = AlarmWatch(info.config)
        with Telemetry(info, config.loggers, alarms, on_step) as telemetry:
            telemetry.event("resumed" if resume else "run_started", step=info.resumed_step)
            async with AsyncExitStack() as stack:
                with dog.ends():  # before any of the parts does
                    world = await stack.enter_async_context(_world(as_divided, counts.world, placement, folder))
                    run, state = await _assemble(stack, world, lock, tasks, telemetry, stop)
                    alarms.stop = stop.set
                    with run_folder.signals(stop, folder), machine.settled():
                        state = await world.watch(loop.train(run, state))
            lock.check()
            telemetry.event("interrupted" if state.step < config.steps else "run_done", step=state.step)
    if state.step < config.steps:
        raise run_folder.stopped(state.step, alarms.ended, folder, config.checkpoint.save)
    return folder


async def evaluate(config: RunConfig, *, weights: Path | None) -> dict[str, Json]:
    """Evaluate the recipe's model, or the trained ``weights`` of a checkpoint; an ``eval.jsonl`` record."""
    async with playing(config, held_out(config, environments.tasks(config, "test")), weights) as runners:
        return await Evaluator(config, runners)(int(weights.parent.name) if weights else 0)


@asynccontextmanager
async def playing(
    config: RunConfig, tasks: environments.Tasks, weights: Path | None, log: Path | None = None
) -> AsyncIterator[list[EnvRunner]]:
    """Environment runners for tasks, with the recipe's model or the trained ``weights`` of a checkpoint.

    What rewards print goes to ``log``, or to stderr.
    """
    async with (
        answering(config, weights) as (engine, template),
        environments.opened(config, config.sources, log) as opened,
    ):
        yield opened.runners(engine, template, tasks)


@asynccontextmanager
async def answering(config: RunConfig, weights: Path | None) -> AsyncIterator[tuple[Engine, Template]]:
    """The recipe's engine with its model, or with the trained ``weights`` of a checkpoint."""
    with watchdog.watching(config.timeouts), memory.explained(config):
        async with live_policy(config) as policy:
            if weights is not None:
                await policy.compute(config.trainable.load, policy.model, weights)
            async with _published(config, policy, fresh=weights is None) as engine:
                yield engine, _template(config, policy)


@asynccontextmanager
async def _published(config: RunConfig, policy: Policy, *, fresh: bool) -> AsyncIterator[Engine]:
    """An engine that samples from the policy as it is; one in another process is given its weights, and proves it."""
    context = memory.context(config, policy.config)
    if ReportsChecksums not in config.engine.capabilities:
        async with config.engine.open(policy, context=context) as engine:
            yield engine
        return
    # What is evaluated is in one process, however many trained it.
    check_pairs(replace(config, ranks=1))
    with tempfile.TemporaryDirectory(prefix="tandem-eval-") as folder:
        config.engine.check(folder=Path(folder))
        requirements = engine_requirements(config, Path(folder))
        async with (
            config.engine.open(policy, context=context, requirements=requirements) as engine,
            WeightSyncSession(
                sync=config.sync, policy=policy, engine=engine, trainable=config.trainable, folder=Path(folder)
            ) as session,
        ):
            is_same = fresh or config.trainable.payload == "adapter"
            await session.bind(fresh=is_same and started_on_ours(config, engine, 0))
            async with session.open(PolicyVersion(step=0, digest="")):
                yield engine


def _world(
    config: RunConfig, size: int, placement: Placement | None, folder: Path
) -> AbstractAsyncContextManager[World]:
    """The ranks of a run, each with its policy loaded."""
    if size == 1:
        return World.opened(config)
    from tandem.trainer.ranks.lead import CutRanks, ManyRanks

    return (CutRanks if is_cut(config) else ManyRanks).connected(config, size, placement, folder)


async def _assemble(
    stack: AsyncExitStack,
    world: World,
    lock: RunLock,
    tasks: Mapping[Split, environments.Tasks],
    telemetry: Telemetry,
    stop: asyncio.Event,
) -> tuple[loop.RunParts, TrainerState]:
    """Every part of a run, live, and the state it starts from."""
    config, folder = world.config, lock.folder
    sources = config.sources if config.plays else {}
    playing = await stack.enter_async_context(environments.opened(config, sources, folder / "logs" / "graders.log"))
    await _grade_gold(playing)
    reference = await reference_of(config, world.policy)
    state = await restore_weights(folder / "checkpoints", world, TrainerState.fresh(config))
    requirements = engine_requirements(config, folder, restored=state.step)
    with progress.under_way("starting the engine"):
        engine = await world.start_engine(stack, requirements)
    policy = world.policy
    weight_sync = WeightSyncSession(
        sync=world.sync,
        policy=policy,
        engine=engine,
        trainable=config.trainable,
        folder=folder,
        versions=requirements.versions,
        ranks=world,
    )
    await stack.enter_async_context(weight_sync)
    # First: the weights may move into the engine's memory, and the optimizer writes where they are.
    await weight_sync.bind(fresh=started_on_ours(config, engine, state.step))
    work = await world.bind(reference)
    staging = stack.enter_context(closing(staging_of(config.checkpoint.asynchronous, policy)))
    checkpoints = Checkpoints(world=world, work=work, lock=lock, staging=staging, telemetry=telemetry)
    await checkpoints.restore(state)
    template = _template(config, policy)
    trained = environments.StepCounter(state.step)
    teacher = await stack.enter_async_context(_teacher(config, policy, template))
    runners = playing.runners(engine, template, tasks.get("train", {}), teacher)
    source = environments.rollout_source(config, folder, policy, engine, runners, trained, telemetry)
    evaluated = playing.runners(engine, template, held_out(config, tasks.get("test", {})))
    replies = environments.held_out_replies(config, template, policy, evaluated)
    run = loop.RunParts(
        steps=config.steps,
        policy=policy,
        weight_sync=weight_sync,
        source=environments.warm_started(config, template, policy, runners, source),
        pack=Packer.of(config, policy, ranks=world.size),
        step=Step.of(config, work),
        checkpoints=checkpoints,
        evaluator=Evaluator(config, evaluated, telemetry, engine.score, replies),
        telemetry=telemetry,
        records=partial(records, template=template, skip_forced=bool(config.sampling.regex)),
        show=partial(config.print_completions.show, telemetry),
        stop=stop,
        reached=trained.advance,
        grading=playing.metrics,
        on_policy=config.max_lag == config.sync.behind,
    )
    return run, state


async def _grade_gold(playing: environments.RunEnvironments) -> None:
    with progress.under_way("grading the first gold answers"):
        for name, graders in playing.graders.items():
            await require_full_marks(name, playing.config.sources[name].env, graders)


@asynccontextmanager
async def _teacher(config: RunConfig, policy: Policy, template: Template) -> AsyncIterator[Score | None]:
    """What scores the policy's answers, if the recipe has a teacher: a server, or a model beside the policy."""
    options = config.teacher
    if options is None:
        yield None
    elif options.url:
        served = ServedTeacher.of(options)
        try:
            await served.check(template)
            yield served.score
        finally:
            await served.client.close()
    else:
        tokenizer = load_tokenizer(options.model, chat_template=config.chat_template)
        if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise ConfigError(f"teacher: {options.model} has another vocabulary than {config.model}; choose a relative")
        with progress.under_way(f"loading the weights of the teacher {options.model}"):
            device, dtype = rank_device(0), getattr(torch, config.dtype)
            model = await policy.compute(load_model, options.model, dtype=dtype, device=device)
        scored = Policy(model, tokenizer, name=options.model, compute=policy.compute)

        async def score(tokens: Sequence[int]) -> Sequence[float]:
            return await policy.compute(scored.score, tokens)

        yield score


def _template(config: RunConfig, policy: Policy) -> Template:
    return Template(policy.tokenizer, config.chat_template_kwargs)
