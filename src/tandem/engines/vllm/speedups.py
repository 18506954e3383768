"""Optional speedups on vLLM's internals: batched logprobs, quick pauses, prompts submitted while paused.

All of it is optional: a release in which an internal is not where it is known to be is used by its public methods
alone. ``benchmarks/decoding.py`` measures the logprobs and ``benchmarks/sync.py`` the
pauses; benchmarks/RESULTS.md has the figures.

Logprobs in pieces (``--scheduler-cls``): vLLM hands over a token's logprob as three arrays of one number each. To
encode them takes the process that samples forty times as long as the token itself, under the lock that the next forward
pass needs to be launched, and the HTTP process as long again to read them. A request for a whole answer needs none of
it before its end, so logprobs leave the process in pieces of many tokens.
"""

from __future__ import annotations

import asyncio
import copy
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tandem.engines.vllm.server.watch import end_with_parent

PIECES_KEY = "tandem_pieces"
"""In a request's ``extra_args``: it is answered whole, so its logprobs may come in pieces."""
PIECE = 32
"""Tokens of a piece: enough that a token costs little, few enough that answers that end together end at once."""
FIELDS = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
"""Of vLLM's ``LogprobsLists``, as far as they are known here; the last says where each request's rows begin, and is
None where each has one row, or all rows are of one request."""


def fork_workers() -> None:
    """vLLM plugin: workers are forked by the scheduler's process, instead of importing vLLM anew, which takes 12 s.

    The server must not fork: the scheduler would hold its socket. Where something has begun CUDA in the scheduler's
    process, such as an import of torchao, vLLM spawns all the same and says so.
    """
    from vllm.platforms import current_platform

    if multiprocessing.parent_process() is not None and current_platform.is_cuda():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def scheduler(**kwargs: Any) -> Any:
    """The scheduler that vLLM would take by itself, with logprobs in pieces if this version's are known here."""
    from vllm.v1.outputs import LogprobsLists

    end_with_parent()
    sys.setswitchinterval(0.001)  # the thread that answers the server waits for the one that launches forward passes
    config = copy.copy(kwargs["vllm_config"].scheduler_config)
    config.scheduler_cls = None
    chosen = config.get_scheduler_cls()
    known = getattr(LogprobsLists, "_fields", None) == FIELDS
    return (type("Scheduler", (Pieces, chosen), {}) if known else chosen)(**kwargs)


class Pieces:
    """Scheduler mixin that returns logprobs in pieces of many tokens; it precedes vLLM's scheduler among the bases."""

    requests: Mapping[str, Any]
    """Those that have not ended, by id."""

    def __init__(self, **kwargs: Any):
        self._held: dict[str, list[tuple[int, float, int]]] = {}  # id, logprob and rank of tokens that are kept back
        self._due: dict[str, int] = {}  # tokens of a request's first piece, which is shorter: not all are full at once
        self._begun = 0
        self._like: Any = None
        super().__init__(**kwargs)

    def update_from_output(self, scheduled: Any, ran: Any) -> Any:
        """What a forward pass gave, for each client.

        Args:
            scheduled: what it was to do.
            ran: vLLM's ``ModelRunnerOutput``.
        """
        rows, index, tokens = ran.logprobs, ran.req_id_to_index, list[tuple[int, float, int]]()
        single = rows is not None and rows.cu_num_generated_tokens is None
        if single:
            self._like = rows
            columns = rows.logprob_token_ids[:, 0], rows.logprobs[:, 0], rows.sampled_token_ranks
            tokens = list(zip(*(column.tolist() for column in columns), strict=True))
            for key in ran.req_ids:
                if key not in self._held and self._wants_pieces(key):
                    self._held[key], self._due[key] = [], 1 + self._begun % PIECE
                    self._begun += 1
            if all(key in self._held for key in ran.req_ids):
                ran = copy.copy(ran)
                ran.logprobs = None  # nothing needs those of one token, and to cut them out takes time
        outputs = super().update_from_output(scheduled, ran)  # type: ignore[misc]
        for output in [output for of in outputs.values() for output in of.outputs if output.request_id in self._held]:
            key = output.request_id
            if single:
                output.new_logprobs = None
                if output.new_token_ids:
                    self._held[key].append(tokens[index[key]])
                    if len(self._held[key]) >= self._due.get(key, PIECE):
                        output.new_logprobs = self._take(key)
            elif output.new_logprobs is not None:  # of several tokens: what was held goes before them
                output.new_logprobs = joined(self._take(key), output.new_logprobs)
            if output.finish_reason is not None:
                output.new_logprobs = joined(output.new_logprobs, self._take(key))
                del self._held[key]
        return outputs

    def _take(self, key: str) -> Any:
        """The logprobs that are kept back of a request, which are not any longer; None if there are none."""
        held, self._held[key] = self._held[key], []
        self._due.pop(key, None)
        if not held:
            return None
        types = self._like.logprob_token_ids.dtype, self._like.logprobs.dtype, self._like.sampled_token_ranks.dtype
        ids, logprobs, ranks = (
            np.array(column, kind) for column, kind in zip(zip(*held, strict=True), types, strict=True)
        )
        return type(self._like)(ids[:, None], logprobs[:, None], ranks, None)

    def finish_requests(self, *args: Any, **more: Any) -> Any:
        """End requests from without: what is held of them goes with them."""
        finished = super().finish_requests(*args, **more)  # type: ignore[misc]
        for key in [key for key in self._held if self._is_finished(key)]:
            self._take(key)
            del self._held[key]
        return finished

    def _is_finished(self, key: str) -> bool:
        request = self.requests.get(key)
        return request is None or request.is_finished()

    def _wants_pieces(self, key: str) -> bool:
        """Whether it wants pieces, and of a token no other logprob than its own."""
        params = None if self._is_finished(key) else self.requests[key].sampling_params
        return params is not None and params.logprobs == 0 and bool((params.extra_args or {}).get(PIECES_KEY))


