"""``tandem serve``: a recipe's engine alone, for trainers that are started apart, or a run's model by OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tandem.agents.server import Proxy, Session
from tandem.api import targets
from tandem.config.loading import RunConfig, load
from tandem.engines.base import ExportsWeights
from tandem.engines.vllm.client.engine import exported_weights
from tandem.engines.vllm.client.fleet import Fleet
from tandem.engines.vllm.spec import LOOPBACK, Vllm
from tandem.errors import ConfigError, EngineError
from tandem.model.policy import load_config
from tandem.trainer import assemble
from tandem.trainer import memory_plan as memory
from tandem.trainer.pairs import check_pairs
from tandem.trainer.world import engine_requirements

Tell = Callable[[str], None]

LOOK_SECONDS = 0.5
"""Between two looks whether the engine still lives."""


def serve(recipe: Path, overrides: Sequence[str], tell: Tell) -> None:
    """Run the engine until Ctrl-C or SIGTERM.

    Args:
        recipe: what it is started for.
        overrides: laid over the recipe.
        tell: shows a line to the person.

    Raises:
        ConfigError: the recipe's engine is not one that can be served.
        EngineError: it did not start, or it died.
    """
    serve_engine(load(recipe, overrides, serving=True).config, tell)


def serve_engine(config: RunConfig, tell: Tell) -> None:
    """The same, of a recipe that was read already; raises as ``serve``."""
    engine = config.engine
    if not isinstance(engine, Vllm):
        raise ConfigError("engine: tandem serve engine runs engine: vllm; others live in the trainer's process")
    if engine.urls:
        raise ConfigError("engine.urls names engines that run already; remove it to start one (engine.port says where)")
    check_pairs(config)
    engine.check(folder=_folder(config))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(config, engine, tell))
    tell("ended")


async def _serve(config: RunConfig, engine: Vllm, tell: Tell) -> None:
    serving = asyncio.current_task()
    assert serving is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    runs, folder = Path(config.runs), _folder(config)
    requirements = engine_requirements(config, folder)
    context = memory.context(config, load_config(config.model))
    tell(f"starting {config.model}; it writes to {folder / 'logs'}")
    async with engine.serve(context=context, requirements=requirements, adapters=runs) as fleet:
        shares = config.sync.capability is ExportsWeights and len(fleet.servers) == 1  # the file is of one engine
        bridge = await _export_weights(fleet, folder) if shares else None
        try:
            _introduce(fleet, engine, bridge, tell)
            while not fleet.dead():
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            if bridge is not None:
                bridge.unlink(missing_ok=True)  # the memory that it names is going
        process = fleet.dead()[0]
        raise EngineError(f"the engine {process.exit_reason()}{process.log_summary()}")


def _folder(config: RunConfig) -> Path:
    """Where it writes."""
    return Path(os.environ.get("LOGDIR") or Path(config.runs) / "served")


async def _export_weights(fleet: Fleet, folder: Path) -> Path:
    """Share the weights with a trainer that reads the file of their places."""
    (server,) = fleet.servers
    await server.post("/bridge/pause")
    exported = await exported_weights(server)
    await server.post("/bridge/resume")
    return exported.write(folder)


def _introduce(fleet: Fleet, engine: Vllm, bridge: Path | None, tell: Tell) -> None:
    """Say where it is and how it is used."""
    urls = [server.url for server in fleet.servers]
    tell(f"serving at {', '.join(urls)}" + (f"; its weights are lent by {bridge}" if bridge else ""))
    key = f", api_key_variable: {engine.api_key_variable}" if engine.api_key_variable else ""
    tell(f"a trainer uses it by: tandem train RECIPE 'engine={{kind: vllm, urls: [{', '.join(urls)}]{key}}}'")
    if not key and not engine.host.startswith(LOOPBACK):
        tell(f"anybody who reaches {engine.host} can use it and overwrite its weights: set engine.api_key_variable")
    tell("Ctrl-C ends it")


def serve_model(run: Path, overrides: Sequence[str], step: int | None, host: str, port: int, tell: Tell) -> None:
    """Serve until Ctrl-C.

    Args:
        run: its folder.
        overrides: laid over its recipe, such as ``engine=embedded``.
        step: the checkpoint; None: the newest.
        host: address to listen at.
        port: 0 is a free one.
        tell: shows a line to the person.

    Raises:
        CheckpointError: there is no such checkpoint.
        EngineError: the engine did not start.
    """
    config = load(targets.recipe_of(run), overrides).config
    weights = targets.weights_of(run, step)

    async def forever() -> None:
        async with serving(config, weights, host, port) as url:
            tell(f"{weights} is served at {url}/v1 by OpenAI's API, as model {run.name!r}; Ctrl-C ends it")
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(forever())


@asynccontextmanager
async def serving(config: RunConfig, weights: Path, host: str, port: int) -> AsyncIterator[str]:
    """Serve the weights of a checkpoint; gives the URL."""
    async with assemble.answering(config, weights) as (engine, template):
        server = ModelServer(Session(engine, template, config.sampling, ""), model=weights.parents[2].name)
        async with server.serving(host, port) as url:
            yield url


class ModelServer(Proxy):
    """The API without sessions: what is asked is answered and forgotten."""

    base = "/v1"

    def _session(self, request: web.Request) -> Session:
        begun, stream = self.session, secrets.token_hex(8)
        return Session(begun.engine, begun.template, begun.sampling, stream, trained=False)
