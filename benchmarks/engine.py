"""Tokens a second of Tandem's embedded engine on the work of ``peers/generate.py``, in bfloat16 on the CPU.

    python benchmarks/engine.py MODEL .cache/chain_sum.jsonl [--new-tokens 48] [--repeat 3]

``fixed`` is 32 problems with the same number of new tokens each; ``mixed`` is 64 requests, each with its own
``max_tokens`` from the file. The end token is held back, so every length is exact. Prints JSON; the rate is of the
fastest repetition.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from _load import Endless

from tandem.engines.base import Engine
from tandem.engines.embedded.spec import Embedded
from tandem.model.policy import Compute, load_model, load_tokenizer, most_positions
from tandem.types import Sampling


async def seconds(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> float:
    begin = time.perf_counter()
    requests = zip(prompts, lengths, strict=True)
    answers = [engine.generate(ids, Sampling(max_tokens=n), key) for key, (ids, n) in enumerate(requests)]
    got = await asyncio.gather(*answers)
    assert [len(answer.tokens) for answer in got] == lengths
    return time.perf_counter() - begin


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(args.model))
    model = load_model(str(args.model), dtype=torch.bfloat16, device=torch.device("cpu"))
    policy = Endless(model, tokenizer, name="benchmark", compute=Compute())
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][:64]
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )
        for row in rows
    ]
    work = {
        "fixed": (prompts[:32], [args.new_tokens] * 32),
        "mixed": (prompts, [row["max_tokens"] for row in rows]),
    }
    result: dict[str, Any] = {"threads": policy.compute.threads}
    async with Embedded().open(policy, context=most_positions(policy.config)) as engine:
        for name in (args.only,) if args.only else tuple(work):
            chosen_prompts, lengths = work[name]
            await seconds(engine, chosen_prompts[:4], [4] * 4)  # warm up
            took = [await seconds(engine, chosen_prompts, lengths) for _ in range(args.repeat)]
            rate = round(sum(lengths) / min(took), 1)
            result[name] = {"tokens": sum(lengths), "seconds": [round(s, 3) for s in took], "tokens_per_second": rate}
    result["peak_rss_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)
    policy.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("prompts", type=Path, help="JSONL with prompt and max_tokens, at least 64 lines")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each completion of the fixed batch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=("fixed", "mixed"))
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
