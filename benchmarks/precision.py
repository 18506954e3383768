"""Four ways of writing bfloat16 weights, the same run: three learn, plain rounding does not.

    .venv/bin/python benchmarks/precision.py [--model .cache/smollm2] [--steps 16] [--lr 3e-5]

Trains every weight of the quickstart's recipe, from the same seed. Plain rounding exists only here: it is what becomes
of AdamW when a bfloat16 weight is updated in bfloat16. The table tells the reward of the first and last quarter of the
steps, the share of held-out problems that are answered rightly after it, and the share of weights whose bits changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from tandem.optimizers._adam import FloatMoments
from tandem.optimizers._precise import TrainedWeight, whole
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.base import Stepper

HERE = Path(__file__).parent
WAYS = {
    "masters": ["optimizer.kind=adamw", "optimizer.precision=masters"],
    "stochastic": ["optimizer.kind=adamw", "optimizer.precision=stochastic"],
    "plain": ["optimizer.kind=precision:Plain"],
}


class Nearest(TrainedWeight):
    """Rounds what the update made to the nearest bfloat16 and keeps nothing of the rest."""

    def _narrow(self, value: Tensor, flat: Tensor, start: int) -> None:
        flat[start : start + len(value)].copy_(value)


@dataclass(frozen=True, kw_only=True)
class Plain(AdamW):
    """AdamW with float32 moments whose weights are rounded to nearest."""

    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        return FloatMoments(self, [Nearest(part, "stochastic") for part in whole(named_parameters)])


def train(way: str, folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Rewards of the steps, right answers of the evaluations."""
    overrides = [
        f"model={args.model}",
        f"steps={args.steps}",
        f"runs={folder}",
        f"name={way}",
        f"seed={args.seed}",
        f"optimizer.lr={args.lr}",
        "evaluate.before=false",
        "evaluate.samples=2",
        "checkpoint.every=1000000",
        "loggers=[]",
        f"threads={args.threads}",
        *WAYS[way],
    ]
    command = [sys.executable, "-m", "tandem", "train", "recipes/quickstart.yaml", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    steps = [json.loads(line)["metrics"] for line in (folder / way / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (folder / way / "eval.jsonl").read_text().splitlines()]
    return {
        "reward": [step["reward"] for step in steps if "reward" in step],
        "right": [evaluation["mean"] for evaluation in evaluations],
    }


def changed(before: Path, after: Path) -> float:
    """Share of the weights whose bits differ."""
    differ = total = 0
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        for name in new.keys():  # noqa: SIM118
            a, b = old.get_tensor(name).to(torch.bfloat16), new.get_tensor(name)
            differ += int((a.view(torch.int16) != b.view(torch.int16)).sum())
            total += a.numel()
    return differ / total


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2"), help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    args = parser.parse_args()
    args.threads = args.threads or os.cpu_count()
    args.model = args.model.resolve()
    print(f"{'':<11} {'reward, first':>14} {'last quarter':>13} {'right after':>12} {'weights changed':>16}")
    for way in args.ways:
        with tempfile.TemporaryDirectory(prefix="precision-") as folder:
            scores = train(way, Path(folder), args)
            final = next(Path(folder, way, "checkpoints").glob("*/model")) / "model.safetensors"
            share = changed(args.model / "model.safetensors", final)
        quarter = max(1, len(scores["reward"]) // 4)
        first, last = mean(scores["reward"][:quarter]), mean(scores["reward"][-quarter:])
        print(f"{way:<11} {first:>14.3f} {last:>13.3f} {scores['right'][-1]:>12.3f} {share:>16.2%}", flush=True)
        print(f"  rewards: {' '.join(f'{value:.2f}' for value in scores['reward'])}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
