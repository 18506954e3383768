"""The trainer's client of one or more vLLM servers that hold the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.engines.base import (
    PROBE_SAMPLES,
    PROBE_TEMPERATURE,
    Engine,
    Health,
    LoadsVersions,
    LoraAdapter,
    ProbeResult,
    UnmappedWeights,
)
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.adapters import AdapterWriter
from tandem.engines.vllm.client.fleet import Fleet
from tandem.engines.vllm.client.http import EngineReplaced, EngineServer, EngineStopped, EngineUnreachable
from tandem.engines.vllm.client.urls import UrlServer
from tandem.engines.vllm.client.waves import Waves
from tandem.engines.vllm.protocol import Sampled
from tandem.errors import EngineError, StaleWeights
from tandem.observability import waits
from tandem.together import all_ended
from tandem.transport.bridge import VllmBridge
from tandem.transport.checksums import joined
from tandem.types import Completion, Finish, PolicyVersion, Sampling

log = logging.getLogger(__name__)

TRIES = 3
"""Attempts at a request to external engines that are healthy and do not answer it."""


class VllmEngine(Engine):
    """One policy on one or more servers."""

    def __init__(self, fleet: Fleet, *, context: int, ends: Sequence[int]):
        self.fleet = fleet
        self.servers: Sequence[EngineServer] = fleet.servers
        """Where requests go: the fleet's own list."""
        self._context = context
        self._ends = list(ends)
        self._requirements = fleet.requirements
        self._pause_seconds = fleet.options.pause_seconds
        self._version = PolicyVersion(step=0, digest="")
        self._least = -1
        self._swapped: list[str] = []
        self._pending: str | None = None
        self._adapter: LoraAdapter | None = None
        self._writers = defaultdict[int, AdapterWriter](AdapterWriter)
        """Of each server's slot, by its place among them."""
        self._bridge: Path | None = None
        self._is_mapped = True
        self._before_pause: dict[str, str] = {}
        """State of each server when it was first paused, kept until it is resumed or stopped."""
        self._waves = Waves()

    # Life and death

    async def start(self) -> None:
        """Start or find the servers."""
        await self.fleet.start()
        stock = [server.name for server in self.servers if server.plain]
        if len(stock) not in (0, len(self.servers)):
            raise EngineError(f"{', '.join(stock)} is stock vLLM and the others are not; name one kind in engine.urls")
        if stock:
            log.warning(
                "%s: stock vLLM, which cannot checksum its weights or tag tokens with versions: each publish is proven "
                "by a probe alone, and every answer is sampled by one version",
                ", ".join(stock),
            )
        if self.fleet.started_elsewhere:
            await self.wake()  # their trainer may have died while they slept
            self._swapped = await self._without_adapters()
        self._context = self.fleet.least = min(self._context, self.fleet.context)

    async def _without_adapters(self) -> list[str]:
        """Unload adapters in the way of what is published; versions by name are served on, and unloaded later."""
        weights, swaps = self._requirements.payload == "weights", self._requirements.capability is LoadsVersions
        names, in_the_way = [], []
        for server in self.servers:
            status = await server.get("/lora/status", dict)
            names.append([entry["name"] for entry in status["loaded"]])
            if (weights and (names[-1] or status["in_place"])) or (swaps and status["in_place"]):
                in_the_way.append(server)
        if in_the_way:
            await self.pause(finish=True)
            try:
                unloaded = wire.UnloadAdapter(adapter_name=None if weights else wire.IN_PLACE)
                await all_ended(server.post("/lora/unload", unloaded) for server in in_the_way)
            finally:
                await self.resume_unchanged("its weights were in doubt before")
        everywhere = set(names[0]).intersection(*names) if swaps else ()
        return [name for name in names[0] if name.startswith("step-") and name in everywhere]

    async def recover(self) -> bool:
        recovered = await self.fleet.recover()
        if recovered:
            self._swapped.clear()
        return recovered

    @property
    def failure(self) -> Exception | None:
        return self.fleet.failure

    @property
    def restart_count(self) -> int:
        return self.fleet.restart_count

    def on_restart(self, republish: Callable[[], Awaitable[None]]) -> None:
        self.fleet.watch(republish)

    async def close(self) -> None:
        self._writers.clear()  # lets go of the slots
        await self.fleet.close()
        if self._bridge is not None:
            self._bridge.unlink(missing_ok=True)  # the memory that it names is gone

    @property
    def sums_bytes(self) -> bool:
        return self._is_mapped and not any(server.plain for server in self.servers)

    @property
    def started_elsewhere(self) -> bool:
        return self.fleet.started_elsewhere

    async def load(self, folder: Path, adapter: LoraAdapter) -> None:
        """Load a PEFT folder, which holds ``adapter``, into every engine as it runs."""
        await self._load(folder, f"{folder.name}-{self.restart_count}", adapter)

    async def relaunch(self, weights: Path | None) -> None:
        """End the engines and start them anew: on a model folder, or on the weights that they had."""
        if weights is not None:
            self.fleet.model = str(weights)
        await self.fleet.relaunch()
        self._swapped.clear()

    # Sampling

    @property
    def context(self) -> int:
        return self._context

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        room = self.room(prompt)
        seed, least = key % 2**63 if self.fleet.options.seeded else None, self._least
        request = wire.completion_request(prompt, sampling, limit=room, ends=self._ends, min_step=least)
        tries = 0
        while True:
            if not self.fleet.ready.is_set():
                async with waits.waiting(waits.actor("rollouts"), "an engine with weights", on="trainer"):
                    await self.fleet.ready.wait()
            if self.fleet.failure is not None:
                raise self.fleet.failure
            restart_count, server = self.restart_count, min(self.servers, key=lambda s: s.outstanding)
            later = self._pause_seconds if least > self._version.step else 0.0  # it waits for the trainer first
            server.outstanding += 1
            try:
                if isinstance(server, UrlServer) and server.plain:
                    sampled = await server.sample(request, seed=seed, later=later)
                else:
                    sampled = await self._waves.answer(server, request, seed=seed, later=later)
                return self._completion(server, sampled, least)
            except EngineStopped:  # by a publish that broke off, and is made again where an engine died under it
                if restart_count == self.restart_count and self.fleet.republish is not None:
                    await self.fleet.republish()
                if restart_count == self.restart_count:
                    raise
            except EngineUnreachable:
                tries += 1
                if self.fleet.closed or not await self._restarted(server, restart_count, tries):
                    raise
            finally:
                server.outstanding -= 1

    async def _restarted(self, server: EngineServer, restart_count: int, tries: int) -> bool:
        """Bring the engines back to life, weights and all; False if there is nothing to be brought back."""
        if restart_count != self.restart_count or not self.fleet.ready.is_set():
            return True  # another task recovers it, or did
        if self.fleet.ours and (not await server.gone() or not await self.recover()):
            await self.fleet.settled()  # it may answer since a moment, to what is starting it again
            return restart_count != self.restart_count
        if self.fleet.republish is not None:
            await self.fleet.republish()  # which recovers those of others, though not in the midst of a publish
        return self.fleet.ours or restart_count != self.restart_count or tries < TRIES

    def _completion(self, server: EngineServer, sampled: Sampled, least: int) -> Completion:
        self._same(server, sampled.engine)
        least = max(0, least)
        if min((step for step, _ in sampled.versions), default=least) < least:
            newest = f"version {least} was" if least else "any weights were"
            raise StaleWeights(f"{server.name} sampled before {newest} published to it")
        if self._requirements.router_replay and sampled.tokens and not sampled.experts and sampled.finish != "abort":
            raise EngineError(f"{server.name} does not tell which experts it chose: start it from this recipe")
        return server.completion(sampled)

    def _same(self, server: EngineServer, instance_id: str) -> None:
        if instance_id != server.instance_id:
            raise EngineReplaced(f"{server.name} was restarted externally (new instance id); resume the run")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return list((await self._probe(self.servers[0], tokens, 1)).scored or ())

    async def probe(self, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> Sequence[ProbeResult]:
        return await asyncio.gather(*(self._probe(server, tokens, samples) for server in self.servers))

    async def _probe(self, server: EngineServer, tokens: Sequence[int], samples: int) -> ProbeResult:
        request = wire.ProbeRequest(
            tokens=list(tokens), temperature=PROBE_TEMPERATURE, max_tokens=samples, adapter=self._pending
        )
        response: wire.ProbeResponse = await server.post("/bridge/probe", request, wire.ProbeResponse)
        tokens, logprobs = tuple(response.tokens), _numbers(response.logprobs)
        finish: Finish = "stop" if response.finish == "stop" else "length"
        return ProbeResult(
            name=server.name,
            scored=_numbers(response.scored),
            sampled=Completion(tokens=tokens, logprobs=logprobs, versions=(0,) * len(tokens), finish=finish),
            temperature=PROBE_TEMPERATURE,
            cached=response.cached,
        )

    async def health(self) -> Health:
        answers = await asyncio.gather(*(s.get("/health", dict) for s in self.servers), return_exceptions=True)
        bad = [str(f) for f in answers if isinstance(f, BaseException)]
        running, waiting = (sum(int(f[key]) for f in answers if isinstance(f, dict)) for key in ("running", "waiting"))
        return Health(ok=not bad, running=running, waiting=waiting, detail="; ".join(bad))

    # The transaction

    def version(self) -> PolicyVersion:
        return self._version

    async def set_version(self, version: PolicyVersion) -> None:
        body = wire.SetVersion(step=version.step, digest=version.digest, adapter=self._pending)
        for answer, server in zip(await self.fleet.all("/bridge/stamp", body), self.servers, strict=True):
            self._same(server, answer["engine"])
        self._version = version
        if self._pending is not None:
            # Versions that no request can need any more; one still in use is tried again next time.
            for name in self._swapped[: -self._requirements.versions]:
                answers = await self.fleet.all("/lora/unload", wire.UnloadAdapter(adapter_name=name, unless_used=True))
                if all(name in answer["unloaded"] for answer in answers):
                    self._swapped.remove(name)
        self._pending = None

    def accept_requests_for(self, step: int) -> bool:
        self._least = step
        return True

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        by = f"trainer (pid {os.getpid()} on {socket.gethostname()})"
        request = wire.Pause(finish=finish, seconds=self._pause_seconds, step=step, by=by)

        async def pause_server(server: EngineServer) -> None:  # noted at once, whatever becomes of the others
            answer = await server.post("/bridge/pause", request)
            self._before_pause.setdefault(server.instance_id, answer["before"])

        await all_ended(map(pause_server, self.servers))

    async def resume_unchanged(self, reason: str) -> None:
        """One that served goes on, one that was stopped is stopped again, and so is one in which weights are proven.

        A pause by another client is left to that client.
        """
        for server in self.servers:
            before = self._before_pause.pop(server.instance_id, None)
            with contextlib.suppress(EngineUnreachable):
                state = (await server.info()).state
                if state == "paused" and before == "serving":
                    try:
                        if self.sleeps:
                            await server.post("/bridge/wake")
                        await server.post("/bridge/resume")
                        continue
                    except EngineUnreachable:
                        raise
                    except EngineError:  # it has lost its weights in its sleep, or does not wake up
                        before = "stopped"
                if state == "proving" or (state == "paused" and before == "stopped"):
                    await server.post("/bridge/stop", wire.Stop(reason=reason))

    async def resume(self) -> float:
        answers, version = await self.fleet.all("/bridge/resume"), self._version
        self._before_pause.clear()
        for server, answer in zip(self.servers, answers, strict=True):
            if version.digest and (answer["step"], answer["digest"]) != (version.step, version.digest):
                raise StaleWeights(
                    f"{server.name} was stamped with version {version.step} and goes on with {answer['step']}: "
                    "another client publishes to it, or the stamp was lost. Resume the run: its weights are then "
                    "published again"
                )
        self.fleet.ready.set()
        return max(float(answer["seconds"]) for answer in answers)

    @property
    def sleeps(self) -> int:
        return int(self.fleet.options.sleep)

    async def sleep(self) -> None:
        await self.fleet.all("/bridge/sleep", wire.Sleep(level=1 if self.sleeps == 1 else 2))

    async def wake(self) -> None:
        if self.sleeps:
            await self.fleet.all("/bridge/wake")

    async def stop(self, reason: str) -> None:
        self._before_pause.clear()
        await self.fleet.all("/bridge/stop", wire.Stop(reason=reason))

    async def checksums(self, payload: Literal["weights", "adapter"]) -> Mapping[str, Mapping[str, int]]:
        """What every server holds; the parts that its ranks hold added up."""
        body = wire.Checksums(payload=payload, adapter=self._pending)
        if self._pending is not None and self._adapter is not None:
            body.names, body.config = [name for name, _ in self._adapter.tensors], dict(self._adapter.config)
        out: dict[str, Mapping[str, int]] = {}
        for server, answer in zip(self.servers, await self.fleet.all("/bridge/checksums", body), strict=True):
            self._same(server, answer["engine"])
            if reason := answer["ranks"][0].get("unmapped"):
                self._is_mapped = self._requirements.payload == "adapter"  # whose own bytes it does find
                raise UnmappedWeights(reason)
            out[server.name] = joined(server.name, answer["ranks"])
        return out

    async def export_weights(self) -> Mapping[str, Any]:
        """Hugging Face name and tensor, in this process, of every weight that the engine samples from."""
        exported = await exported_weights(self.servers[0])
        if self._requirements.folder is not None and self.fleet.ours:
            self._bridge = exported.write(Path(os.environ.get("LOGDIR") or self._requirements.folder))
        return exported.attach()

    async def exports_of_ranks(self) -> Sequence[Any]:
        """Where the weights of each engine but the first are, as plain data: ``attach_export`` takes it."""
        return [msgspec.to_builtins(await exported_weights(server)) for server in self.servers[1:]]

    async def exports_of_workers(self) -> Sequence[Sequence[Any]]:
        """Where the slices of each worker of each engine are, as plain data."""
        answers = await self.fleet.all("/bridge/lend")
        return [[{"parameters": rank["lent"], "places": rank["map"]} for rank in answer["ranks"]] for answer in answers]

    def as_stored(self, adapter: LoraAdapter) -> Iterable[tuple[str, Any]]:
        """An adapter's tensors under the names and with the values that the engine stores them."""
        return self._writers[0].stored(adapter)

    async def adapt(self, adapter: LoraAdapter, *, everywhere: bool = True) -> int:
        """Sample with this adapter from now on, by writing the servers' slots, or the first one's alone.

        Returns:
            Bytes copied.
        """
        stored = self._writers[0].stored(adapter)
        request, number = _slot_request(adapter, stored), len(self.servers) if everywhere else 1
        slots = await asyncio.gather(*(self._slot(index, request) for index in range(number)))
        return sum(self._writers[index].copy(slot, stored) for index, slot in enumerate(slots))

    async def slots_of_ranks(self, adapter: LoraAdapter) -> Sequence[Any]:
        """Where each server but the first has this adapter, as plain data: ``AdapterWriter`` takes it."""
        request = _slot_request(adapter, self._writers[0].stored(adapter))
        return list(await asyncio.gather(*(self._slot(index, request) for index in range(1, len(self.servers)))))

    async def _slot(self, index: int, request: wire.ExportAdapter) -> Mapping[str, Any]:
        """A server's slot, which is to be written now and is sampled with from then on."""
        (rank,) = (await self.servers[index].post("/bridge/lend_slot", request))["ranks"]
        slot: Mapping[str, Any] = rank
        return slot

    async def swap(self, folder: Path, version: PolicyVersion, adapter: LoraAdapter) -> int:
        """Load a PEFT folder as this version.

        Returns:
            Bytes loaded.
        """
        # Never a name twice: an engine may outlive its trainer, and versions that it holds still are sampled from.
        await self._load(folder, f"step-{version.step:06d}-{secrets.token_hex(4)}", adapter)
        return int(sum(t.numel() * t.element_size() for _, t in adapter.tensors)) * len(self.servers)

    async def _load(self, folder: Path, name: str, adapter: LoraAdapter) -> None:
        request = wire.LoadAdapter(adapter_path=str(folder.absolute()), adapter_name=name, served=False)
        await self.fleet.all("/lora/load", request)
        self._adapter, self._pending = adapter, name
        self._swapped.append(name)

    async def connect(self, rendezvous: Mapping[str, Any], first: Sequence[int]) -> None:
        """Every server's workers join a group; ``first`` is the rank of each server's first worker."""
        for server, rank in zip(self.servers, first, strict=True):
            body = wire.StartReceiver(
                init_method=f"tcp://{rendezvous['host']}:{rendezvous['port']}",
                world_size=int(rendezvous["world"]),
                backend=rendezvous["backend"],
                name=rendezvous["name"],
                seconds=float(rendezvous["seconds"]),
                first_rank=rank,
            )
            await server.post("/nccl/start_receiver", body)

    async def workers(self) -> Sequence[Sequence[str]]:
        """Accelerators of each server's ranks."""
        return [[worker.accelerator for worker in (await server.info()).workers] for server in self.servers]

    async def addresses(self) -> Sequence[str]:
        """The trainer's own address on the way to each engine."""
        return [server.address() for server in self.servers]

    async def receive(
        self, manifest: Sequence[tuple[str, tuple[int, ...], str]], bucket_bytes: int, adapter: LoraAdapter | None
    ) -> None:
        """Take one publish from the process group into the weights, or into the adapter."""
        entries = [(name, list(shape), dtype) for name, shape, dtype in manifest]
        config = None if adapter is None else dict(adapter.config)
        body = wire.Receive(manifest=entries, bucket_bytes=bucket_bytes, config=config, verify=True)
        await self.fleet.all("/nccl/receive", body)

    async def disconnect(self) -> None:
        """Leave the process group."""
        await self.fleet.all("/nccl/stop_receiver")


def _slot_request(adapter: LoraAdapter, stored: Iterable[tuple[str, Any]]) -> wire.ExportAdapter:
    return wire.ExportAdapter(
        config=dict(adapter.config),
        tensors=[(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in stored],
    )


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(float("nan") if value is None else value for value in values)


async def exported_weights(server: EngineServer) -> VllmBridge:
    """Have an engine of one process lend its weights; where they are."""
    answer = await server.post("/bridge/lend")
    (rank,) = answer["ranks"]
    return VllmBridge.of_places(answer["model"], rank["lent"], rank["map"], url=server.url)
