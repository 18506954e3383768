"""The composition root: a ``RunConfig`` becomes live parts, and only here."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tandem import config as recipes
from tandem import memory
from tandem.config import RunConfig
from tandem.engines.base import CanAttest, CanLend, Engine, Needs
from tandem.envs.base import Split
from tandem.errors import EnvError, RewardError, UnsupportedPair
from tandem.policy.policy import Compute, Policy, load_config, load_model, load_tokenizer
from tandem.rewards._workers import Graders
from tandem.rollout import prompts
from tandem.rollout.chat import Template
from tandem.rollout.feed import Cursor, Supply
from tandem.rollout.gold import check_environment
from tandem.rollout.measure import Solved
from tandem.rollout.worker import Worker
from tandem.sinks.base import RunInfo
from tandem.sync.base import Link
from tandem.telemetry import log as logs
from tandem.telemetry.emit import Telemetry
from tandem.trainer import lifetime, loop, supply
from tandem.trainer.checkpoint import Checkpoints, restore_weights, saved_steps
from tandem.trainer.evaluate import Evaluator
from tandem.trainer.pack import Packer
from tandem.trainer.record import records
from tandem.trainer.state import TrainerState
from tandem.trainer.step import Step
from tandem.types import Json, PolicyVersion, Sampling, Task


def check_pairs(config: RunConfig) -> None:
    """Refuse parts that cannot work together, before anything is loaded.

    Raises:
        UnsupportedPair: names the ones that can.
    """
    config.sync.check(trains=config.trains, engine=config.engine)
    behind = config.sync.behind
    if config.max_lag < behind:
        raise UnsupportedPair(
            f"sync.every: {behind + 1} leaves the engine up to {behind} steps behind the policy, and max_lag allows "
            f"{config.max_lag}; set max_lag to {behind} at least, or sync.every to {config.max_lag + 1} at most"
        )


async def train(config: RunConfig, *, resume: Path | None) -> Path:
    """Start a run, or go on with the one in ``resume``; returns its folder.

    Raises:
        KeyboardInterrupt: stopped by a signal; everything is saved, and its text says how to go on.
        TandemError: anything else that ended it.
    """
    check_pairs(config)
    tasks = {split: _tasks(config, split) for split in _splits(config)}
    model = load_config(config.model)
    longest = _longest_prompt(config, model, tasks["train"]) if "train" in tasks else memory.TYPICAL_PROMPT
    memory.plan(config, model, prompt_tokens=longest, resumed=resume).require()
    folder = resume or lifetime.new_folder(config)
    with lifetime.writable(folder), logs.to_folder(folder), lifetime.reported(folder):
        if resume:
            lifetime.write_recipe(config, folder)  # what this resume changed holds for the next one too
        steps = saved_steps(folder / "checkpoints")
        info = RunInfo(
            name=folder.name,
            folder=folder,
            steps=config.steps,
            config=recipes.as_json(config),
            resumed_step=steps[-1] if steps else 0,
        )
        with Telemetry(info, config.sinks) as telemetry:
            telemetry.event("resumed" if resume else "run_started", step=info.resumed_step)
            async with _assembled(config, folder, tasks, telemetry) as (run, state):
                with lifetime.signals(run.stop):
                    state = await loop.train(run, state)
            telemetry.event("interrupted" if state.step < config.steps else "run_done", step=state.step)
    if state.step < config.steps:
        raise KeyboardInterrupt(f"stopped at step {state.step}, everything is saved; go on with: tandem train {folder}")
    return folder


async def evaluate(config: RunConfig, *, weights: Path | None) -> dict[str, Json]:
    """Evaluate the recipe's model, or the trained ``weights`` of a checkpoint; an ``eval.jsonl`` record."""
    tasks = _tasks(config, "test")
    async with _policy(config) as policy, _graders(config, None) as graders:
        if weights is not None:
            await policy.compute(config.trains.load, policy.model, weights)
        async with _published(config, policy, fresh=weights is None) as engine:
            worker = _worker(config, policy, engine, graders)
            evaluator = _evaluator(config, worker, tasks, None, lambda record: None)
            return await evaluator(0)


@asynccontextmanager
async def _published(config: RunConfig, policy: Policy, *, fresh: bool) -> AsyncIterator[Engine]:
    """An engine that samples from the policy as it is; one in another process is given its weights, and proves it."""
    context = memory.context(config, policy.config)
    if CanAttest not in config.engine.ports:
        async with config.engine.open(policy, context=context) as engine:
            yield engine
        return
    check_pairs(config)
    with tempfile.TemporaryDirectory(prefix="tandem-eval-") as folder:
        needs = engine_needs(config, Path(folder))
        async with config.engine.open(policy, context=context, needs=needs) as engine:
            link = Link(sync=config.sync, policy=policy, engine=engine, trains=config.trains, folder=Path(folder))
            await link.bind(fresh=_started_on_ours(config, engine, 0) and (fresh or config.trains.travels == "adapter"))
            async with link.open(PolicyVersion(step=0, digest="")):
                yield engine


