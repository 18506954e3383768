"""Questions about the weights that an engine holds now, asked before anything else is sampled from them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.engines.vllm.server.frontend import Frontend


async def probe(
    front: Frontend,
    tokens: Sequence[int],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    adapter: Any = None,
) -> dict[str, Any]:
    """Score the tokens and sample a few after them."""
    ask: dict[str, Any] = {"detokenize": False, "temperature": temperature, "seed": seed, "logprobs": 0}
    sample = {**ask, "max_tokens": max_tokens, "ignore_eos": True}  # as many tokens as are asked for
    once = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    longer = beyond_a_block(tokens, front.client.vllm_config)
    async with front.first():
        async with front.proving():
            salt = front.salt
            # Scoring reads no prefix cache but fills it, so that what it fills is kept from the others.
            asks = [(tokens, sample, salt), (tokens, {**once, "prompt_logprobs": 0}, f"{salt}-scored")]
            asks += [(longer, once, salt)] if longer else []
            asked = asyncio.gather(*(front.generate(t, params, adapter=adapter, probe=key) for t, params, key in asks))
            await asyncio.sleep(0)  # each is handed in
        sampled, scored, *more = await asked
    answer, cached = sampled.completions[0], (more or [sampled])[0].cached
    return {
        "scored": [p[t] for t, p in zip(tokens[1:], (scored.prompt_logprobs or [])[1:], strict=True) if p],
        "tokens": answer.tokens,
        "logprobs": answer.own_logprobs,
        "finish": answer.finish,
        "cached": cached,
        "temperature": temperature,
    }


def beyond_a_block(tokens: Sequence[int], config: Any) -> list[int]:
    """The tokens again and again, one more than the prefix cache's unit: it keeps nothing that is shorter.

    Empty where they are long enough by themselves, or where so many would not fit. ``config`` is vLLM's.
    """
    block = int(config.cache_config.block_size)
    if len(tokens) > block or block + 1 >= config.model_config.max_model_len:
        return []
    return ([*tokens] * (block // len(tokens) + 1))[: block + 1]
