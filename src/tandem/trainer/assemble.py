"""The composition root: a ``RunConfig`` becomes live parts, and only here."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from tandem import machine
from tandem.algorithms.advantages.base import Advantage, Weighs
from tandem.algorithms.references.base import ReferenceWeights
from tandem.config import loading as recipes
from tandem.config.loading import RunConfig, only_by_advantage
from tandem.distributed import flight_recorder
from tandem.distributed.placement import Placement
from tandem.distributed.shared_slices import SharedSlices
from tandem.engines.base import Engine, EngineRequirements, ReportsChecksums
from tandem.envs.base import Split
from tandem.errors import ConfigError
from tandem.model.penalties import Penalties
from tandem.model.policy import Policy, load_config
from tandem.observability import progress, vitals, waits, watchdog
from tandem.observability.alarms import AlarmWatch
from tandem.observability.completions import Completions
from tandem.observability.emit import OnStep, Telemetry
from tandem.observability.loggers.base import RunInfo
from tandem.rollout.data_state import DataState
from tandem.rollout.lag_control import LagControl
from tandem.rollout.source import RolloutSource
from tandem.rollout.task_sampler import EnvRunner
from tandem.rollout.template import Template
from tandem.trainer import environments, loop, out_of_memory, rank_checks, rank_parts, run_folder, user_code
from tandem.trainer import memory_plan as memory
from tandem.trainer.checkpoint import Checkpoints, restore_weights, saved_steps
from tandem.trainer.evaluate import evaluator
from tandem.trainer.follow import follow
from tandem.trainer.heads import check_model_heads
from tandem.trainer.live import changing as changing
from tandem.trainer.live import live_policy, model_of, rank_device, work_of
from tandem.trainer.live import objective as objective
from tandem.trainer.pack import Packer
from tandem.trainer.pairs import check_pairs as check_pairs
from tandem.trainer.pairs import has_engines_beside, has_slices, ranks_of_engine
from tandem.trainer.rank_crew import RankCrew
from tandem.trainer.rank_parts import RankParts, Together
from tandem.trainer.rank_slices import RankSlices, Skeleton, SliceCrew
from tandem.trainer.record import records
from tandem.trainer.run_lock import RunLock
from tandem.trainer.staging import Staging, staging_of
from tandem.trainer.state import TrainerState
from tandem.trainer.step import Step
from tandem.trainer.work import LocalWork
from tandem.types import Json, PolicyVersion
from tandem.weight_sync.transaction.session import WeightSyncSession

log = logging.getLogger(__name__)


async def train(
    config: RunConfig,
    *,
    resume: Path | None,
    set_options: Collection[str] = (),
    on_step: OnStep | None = None,
    stop: asyncio.Event | None = None,
) -> Path:
    """Start a run, or go on with the one in ``resume``; returns its folder.

    Args:
        config: the recipe.
        resume: the folder of a run to go on with.
        set_options: options that the recipe sets, by dotted path: ``memory: fit`` leaves them as they are.
        on_step: called after every step with its number and metrics; what it raises ends the run.
        stop: ends the run in order once it is set, as a signal does.

    Raises:
        KeyboardInterrupt: stopped by a signal; everything is saved, and its text says how to go on.
        Deadline: a wait passed its deadline; the message names both parts.
        TandemError: anything else that ended it.
    """
    if (placement := Placement.from_environment(os.environ)) is not None and not placement.is_lead:
        return await follow(config, placement)
    with watchdog.watching(config.timeouts) as dog, RunLock() as lock:
        if resume:
            lock.take(resume)
        return await _train(config, dog, lock, resume, set_options, on_step, stop or asyncio.Event())


async def _train(
    config: RunConfig,
    dog: watchdog.Watchdog,
    lock: RunLock,
    resume: Path | None,
    set_options: Collection[str],
    on_step: OnStep | None,
    stop: asyncio.Event,
) -> Path:
    placement = Placement.from_environment(os.environ)
    counts = memory.RankCounts.of(config)
    world = counts.world
    check_pairs(config)
    rank_checks.check_ranks(config, world, placement)
    config.engine.check(trainable=config.trainable, folder=resume or Path(config.runs) / (config.name or ""))
    tasks = {split: environments.tasks(config, split) for split in environments.splits(config)}
    with waits.blocking("trainer", "its shape, prompts and memory", model_of(config), config.timeouts.wait_seconds):
        model = load_config(config.model)
        check_model_heads(config, model)
        longest = (
            environments.longest_prompt(config, model, tasks["train"]) if "train" in tasks else memory.TYPICAL_PROMPT
        )
        planner = memory.planner(config, model, prompt_tokens=longest, resumed=resume)
        config = memory.settled(planner, config, set_options)
        as_divided = memory.with_gradients(planner, config)
    folder = dog.folder = resume or run_folder.new_folder(config)
    lock.take(folder)
    explained = out_of_memory.explained(config, lambda: planner.plan(config).largest())
    with run_folder.reporting(folder), explained, vitals.shown(folder):
        for doubt in filter(None, (counts.idle_options(config), config.optimizer.doubt())):
            log.warning("%s", doubt)
        if resume:
            run_folder.write_recipe(config, folder)  # what this resume changed holds for the next one too
        steps = saved_steps(folder / "checkpoints")
        if resume:
            for change in user_code.keep(config, folder, steps[-1] if steps else 0):
                log.warning("%s: the run goes on with it as it is now; for the run that was begun, put it back", change)
        info = RunInfo(
            name=folder.name,
            folder=folder,
            steps=config.steps,
            config=recipes.as_json(config),
            resumed_step=steps[-1] if steps else 0,
        )
        alarms = AlarmWatch(info.config)
        with Telemetry(info, config.loggers, alarms, on_step) as telemetry:
            telemetry.event("resumed" if resume else "run_started", step=info.resumed_step)
            async with AsyncExitStack() as stack:
                with dog.ends():  # before any of the parts does
                    together = await stack.enter_async_context(rank_parts.opened(config, world, placement, folder))
                    run, state = await _assemble(stack, as_divided, lock, tasks, telemetry, stop, together)
                    alarms.stop = stop.set
                    with run_folder.signals(stop, folder), machine.settled():
                        training = loop.train(run, state)
                        state = await (training if together is None else together.ranks.watch(training))
            lock.check()
            telemetry.event("interrupted" if state.step < config.steps else "run_done", step=state.step)
    if state.step < config.steps:
        raise run_folder.stopped(state.step, alarms.ended, folder, config.checkpoint.save)
    return folder


async def evaluate(config: RunConfig, *, weights: Path | None) -> dict[str, Json]:
    """Evaluate the recipe's model, or the trained ``weights`` of a checkpoint; an ``eval.jsonl`` record."""
    async with playing(config, _first(config, environments.tasks(config, "test")), weights) as runners:
        return await evaluator(config, runners)(int(weights.parent.name) if weights else 0)


