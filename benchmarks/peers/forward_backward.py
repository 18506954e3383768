"""Tokens a second of a padded transformers forward and backward, in bfloat16 on the CPU.

    python benchmarks/peers/forward_backward.py MODEL [--groups 4] [--group-size 8] [--batch FILE]

Runs in Tandem's environment and in the peers'. The sequences are those of ``workload.token_groups``, or of FILE: JSON
lines with ``tokens`` and ``prompt_len``. They go through the model ``--rows`` at a time, padded to the longest of
those; 8 are fastest on two cores. The loss is the mean negative logprob of the completions, and only tokens that are
not padding count.
Prints JSON; ``seconds`` lists every repetition, the rate is of the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import workload
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--low", type=int, default=8, help="fewest tokens of a completion")
    parser.add_argument("--high", type=int, default=128, help="most tokens of a completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=Path, help="JSONL with tokens and prompt_len, instead of random tokens")
    parser.add_argument("--rows", type=int, default=8, help="sequences of one forward; 0 takes all at once")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def padded(sequences: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-padded inputs; labels are -100 on prompts and padding, as transformers wants them."""
    longest = max(len(s["tokens"]) for s in sequences)
    input_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, -100)
    for row, sequence in enumerate(sequences):
        tokens, start = torch.tensor(sequence["tokens"]), sequence["prompt_len"]
        input_ids[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
        labels[row, start : len(tokens)] = tokens[start:]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def step(model: Any, sequences: list[dict[str, Any]], rows: int) -> None:
    """Forward and backward over all sequences; gradients end up summed and are then forgotten."""
    for start in range(0, len(sequences), rows):
        batch = padded(sequences[start : start + rows])
        model(**batch, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def main() -> None:
    args = arguments()
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).train()
    sequences = (
        workload.read(args.batch)
        if args.batch
        else workload.token_groups(
            args.groups,
            args.group_size,
            vocabulary=model.config.vocab_size,
            seed=args.seed,
            low=args.low,
            high=args.high,
        )
    )
    rows = args.rows or len(sequences)
    before = workload.peak_rss_gb()
    step(model, sequences[:2], 2)  # warm up
    seconds = []
    for _ in range(args.repeat):
        begin = time.perf_counter()
        step(model, sequences, rows)
        seconds.append(time.perf_counter() - begin)
    lengths = [len(s["tokens"]) for s in sequences]
    tokens = sum(lengths)
    chunks = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    result = {
        "tokens": tokens,
        "trained_tokens": sum(len(s["tokens"]) - s["prompt_len"] for s in sequences),
        "padded_tokens": sum(len(chunk) * max(chunk) for chunk in chunks),
        "rows": rows,
        "tokens_per_second": round(tokens / min(seconds), 1),
        "seconds": [round(s, 3) for s in seconds],
        "peak_rss_gb": round(workload.peak_rss_gb(), 3),
        "loaded_rss_gb": round(before, 3),
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
