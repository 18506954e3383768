"""Metrics of made-up runs, step by step: healthy ones, and ones in which something goes wrong at a step."""

# ruff: noqa: RUF009 - flat() makes a function, which nobody changes
from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.observability.alarms import AlarmWatch, Notice

Curve = Callable[[float], float]
"""A level by the step."""


def flat(level: float) -> Curve:
    return lambda step: level


def slope(start: float, end: float, steps: float, begin: float = 0) -> Curve:
    """From one level to another in so many steps, exponentially where both are above 0."""

    def at(step: float) -> float:
        part = min(1.0, max(0.0, (step - begin) / steps))
        if start > 0 and end > 0:
            return start * (end / start) ** part
        return start + (end - start) * part

    return at


def learned(start: float, end: float, half: float) -> Curve:
    """A learning curve that is half way after so many steps."""
    return lambda step: start + (end - start) * (1 - 0.5 ** (step / half))


@dataclass(frozen=True, kw_only=True)
class Made:
    """A made-up run: levels by step, sampled with the scatter that groups of answers have."""

    config: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 8
    size: int = 8
    accuracy: Curve = flat(0.4)
    bonuses: Mapping[str, Curve] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=lambda: {"number": 1.0})
    length: Curve = flat(120)
    truncated: Curve = flat(0.03)
    entropy: Curve = flat(0.6)
    flat_share: Curve = flat(0.4)
    kl: Curve = flat(0.001)
    ess: Curve = flat(0.99)
    grad: Curve = flat(0.5)
    grad_tail: float = 0.4
    loss: Curve = flat(0.0)
    wait: Curve = flat(6.0)
    failed_grading: Curve = flat(0.0)
    failed: Curve = flat(0.0)
    shares: Mapping[str, Curve] = field(default_factory=lambda: {"task": flat(1.0)})

    def recipe(self) -> dict[str, Any]:
        """As a run's loggers get it."""
        rewards = {name: {"weight": weight} for name, weight in self.weights.items()}
        mixture = {name: {"rewards": rewards, "weight": 1.0, "min_share": 0.0} for name in self.shares}
        return {
            "groups_per_step": self.groups,
            "group_size": self.size,
            "max_lag": 0,
            "rewards": rewards if len(mixture) == 1 else {},
            "envs": mixture if len(mixture) > 1 else {},
            "sampling": {"max_tokens": 512},
            "optimizer": {"lr": 1e-5, "max_grad_norm": 1.0},
            "loss": {"clip_high": 0.28},
            "grading": {"workers": 1, "timeout_seconds": 10.0},
            **self.config,
        }

    def steps(self, count: int, seed: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        rng = random.Random(seed)
        for step in range(1, count + 1):
            yield step, self._row(rng, step)

    def _row(self, rng: random.Random, step: int) -> dict[str, float]:
        def noisy(level: float, part: float) -> float:
            return level * math.exp(rng.gauss(0, part))

        played = self.groups / max(0.05, 1 - self.flat_share(step))  # flat ones are dropped and others sampled
        groups = max(self.groups, round(noisy(played, 0.15)))
        rollouts = groups * self.size
        accuracy = share(rng, self.accuracy(step), groups, self.size)
        row = {
            "accuracy": accuracy,
            "reward/number": accuracy,
            "reward/std": math.sqrt(max(0.0, accuracy * (1 - accuracy))),
            "length": noisy(self.length(step), 0.08),
            "rollouts/truncated": share(rng, self.truncated(step), groups, self.size),
            "entropy": noisy(self.entropy(step), 0.06),
            "kl_behavior": noisy(self.kl(step), 0.3),
            "ess": min(1.0, noisy(self.ess(step), 0.005)),
            "grad_norm": noisy(self.grad(step), self.grad_tail),
            "loss": rng.gauss(self.loss(step), 0.02),
            "seconds/wait": noisy(self.wait(step), 0.1),
            "seconds/grading": noisy(0.8, 0.1),
            "grading/failed_timeout": float(round(self.failed_grading(step) * rollouts)),
            "groups/trained": float(self.groups),
            "groups/dropped_zero_variance": float(groups - self.groups),
        }
        row["rollouts/failed"] = float(round(self.failed(step) * rollouts)) + row["grading/failed_timeout"]
        row["seconds/step"] = row["seconds/wait"] + noisy(3.0, 0.05)
        row["tokens/generated"] = row["length"] * rollouts
        row["reward"] = accuracy * self.weights["number"]
        for name, curve in self.bonuses.items():
            row[f"reward/{name}"] = share(rng, curve(step), groups, self.size)
            row["reward"] += self.weights[name] * row[f"reward/{name}"]
        for name, curve in self.shares.items():
            part = curve(step)
            row[f"env/{name}/groups"] = float(round(part * groups))
            row[f"env/{name}/trained"] = float(round(part * self.groups))
            if row[f"env/{name}/groups"]:
                row[f"env/{name}/zero_variance"] = share(rng, self.flat_share(step), groups, 1)
        return row


def share(rng: random.Random, level: float, groups: int, size: int) -> float:
    """Share of answers that are so, when it differs from task to task how often they are."""
    level = min(1.0, max(0.0, level))
    if level in (0.0, 1.0):
        return level
    right = 0
    for _ in range(groups):
        chance = rng.betavariate(max(1e-3, 1.5 * level), max(1e-3, 1.5 * (1 - level)))
        right += sum(rng.random() < chance for _ in range(size))
    return right / (groups * size)


def watched(made: Made, count: int, seed: int = 0, **config: Any) -> list[Notice]:
    """What is told of a run."""
    watch = AlarmWatch({**made.recipe(), **config})
    notices: list[Notice] = []
    for step, row in made.steps(count, seed):
        notices += watch.step(step, row)
    return notices


FORMAT = {"number": 1.0, "format": 0.1}

HEALTHY: Mapping[str, Made] = {
    "sums, small steps: answers get shorter, surer and right": Made(
        groups=4,
        accuracy=learned(0.2, 0.85, 15),
        length=learned(28, 7, 15),
        truncated=learned(0.5, 0.01, 12),
        entropy=learned(1.0, 0.06, 25),
        flat_share=learned(0.3, 0.6, 30),
        kl=learned(0.0007, 0.003, 30),
        grad=learned(3.0, 1.0, 30),
    ),
    "word problems: the format first, then the number": Made(
        groups=16,
        weights=FORMAT,
        accuracy=learned(0.3, 0.6, 60),
        bonuses={"format": learned(0.5, 0.98, 10)},
        length=learned(160, 220, 40),
        entropy=learned(0.5, 0.25, 60),
    ),
    "word problems: a form that is learned first, in steps that scatter": Made(
        groups=8,
        weights=FORMAT,
        accuracy=learned(0.25, 0.5, 60),
        bonuses={"format": learned(0.4, 0.99, 8)},
        length=learned(160, 190, 40),
        entropy=learned(0.5, 0.3, 60),
    ),
    "reasoning: answers grow with what they solve": Made(
        groups=32,
        config={"sampling": {"max_tokens": 8192}},
        accuracy=learned(0.2, 0.6, 60),
        length=slope(800, 3200, 150),
        truncated=slope(0.04, 0.15, 200),
        entropy=learned(0.3, 0.5, 80),
        grad_tail=0.6,
    ),
    "nearly solved: sure, and most groups all right": Made(
        groups=8,
        accuracy=learned(0.9, 0.99, 20),
        length=flat(12),
        entropy=learned(0.1, 0.004, 30),
        flat_share=learned(0.7, 0.95, 20),
        grad=learned(1.0, 0.2, 40),
    ),
    "hard tasks: learns slowly, two groups of three without variance, wild gradients": Made(
        groups=8,
        accuracy=slope(0.06, 0.18, 200),
        flat_share=flat(0.66),
        grad_tail=0.7,
        length=slope(180, 140, 200),
        entropy=slope(0.7, 0.4, 200),
        wait=flat(30.0),
    ),
    "a mixture two steps off policy": Made(
        groups=12,
        config={"max_lag": 2},
        shares={"sums": flat(0.5), "words": flat(0.5)},
        accuracy=learned(0.35, 0.6, 80),
        kl=learned(0.01, 0.04, 30),
        ess=flat(0.65),
    ),
}
"""Runs in which nothing is to be told."""

BASE = Made()
ONSET = 40
"""Step at which something goes wrong in each of the following."""


def after(before: float, then: float, steps: float = 8) -> Curve:
    """A level that changes from ONSET on, within so many steps."""
    return slope(before, then, steps, begin=ONSET)


SICK: Mapping[str, tuple[str, Made]] = {
    "answers collapse to a few tokens": ("length", replace(BASE, length=after(166, 4, 12))),
    "answers explode": ("length", replace(BASE, length=after(120, 400, 12))),
    "answers are cut": ("length", replace(BASE, truncated=after(0.03, 0.6))),
    "entropy collapses": ("entropy", replace(BASE, entropy=after(0.6, 0.004), accuracy=after(0.4, 0.1))),
    "entropy explodes": ("entropy", replace(BASE, entropy=after(0.6, 4.0), accuracy=after(0.4, 0.01))),
    "groups lose their variance": (
        "zero_variance",
        replace(BASE, flat_share=after(0.4, 0.92), accuracy=after(0.4, 0.02)),
    ),
    "data are too old": ("kl_behavior", replace(BASE, config={"max_lag": 4}, kl=after(0.02, 0.5))),
    "engine and trainer disagree": ("kl_behavior", replace(BASE, kl=after(0.001, 0.08))),
    "the loss is not a number": ("loss", replace(BASE, loss=lambda step: math.nan if step >= ONSET else 0.0)),
    "environments fail": ("failures", replace(BASE, failed=after(0.0, 0.5))),
    "graders time out": ("failures", replace(BASE, failed_grading=after(0.0, 0.4))),
}
"""What goes wrong: the alarm that must name it, and the run."""