@asynccontextmanager
async def playing(
    config: RunConfig, tasks: environments.Tasks, weights: Path | None, log: Path | None = None
) -> AsyncIterator[list[EnvRunner]]:
    """Environment runners for tasks, with the recipe's model or the trained ``weights`` of a checkpoint.

    What rewards print goes to ``log``, or to stderr.
    """
    with watchdog.watching(config.timeouts), out_of_memory.explained(config):
        async with live_policy(config) as policy, environments.opened(config, config.sources, log) as opened:
            if weights is not None:
                await policy.compute(config.trainable.load, policy.model, weights)
            async with _published(config, policy, fresh=weights is None) as engine:
                yield opened.runners(engine, _template(config, policy), tasks)


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
        config.engine.check(trainable=config.trainable, folder=Path(folder))
        requirements = engine_requirements(config, Path(folder))
        async with (
            config.engine.open(policy, context=context, requirements=requirements) as engine,
            WeightSyncSession(
                sync=config.sync, policy=policy, engine=engine, trainable=config.trainable, folder=Path(folder)
            ) as session,
        ):
            await session.bind(
                fresh=_started_on_ours(config, engine, 0) and (fresh or config.trainable.payload == "adapter")
            )
            async with session.open(PolicyVersion(step=0, digest="")):
                yield engine


