"""Tokens a second of transformers' ``generate`` with static batches, in bfloat16 on the CPU.

    python benchmarks/peers/generate.py MODEL .cache/chain_sum.jsonl [--new-tokens 64] [--repeat 3]

Runs in Tandem's environment and in the peers'. Two measurements, every length exact because the end token is held
back: ``fixed`` is one batch of 32 problems and the same number of new tokens each; ``mixed`` is 64 requests, each
with its own ``max_tokens`` from the file, in batches of 32 in the file's order that wait for their longest. Only the
tokens that were asked for count. Prints JSON; ``seconds`` lists every repetition, the rate is of the fastest.
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("prompts", type=Path, help="JSONL with prompt and max_tokens, at least 64 lines")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each completion of the fixed batch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=("fixed", "mixed"))
    return parser.parse_args()


class Peer:
    """A model, its tokenizer and chat prompts, left-padded as ``generate`` wants them."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(self, start: int, new_tokens: int) -> None:
        """Sample exactly ``new_tokens`` after each of the ``BATCH`` problems from ``start`` on."""
        batch = self.tokenizer.apply_chat_template(
            [row["prompt"] for row in self.rows[start : start + BATCH]],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = self.model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        made = out.shape[1] - batch["input_ids"].shape[1]
        if made != new_tokens:
            raise RuntimeError(f"asked for {new_tokens} tokens, got {made}")

    def fixed(self, new_tokens: int) -> int:
        """One batch of one length; returns the tokens that were asked for."""
        self.generate(0, new_tokens)
        return BATCH * new_tokens

    def mixed(self) -> int:
        """Batches that wait for their longest; returns the tokens that were asked for."""
        lengths = [row["max_tokens"] for row in self.rows[: 2 * BATCH]]
        for start in range(0, len(lengths), BATCH):
            self.generate(start, max(lengths[start : start + BATCH]))
        return sum(lengths)


def timed(measure: Any, repeat: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        tokens = measure()
        seconds.append(time.perf_counter() - begin)
    rate = round(tokens / min(seconds), 1)
    return {"tokens": tokens, "tokens_per_second": rate, "seconds": [round(s, 3) for s in seconds]}


def main() -> None:
    args = arguments()
    disable_progress_bar()
    torch.manual_seed(0)
    rows = workload.read(args.prompts)
    if len(rows) < 2 * BATCH:
        raise SystemExit(f"{args.prompts} has {len(rows)} problems; {2 * BATCH} are needed")
    peer = Peer(args.model, rows)
    peer.generate(0, 8)  # warm up
    result: dict[str, Any] = {}
    if args.only != "mixed":
        result["fixed"] = timed(lambda: peer.fixed(args.new_tokens), args.repeat)
    if args.only != "fixed":
        result["mixed"] = timed(peer.mixed, args.repeat)
    result |= {"peak_rss_gb": round(workload.peak_rss_gb(), 3), "threads": torch.get_num_threads()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