@asynccontextmanager
async def _assembled(
    config: RunConfig, folder: Path, tasks: Mapping[Split, Sequence[Task]], telemetry: Telemetry
) -> AsyncIterator[tuple[loop.Run, TrainerState]]:
    """Every part of a run, live, and the state it starts from."""
    async with AsyncExitStack() as stack:
        policy = await stack.enter_async_context(_policy(config))
        graders = await stack.enter_async_context(_graders(config, folder)) if config.plays else None
        if graders is not None:
            await _check_gold(config, graders)
        state = await restore_weights(folder / "checkpoints", policy, config.trains, _fresh(config))
        needs = engine_needs(config, folder, restored=state.step)
        context = memory.context(config, policy.config)
        engine = await stack.enter_async_context(config.engine.open(policy, context=context, needs=needs))
        link = Link(
            sync=config.sync,
            policy=policy,
            engine=engine,
            trains=config.trains,
            folder=folder,
            versions=needs.versions,
        )
        # First: the weights may move into the engine's memory, and the optimizer writes where they are.
        await link.bind(fresh=_started_on_ours(config, engine, state.step))
        stepper = await policy.compute(config.optimizer.bind, config.trains.parameters(policy.model))
        checkpoints = Checkpoints(
            folder=folder / "checkpoints",
            every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            steps=config.steps,
            policy=policy,
            trains=config.trains,
            stepper=stepper,
            on_saved=lambda step, path: telemetry.event("checkpoint_saved", step=step, path=str(path)),
        )
        await checkpoints.restore(state)
        worker = None if graders is None else _worker(config, policy, engine, graders)
        reached = supply.Reached(state.step)
        run = loop.Run(
            steps=config.steps,
            policy=policy,
            link=link,
            feed=_supply(config, folder, policy, worker, tasks, reached, telemetry),
            pack=_packer(config, policy),
            step=Step(
                policy=policy,
                loss=config.loss,
                optimizer=config.optimizer,
                stepper=stepper,
                sampling=config.sampling,
                steps=config.steps,
            ),
            checkpoints=checkpoints,
            evaluate=_looks(config, worker, tasks.get("test", ()), telemetry),
            telemetry=telemetry,
            records=lambda step, batch, stats: records(step, batch, stats, _template(config, policy)),
            stop=asyncio.Event(),
            reached=reached.set,
            grading=graders.metrics if graders else dict,
        )
        yield run, state


def engine_needs(config: RunConfig, folder: Path | None, *, restored: int = 0) -> Needs:
    """What the run asks of its engine; after ``restored`` steps it is started on the checkpoint's own weights."""
    saved = folder / "checkpoints" / f"{restored:06d}" / config.trains.folder_name if folder and restored else None
    return Needs(
        model=config.model,
        dtype=config.dtype,
        folder=folder,
        weights=saved if config.trains.folder_name == "model" else None,
        travels=config.trains.travels,
        rank=getattr(config.trains, "rank", 0),
        targets=_adapted(config),
        port=config.sync.port,
        versions=config.max_lag + 2,
        seed=config.seed,
    )


def _adapted(config: RunConfig) -> tuple[str, ...]:
    """Names of the layers that an engine in another process must be ready to adapt; no weight is loaded for it."""
    if config.trains.travels != "adapter" or CanAttest not in config.engine.ports:
        return ()
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(config.model))
    targets: Callable[[Any], Sequence[str]] = getattr(config.trains, "targets", lambda _: ())
    return tuple(targets(model))


def _started_on_ours(config: RunConfig, engine: Engine, restored: int) -> bool:
    """Whether the engine, as it started, holds the weights that the policy holds (adapters aside)."""
    if engine.adopted:
        return False
    return not restored or config.trains.folder_name == "model" or config.trains.travels == "adapter"


async def _check_gold(config: RunConfig, graders: Graders) -> None:
    """Grade the first gold replies: a reward that refuses the right answer teaches nothing.

    Raises:
        RewardError: one did not get full marks.
    """
    assert config.env is not None
    failures = await check_environment(config.env, graders, 2)
    if failures:
        raise RewardError(
            f"a gold reply did not get full marks: {failures[0]}; mend the reward or what the environment's check() "
            "replies (tandem check looks at more of them)"
        )
    graders.metrics()  # these are nobody's rollouts


def _fresh(config: RunConfig) -> TrainerState:
    return TrainerState(
        step=0,
        version=PolicyVersion(step=0, digest=""),
        tokens_seen=0,
        cursor=Cursor(),
        config_digest=recipes.digest(config),
    )