async def _assemble(
    stack: AsyncExitStack,
    config: RunConfig,
    lock: RunLock,
    tasks: Mapping[Split, environments.Tasks],
    telemetry: Telemetry,
    stop: asyncio.Event,
    together: Together | None,
) -> tuple[loop.RunParts, TrainerState]:
    """Every part of a run, live, and the state it starts from."""
    folder = lock.folder
    policy, parts = await _loaded(stack, config, folder, together)
    playing = await stack.enter_async_context(_environments(config, folder))
    with progress.under_way("grading the first gold answers"):
        await playing.check_gold()
    held = None if config.reference is None else await policy.compute(config.reference.hold, changing(config, policy))
    state = await restore_weights(folder / "checkpoints", policy, config.trainable, _fresh(config))
    await rank_parts.load_weights(together, config, folder, state.step)
    requirements = engine_requirements(config, folder, restored=state.step, together=together)
    context = memory.context(config, policy.config)
    with progress.under_way("starting the engine"):
        engines = rank_parts.engines_of(config, together)
        engine = await stack.enter_async_context(engines.open(policy, context=context, requirements=requirements))
    policy, crew = await _cut(config, policy, together, parts)
    session = _session(config, policy, engine, folder, requirements, together, crew)
    await stack.enter_async_context(session)
    # First: the weights may move into the engine's memory, and the optimizer writes where they are.
    await session.bind(fresh=_started_on_ours(config, engine, state.step))
    step = await _step(config, policy, held, together, parts)
    staging = stack.enter_context(closing(staging_of(config.checkpoint.asynchronous, policy)))
    checkpoints = _checkpoints(config, lock, policy, step.work, staging, telemetry, together, crew)
    await checkpoints.restore(state)
    await rank_parts.load_states(together, folder, state.step)
    template = _template(config, policy)
    held_out = evaluator(config, playing.runners(engine, template, _first(config, tasks.get("test", {}))), telemetry)
    trained = environments.StepCounter(state.step)
    lag_control = environments.lag_control(config, state.rate, telemetry)
    runners = playing.runners(engine, template, tasks.get("train", {}))
    run = loop.RunParts(
        steps=config.steps,
        policy=policy,
        weight_sync=session,
        source=_source(config, folder, policy, engine, runners, trained, telemetry, lag_control),
        pack=packer(config, policy, ranks=rank_parts.world_of(together)),
        step=step,
        checkpoints=checkpoints,
        evaluator=held_out,
        telemetry=telemetry,
        records=partial(records, template=template, skip_forced=bool(config.sampling.regex)),
        show=Completions(config.print_completions, telemetry),
        stop=stop,
        reached=trained.advance,
        grading=playing.metrics,
        lag_control=lag_control,
    )
    return run, state


def _environments(config: RunConfig, folder: Path) -> AbstractAsyncContextManager[environments.RunEnvironments]:
    """What is played here, if anything is."""
    return environments.opened(config, config.sources if config.plays else {}, folder / "logs" / "graders.log")


def _session(
    config: RunConfig,
    policy: Policy,
    engine: Engine,
    folder: Path,
    requirements: EngineRequirements,
    together: Together | None,
    crew: SliceCrew | None,
) -> WeightSyncSession:
    return WeightSyncSession(
        sync=config.sync if crew is None else SharedSlices.of(config.sync, crew),
        policy=policy,
        engine=engine,
        trainable=config.trainable,
        folder=folder,
        versions=requirements.versions,
        ranks=together,
    )


