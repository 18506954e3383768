"""``tandem serve broker``: the broker alone, which environments and a trainer find by its URL."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp.http_exceptions import HttpProcessingError

from tandem.errors import ConfigError
from tandem_broker.journal import Ledger
from tandem_broker.queue.records import StoreOptions
from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.app import BrokerServer
from tandem_broker.server.bodies import Bodies
from tandem_broker.server.keys import Keys
from tandem_broker.server.serving import serving

Tell = Callable[[str], None]

KEY = "TANDEM_BROKER_KEY"
"""Environment variable with the trainer's key."""
ENV_KEY = "TANDEM_BROKER_ENV_KEY"
"""Environment variable with the environments' key."""
LOOPBACK = ("127.", "localhost", "::1")
"""How addresses begin that this machine alone can reach."""


def serve_broker(host: str, port: int, data: Path | None, body_bytes: int, held_bytes: int, tell: Tell) -> None:
    """Run a broker until Ctrl-C or SIGTERM.

    Args:
        host: address to listen at.
        port: 0 takes a free one.
        data: folder of the ledger; None keeps everything in memory alone.
        body_bytes: largest body.
        held_bytes: most payload bytes held before environments are held back.
        tell: shows a line to the person.

    Raises:
        ConfigError: a key for environments alone.
        BrokerError: the address or the folder cannot be had.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    trainer, environments = _keys()

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        options = StoreOptions(max_bytes=held_bytes, max_env_bytes=held_bytes // 2)
        bodies, keys = Bodies(body_bytes=body_bytes), Keys(trainer=trainer, environments=environments)
        with contextlib.ExitStack() as opened:
            store = GroupQueue(options)
            if data is not None:
                store = opened.enter_context(contextlib.closing(Ledger.open(data, options, time.time()))).store
            broker = BrokerServer(store, bodies=bodies, keys=keys, host=host)
            async with serving(broker, host, port) as url:
                _introduce(url, host, data, broker, tell)
                await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(serve())
    tell("ended")


def _is_ours(record: logging.LogRecord) -> bool:
    """False for the trace of a request that was no HTTP: it is answered with 400, and is its sender's affair."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _keys() -> tuple[str, str]:
    """Read the trainer's and the environments', without what a file of a secret adds around them."""
    values = {name: os.environ.get(name, "") for name in (KEY, ENV_KEY)}
    if blank := [name for name, value in values.items() if value and not value.strip()]:
        raise ConfigError(f"{blank[0]} holds nothing but blanks; put a key into it, or unset it")
    trainer, environments = (value.strip() for value in values.values())
    if environments and not trainer:
        raise ConfigError(f"{ENV_KEY} is set without {KEY}, which would leave the trainer's side open; set both")
    return trainer, environments


def _introduce(url: str, host: str, data: Path | None, broker: BrokerServer, tell: Tell) -> None:
    """Say where it is and how it is used."""
    tell(f"broker at {url}; what waits for what: {url}/status?detail=1")
    if data is None:
        tell("what is queued ends with this process; --data FOLDER keeps it through a restart")
    else:
        report = broker.store.status(time.time())
        groups = sum(report[f"{state}_groups"] for state in ("queued", "buffered", "leased"))
        tell(f"everything accepted is kept in {data}, which has {groups} groups of step {report['step']}")
    tell(f"use it by: tandem train RECIPE broker={url}, and: tandem work env=NAME broker={url} engine=URL")
    if not broker.keys.trainer and not host.startswith(LOOPBACK):
        tell(f"anybody who reaches {host} can read, add and drop data: set {KEY}, and {ENV_KEY} for environments")
    tell("Ctrl-C ends it")