@asynccontextmanager
async def _policy(config: RunConfig) -> AsyncIterator[Policy]:
    """Model, adapter and tokenizer on the compute thread."""
    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    compute = Compute(config.threads)

    def load() -> Any:
        torch.manual_seed(config.seed)
        model = load_model(config.model, dtype=getattr(torch, config.dtype), device=_device(config))
        return config.trains.prepare(model).eval()

    try:
        yield Policy(await compute(load), tokenizer, name=config.model, compute=compute)
    finally:
        compute.close()


def _device(config: RunConfig) -> torch.device:
    """Where the policy is loaded: on the host if its weights will be those in the memory of an engine's process."""
    lent = config.sync.port is CanLend and CanAttest in config.engine.ports
    return torch.device("cuda" if torch.cuda.is_available() and not lent else "cpu")


def _graders(config: RunConfig, folder: Path | None) -> Graders:
    return Graders(
        {name: (spec.reward, spec.weight) for name, spec in config.rewards.items()},
        workers=config.grading.workers,
        timeout=config.grading.timeout,
        log=folder / "logs" / "graders.log" if folder else None,
    )


def _worker(config: RunConfig, policy: Policy, engine: Engine, graders: Graders) -> Worker:
    assert config.env is not None
    template = _template(config, policy)
    return Worker(env=config.env, engine=engine, graders=graders, template=template, seed=config.seed)


def _template(config: RunConfig, policy: Policy) -> Template:
    return Template(policy.tokenizer, config.chat_template_kwargs)


def _solved(config: RunConfig, worker: Worker) -> Solved:
    """Right answers by the first reward of the recipe; 1.0 where it does not say what full marks are."""
    first = next(iter(config.rewards))
    full = worker.graders.full_marks[first]
    return Solved(reward=first, full_marks=1.0 if full is None else full)


def _supply(
    config: RunConfig,
    folder: Path,
    policy: Policy,
    worker: Worker | None,
    tasks: Mapping[Split, Sequence[Task]],
    reached: supply.Reached,
    telemetry: Telemetry,
) -> Supply:
    """Where groups come from: a broker if the recipe names one, else what is played here."""
    if config.broker is not None or worker is None:
        return supply.foreign(
            config,
            folder=folder,
            context=memory.context(config, policy.config),
            vocabulary=policy.head.weight.shape[0],
            template=_template(config, policy),
            reached=reached,
            telemetry=telemetry,
        )
    return supply.played(config, worker, tasks["train"], _solved(config, worker), reached, telemetry)


def _packer(config: RunConfig, policy: Policy) -> Packer:
    return Packer(
        advantage=config.advantage,
        reduction=config.loss.reduction,
        max_tokens=config.sampling.max_tokens,
        budget=config.micro_batch_tokens,
        mask_truncated=config.truncated == "mask",
        device=policy.device,
    )


def _evaluator(
    config: RunConfig,
    worker: Worker,
    tasks: Sequence[Task],
    telemetry: Telemetry | None,
    record: Callable[[dict[str, Json]], None],
) -> Evaluator:
    asked = config.evaluate
    sampling = Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        max_tokens=config.sampling.max_tokens,
        stop=config.sampling.stop,
    )

    def due(step: int) -> bool:
        if telemetry is not None and telemetry.evaluated(step):
            return False
        if step == 0:
            return asked.before
        return (step == config.steps and asked.after) or (asked.every > 0 and step % asked.every == 0)

    return Evaluator(
        worker=worker,
        tasks=tasks[: asked.tasks],
        samples=asked.samples,
        sampling=sampling,
        solved=_solved(config, worker),
        due=due,
        record=record,
        started=lambda step: telemetry.event("eval_started", step=step) if telemetry else None,
    )


def _looks(
    config: RunConfig, worker: Worker | None, tasks: Sequence[Task], telemetry: Telemetry
) -> Callable[[int], Awaitable[None]]:
    """What looks at held-out tasks between steps."""

    async def nowhere(step: int) -> None:
        return

    if worker is None:
        return nowhere
    return _evaluator(config, worker, tasks, telemetry, telemetry.evaluation).maybe


def _splits(config: RunConfig) -> tuple[Split, ...]:
    """Splits that this process reads."""
    train: tuple[Split, ...] = () if config.broker else ("train",)
    return (*train, "test") if config.env is not None and config.evaluate.tasks else train


def _tasks(config: RunConfig, split: Split) -> Sequence[Task]:
    assert config.env is not None
    tasks = config.env.tasks(split)
    if not len(tasks):
        raise EnvError(f"{config.env.name} has no {split} tasks; look at its options: tandem list envs")
    return tasks


def _longest_prompt(config: RunConfig, model: Any, tasks: Sequence[Task]) -> int:
    """Tokens of the longest of the first prompts; an error if one leaves no room for an answer."""
    template = Template(load_tokenizer(config.model, chat_template=config.chat_template), config.chat_template_kwargs)
    return prompts.longest(list(islice(tasks, prompts.FIRST)), template, memory.context(config, model))
