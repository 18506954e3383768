"""``tandem serve broker``: the broker alone, which environments and a trainer find by its URL."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.broker.server.serving import listening
from tandem.errors import BrokerError, ConfigError

if TYPE_CHECKING:
    from tandem.broker.server.app import BrokerServer

Tell = Callable[[str], None]

KEY = "TANDEM_BROKER_KEY"
"""Environment variable with the trainer's key."""
ENV_KEY = "TANDEM_BROKER_ENV_KEY"
"""Environment variable with the environments' key."""
KEEP_BYTES = 32 << 20
"""Blocks of memory up to this size come from what the process has already; glibc takes no more than this."""
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
    _keep_memory()
    keys = _keys()
    if data is not None:
        _writable(data)
    sockets = listening(host, port)
    runner = asyncio.Runner(loop_factory=_loop_factory(tell))
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError), runner:
        runner.run(_serve(host, sockets, data, body_bytes, held_bytes, keys, tell))
    tell("ended")


def _loop_factory(tell: Tell) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop: uvloop's, or asyncio's own (None) where that is not installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        tell("uvloop is not installed: the broker takes a few percent more of a processor without it")
        return None
    return new_event_loop


def _is_ours(record: logging.LogRecord) -> bool:
    """False for the trace of a request that was no HTTP: it is answered with 400, and is its sender's affair."""
    from aiohttp.http_exceptions import HttpProcessingError

    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _keep_memory() -> None:
    """Use memory again that was let go, instead of giving it back and asking the system for the next body's.

    glibc gives blocks of a body's size back at once, and the system clears every page that it hands out: on the
    measured machine that took 0.7 ms for each group of 275 KB, as long as everything else that is done to it. Other
    C libraries have no such call, or ignore it.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, KEEP_BYTES)
        libc.mallopt(trim_threshold, 2 * KEEP_BYTES)


async def _serve(
    host: str,
    sockets: Sequence[socket.socket],
    data: Path | None,
    body_bytes: int,
    held_bytes: int,
    keys: tuple[str, str],
    tell: Tell,
) -> None:
    # Only now that clients can connect: loading these takes as long as everything else of the start.
    from tandem.broker.journal.ledger import opened
    from tandem.broker.queue.records import StoreOptions
    from tandem.broker.queue.store import GroupQueue
    from tandem.broker.server.app import BrokerServer
    from tandem.broker.server.bodies import BodyLimits
    from tandem.broker.server.keys import Keys
    from tandem.broker.server.serving import serving

    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    options = StoreOptions(max_bytes=held_bytes, max_env_bytes=held_bytes // 2)
    limits, who = BodyLimits(body_bytes=body_bytes), Keys(trainer=keys[0], environments=keys[1])
    with opened(data, options, time.time()) as ledger:
        if ledger is None:
            broker = BrokerServer(GroupQueue(options), limits=limits, keys=who, host=host)
        else:
            broker = BrokerServer(ledger.store, committed=ledger.committed, limits=limits, keys=who, host=host)
        async with serving(broker, host, 0, sockets) as url:
            _introduce(url, host, data, broker, tell)
            gc.freeze()  # what is there now stays; to look at it again and again would cost each request a little
            await asyncio.Event().wait()


def _writable(data: Path) -> None:
    """See that the ledger can be kept there.

    Raises:
        BrokerError: it cannot.
    """
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(data, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise BrokerError(
            f"no ledger can be kept in {data}: {error.strerror}; give --data a folder to write to"
        ) from error


def _keys() -> tuple[str, str]:
    """The trainer's and the environments', without what a file of a secret adds around them, such as a new line."""
    values = {name: os.environ.get(name, "") for name in (KEY, ENV_KEY)}
    if blank := [name for name, value in values.items() if value and not value.strip()]:
        raise ConfigError(f"{blank[0]} holds nothing but blanks; put a key into it, or unset it")
    trainer, environments = (value.strip() for value in values.values())
    if environments and not trainer:
        raise ConfigError(f"{ENV_KEY} is set without {KEY}, which would leave the trainer's side open; set both")
    return trainer, environments


def _introduce(url: str, host: str, data: Path | None, broker: BrokerServer, tell: Tell) -> None:
    """Say where it is and how it is used."""
    tell(f"broker at {url}; open it in a browser to watch")
    if data is None:
        tell("what is queued ends with this process; --data FOLDER keeps it through a restart")
    else:
        held = broker.store.status(time.time())
        groups = held.queued_groups + held.buffered_groups + held.leased_groups
        tell(f"everything accepted is kept in {data}, which has {groups} groups of step {held.step}")
    tell(f"a trainer uses it by: tandem train RECIPE broker={url}")
    tell(f"an environment by: tandem work env=NAME broker={url} engine=URL")
    if not broker.keys.trainer and not host.startswith(LOOPBACK):
        tell(f"anybody who reaches {host} can read, add and drop data: set {KEY}, and {ENV_KEY} for environments")
    tell("Ctrl-C ends it")
