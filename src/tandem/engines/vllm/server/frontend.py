"""State of the engine's HTTP process: the policy version of each token, pauses, and when answers are released.

The scheduler is paused between two forward passes ("keep": requests in flight stay where they are). Every time it
goes on, a weights generation begins, and every token is filed under the generation it was sampled in. A publish gives
the generation its policy step. Until then its tokens are held back: they may be sampled, so that a probe can run, but
none is given out before the weights are verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from tandem.engines.vllm.protocol import IN_PLACE, Refusal
from tandem.engines.vllm.server.admission import PROBES, Places
from tandem.engines.vllm.speedups import PIECES_KEY, PrefillRoom, Scheduler
from tandem.types import UNKNOWN_VERSION

log = logging.getLogger("vllm.tandem")


@dataclass(slots=True)
class PartialCompletion:
    """One completion while it is sampled."""

    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprob_pieces: list[Any] = field(default_factory=list)
    """vLLM's logprobs of them, piece by piece; empty where none were requested."""
    generations: list[int] = field(default_factory=list)
    """The weights generation that each token was sampled in."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Generations that ended while it was sampled, each with the number of tokens there were by then."""
    text: str = ""
    """The tokens as text; empty where that was spared."""
    finish: str = "abort"
    """Why it ended: stop or length; abort until it did."""
    experts: bytes = b""
    """Experts that its tokens were routed to, prompt first; empty where vLLM does not tell."""

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """Of each token: its logprob, and those of the likeliest ones where requested."""
        return [_plain(position) for piece in self.logprob_pieces for position in piece]

    @property
    def own_logprobs(self) -> list[float]:
        """Of each token: its own, without an object for each."""
        values: list[float] = []
        for piece in self.logprob_pieces:
            logprobs = piece.logprobs  # of vLLM's FlatLogprobs; what was sampled is the first of its position
            values += [logprobs[start] for start in piece.start_indices]
        return values


@dataclass(slots=True)
class RequestRecord:
    """Completions and prompt logprobs of one request."""

    completions: list[PartialCompletion]
    """As many as were requested."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """Of each prompt token but the first; None where not requested."""
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""

    def add(self, output: Any, generation: int) -> None:
        """File what vLLM sampled since the last time: in this generation, but for what its marks say."""
        if output.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = [_plain(p) if p else None for p in output.prompt_logprobs]
        self.cached = max(self.cached, output.num_cached_tokens or 0)
        for part in output.outputs:
            answer = self.completions[part.index]
            # Ended from without, it may lack the logprobs of its last tokens, which the scheduler still had.
            num_tokens = len(part.logprobs) if part.finish_reason == "abort" and part.logprobs is not None else None
            answer.tokens.extend(part.token_ids[:num_tokens])
            for ended, count in answer.marks:
                answer.generations.extend([ended] * (min(count, len(answer.tokens)) - len(answer.generations)))
            answer.generations.extend([generation] * (len(answer.tokens) - len(answer.generations)))
            if part.logprobs:
                answer.logprob_pieces.append(part.logprobs)
            answer.text += part.text or ""
            answer.finish = part.finish_reason or answer.finish
            if getattr(part, "routed_experts", None) is not None:
                answer.experts = part.routed_experts.tobytes()


def _plain(logprobs: Mapping[int, Any]) -> dict[int, float]:
    return {token: value.logprob for token, value in logprobs.items()}


class PauseLease:
    """Deadline of a pause: an engine that is not resumed in time is stopped, since its weights may be half written.

    Args:
        stop: stops the engine, with a reason.
    """

    def __init__(self, stop: Callable[[str], Coroutine[Any, Any, None]]):
        self._stop = stop
        self._timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._by = ""
        self._since, self._seconds = 0.0, 600.0

    @property
    def report(self) -> dict[str, Any] | None:
        """Client that paused the engine, since when (UTC), and seconds left; None while it is not paused."""
        if not self._since:
            return None
        left = None if self._timer is None else self._timer.when() - asyncio.get_running_loop().time()
        return {"by": self._by, "since": _utc(self._since), "seconds_left": left and round(max(0.0, left), 1)}

    def renew(self, seconds: float = 0.0, by: str = "") -> None:
        """Stop the engine unless this is ended or renewed in time.

        Args:
            seconds: from now; by default as many as before.
            by: the client; by default the one before.
        """
        self.hold()
        loop, self._since = asyncio.get_running_loop(), self._since or time.time()
        self._by, self._seconds = by or self._by or "somebody", seconds or self._seconds
        reason = (
            f"paused at {_utc(self._since)} by {self._by}, last for {self._seconds:g} s, and never resumed; its "
            "trainer is gone. Publish again"
        )

        def late() -> None:
            self._stopping = loop.create_task(self._stop(reason))

        self._timer = loop.call_later(self._seconds, late)

    def hold(self) -> None:
        """It may take as long as it likes."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def end(self) -> None:
        """The pause is over."""
        self.hold()
        self._by, self._since = "", 0.0


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


