"""Families of open models: what each is packed as, and that the embedded engine and LoRA compute what transformers does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import FAMILIES, config_of

from tandem.engines.embedded.spec import Embedded
from tandem.errors import ConfigError
from tandem.model import packing
from tandem.model.policy import Compute, Policy
from tandem.trainable.lora import Lora
from tandem.types import Completion, Sampling

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
REFUSED = {"glm_moe_dsa": "sparse-indexed attention: transformers' own rows differ from single sequences"}
PROMPTS = [list(range(5, 25)), [7, 9, 11], list(range(5, 25)), list(range(30, 42))]


def policy_of(name: str) -> Policy:
    torch.manual_seed(0)
    config = config_of(name)
    told = packing.attention(config, "auto")
    model = packing.causal_class(config).from_config(config, dtype=torch.float32, **told).eval()
    return Policy(model, SimpleNamespace(eos_token_id=None), name=name, compute=Compute(1))


def logprobs(model: Any, prompt: list[int], answer: tuple[int, ...]) -> torch.Tensor:
    """By transformers' own forward."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def sampled(policy: Policy) -> float:
    """Largest distance of a sampled token's logprob from transformers' own forward."""

    async def main() -> list[Completion]:
        async with Embedded(max_rows=3).open(policy, context=128) as engine:
            requests = ((p, Sampling(max_tokens=n), i) for i, (p, n) in enumerate(zip(PROMPTS, (6, 14, 11, 9), strict=True)))
            return await asyncio.wait_for(asyncio.gather(*(engine.generate(*request) for request in requests)), 60)

    answers = asyncio.run(main())
    if packing.is_tree(policy.causal):
        policy.causal.set_attn_implementation("sdpa")
    with torch.no_grad():
        return max(
            float((torch.tensor(answer.logprobs) - logprobs(policy.causal, prompt, answer.tokens)).abs().max())
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        )


if __name__ == "__main__":
    import sys, traceback
    for name in sys.argv[1:] or FAMILIES:
        if name in REFUSED: continue
        policy = policy_of(name)
        own = packing.causal_class(config_of(name)).from_config(config_of(name), dtype=torch.float32).eval().config.get_text_config()._attn_implementation
        policy.causal  # noqa
        try:
            print(name, packing.chosen(config_of(name)).packing, f"{sampled(policy):.0e}", own, flush=True)
        except Exception as e:
            print(name, "FAIL", repr(e)[:300], flush=True)
            if len(sys.argv) > 1: traceback.print_exc()
        policy.close()
