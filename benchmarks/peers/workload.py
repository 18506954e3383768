"""The work that peers and Tandem are both given, so that one run compares the same thing.

    python benchmarks/peers/workload.py OUT.jsonl [--count 64] [--seed 0]

writes ``chain_sum`` problems of 2 terms and 1 digit, one JSON object a line: ``prompt`` (chat messages), ``answer`` and
``max_tokens`` (8 to 128, for the measurements with mixed lengths). Everything is a pure function of the seed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def mixed_lengths(count: int, *, low: int = 8, high: int = 128, seed: int = 0) -> list[int]:
    """Completion lengths in tokens, uniform from ``low`` to ``high``."""
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def token_groups(
    groups: int, group_size: int, *, vocabulary: int, seed: int = 0, low: int = 8, high: int = 128
) -> list[dict[str, Any]]:
    """Random token sequences of a training step: siblings share a prompt of 40 to 80 tokens and differ in length."""
    rng = random.Random(seed)
    lengths = iter(mixed_lengths(groups * group_size, low=low, high=high, seed=seed))
    sequences = []
    for group in range(groups):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(40, 80))]
        for _ in range(group_size):
            completion = [rng.randrange(vocabulary) for _ in range(next(lengths))]
            sequences.append({"group": group, "tokens": prompt + completion, "prompt_len": len(prompt)})
    return sequences


def chain_sum(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Problems of reasoning-gym's ``chain_sum``; needs the ``reasoning-gym`` extra."""
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **options)
    lengths = mixed_lengths(count, seed=seed)
    return [
        {
            "prompt": [{"role": "user", "content": item["question"]}],
            "answer": item["answer"],
            "max_tokens": length,
        }
        for item, length in zip(data, lengths, strict=True)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """The problems that were written to ``path``."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def last_number_reward(text: str, answer: str) -> float:
    """1 if the last number of ``text`` is ``answer``, else 0."""
    numbers = _NUMBER.findall(text)
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


def peak_rss_gb() -> float:
    """Largest resident size of this process so far, in GB (1e9 bytes)."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(item) + "\n" for item in chain_sum(args.count, seed=args.seed)))


if __name__ == "__main__":
    main()
