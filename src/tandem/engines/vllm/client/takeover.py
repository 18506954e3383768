"""Servers that another trainer used before: they let go of its adapters that would be in the way of ours."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from tandem.engines.base import CanSwap, Needs
from tandem.engines.vllm.client.http import Server, Unreachable
from tandem.engines.vllm.client.pauses import Pauses
from tandem.engines.vllm.protocol import messages as wire

log = logging.getLogger(__name__)

TRIES = 10
"""How often servers may be lost while they are looked at; one that comes back each time only to go is of no use."""


async def inherit(
    servers: Callable[[], Sequence[Server]],
    needs: Needs,
    *,
    patience: float,
    wake: Callable[[], Awaitable[None]],
    again: Callable[[], Awaitable[object]],
) -> list[str]:
    """Have them awake and without adapters in the way; versions by name that all of them hold already.

    Args:
        servers: those of now; after ``again`` they may be others.
        needs: of the run.
        patience: seconds that a pause may last.
        wake: their trainer may have died while they slept.
        again: waits for servers that went away meanwhile, or starts them.

    Raises:
        EngineError: they do not come back, or go each time.
    """

    async def once() -> list[str]:
        await wake()
        return await _without_adapters(servers(), needs, patience)

    for _ in range(TRIES - 1):
        try:
            return await once()
        except Unreachable as error:
            log.warning("%s; it is looked for again", str(error).splitlines()[0])
            await again()
    return await once()


async def _without_adapters(servers: Sequence[Server], needs: Needs, patience: float) -> list[str]:
    """Versions by name are served on, and unloaded when ours have taken their place."""
    weights, swaps = needs.travels == "weights", needs.port is CanSwap
    names = []
    for server in servers:
        held = await server.get("/lora/status", dict)
        loaded = [entry["name"] for entry in held["loaded"]]
        if (weights and (loaded or held["in_place"])) or (swaps and held["in_place"]):
            pauses, only = Pauses(), None if weights else wire.IN_PLACE
            await pauses.pause([server], wire.Pause(finish=True, seconds=patience))
            try:
                await server.post("/lora/unload", wire.UnloadAdapter(adapter_name=only))
            finally:
                await pauses.release([server], "its weights were in doubt before", sleeps=0, seconds=patience)
        names.append(loaded)
    if not swaps:
        return []
    everywhere = set(names[0]).intersection(*names)
    return [name for name in names[0] if name.startswith("step-") and name in everywhere]