State = Literal["serving", "paused", "proving", "stopped"]
"""serving; paused: nothing is sampled; proving: sampled and held back; stopped: the weights are in doubt."""

ANSWERED = 0.002
"""Seconds in which a pause is answered, before those that there is room for are handed in: that takes longer."""

REPLACED = "its weights were replaced before they were proven"
"""Told to what was sampled by weights that were being proven, where nothing else is known."""

LOOK = 0.2
"""Seconds between two looks at whether vLLM's process lives."""


class Stopped(Exception):
    """The engine refuses requests: its weights are unverified, after a failed publish or an expired pause."""


class Frontend:
    """Generation, pauses and policy versions over vLLM's asynchronous engine, shared by all routes."""

    def __init__(self, client: Any):
        self.client = client
        self._scheduler = Scheduler(client)
        self.id = uuid.uuid4().hex[:12]
        self.state: State = "serving"
        self.reason = ""
        self.adapter: Any = None
        self.generation = 0
        self.updates = 0
        self.steps: dict[int, int] = {UNKNOWN_VERSION: UNKNOWN_VERSION, 0: UNKNOWN_VERSION}
        self.digest = ""
        self.places = Places(client.vllm_config.scheduler_config.max_num_seqs - PROBES)
        self._live: dict[str, RequestRecord] = {}
        self._verified = 0
        self._generation_of: dict[str, int] = {}  # of adapters by name, where each is a version of its own
        self.lease = PauseLease(self.stop)
        self._broken_off = asyncio.Event()
        self._stood_since: float | None = None
        self._stood = 0.0
        self._version_set: int | None = None
        self._coming: int | None = None
        self._room = PrefillRoom()
        self.written = False
        self.derives = False
        """Something sampled from is computed of what is lent, anew before sampling goes on."""
        self._changed = asyncio.Event()
        self._control, self._handing_in = asyncio.Lock(), asyncio.Lock()

    @property
    def step(self) -> int:
        """Policy step that is served; -1 before the first stamp."""
        return self.steps[self._verified]

    async def pause(self, *, finish: bool = False, reason: str = REPLACED, step: int | None = None) -> State:
        """Return the state until now, once nothing is sampled and all that was sampled is filed. Twice is once.

        Args:
            finish: let requests in flight end first.
            reason: told to those that were sampled by weights that are being proven; such tokens are not given out.
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
            await self._pause_scheduler()
            if before == "proving":
                await self.rpc("tandem_clear_cache")
            self._room = PrefillRoom() if self.places.running else self._scheduler.room()
            # For those that there is room for now.
            asyncio.get_running_loop().call_later(ANSWERED, lambda: self._turn(self.state))
            self._stood_since = self._stood_since or time.monotonic()
            return before

    async def still(self) -> None:
        """Have a scheduler that something else may have set going stand still again; the state is as it was."""
        async with self._control:
            await self._pause_scheduler()

    async def in_turn(self) -> None:
        """Return when commands that came before have been given to the scheduler: first it goes on, then it sums."""
        async with self._control:
            pass

    async def _pause_scheduler(self) -> None:
        """Have the scheduler stand still, and every token that it sampled be filed under the generation that ends."""
        await self._scheduler.pause()
        for key, index, tokens in self._scheduler.counts():
            if key in self._live:
                self._live[key].completions[index].marks.append((self.generation, tokens))

    async def set_version(self, step: int, digest: str, adapter: Any = None) -> None:
        """The weights held now are this policy step, from the generation that is being proven or from the next one.

        While serving (a way that never pauses) a generation begins at once, for requests handed in from now on: those
        in flight go on with the adapter they have, and stay in its generation.
        """
        async with self._control:
            if self.state == "stopped":
                raise Stopped(self.reason)
            self.digest, self.adapter, self.written = digest, adapter, False
            self.updates += 1
            if self.state == "serving":
                self.generation += 1
                self._verified = self.generation
                self.steps[self.generation] = step
                self._name_generation()
                self._turn("serving")
            else:
                self._version_set = step

    async def resume(self) -> float:
        """Sample and give out; returns the seconds in which nothing was sampled.

        Raises:
            Stopped: a publish is needed first.
            Refusal: weights were being proven, and no stamp has said that they are.
        """
        async with self._control:
            if self.state == "stopped":
                raise Stopped(self.reason)
            if self._version_set is None and (self.written or self.state == "proving"):
                raise Refusal(409, "weights were written and nobody says whose: stamp them first (POST /bridge/stamp)")
            if self.state == "paused":
                if self._room.requests and self._version_set is None:
                    self._break_off("the policy step that it was to be sampled by was not published")
                self._begin_generation()
                await self._go_on()
            self.steps[self.generation] = self.steps[self._verified] if self._version_set is None else self._version_set
            self._version_set = self._coming = None
            self._verified = self.generation
            self._name_generation()
            self.lease.end()
            self._turn("serving")
            stood, self._stood = self._stood, 0.0
            return stood

    def _name_generation(self) -> None:
        """Requests that ask for an adapter by name are of the generation in which it was stamped."""
        if self.adapter is not None and self.adapter.lora_name != IN_PLACE:
            self._generation_of.setdefault(self.adapter.lora_name, self.generation)

    def forget(self, adapter: Any) -> None:
        """An adapter is unloaded; if it was served, what is sampled from now on is of no version that was stamped."""
        self._generation_of.pop(adapter.lora_name, None)
        if self.adapter is adapter:
            self.adapter = None
            self.generation += 1
            self.steps[self.generation] = UNKNOWN_VERSION
            if self.state != "proving":
                self._verified = self.generation

    async def stop(self, reason: str) -> None:
        """Give out nothing more until a publish succeeds; requests in flight end with ``Stopped``."""
        log.error("stopped: %s", reason)
        if self.state != "paused":
            await self.pause(reason=reason)
        async with self._control:
            self.lease.end()
            self._version_set, self._coming, self.written = None, None, True
            self._break_off(reason)
            self._turn("stopped")

    def _break_off(self, reason: str) -> None:
        self.reason = reason
        self._broken_off.set()  # wakes present waiters, even though it is cleared at once
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

        What is asked within is asked before all that waited: none is told yet. Where nothing is in flight, the
        scheduler goes on at the end of the block, so that its first forward pass has all of it.
        """
        async with self._control:
            stood, alone = self.state in ("paused", "stopped"), self._alone
            if stood:
                self._begin_generation()
                if not alone:
                    await self._go_on()
            try:
                yield
            finally:
                if stood:
                    if alone:
                        await self._go_on()
                    self._turn("proving")

    @property
    def _alone(self) -> bool:
        """Nothing is in flight but what was handed in since the scheduler stands still."""
        return self.places.running <= self._room.requests

    def _begin_generation(self) -> None:
        self.generation += 1
        self._room = PrefillRoom()
        self.steps[self.generation] = UNKNOWN_VERSION if self._version_set is None else self._version_set

    async def _go_on(self) -> None:
        if self.derives:
            await self.rpc("tandem_derive")
        await self.client.resume_generation()
        if self._stood_since is not None:
            self._stood, self._stood_since = self._stood + time.monotonic() - self._stood_since, None

    def _turn(self, state: State) -> None:
        """Take a state, and have all that wait for one look again, in one turn of the event loop."""
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def deliverable(self, generation: int | None = None) -> None:
        """Return once tokens of a generation (by default: of any) may be given out.

        Raises:
            Stopped: they never may.
        """
        while True:
            if generation is not None and generation <= self._verified:
                return
            if self.state == "stopped":
                raise Stopped(self.reason)
            if generation is None and self.state == "serving":
                return
            await self._changed.wait()

    @property
    def _sampling_step(self) -> int:
        """Policy step of the weights that a request made now is sampled by, as far as it is known."""
        return self.step if self.state == "serving" or self._coming is None else self._coming

    @contextlib.asynccontextmanager
    async def admitted(
        self, answers: int = 1, *, prompt: Sequence[int] = (), min_step: int = UNKNOWN_VERSION
    ) -> AsyncIterator[None]:
        """Within it that many answers may be asked of the scheduler: their cache salt must be that of their generation.

        Args:
            answers: places that are taken.
            prompt: of a request that waits for a policy step; such may be handed in before the scheduler goes on.
            min_step: the step; the wait for it blocks no other request.
        """
        while min_step > self._sampling_step and self.state != "stopped":
            await self._changed.wait()
        async with self.places.taken(answers):
            waits_for_step = min_step > UNKNOWN_VERSION
            while self.state == "paused" and not (waits_for_step and self._room.takes(prompt, answers)):
                await self._changed.wait()
            if self.state == "paused":
                async with self._handing_in:  # one by one: the trainer's next command is not to wait for all
                    await asyncio.sleep(0)
            if self.state == "stopped":
                raise Stopped(self.reason)
            yield

    @property
    def salt(self) -> str:
        """Prefix cache entries are found under the same salt alone, so none outlives the weights it was made by.

        What is handed in while the scheduler stands still is of the generation to come.
        """
        return f"{self.id}-{self.generation + bool(self._room.requests)}"

    def params(self, options: Mapping[str, Any]) -> Any:
        """vLLM's SamplingParams, for as many requests as like; raises ValueError as vLLM does."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if "regex" in options:  # vLLM makes a grammar of it
            from vllm.sampling_params import StructuredOutputsParams

            rest = {name: value for name, value in options.items() if name != "regex"}
            options = {**rest, "structured_outputs": StructuredOutputsParams(regex=options["regex"])}
        # Token by token costs a tenth of the engine's speed; where vLLM counts tokens for us, the end is enough.
        kind = RequestOutputKind.FINAL_ONLY if self._scheduler.counting else RequestOutputKind.DELTA
        whole = self._scheduler.counting and not options.get("detokenize", True)  # so no text ends it either
        extra = {PIECES_KEY: True} if whole else None
        # Flat: lists for all tokens, not a mapping and an object for each.
        return SamplingParams(**options, flat_logprobs=True, output_kind=kind, extra_args=extra)

    async def generate(
        self,
        prompt: Sequence[int],
        params: Any,
        *,
        adapter: Any = None,
        probe: str = "",
        min_step: int = UNKNOWN_VERSION,
    ) -> RequestRecord:
        """Sample; the answer is given out once every generation in it is proven.

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
        with self.places.using(adapter):  # a request that names one still has it after a wait
            admitted = contextlib.nullcontext() if probe else self.admitted(params_.n, prompt=prompt, min_step=min_step)
            async with admitted:
                record = await self._sampled(prompt, params_, adapter, probe)
        if not probe:
            generations = (generation for completion in record.completions for generation in completion.generations)
            await self.deliverable(max(generations, default=0))
        return record

    async def _sampled(self, prompt: Sequence[int], params: Any, adapter: Any, salt: str) -> RequestRecord:
        record = RequestRecord([PartialCompletion() for _ in range(params.n)])
        served, adapter = adapter is None, adapter or self.adapter
        # An adapter of its own name never changes under a request; one that is written in place does, as weights do.
        generation = None
        if adapter is not None and adapter.lora_name != IN_PLACE:
            generation = self.generation if served else self._generation_of.get(adapter.lora_name, UNKNOWN_VERSION)
        key = uuid.uuid4().hex
        if generation is None:
            self._live[key] = record
        try:
            async with self.places.counted(adapter if served else None):
                # With its type it is what vLLM makes of a prompt, so nothing is left to be done in a thread of its own.
                token_prompt = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": salt or self.salt}
                async for output in self.client.generate(token_prompt, params, key, lora_request=adapter):
                    record.add(output, self.generation if generation is None else generation)
        finally:
            self._live.pop(key, None)
        return record

    def steps_of(self, answer: PartialCompletion) -> list[int]:
        """Policy step of each token."""
        return [self.steps[generation] for generation in answer.generations]

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every rank; results by rank."""
        return list(await self.client.collective_rpc(method, args=args))
