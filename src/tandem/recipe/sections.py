"""Mappings of a recipe that choose no part: evaluation, checkpoints, grading, and a broker to train from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Measuring on held-out tasks."""

    every: int = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    tasks: int = 40
    """Held-out tasks, the first of the test split; 0 never evaluates."""
    samples: int = 4
    """Answers per task: mean@k and pass@k are over these."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus of the evaluation's answers; 1 keeps every token."""
    before: bool = True
    """Evaluate the model as loaded."""
    after: bool = True
    """Evaluate after the last step."""

    def __post_init__(self) -> None:
        require(
            every=(self.every >= 0, "at least 0"),
            tasks=(self.tasks >= 0, "at least 0"),
            samples=(self.samples >= 1, "at least 1"),
            temperature=(0 <= self.temperature < math.inf, "at least 0"),
            top_p=(0 < self.top_p <= 1, "above 0 and at most 1"),
        )

    def inert(self) -> Mapping[str, str]:
        """Without tasks or occasions nothing else is read; greedy answers are all alike."""
        if self.tasks == 0:
            return {
                f.name: "tasks is 0, so nothing is evaluated" for f in resolve.options(Evaluate) if f.name != "tasks"
            }
        if not (self.before or self.after or self.every):
            never = "before and after are false and every is 0, so nothing is evaluated"
            return dict.fromkeys(("tasks", "samples", "temperature", "top_p"), never)
        if self.temperature == 0:
            greedy = "temperature is 0, so an answer is always the likeliest one"
            return {"top_p": greedy, **({"samples": greedy} if self.samples > 1 else {})}
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What survives a crash. One is always written at the end."""

    every: int = 50
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        require(every=(self.every >= 1, "at least 1"), keep=(self.keep >= 1, "at least 1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How rewards are computed: in processes that can be killed."""

    workers: int = 1
    """Grader processes of each environment."""
    timeout: float = 10.0
    """Seconds one rollout's rewards may take; then its grader is killed and the rollout counts as failed."""

    def __post_init__(self) -> None:
        require(workers=(self.workers >= 1, "at least 1"), timeout=(0 < self.timeout < math.inf, "above 0 (seconds)"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Environments elsewhere: what they sample and score is trained on, through a broker."""

    url: str
    """Its address, such as http://127.0.0.1:8000 (tandem serve broker, or Atropos' run-api)."""
    key_variable: str = ""
    """Environment variable with the trainer's key, where the broker asks for one."""
    lease_seconds: float = 600.0
    """How long the broker keeps a batch for a trainer that it does not hear of; then it is served again."""
    missing_logprobs: Literal["refuse", "policy"] = "refuse"
    """Groups without sampling logprobs: end with an error, or train as if the policy of now had sampled them."""
    given_advantages: bool = False
    """Train on the advantages that environments give for each token; where one gives none, the recipe's advantage."""

    def __post_init__(self) -> None:
        require(
            url=(self.url.startswith(("http://", "https://")), "an address that begins with http:// or https://"),
            lease_seconds=(0 < self.lease_seconds < math.inf, "above 0 (seconds)"),
        )


def require(**checks: tuple[bool, str]) -> None:
    """Check options.

    Raises:
        ValueError: with one line for each that is out of range.
    """
    wrong = [f"{name} must be {expected}" for name, (fine, expected) in checks.items() if not fine]
    if wrong:
        raise ValueError("\n".join(wrong))
