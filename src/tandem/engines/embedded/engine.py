"""Continuous batching for the embedded engine: the policy's own module, sampled in process.

There is one copy of the weights by construction. Requests join the batch as others finish, each stops on its
own, and each draws from its own counter-based random stream, so that its tokens do not depend on its neighbours.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engines.base import PROBE_SAMPLES, PROBE_TEMPERATURE, Engine, Health, ProbeResult
from tandem.errors import EngineError
from tandem.model import packing, routing
from tandem.model.attention import KVCache, Packed, decode_plan, sequential_positions
from tandem.model.penalties import Penalties, penalise_rows
from tandem.model.policy import Policy
from tandem.model.sampling import draw, restrict, uniform
from tandem.observability import waits
from tandem.together import cancel
from tandem.types import Completion, Finish, PolicyVersion, Sampling

_AHEAD = 128
"""Tokens of an answer for which a newcomer's cache is made at once; longer answers grow it as they go."""
_ROWS, _FEWEST = 4, 16
"""Rows come in multiples of the first, and in products so many at least: of fewer, or of odd ones, a CPU multiplies
some by another kernel, and the last bits of a request would depend on who came meanwhile (in bfloat16, on some
processors, they do)."""


@dataclass(slots=True, eq=False)
class _Request:
    """One row of the running batch."""

    prompt: tuple[int, ...]
    sampling: Sampling
    key: int
    limit: int
    future: asyncio.Future[Completion]
    penalties: Penalties | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[bytes] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are computed: all but the last sampled."""
        return len(self.prompt) + len(self.tokens) - 1

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=finish,
            experts=b"".join(self.experts),
        )


class EmbeddedEngine(Engine):
    """The embedded engine: one copy of the weights, a KV cache, and a batch that requests join and leave.

    Args:
        policy: whose module it samples from.
        context: most tokens of a prompt and its completion.
        options: the recipe's.
        tells_experts: completions have the experts that tokens were routed to.
    """

    def __init__(self, policy: Policy, context: int, options: Any, *, tells_experts: bool = False):
        self._options = options
        self._routing = routing.of(policy.causal) if tells_experts else None
        self._policy = policy
        self._context = context
        self._version = PolicyVersion(step=0, digest="")
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._work = asyncio.Event()
        self._gate = asyncio.Event()
        self._gate.set()
        self._stepping = asyncio.Lock()
        self._failure: str | None = None
        self._paused_at: float | None = None
        self._admitting = True
        self._finished = asyncio.Event()
        self._cache = _cache(policy, options.max_rows)
        self._task = asyncio.create_task(self._run(), name="embedded engine")

    @property
    def context(self) -> int:
        return self._context

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        if self._failure is not None:
            raise EngineError(self._failure)
        limit = min(sampling.max_tokens, self.room(prompt))
        future = asyncio.get_running_loop().create_future()
        penalties = Penalties.of(sampling, sorted(self._policy.end_tokens))
        request = _Request(tuple(prompt), sampling, key, limit, future, penalties)
        self._waiting.append(request)
        self._work.set()
        return await request.future  # which is cancelled with whoever waits for it

    async def score(self, tokens: Sequence[int]) -> list[float]:
        async with self._stepping:
            return await self._policy.compute(self._policy.score, tokens)

    async def probe(self, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> Sequence[ProbeResult]:
        """Sample after ``tokens``, also while paused. They are not scored: that is the trainer's own pass."""
        sampling = Sampling(temperature=PROBE_TEMPERATURE, max_tokens=samples)
        future = asyncio.get_running_loop().create_future()
        request = _Request(tuple(tokens), sampling, 0, samples, future, None)
        async with self._stepping:
            sampled = await self._policy.compute(self._sample_alone, request)
        return [ProbeResult(scored=None, sampled=sampled, temperature=PROBE_TEMPERATURE)]

    def version(self) -> PolicyVersion:
        return self._version

    async def set_version(self, version: PolicyVersion) -> None:
        self._version = version

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        if finish and self._gate.is_set():  # what an earlier pause holds cannot end
            await self._drained()
        self._gate.clear()
        async with self._stepping:  # the step under way ends first
            self._paused_at = self._paused_at or time.monotonic()

    async def resume(self) -> float:
        began, self._paused_at = self._paused_at, None
        self._admitting = True
        self._gate.set()
        self._work.set()
        return 0.0 if began is None else time.monotonic() - began

    async def _drained(self) -> None:
        """Stop admitting, and return once every admitted request has ended."""
        self._admitting = False
        while self._running and self._failure is None:
            self._finished.clear()
            async with waits.waiting(waits.actor("trainer"), "requests to end", on="engine"):
                await self._finished.wait()

    async def health(self) -> Health:
        failure = self._failure
        return Health(ok=failure is None, running=len(self._running), waiting=len(self._waiting), detail=failure or "")

    async def close(self) -> None:
        self._failure = self._failure or "the engine is closed"
        async with self._stepping:  # the step under way ends first: it is in another thread
            await cancel(self._task)
            self._fail(EngineError(self._failure))
            self._cache.clear()

    async def export_weights(self) -> Mapping[str, Tensor]:
        """Every weight it samples from: the module's own parameters."""
        return dict(self._policy.model.named_parameters())

    async def _run(self) -> None:
        """Consumes: waiting requests. Waits for: work, and the gate. Unblocks: what awaits a completion."""
        try:
            while True:
                await self._work.wait()
                await self._settle()
                await waits.wait(self._gate.wait(), owner="engine", reason="to go on sampling", on="trainer")
                for request, finish in await self._turn():
                    if not request.future.done():
                        request.future.set_result(request.completion(finish))
                self._finished.set()
        except Exception as error:
            # Whatever broke inside the model or the loop belongs to all that wait for it: none waits in vain.
            self._failure = f"the embedded engine failed: {type(error).__name__}: {error}"
            self._fail(EngineError(self._failure), error)

    async def _turn(self) -> list[tuple[_Request, Finish]]:
        """One step, unless the engine was paused meanwhile or there is nothing to do; what ended in it."""
        async with self._stepping:
            if not self._gate.is_set():
                return []
            self._drop_cancelled()
            if self._running or (self._waiting and self._admitting):
                tokens = self._policy.compute(self._step)
                return await waits.wait(tokens, owner="engine", reason="a token for each request", on="policy")
            self._work.clear()
            self._cache.clear()  # the trainer's activations need the memory
            return []

    async def _settle(self) -> None:
        """Let everything that is ready to ask do so, so that a batch does not depend on the moment of asking."""
        seen = -1
        while seen != len(self._waiting):
            seen = len(self._waiting)
            for _ in range(8):
                await asyncio.sleep(0)

    @torch.inference_mode()  # the cache's tensors were made in it, and may be written in it alone
    def _drop_cancelled(self) -> None:
        self._waiting = deque(r for r in self._waiting if not r.future.cancelled())
        for request in [r for r in self._running if r.future.cancelled()]:
            self._remove(request)

    def _fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        error.__cause__ = cause
        for request in (*self._waiting, *self._running):
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting.clear()
        self._running.clear()
        self._finished.set()

    # Below: on the compute thread.

    @torch.inference_mode()
    def _step(self) -> list[tuple[_Request, Finish]]:
        """Prefill what fits, or sample one token for every running row; returns the requests that ended."""
        done = self._prefill() if self._admitting else []
        if self._running:
            hidden_RH = self._decoded(self._cache, self._running)
            if self._routing is not None:
                for request, chosen_LK in zip(self._running, self._routing.chosen(), strict=False):  # rows are padded
                    request.experts.append(chosen_LK.tobytes())
            done += self._take_out(self._sample(hidden_RH, list(self._running)))
        return done

    @torch.inference_mode()
    def _sample_alone(self, request: _Request) -> Completion:
        """By the code that samples all requests, in a cache of its own: those under way stay as they are."""
        cache = _cache(self._policy, 1)
        cache.reserve(len(request.prompt) + request.limit)
        ended = self._sample(self._prefilled(cache, {request.prompt: [0]})[-1:], [request])
        while not ended:
            ended = self._sample(self._decoded(cache, [request]), [request])
        return request.completion(ended[0][1])

    def _prefill(self) -> list[tuple[_Request, Finish]]:
        """Compute waiting prompts, each distinct one once, and sample every newcomer's first token."""
        rows_of: dict[tuple[int, ...], list[int]] = {}
        budget = self._options.prefill_tokens
        first = len(self._running)
        while self._waiting and len(self._running) < self._options.max_rows:
            prompt = self._waiting[0].prompt
            cost = 0 if prompt in rows_of else len(prompt)
            if cost > budget and rows_of:
                break
            budget -= cost
            rows_of.setdefault(prompt, []).append(len(self._running))
            self._running.append(self._waiting.popleft())
        if not rows_of:
            return []
        self._cache.reserve(max(len(r.prompt) + min(r.limit, _AHEAD) for r in self._running[first:]))
        hidden = self._prefilled(self._cache, rows_of)
        last, end = [0] * (len(self._running) - first), 0
        chosen_TLK = None if self._routing is None else self._routing.chosen()
        for prompt, rows in rows_of.items():
            end += len(prompt)
            for row in rows:
                last[row - first] = end - 1
                if chosen_TLK is not None:
                    self._running[row].experts.append(chosen_TLK[end - len(prompt) : end].tobytes())
        return self._take_out(self._sample(hidden[last], self._running[first:]))

    def _prefilled(self, cache: KVCache, rows_of: Mapping[tuple[int, ...], Sequence[int]]) -> Tensor:
        """Hidden states of all prompts, one after the other; their keys and values go to the rows of each."""
        if isinstance(cache, PlainCache):
            return cache.prefilled(rows_of, self._policy.device)
        prompts = list(rows_of)
        if more := max(0, _FEWEST - sum(map(len, prompts))):  # nobody's
            prompts.append((0,) * more)
        rows = (*map(tuple, rows_of.values()), ())[: len(prompts)]
        plan = Packed(lengths=tuple(map(len, prompts)), parents=(None,) * len(prompts), store=(cache, rows))
        device = self._policy.device
        tokens = torch.tensor([t for prompt in prompts for t in prompt], device=device)
        positions = torch.tensor(sequential_positions(plan), device=device)
        return self._policy.hidden(tokens[None], positions[None], plan)[0, : sum(map(len, rows_of))]

    def _decoded(self, cache: KVCache, requests: Sequence[_Request]) -> Tensor:
        """Hidden state of the last token of each request, which are the rows of a cache."""
        device, lengths = self._policy.device, [r.cached for r in requests]
        tokens_R1 = torch.tensor([[r.tokens[-1]] for r in requests], device=device)
        if isinstance(cache, PlainCache):
            return cache.decoded(tokens_R1, lengths)
        plan = decode_plan(cache, lengths + [0] * (-len(requests) % _ROWS), device, self._policy.dtype)
        tokens_R1 = F.pad(tokens_R1, (0, 0, 0, _padding(len(requests))))
        positions_R = F.pad(plan.positions_R, (0, len(tokens_R1) - len(plan.positions_R)))
        return self._policy.hidden(tokens_R1, positions_R[:, None], plan)[: len(requests), 0]

    def _sample(self, hidden_RH: Tensor, requests: list[_Request]) -> list[tuple[_Request, Finish]]:
        """Draw one token for each request and record it; returns the requests that ended."""
        logits = self._policy.logits(F.pad(hidden_RH, (0, 0, 0, _padding(len(requests)))))[: len(requests)]
        penalties = [r.penalties for r in requests]
        penalise_rows(logits, penalties, [r.prompt for r in requests], [r.tokens for r in requests])
        temperatures = torch.tensor([r.sampling.temperature or 1.0 for r in requests], device=logits.device)
        logits = restrict(
            logits.div_(temperatures[:, None]),
            top_p=[r.sampling.top_p for r in requests],
            top_k=[r.sampling.top_k for r in requests],
            min_p=[r.sampling.min_p for r in requests],
        )
        uniforms = uniform([r.key for r in requests], [len(r.tokens) for r in requests]).to(logits.device)
        greedy = [r.sampling.temperature == 0 for r in requests]
        tokens, logprobs = draw(logits, uniforms, greedy=greedy)
        step = self._version.step
        ended: list[tuple[_Request, Finish]] = []
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise EngineError(f"the policy's logits are not finite (token {len(request.tokens)} of an answer)")
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(step)
            if finish := self._finish(request):
                ended.append((request, finish))
        return ended

    def _take_out(self, ended: list[tuple[_Request, Finish]]) -> list[tuple[_Request, Finish]]:
        for request, _ in ended:
            self._remove(request)
        return ended

    def _finish(self, request: _Request) -> Finish | None:
        if len(request.tokens) > request.sampling.min_tokens and self._ended(request):
            return "stop"
        return "length" if len(request.tokens) >= request.limit else None

    def _ended(self, request: _Request) -> bool:
        """True if the last token ends the answer, or completes a text that does."""
        sampling, last = request.sampling, request.tokens[-1]
        if last in self._policy.end_tokens or last in sampling.stop_token_ids:
            return True
        if not sampling.stop:
            return False
        # A token adds at least one byte of a stop text that it completes, so the tail is enough.
        tail = request.tokens[-(max(len(stop.encode()) for stop in sampling.stop) + 8) :]
        text, before = self._text(tail), self._text(tail[:-1]) if sampling.min_tokens else ""
        # What was complete in it came too early to end the answer; half a character at its end may be another by now.
        old = len(before.rstrip("\N{REPLACEMENT CHARACTER}"))
        return any(stop in text[max(0, old - len(stop) + 1) :] for stop in sampling.stop)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._policy.tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[no-any-return]

    def _remove(self, request: _Request) -> None:
        """Close the gap that a finished row leaves with the last row."""
        row, last = self._running.index(request), len(self._running) - 1
        if row != last:
            self._cache.move(last, row, self._running[last].cached)
            self._running[row] = self._running[last]
        self._running.pop()


