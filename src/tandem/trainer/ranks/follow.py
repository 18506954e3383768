"""A follower's process: the same policy as the lead's, and its part of each command; it has no loop of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from tandem.config.loading import RunConfig, from_options
from tandem.distributed.follower import Follower, Handler
from tandem.distributed.placement import Placement
from tandem.engines.base import EngineRequirements
from tandem.errors import RankError
from tandem.observability import vitals, watchdog
from tandem.trainer import memory_plan
from tandem.trainer.checkpoint import load_states, staged_states, staging_of
from tandem.trainer.pairs import engine_devices, is_cut, ranks_of_engine
from tandem.trainer.ranks.parts import RankParts
from tandem.trainer.ranks.slices import RankSlices, slice_handlers
from tandem.trainer.ranks.work import RankWork, handlers
from tandem.trainer.world import Write, live_policy, reference_of
from tandem.transport.rendezvous import own_address
from tandem.transport.sharing import finish
from tandem.weight_sync.shared import attach_export
from tandem.weight_sync.transaction.trained import Trained

if TYPE_CHECKING:
    from tandem.engines.vllm.adapters import AdapterWriter
    from tandem.engines.vllm.client.fleet import Fleet

COMMANDS = ["begin", "connect", "weights", "engine", "attach", "adapt", "cut", "bind", "checksums", "restore", "save"]
"""Of the lead, each executed by the method of ``_Rank`` of its name."""
GRACE_SECONDS = 3.0
"""How long a follower that ends waits for a collective in which no other rank may be any more."""


async def follow(config: RunConfig, placement: Placement) -> Path:
    """Follow the lead until the run ends; returns the run's folder.

    Raises:
        RankError: the lead is gone, or failed.
    """
    async with AsyncExitStack() as stack:
        try:
            follower = await Follower.join(placement, config.distributed.timeout_seconds)
            with ExitStack() as signs:  # which end before the parts do: those may have to be left behind
                rank = _Rank(stack, signs, placement, follower)
                await follower.serve(rank.handlers)
        except RankError as error:
            # What a thread is in may never return; the interpreter would wait for it.
            timer = threading.Timer(GRACE_SECONDS, _leave, (error,))
            timer.daemon = True
            timer.start()
            raise
    return rank.folder


def _leave(error: RankError) -> None:
    """End the process at once, and say why: what would have said so is still waited for."""
    watchdog.say(str(error))
    os._exit(RankError.exit_code)


class _Rank:
    """The parts of a follower, as the lead's commands make them."""

    def __init__(self, stack: AsyncExitStack, signs: ExitStack, placement: Placement, follower: Follower):
        self._stack, self._signs, self._placement, self._follower = stack, signs, placement, follower
        self.folder = Path()
        self._writing: asyncio.Task[None] | None = None
        self._writer: AdapterWriter | None = None
        self._fleet: Fleet | None = None
        self._slices: RankSlices | None = None
        self.handlers: dict[str, Handler] = {command: getattr(self, f"_{command}") for command in COMMANDS}

    async def _begin(self, body: Any) -> None:
        """Load the policy of the lead's recipe, as the lead does at the same time."""
        self.folder, place = Path(body["folder"]), self._placement
        self._signs.enter_context(vitals.shown(self.folder, place.rank))
        self._config = config = from_options(body["recipe"], (), Path("the lead's recipe")).config
        is_bare = is_cut(config)
        loading = live_policy(config, local_rank=place.local_rank, local_ranks=place.local_world_size, bare=is_bare)
        self._policy = await self._stack.enter_async_context(loading)
        self._reference = await reference_of(config, self._policy)

    async def _connect(self, body: Any) -> None:
        place, met = self._placement, self._follower.rendezvous
        self._parts = await RankParts.join(self._config, met, place.rank, place.local_rank)
        self._stack.callback(self._parts.abort)

    async def _weights(self, body: Any) -> None:
        """Load a checkpoint's weights, which the lead has checked."""
        await self._policy.compute(self._config.trainable.load, self._policy.model, Path(body))

    async def _engine(self, body: Any) -> dict[str, Any] | None:
        """Start the engine of this rank on its host; again where it died, and None where another's has.

        Of ranks that share an engine the first does so.
        """
        if body is None or self._placement.rank % ranks_of_engine(self._config):
            return None
        if self._fleet is None:
            self._fleet = await self._stack.enter_async_context(await self._beside(body))
        else:
            await self._fleet.recover()
        (server,) = self._fleet.servers
        return {"url": server.url, "key": server.key, "reattached": self._fleet.started_elsewhere}

    async def _beside(self, body: Any) -> AbstractAsyncContextManager[Fleet]:
        from tandem.engines.vllm.spec import Vllm  # where there is no such engine nothing of it is loaded

        config, place, engine = self._config, self._placement, self._config.engine
        each = ranks_of_engine(config)
        assert isinstance(engine, Vllm)
        weights = None if body["weights"] is None else Path(body["weights"])
        sent = {**body, "targets": tuple(body["targets"]), "weights": weights}
        if torch.cuda.is_available():
            engine = replace(engine, devices=(engine_devices(place.local_rank, each),))
        return engine.beside_ranks(
            place.rank // each,
            engines=place.world_size // each,
            host=await asyncio.to_thread(own_address, self._follower.rendezvous),
            context=memory_plan.context(config, self._policy.config),
            requirements=EngineRequirements(**sent, folder=self.folder, capability=config.sync.capability),
        )

    async def _attach(self, body: Any) -> None:
        """Share the weights of this rank's engine; again where that was started anew."""
        export, fresh = body
        model = self._policy.model
        names = self._config.trainable.base_names(model)
        await self._policy.compute(attach_export, model, names, export, fresh=fresh)
        await self._policy.compute(finish, self._policy.device)

    async def _adapt(self, body: Any) -> None:
        """Write this rank's adapter into the slot of its engine."""
        from tandem.engines.vllm.adapters import AdapterWriter  # where there is no such engine nothing of it is loaded

        writer = self._writer = self._writer or AdapterWriter()
        await self._policy.compute(lambda: writer.write(body, self._trained.adapter()))
        await self._policy.compute(finish, self._policy.device)

    async def _checksums(self, body: Any) -> dict[str, int]:
        """Checksums of what this rank trains."""
        return dict(await self._trained.checksums())

    @cached_property
    def _trained(self) -> Trained:
        return Trained(self._config.trainable, self._policy)

    async def _cut(self, body: Any) -> None:
        """Take this rank's part of the weights from the lead."""
        bare = self._policy
        self._policy = policy = await bare.compute(self._parts.cut, bare, self._config.trainable)
        self._slices = RankSlices(policy, bare.causal)
        self.handlers |= slice_handlers(self._slices)

    async def _bind(self, body: Any) -> None:
        policy, config = self._policy, self._config
        trained, stepper = await policy.compute(self._parts.bind, config, policy, self._reference)
        # Now that the weights lie where they are trained: they may have been loaded on the host.
        self._staging = self._stack.enter_context(closing(staging_of(config.checkpoint.asynchronous, policy)))
        self._work = RankWork.of(config, trained, stepper, self._reference, context=self._parts.context)
        self.handlers |= handlers(self._work)

    async def _restore(self, body: Any) -> None:
        """Load this rank's part of a checkpoint's states."""
        await self._policy.compute(load_states, Path(body), self._work.stepper, self._reference)

    async def _save(self, body: Any) -> None:
        """Stage this rank's share, and begin to write it."""
        folder, config = Path(body), self._config
        writes: list[tuple[Write, Path]] = []
        if self._slices is not None and config.trainable.folder_name == "model":
            writes.append((await self._policy.compute(self._slices.stage), folder / config.trainable.folder_name))
        if config.checkpoint.save == "all":
            rank, hold = self._placement.rank, self._staging.hold
            writes.append((await self._policy.compute(staged_states, self._work.stepper, rank, hold), folder))
        self._writing = asyncio.create_task(self._write(writes), name="checkpoint")

    async def _write(self, writes: Sequence[tuple[Write, Path]]) -> None:
        """Write what was staged, and report it; a disk that refuses is the lead's to tell."""
        report = None
        try:
            for write, where in writes:
                await self._staging.write(write, where)
        except (OSError, SafetensorError) as error:
            report = f"{error} (on {socket.gethostname()})"
        except Exception as error:
            await self._follower.fail(error)
            raise
        await self._follower.report(report)
