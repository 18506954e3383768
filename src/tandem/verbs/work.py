"""``tandem work``: an environment that plays for a broker, sampling from engines that run elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.broker.client import Connection, EnvClient
from tandem.broker.wire import EnvRegistration
from tandem.errors import BrokerError, ConfigError, EnvError, RewardError
from tandem.policy.policy import load_config, load_tokenizer
from tandem.rewards._workers import Graders
from tandem.rollout import prompts
from tandem.rollout.chat import Template
from tandem.rollout.feed import Judge, as_is, penalise_truncated
from tandem.rollout.gold import check_environment
from tandem.rollout.produce import Pace, Producer, Tally
from tandem.rollout.remote import Remote
from tandem.rollout.worker import Worker
from tandem.types import Group
from tandem.verbs._work_recipe import Work, load

log = logging.getLogger(__name__)


def work(words: Sequence[str]) -> str:
    """Play until the trainer has what it wanted, or until Ctrl-C; returns what to tell.

    Args:
        words: a recipe and options, or options alone.

    Raises:
        ConfigError: an option is wrong.
        EngineError, BrokerError: one of them refuses, or stays away.
    """
    recipe = Path(words[0]) if words and "=" not in words[0] else None
    return play(load(recipe, words[recipe is not None :]))


def play(config: Work) -> str:
    """Play as configured; returns what to tell."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("tandem").setLevel(logging.INFO)
    logging.getLogger("tandem.rollout.worker").setLevel(logging.ERROR)  # a failed rollout is told with its group
    tally = Tally()
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(run(config, tally))
    return f"ended: {tally.line()}"


async def run(config: Work, tally: Tally) -> None:
    """Play, in an event loop; SIGINT and SIGTERM end it, gently the first time.

    Args:
        config: what and where.
        tally: counts what becomes of the groups.
    """
    async with _producer(config, tally) as producer:
        stop = asyncio.Event()
        with _signals(stop):
            try:
                await producer.run(stop)
            finally:
                await _leave(producer.client)


@asynccontextmanager
async def _producer(config: Work, tally: Tally) -> AsyncIterator[Producer]:
    """Every part, live: what can be wrong without the others is found first."""
    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    template = Template(tokenizer, config.chat_template_kwargs)
    model = load_config(config.model)
    context = min(config.context or 2**31, int(model.get_text_config().max_position_embeddings))
    tasks = config.env.tasks("train")
    if not len(tasks):
        raise EnvError(f"{config.env.name} has no train tasks; look at its options: tandem list envs")
    prompts.longest(list(islice(tasks, prompts.FIRST)), template, context)
    connection = Connection(
        config.broker.url, _key(config.broker.key_variable, "broker.key_variable"), patience=config.patience_seconds
    )
    spec = EnvRegistration(
        max_token_length=context,
        desired_name=config.known_as or config.env.name,
        weight=config.weight,
        group_size=config.group_size,
        min_batch_allocation=config.min_share,
    )
    remote = Remote(
        urls=config.engine.urls,
        model=config.engine.model or config.model,
        key=_key(config.engine.api_key_variable, "engine.api_key_variable"),
        request_seconds=config.engine.request_seconds,
        patience=config.patience_seconds,
    )
    async with (
        _graders(config) as graders,
        EnvClient(connection, spec, key=secrets.token_hex(16)) as client,
        remote.open(context=context, ends=_end_tokens(config.model, model, tokenizer)) as engine,
    ):
        if not engine.tells_versions and config.sampling != dataclasses.replace(
            config.sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0
        ):
            log.warning(
                "these engines are not Tandem's: their logprobs must be those of the distribution that is sampled "
                "(vLLM: --logprobs-mode processed_logprobs), or sample with temperature 1 and nothing cut off"
            )
        yield Producer(
            worker=Worker(env=config.env, engine=engine, graders=graders, template=template, seed=config.seed),
            tasks=tasks,
            client=client,
            sampling=config.sampling,
            judge=_judge(config),
            drop_flat=config.flat_groups == "drop",
            pace=Pace(
                n=config.n, ahead=config.ahead, total_steps=config.total_steps, group_seconds=config.group_seconds
            ),
            limit=engine.limit,
            tally=tally,
        )


@asynccontextmanager
async def _graders(config: Work) -> AsyncIterator[Graders]:
    """Graders that gave full marks to the first gold replies.

    Raises:
        RewardError: they did not.
    """
    specs = {name: (spec.reward, spec.weight) for name, spec in config.rewards.items()}
    async with Graders(specs, workers=config.grading.workers, timeout=config.grading.timeout) as graders:
        if failures := await check_environment(config.env, graders, 2):
            raise RewardError(
                f"a gold reply did not get full marks: {failures[0]}; mend the reward or what the environment's "
                "check() replies (tandem check looks at more of them)"
            )
        yield graders


def _judge(config: Work) -> Judge:
    if config.truncated == "penalise":
        return penalise_truncated(config.truncated_penalty)
    return mask_truncated if config.truncated == "mask" else as_is


def mask_truncated(group: Group) -> Group:
    """A judge that keeps answers cut by a length limit from being trained on; their rewards still count."""
    rollouts = [dataclasses.replace(r, trained=False) if r.truncated else r for r in group.rollouts]
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def _end_tokens(name: str, model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, as the trainer's own policy has them."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        ends = getattr(model, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}
    return sorted(ids)


def _key(variable: str, option: str) -> str:
    """The key in an environment variable; empty where none is named.

    Raises:
        ConfigError: it is not set.
    """
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(f"{option}: {variable} is not set in the environment")
    return key


async def _leave(client: EnvClient) -> None:
    """Tell the broker, if it is there: a share that nobody fills would hold up the trainer."""
    try:
        async with asyncio.timeout(5.0):
            await client.disconnect()
    except (BrokerError, TimeoutError) as error:
        log.info("the broker was not told of the end: %s", str(error) or "it does not answer")


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Any:
    """The first SIGINT or SIGTERM asks for a gentle end, the second ends."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None

    def stopped() -> None:
        if stop.is_set():
            me.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
