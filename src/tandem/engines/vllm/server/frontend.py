"""What the engine's HTTP process keeps: which weights a token comes from, and when it may be given out.

The scheduler is paused between two forward passes ("keep": requests in flight stay where they are). Every time it
goes on, an era begins, and every token is filed under the era it was sampled in. A publish gives the era its policy
step. Until then, tokens of that era are held back: they may be sampled, so that a probe can run, but nobody gets
them before the weights are proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from tandem.engines.vllm.arguments import with_grammar
from tandem.engines.vllm.core.scheduler import ASKED as IN_PIECES
from tandem.engines.vllm.protocol.messages import IN_PLACE, Refused, unrefused
from tandem.engines.vllm.server.answers import Answer, Answers
from tandem.engines.vllm.server.pause_lease import Lease
from tandem.engines.vllm.server.pausing import Room, Scheduler
from tandem.engines.vllm.server.places import PROBES, Places

log = logging.getLogger("vllm.tandem")

State = Literal["serving", "paused", "proving", "stopped"]
"""serving; paused: nothing is sampled; proving: sampled and held back; stopped: the weights are in doubt."""

UNKNOWN = -1
"""Era, and policy step, of weights that nobody has stamped."""

ANSWERED = 0.002
"""Seconds in which a pause is answered, before those that there is room for are handed in: that takes longer."""

LOOK = 0.2
"""Seconds between two looks at whether vLLM's process lives."""


class Stopped(Exception):
    """The engine holds weights that nobody vouches for, so it answers nothing."""


