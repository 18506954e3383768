"""``tandem serve RUN``: a trained model behind OpenAI's API, on the engine that the run had."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tandem.agents.server import Proxy, Session
from tandem.api import targets
from tandem.config.loading import RunConfig, load
from tandem.types import Sampling, Turn


def serve_model(
    run: Path, overrides: Sequence[str], step: int | None, host: str, port: int, tell: Callable[[str], object]
) -> None:
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
    from tandem.trainer import assemble  # which needs torch

    async with assemble.answering(config, weights) as (engine, template):
        server = ModelServer(engine, template, config.sampling, model=weights.parents[2].name)
        async with server.serving(host, port) as url:
            yield url


class ServedRequest(Session):
    """One request; nothing is trained on it, so that it may ask for any sampling."""

    async def _sample(self, prompt: Sequence[int], sampling: Sampling, number: int) -> Turn:
        self.sampling = sampling
        return await super()._sample(prompt, sampling, number)


class ModelServer(Proxy):
    """The API without sessions: what is asked is answered and forgotten."""

    base = "/v1"

    def _session(self, request: web.Request) -> Session:
        return ServedRequest(self._engine, self._template, self._sampling, secrets.token_hex(8))