async def _loaded(
    stack: AsyncExitStack, config: RunConfig, folder: Path, together: Together | None
) -> tuple[Policy, RankParts | None]:
    """The policy, and the lead's place among the ranks, which load theirs at the same time."""
    if together is None:
        return await stack.enter_async_context(live_policy(config)), None
    ranks = together.ranks
    loading = stack.enter_async_context(live_policy(config, local_ranks=ranks.world))
    policy = await together.do("begin", {"recipe": recipes.dump(config), "folder": str(folder)}, loading)
    logs = folder / "logs"
    workers = ranks_of_engine(config)
    connecting = RankParts.join(ranks.rendezvous, 0, rank_device(0), config.distributed, logs, workers)
    parts = await together.do("connect", None, connecting)
    stack.callback(parts.abort)
    ranks.on_failure.append(parts.give_up)
    if parts.rendezvous.backend == "nccl":
        ranks.advice = f"; the last collectives of each rank: {flight_recorder.command(logs)}"
        watching = asyncio.create_task(ranks.end_at(parts.fault()), name="NCCL's watchdog")
        stack.callback(watching.cancel)
    return policy, parts


async def _cut(
    config: RunConfig, policy: Policy, together: Together | None, parts: RankParts | None
) -> tuple[Policy, SliceCrew | None]:
    """Where each rank writes the slices of an engine's worker: the policy cut so, and the ranks; else as it is."""
    if together is None or parts is None or not has_slices(config):
        return policy, None
    skeleton = await policy.compute(Skeleton, policy.model)
    cut = await together.do("cut", None, policy.compute(parts.cut, policy, skeleton.bare(), policy.model))
    return cut, SliceCrew(RankSlices(cut), skeleton, together.ranks)


async def _step(
    config: RunConfig,
    policy: Policy,
    held: ReferenceWeights | None,
    together: Together | None,
    parts: RankParts | None,
) -> Step:
    """The optimizer bound, by every rank to its part, and the step that it ends."""
    options: dict[str, Any] = {
        "optimizer": config.optimizer,
        "steps": config.steps,
        "updates_per_batch": config.updates_per_batch,
    }
    if together is None or parts is None:
        own = await policy.compute(config.optimizer.bind, config.trainable.parameters(policy.model))
        return Step(work=work_of(config, policy, own, held), **options)
    trained, stepper = await together.do("bind", None, policy.compute(parts.bind, config, policy))
    work = work_of(config, trained, stepper, held, stepper.begin_pass, stepper.flush, stepper.end_pass)
    work.context = parts.context
    crew = RankCrew(work, together.ranks, context_parallel=config.distributed.context_parallel)
    return Step(work=work, crew=crew, **options)


def _checkpoints(
    config: RunConfig,
    lock: RunLock,
    policy: Policy,
    work: LocalWork,
    staging: Staging,
    telemetry: Telemetry,
    together: Together | None,
    crew: SliceCrew | None,
) -> Checkpoints:
    return Checkpoints(
        folder=lock.folder / "checkpoints",
        contents=config.checkpoint.save,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        steps=config.steps,
        policy=policy,
        trainable=config.trainable,
        stepper=work.stepper,
        held=work.held,
        staging=staging,
        still=lock.check,
        on_saved=lambda step, path: telemetry.event("checkpoint_saved", step=step, path=str(path)),
        whole=None if crew is None else crew.whole,
        others=together,
    )


def engine_requirements(
    config: RunConfig, folder: Path | None, *, restored: int = 0, together: Together | None = None
) -> EngineRequirements:
    """Requirements of the run for its engine, which after ``restored`` steps starts on the checkpoint's own weights."""
    saved = folder / "checkpoints" / f"{restored:06d}" / config.trainable.folder_name if folder and restored else None
    return EngineRequirements(
        model=config.model,
        dtype=config.dtype,
        folder=folder,
        weights=saved if config.trainable.folder_name == "model" else None,
        payload=config.trainable.payload,
        rank=getattr(config.trainable, "rank", 0),
        targets=_adapted(config),
        capability=config.sync.capability,
        versions=config.most_lag + 2,
        seed=config.seed,
        hosts=together.hosts if together is not None and has_engines_beside(config) else None,
    )


