"""Train and evaluate from Python: ``python examples/train.py MODEL [STEPS]``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import tandem


def on_step(step: int, metrics: Mapping[str, float]) -> None:
    """Called after each step with its metrics."""
    print(f"step {step}: reward {metrics['reward']:.2f}, {metrics['length']:.0f} tokens an answer")


def main(model: str, steps: str = "20") -> None:
    """Train on small sums, show an answer, and evaluate on held-out sums."""
    recipe = tandem.Recipe.load(
        {
            "model": model,
            "steps": int(steps),
            "env": {"kind": "arithmetic", "min_number": 1, "max_number": 9, "examples": 2},
            "groups_per_step": 4,
            "group_size": 8,
            "sampling": {"max_tokens": 32},
            "optimizer": {"lr": 2e-5},
            "zero_variance_groups": "keep",
            "evaluate": {"tasks": 0},
        }
    )
    run = tandem.train(recipe, on_step=on_step)
    print(run.rollouts(step=1)[0]["text"])
    result = tandem.evaluate(run, {"evaluate.tasks": 12, "evaluate.samples": 2})
    print(f"held out: {result['mean']:.0%} right; everything is in {run.folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
