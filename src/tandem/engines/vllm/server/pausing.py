"""vLLM's scheduler, made to stand still between two forward passes and to go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

AT_ONCE = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
"""vLLM's variable: of how many requests the tokens of a forward pass are filed in one turn of the event loop."""
FEW = 8
"""The same, so that answers which end together are on their way one after another, and not all behind the last."""
SETTLE = 20
"""Turns of the event loop in which tokens that were filed reach whoever asked for them."""
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
        """Handed in."""
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
    """Of vLLM's asynchronous engine (``AsyncLLM``), of which only public methods are used but three.

    The three, each with a public way to fall back on: ``engine_core.pause_scheduler_async``, because the public
    ``pause_generation`` sleeps 20 ms after the work is done, and then keeps back what is asked; ``outputs_queue``
    of the same, to see that every token sampled before a pause has been handed out; and
    ``output_processor.request_states``, which counts the tokens of requests in flight, so that they need not be handed
    over one by one.
    """

    def __init__(self, client: Any):
        self._client = client

    @property
    def _core(self) -> Any:
        return getattr(self._client, "engine_core", None)

    @property
    def _quick(self) -> Any:
        return getattr(self._core, "pause_scheduler_async", None)

    async def halt(self) -> None:
        """Return once nothing is sampled, and whoever waits for tokens has got those that were."""
        await (self._quick or self._client.pause_generation)(mode="keep", clear_cache=False)
        queue = getattr(self._core, "outputs_queue", None)
        while queue is not None and not queue.empty():
            await asyncio.sleep(0)
        for _ in range(SETTLE + self._turns):
            await asyncio.sleep(0)

    @property
    def _turns(self) -> int:
        """Of the event loop, in which the tokens of one forward pass are filed."""
        at_once = int(os.environ.get(AT_ONCE) or 128)
        return -(-int(self._client.vllm_config.scheduler_config.max_num_seqs) // at_once)

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

    async def go_on(self) -> None:
        """Sample again."""
        await self._client.resume_generation()

    @property
    def counting(self) -> bool:
        """vLLM's own record of requests in flight counts their tokens, and is where it is known to be."""
        return self._states is not None

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """Of each answer in flight: the key of its request, its number there and its tokens so far."""
        for state in (self._states or {}).values():
            owner = getattr(state, "parent_req", None) or state
            yield owner.external_req_id, state.request_index, state.detokenizer.num_output_tokens()

    @property
    def _states(self) -> Mapping[str, Any] | None:
        states = getattr(getattr(self._client, "output_processor", None), "request_states", None)
        return states if isinstance(states, Mapping) else None