class Frontend:
    """Between HTTP and vLLM's asynchronous engine."""

    def __init__(self, client: Any):
        self.client = client
        self._scheduler = Scheduler(client)
        self.id = uuid.uuid4().hex[:12]
        self.state: State = "serving"
        self.reason = ""
        self.adapter: Any = None
        self.era = 0
        self.updates = 0
        self.steps: dict[int, int] = {UNKNOWN: UNKNOWN, 0: UNKNOWN}
        self.digest = ""
        self.places = Places(client.vllm_config.scheduler_config.max_num_seqs - PROBES)
        self._live: dict[str, Answers] = {}
        self._proven = 0
        self._era_of: dict[str, int] = {}  # of adapters by name, where each is a version of its own
        self.lease = Lease(self.stop)
        self._broken_off = asyncio.Event()
        self._paused_at = 0.0
        self._stood_still = 0.0
        self._stamped: int | None = None
        self._coming: int | None = None
        self._room = Room()
        self.written = False
        self._first = 0
        self._changed = asyncio.Event()
        self._control = asyncio.Lock()

    @property
    def step(self) -> int:
        """Policy step that is served; -1 before the first stamp."""
        return self.steps[self._proven]

    async def pause(
        self,
        *,
        finish: bool = False,
        reason: str = "its weights were replaced before they were proven",
        step: int | None = None,
    ) -> State:
        """Return the state until now, once nothing is sampled and all that was sampled is filed. Twice is once.

        Args:
            finish: let requests in flight end first.
            reason: told to those that were sampled by weights that are being proven; nobody gets such tokens.
            step: policy step of the weights that are to come, if it is known.
        """
        async with self._control:
            self._coming = self._coming if step is None else step
            before = self.state
            if before == "paused":
                self._turn("paused")  # for those that wait for this step
                return before
            if self.state == "proving":
                self._break_off(reason)
            self._turn("paused")
            if finish:
                await self.places.empty()
            await self._halt()
            self._room = Room() if self.places.running else self._scheduler.room()
            # For those that there is room for now.
            asyncio.get_running_loop().call_later(ANSWERED, lambda: self._turn(self.state))
            self._paused_at = self._paused_at or time.monotonic()
            return before

    async def still(self) -> None:
        """Have a scheduler that something else may have set going stand still again; the state is as it was."""
        async with self._control:
            await self._halt()

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Nothing is sampled in the block. An engine that serves goes on after it, and no pause begins before that."""
        async with self._control:
            serves = self.state == "serving"
            if serves:
                await self._scheduler.halt()
                self._paused_at = time.monotonic()
            try:
                yield
            finally:
                if serves:
                    await self._go_on()

    async def _halt(self) -> None:
        """Have the scheduler stand still, and every token that it sampled be filed under the era that ends."""
        await self._scheduler.halt()
        for key, index, tokens in self._scheduler.counts():
            if key in self._live:
                self._live[key].completions[index].marks.append((self.era, tokens))

    async def stamp(self, step: int, digest: str, adapter: Any = None) -> None:
        """The weights held now are this policy step, from the era that is being proven or from the next one.

        While serving (a way that never pauses) an era begins at once, for requests handed in from now on: those in
        flight go on with the adapter they have, and stay in its era.
        """
        async with self._control:
            if self.state == "stopped":
                raise Stopped(self.reason)
            self.digest, self.adapter, self.written = digest, adapter, False
            self.updates += 1
            if self.state == "serving":
                self.era += 1
                self._proven = self.era
                self.steps[self.era] = step
                self._named_era()
                self._turn("serving")
            else:
                self._stamped = step

    async def resume(self) -> float:
        """Sample and give out; returns the seconds in which nothing was sampled.

        Raises:
            Stopped: a publish is needed first.
            Refused: weights were being proven, and nobody has said that they are.
        """
        async with self._control:
            if self.state == "stopped":
                raise Stopped(self.reason)
            if self._stamped is None and (self.written or self.state == "proving"):
                raise Refused(409, "weights were written and nobody says whose: stamp them first (POST /bridge/stamp)")
            if self.state == "paused":
                if self._room.requests and self._stamped is None:
                    self._break_off("the policy step that it was to be sampled by was not published")
                self._begin_era()
                await self._go_on()
            self.steps[self.era] = self.steps[self._proven] if self._stamped is None else self._stamped
            self._stamped = self._coming = None
            self._proven = self.era
            self._named_era()
            self.lease.end()
            self._turn("serving")
            still, self._stood_still = self._stood_still, 0.0
            return still

    def _named_era(self) -> None:
        """Requests that ask for an adapter by name are of the era in which it was stamped."""
        if self.adapter is not None and self.adapter.lora_name != IN_PLACE:
            self._era_of.setdefault(self.adapter.lora_name, self.era)

    def forget(self, adapter: Any) -> None:
        """An adapter is unloaded; if it was served, what is sampled from now on is of no version anybody stamped."""
        self._era_of.pop(adapter.lora_name, None)
        if self.adapter is adapter:
            self.adapter = None
            self.era += 1
            self.steps[self.era] = UNKNOWN
            if self.state != "proving":
                self._proven = self.era

    async def stop(self, reason: str) -> None:
        """Give out nothing more until a publish succeeds; requests in flight end with ``Stopped``."""
        log.error("stopped: %s", reason)
        if self.state != "paused":
            await self.pause(reason=reason)
        async with self._control:
            self.lease.end()
            self._stamped, self._coming, self.written = None, None, True
            self._break_off(reason)
            self._turn("stopped")

    def _break_off(self, reason: str) -> None:
        self.reason = reason
        self._broken_off.set()  # wakes who waits now, even though it is cleared at once
        self._broken_off.clear()

    async def broken_off(self) -> None:
        """Wait, as the other end of a request in flight, for what ends it.

        Raises:
            Stopped: the weights that it samples from are in doubt.
        """
        await self._broken_off.wait()
        raise Stopped(self.reason)

    async def died(self) -> None:
        """Wait for vLLM's process to end, and raise its error: calls under way to that process would wait for ever."""
        while not self.client.errored:
            await asyncio.sleep(LOOK)
        raise self.client.dead_error

    @contextlib.asynccontextmanager
    async def proving(self) -> AsyncIterator[None]:
        """Let the scheduler go on, with everything sampled from now on held back.

        What is asked within is asked before all that waited: nobody is told yet. Where nothing is in flight, the
        scheduler goes on at the end of the block, once those that waited are handed in too: one forward pass for all.
        """
        async with self._control:
            stood, alone = self.state in ("paused", "stopped"), self._alone
            if stood:
                self._begin_era()
                if not alone:
                    await self._go_on()
            try:
                yield
            finally:
                if stood:
                    self._turn("proving")
                    if alone:
                        await asyncio.sleep(0)  # in which each that waited is handed in
                        await self._go_on()

    @contextlib.asynccontextmanager
    async def first(self) -> AsyncIterator[None]:
        """Around a probe: what is new waits for its end where requests in flight go on meanwhile.

        For a probe takes longer beside the prompts of a whole wave. Where nothing is in flight, it is the wave that all
        wait for.
        """
        others = not self._alone
        self._first += others
        try:
            yield
        finally:
            self._first -= others
            self._turn(self.state)

    @property
    def _alone(self) -> bool:
        """Nothing is in flight but what was handed in since the scheduler stands still."""
        return self.places.running <= self._room.requests

    def _begin_era(self) -> None:
        self.era += 1
        self._room = Room()
        self.steps[self.era] = UNKNOWN if self._stamped is None else self._stamped

    async def _go_on(self) -> None:
        await self._scheduler.go_on()
        self._stood_still += time.monotonic() - self._paused_at
        self._paused_at = 0.0

    def _turn(self, state: State) -> None:
        """Take a state, and have all who wait for one look again, in one turn of the event loop."""
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def deliverable(self, era: int | None = None) -> None:
        """Return once tokens of an era (by default: of any) may be given out.

        Raises:
            Stopped: they never may.
        """
        while True:
            if era is not None and era <= self._proven:
                return
            if self.state == "stopped":
                raise Stopped(self.reason)
            if era is None and self.state == "serving":
                return
            await self._changed.wait()

    @property
    def _asked(self) -> int:
        """Policy step of the weights that what is asked now is sampled by, as far as it is known."""
        return self.step if self.state == "serving" or self._coming is None else self._coming

    @contextlib.asynccontextmanager
    async def admitted(
        self, answers: int = 1, *, prompt: Sequence[int] = (), min_step: int = UNKNOWN
    ) -> AsyncIterator[None]:
        """Within it that many answers may be asked of the scheduler: their cache salt must be that of their era.

        Args:
            answers: places that are taken.
            prompt: of a request that waits for a policy step; such may be handed in before the scheduler goes on.
            min_step: the step, which is waited for in nobody's way.
        """
        while min_step > self._asked and self.state != "stopped":
            await self._changed.wait()
        async with self.places.taken(answers):
            while not self._admits(prompt, answers, min_step):
                await self._changed.wait()
            if self.state == "stopped":
                raise Stopped(self.reason)
            yield

    def _admits(self, prompt: Sequence[int], answers: int, min_step: int) -> bool:
        if self.state == "paused":
            return min_step > UNKNOWN and self._room.takes(prompt, answers)
        return not (self._first and self.state == "proving")

    @property
    def salt(self) -> str:
        """Prefix cache entries are found under the same salt alone, so none outlives the weights it was made by.

        What is handed in while the scheduler stands still is of the era to come.
        """
        return f"{self.id}-{self.era + bool(self._room.requests)}"

    def params(self, given: Mapping[str, Any]) -> Any:
        """vLLM's SamplingParams, for as many requests as like; raises ValueError as vLLM does."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        given = with_grammar(given)
        # Token by token costs a tenth of the engine's speed; where vLLM counts tokens for us, the end is enough.
        kind = RequestOutputKind.FINAL_ONLY if self._scheduler.counting else RequestOutputKind.DELTA
        whole = kind is RequestOutputKind.FINAL_ONLY and not given.get("detokenize", True)  # so no text ends it either
        # Where this release can: lists for all tokens, not a mapping and an object for each.
        flat = {"flat_logprobs": True} if hasattr(SamplingParams, "flat_logprobs") else {}
        return SamplingParams(**given, **flat, output_kind=kind, extra_args={IN_PIECES: True} if whole else None)

    async def generate(
        self,
        prompt: Sequence[int],
        params: Any,
        *,
        adapter: Any = None,
        probe: str = "",
        min_step: int = UNKNOWN,
    ) -> Answers:
        """Sample; the answer is given out once every era in it is proven.

        Args:
            prompt: token ids.
            params: of vLLM's SamplingParams, or what ``params`` made of them.
            adapter: a LoRARequest, instead of the one that is served.
            probe: cache salt of a question about the weights themselves: answered while they are being proven.
            min_step: oldest policy step that may sample it; one that is to come is waited for.

        Raises:
            Stopped: the weights are in doubt.
            ValueError: vLLM refuses the request.
        """
        params_ = self.params(params) if isinstance(params, Mapping) else params
        with self.places.using(adapter):  # whoever asks for one by name has it also after it has waited
            async with (
                contextlib.nullcontext() if probe else self.admitted(params_.n, prompt=prompt, min_step=min_step)
            ):
                found = await self._sampled(prompt, params_, adapter, probe)
        if not probe:
            await self.deliverable(max((era for c in found.completions for era in c.eras), default=0))
        return found

    async def _sampled(self, prompt: Sequence[int], params: Any, adapter: Any, salt: str) -> Answers:
        found = Answers([Answer() for _ in range(params.n)], list(prompt), None, 0)
        served, adapter = adapter is None, adapter or self.adapter
        # An adapter of its own name never changes under a request; one that is written in place does, as weights do.
        era = None
        if adapter is not None and adapter.lora_name != IN_PLACE:
            era = self.era if served else self._era_of.get(adapter.lora_name, UNKNOWN)
        key = uuid.uuid4().hex
        if era is None:
            self._live[key] = found
        try:
            async with self.places.counted(adapter if served else None):
                # With its type it is what vLLM makes of a prompt, so nothing is left to be done in a thread of its own.
                asked = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": salt or self.salt}
                async for output in self.client.generate(asked, params, key, lora_request=adapter):
                    found.add(output, self.era if era is None else era)
        finally:
            self._live.pop(key, None)
        return found

    def steps_of(self, answer: Answer) -> list[int]:
        """Policy step of each token."""
        return [self.steps[era] for era in answer.eras]

    async def rpc(self, method: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """Call a method of the worker extension on every rank; results by rank. Raises Refused where one refuses."""
        call = self.client.collective_rpc(method, args=args)
        return unrefused(list(await asyncio.wait_for(call, seconds)))