class PlainCache(KVCache):
    """transformers' own caches, for models that are not computed as packed trees: one for each distinct prompt.

    Its rows are of equal length, so nothing is padded.
    """

    def __init__(self, policy: Policy, rows: int):
        super().__init__(rows)
        self._model = packing.backbone(policy.causal)
        self._has_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self._at: dict[int, tuple[Any, int]] = {}
        """Cache of each row, and its place there."""
        self._name = ""
        """The cache's in the model's code."""

    def reserve(self, length: int) -> None:
        """They grow by themselves."""

    def move(self, source: int, target: int, length: int) -> None:
        self._at[target] = self._at[source]

    def clear(self) -> None:
        self._at.clear()

    def prefilled(self, rows_of: Mapping[tuple[int, ...], Sequence[int]], device: torch.device) -> Tensor:
        """Hidden states of all prompts, one after the other."""
        hidden = []
        for prompt, rows in rows_of.items():
            out = self._model(input_ids=torch.tensor([prompt], device=device), use_cache=True)
            self._name = next(name for name in ("past_key_values", "cache_params") if name in out)
            cache = out[self._name]
            _take(cache, torch.zeros(len(rows), dtype=torch.int64, device=device))
            self._at |= {row: (cache, place) for place, row in enumerate(rows)}
            hidden.append(out.last_hidden_state[0])
        return torch.cat(hidden)

    def decoded(self, tokens_R1: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden state of one more token of each row, which has ``lengths`` before it."""
        rows_of: dict[int, list[int]] = {}
        for row in range(len(tokens_R1)):
            rows_of.setdefault(id(self._at[row][0]), []).append(row)
        hidden: list[Tensor] = []
        at: dict[int, tuple[Any, int]] = {}
        for rows in rows_of.values():
            cache, places = self._at[rows[0]][0], [self._at[row][1] for row in rows]
            at |= {row: (cache, place) for place, row in enumerate(rows)}
            _take(cache, torch.tensor(places, device=tokens_R1.device))  # those that have ended are left out
            options = {self._name: cache}
            if self._has_positions:  # some models count from 0 if they are not told
                options["position_ids"] = torch.full_like(tokens_R1[rows], lengths[rows[0]])
            out = self._model(input_ids=tokens_R1[rows], **options, use_cache=True)
            hidden.append(out.last_hidden_state[:, 0])
        self._at = at
        order = [row for rows in rows_of.values() for row in rows]
        return torch.cat(hidden)[np.argsort(order)]


def _take(cache: Any, places: Tensor) -> None:
    """Make these rows of transformers' cache all that it has."""
    if "batch_select_indices" in vars(type(cache)):  # one with a state beside its layers
        cache.batch_select_indices(places)
    else:
        cache.reorder_cache(places)


def _padding(rows: int) -> int:
    """Rows that nobody reads, beside so many."""
    return max(_FEWEST, rows + -rows % _ROWS) - rows


def _cache(policy: Policy, rows: int) -> KVCache:
    return KVCache(rows + -rows % _ROWS) if packing.is_tree(policy.causal) else PlainCache(policy, rows)
