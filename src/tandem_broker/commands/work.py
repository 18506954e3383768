"""``tandem work`` and ``tandem env``: environments that play for a broker, sampling from engines that run elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from tandem.config.sources import EnvSource
from tandem.errors import BrokerError, ConfigError
from tandem.http import RetryPolicy
from tandem.model.policy import load_config, load_tokenizer
from tandem.observability import waits, watchdog
from tandem.rewards.grading.workers import Graders
from tandem.rollout.gold import require_full_marks
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.task_sampler import TaskOrder
from tandem.rollout.template import FIRST_PROMPTS, Template, longest_prompt
from tandem.together import together
from tandem.trainer import environments
from tandem.types import Sampling
from tandem_broker.client import Connection, EnvClient, key_in
from tandem_broker.producer import GroupTally, Producer
from tandem_broker.protocol.messages import EnvRegistration
from tandem_broker.recipe import Work, from_options, load
from tandem_broker.remote_engine import RemoteEngine
from tandem_compat.atropos.environment import from_file, tokenizer_of, translate
from tandem_compat.atropos.options import ENVIRONMENT
from tandem_compat.atropos.services import served_model

log = logging.getLogger(f"tandem.{__name__}")


def work(words: Sequence[str]) -> str:
    """Play until the trainer has what it wanted, or until Ctrl-C; returns the message to print.

    Args:
        words: a recipe and options, or options alone.

    Raises:
        ConfigError: an option is wrong.
        EngineError, BrokerError: one of them refuses, or stays away.
        Deadline: a wait passed its deadline.
    """
    recipe = Path(words[0]) if words and "=" not in words[0] else None
    return play(load(recipe, words[recipe is not None :]))


def play_by_flags(name: str, mode: str, flags: Mapping[str, Sequence[str]], overrides: Sequence[str]) -> str:
    """Play by the flags that Atropos' environments take; returns the message to print.

    Args:
        name: the environment.
        mode: serve.
        flags: the words of every flag that was not left out.
        overrides: options of ``tandem work`` laid over them.

    Raises:
        ConfigError: a flag is wrong, or the mode is another.
        EngineError: no flag says which model it is, and no engine answers that could.
    """
    if mode != "serve":
        raise ConfigError(f"tandem env {name} {mode}: the mode is serve; tandem eval and tandem check do the others")
    if "config" in flags:
        flags = {**from_file(Path(flags["config"][-1])), **flags}
    values, source = {flag: words[-1] for flag, words in flags.items()}, f"tandem env {name}"
    if not tokenizer_of(values):
        # Before an engine is waited for: whatever its model is called, the rest must be right.
        from_options(translate(name, {**flags, "env.tokenizer_name": ["unknown"]}).options, overrides, source)
        url = values.get("openai.base_url") or str(ENVIRONMENT["openai.base_url"].default)
        model = served_model(url.partition(",")[0], values.get("openai.api_key", ""))
        flags = {**flags, "env.tokenizer_name": [model]}
        typer.echo(f"tandem: --env.tokenizer_name: that of {model}, which the engine serves", err=True)
    translated = translate(name, flags)
    for note in translated.notes:
        typer.echo(f"tandem: {note}", err=True)
    os.environ.update(translated.environ)
    return play(from_options(translated.options, overrides, source))


def play(config: Work) -> str:
    """Play as configured; returns the message to print."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("tandem").setLevel(logging.INFO)
    logging.getLogger("tandem.rollout.group_runner").setLevel(logging.ERROR)  # a failed rollout is told with its group
    tallies: dict[str, GroupTally] = {}
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(run(config, tallies))
    played = "; ".join(f"{name}: {tally.line()}" for name, tally in tallies.items())
    return f"ended: {played or 'nothing was played'}"


async def run(config: Work, tallies: dict[str, GroupTally]) -> None:
    """Play, in an event loop; SIGINT and SIGTERM end it, gently the first time.

    Args:
        config: what and where.
        tallies: gets one for each environment, which counts what becomes of its groups.

    Raises:
        Deadline: a wait passed its deadline; the message names both parts.
    """
    with watchdog.watching(config.timeouts):
        async with _producers(config, tallies) as producers:
            _signals(stop := asyncio.Event())
            try:
                await together(producer.run(stop) for producer in producers)
            finally:
                await asyncio.gather(*(_leave(producer.client) for producer in producers))