def joined(first: Any, second: Any) -> Any:
    """One ``LogprobsLists`` of two, as wide as the narrower; where one is None, the other."""
    if first is None or second is None:
        return second if first is None else first
    both = (first, second)
    width = min(part.logprobs.shape[1] for part in both)
    ids, logprobs = (np.concatenate([getattr(part, name)[:, :width] for part in both]) for name in FIELDS[:2])
    return type(first)(ids, logprobs, np.concatenate([part.sampled_token_ranks for part in both]), None)


AT_ONCE = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
"""vLLM's variable: of how many requests the tokens of a forward pass are filed in one turn of the event loop."""
FEW = 8
"""The same, so that answers which end together are on their way one after another, and not all behind the last."""
SETTLE = 20
"""Turns of the event loop in which tokens that were filed reach what asked for them."""
PROBE_TOKENS = 1024
"""Of a forward pass, kept for a probe: three times its text, or a block of the cache and one token."""


class PrefillRoom:
    """Prompts that are handed in while nothing is sampled, no more than one forward pass reads beside a probe.

    So they are all read by the first pass, and the probe that is handed in last is not kept waiting.

    Args:
        tokens: that there is room for.
        block: unit of the prefix cache, beyond which a prompt that was read costs nothing; None where there is none.
    """

    def __init__(self, tokens: int = 0, block: int | None = None):
        self.requests = 0
        self._tokens, self._block = tokens, block
        self._read: set[tuple[int, ...]] = set()

    def takes(self, prompt: Sequence[int], answers: int) -> bool:
        """Hand a request in, if there is room for it."""
        again = len(prompt) if self._block is None else min(self._block, len(prompt))
        key = tuple(prompt)
        cost = again * answers if key in self._read else len(prompt) + again * (answers - 1)
        if cost > self._tokens:
            return False
        self._tokens -= cost
        self._read.add(key)
        self.requests += 1
        return True


class Scheduler:
    """Scheduler controls of vLLM's asynchronous engine (``AsyncLLM``), of which only public methods are used but three.

    The three, each with a public way to fall back on: ``engine_core.pause_scheduler_async``, because the public
    ``pause_generation`` sleeps 20 ms after the work is done, and then keeps back what is asked; ``outputs_queue``
    of the same, to see that every token sampled before a pause has been handed out; and
    ``output_processor.request_states``, which counts the tokens of requests in flight, so that they need not be handed
    over one by one.
    """

    def __init__(self, client: Any):
        self._client = client
        states = getattr(getattr(client, "output_processor", None), "request_states", None)
        self._states: Mapping[str, Any] | None = states if isinstance(states, Mapping) else None

    @property
    def _core(self) -> Any:
        return getattr(self._client, "engine_core", None)

    @property
    def _quick(self) -> Any:
        return getattr(self._core, "pause_scheduler_async", None)

    async def pause(self) -> None:
        """Return once nothing is sampled, and all that wait for tokens have got those that were."""
        await (self._quick or self._client.pause_generation)(mode="keep", clear_cache=False)
        queue = getattr(self._core, "outputs_queue", None)
        while queue is not None and not queue.empty():
            await asyncio.sleep(0)
        most, at_once = self._client.vllm_config.scheduler_config.max_num_seqs, int(os.environ.get(AT_ONCE) or 128)
        for _ in range(SETTLE + math.ceil(most / at_once)):  # turns in which the tokens of one forward pass are filed
            await asyncio.sleep(0)

    def room(self) -> PrefillRoom:
        """What it may be given while it stands still; call it when it does, with nothing in flight."""
        config = self._client.vllm_config
        if (
            self._quick is None  # the public pause keeps them back itself
            or config.lora_config is not None  # the adapter that comes is not known yet
            or getattr(config.model_config, "enable_sleep_mode", False)  # nothing may be in flight then
            or getattr(config.parallel_config, "data_parallel_size", 1) > 1  # a request sets all replicas going
        ):
            return PrefillRoom()
        cached = config.cache_config.enable_prefix_caching
        batched = config.scheduler_config.max_num_batched_tokens
        return PrefillRoom(batched - PROBE_TOKENS, config.cache_config.block_size if cached else None)

    @property
    def counting(self) -> bool:
        """vLLM's own record of requests in flight counts their tokens, and is where it is known to be."""
        return self._states is not None

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """Of each answer in flight: the key of its request, its number there and its tokens so far."""
        for state in (self._states or {}).values():
            owner = getattr(state, "parent_req", None) or state
            yield owner.external_req_id, state.request_index, state.detokenizer.num_output_tokens()