def _adapted(config: RunConfig) -> tuple[str, ...]:
    """Names of the layers that an engine in another process must be ready to adapt; no weight is loaded for it."""
    if config.trainable.payload != "adapter" or ReportsChecksums not in config.engine.capabilities:
        return ()
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(config.model))
    targets: Callable[[Any], Sequence[str]] = getattr(config.trainable, "targets", lambda _: ())
    return tuple(targets(model))


def _started_on_ours(config: RunConfig, engine: Engine, restored: int) -> bool:
    """Whether the engine, as it started, holds the weights that the policy holds (adapters aside)."""
    if engine.started_elsewhere:
        return False
    return not restored or config.trainable.folder_name == "model" or config.trainable.payload == "adapter"


def _fresh(config: RunConfig) -> TrainerState:
    return TrainerState(
        step=0,
        version=PolicyVersion(step=0, digest=""),
        tokens_seen=0,
        data_state=DataState(),
        config_digest=recipes.digest(config),
    )


def _template(config: RunConfig, policy: Policy) -> Template:
    return Template(policy.tokenizer, config.chat_template_kwargs)


def _source(
    config: RunConfig,
    folder: Path,
    policy: Policy,
    engine: Engine,
    runners: Sequence[EnvRunner],
    trained: environments.StepCounter,
    telemetry: Telemetry,
    lag_control: LagControl,
) -> RolloutSource:
    """Where groups come from: a broker if the recipe names one, else what is played here."""
    if config.broker is not None:
        source: RolloutSource = _broker_source()(
            config,
            folder=folder,
            context=memory.context(config, policy.config),
            vocabulary=policy.head.weight.shape[0],
            template=_template(config, policy),
            trained=trained,
            telemetry=telemetry,
            engine=engine,
        )
        return source
    return environments.rollout_buffer(config, runners, trained, telemetry, lag_control)


def _broker_source() -> Callable[..., RolloutSource]:
    """What makes the source of a recipe with ``broker:``; a run without one loads nothing of it."""
    points = entry_points(group="tandem.rollout_sources", name="broker")
    if not points:
        raise ConfigError("broker: tandem_broker is not installed; install Tandem again (pip install -e .)")
    make: Callable[..., RolloutSource] = next(iter(points)).load()
    return make


def _advantage(config: RunConfig) -> Advantage:
    if not isinstance(config.advantage, Weighs):
        return config.advantage
    return config.advantage.weighed(
        {env: {name: spec.weight for name, spec in source.rewards.items()} for env, source in config.sources.items()}
    )


def packer(config: RunConfig, policy: Policy, *, ranks: int = 1) -> Packer:
    """The packer of a recipe's micro-batches."""
    return Packer(
        advantage=_advantage(config),
        reduction=config.loss.reduction,
        max_tokens=config.sampling.max_tokens,
        budget=config.micro_batch_tokens * config.distributed.context_parallel,
        mask_truncated=config.truncated == "mask",
        device=policy.device if ranks == 1 else torch.device("cpu"),  # from which they are sent to their ranks
        width=policy.config.hidden_size,
        ranks=ranks // config.distributed.context_parallel,  # those that share a micro-batch are as one
        skip_zero=only_by_advantage(config),
        penalties=Penalties.of(config.sampling, sorted(policy.end_tokens)),
        skip_forced=bool(config.sampling.regex),
    )


def _first(config: RunConfig, tasks: environments.Tasks) -> environments.Tasks:
    """The held-out tasks that are looked at; a sequence of a user's own may take no slices."""
    return {name: [some[i] for i in range(min(config.evaluate.tasks, len(some)))] for name, some in tasks.items()}