@asynccontextmanager
async def _producers(config: Work, tallies: dict[str, GroupTally]) -> AsyncIterator[list[Producer]]:
    """Every part, live, and a producer for each environment: what can be wrong without the others is found first."""
    with waits.blocking("tandem work", "its tokenizer", f"model {config.model}", config.timeouts.wait_seconds):
        tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
        model = load_config(config.model)
        ends = _end_tokens(config.model, model, tokenizer)
    template = Template(tokenizer, config.chat_template_kwargs)
    context = min(config.context or 2**31, int(model.get_text_config().max_position_embeddings))
    tasks = {}
    for name, source in config.sources.items():
        on = f"data of environment {name}"
        with waits.blocking("tandem work", "train tasks and their prompts", on, config.timeouts.wait_seconds):
            tasks[name] = environments.tasks_of(name, source, "train")
            longest_prompt(list(islice(tasks[name], FIRST_PROMPTS)), template, context)
    broker_key = key_in(config.broker.key_variable, "broker.key_variable")
    engine = RemoteEngine(
        tuple(config.engine.urls),
        config.engine.model or config.model,
        context=context,
        ends=ends,
        key=key_in(config.engine.api_key_variable, "engine.api_key_variable"),
        request_seconds=config.engine.request_seconds,
        retry=RetryPolicy(max_seconds=5.0, give_up_seconds=config.give_up_seconds),
    )
    async with AsyncExitStack() as stack:
        opened = []
        for name, source in config.sources.items():
            specs = {reward: (spec.reward, spec.weight) for reward, spec in source.rewards.items()}
            workers = config.grading.processes(config.n * config.group_size)
            graders = Graders(specs, workers=workers, timeout=config.grading.timeout_seconds)
            await require_full_marks(name, source.env, await stack.enter_async_context(graders))
            client = await stack.enter_async_context(_client(config, name, source, context, broker_key))
            opened.append((name, source.env, graders, client))
        await stack.enter_async_context(engine.opened())
        _warn_of_other_engines(engine, config.sampling)
        tallies.update({name: GroupTally() for name in config.sources})
        yield [
            Producer(
                worker=GroupRunner(
                    name=name,
                    env=env,
                    engine=engine,
                    graders=graders,
                    template=template,
                    seed=config.seed,
                    truncated=config.truncated,
                    truncated_penalty=config.truncated_penalty,
                ),
                tasks=TaskOrder(name=name, label="", tasks=tasks[name], seed=config.seed),
                client=client,
                config=config,
                limit=engine.limit,
                tally=tallies[name],
            )
            for name, env, graders, client in opened
        ]


def _client(config: Work, name: str, source: EnvSource, context: int, key: str) -> EnvClient:
    """One environment at the broker, by an identity of its own."""
    share = source.min_share or None
    spec = EnvRegistration(max_token_length=context, desired_name=name, weight=source.weight,
                           group_size=config.group_size, min_batch_allocation=share)  # fmt: skip
    retry = RetryPolicy(give_up_seconds=config.give_up_seconds)
    return EnvClient(Connection(config.broker.url, key, retry=retry), spec, key=secrets.token_hex(16))


def _warn_of_other_engines(engine: RemoteEngine, sampling: Sampling) -> None:
    plain = Sampling(max_tokens=sampling.max_tokens, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids)
    if not engine.tells_versions and sampling != plain:
        remedy = "give vLLM --logprobs-mode processed_logprobs, or sample with temperature 1 and nothing cut off"
        log.warning("these engines are not Tandem's: %s", remedy)


def _end_tokens(name: str, model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, as the trainer's own policy has them."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        ends = getattr(model, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}
    return sorted(ids)


async def _leave(client: EnvClient) -> None:
    """Tell the broker, if it is there: an unfilled share would hold up the trainer."""
    try:
        async with asyncio.timeout(5.0):
            await client.disconnect()
    except (BrokerError, TimeoutError) as error:
        log.info("the broker was not told of the end: %s", str(error) or "it does not answer")


def _signals(stop: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM asks for a gentle end, the second ends."""
    task = asyncio.current_task()
    assert task is not None

    def stopped() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped)
