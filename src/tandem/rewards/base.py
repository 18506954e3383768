"""The reward contract: a number for one finished rollout, computed in a worker process that can be killed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from tandem.errors import Bounded, RewardError
from tandem.lazy import asyncio
from tandem.types import Rollout


class Failure(NamedTuple):
    """A reward that could not be computed: its kind, and what it costs."""

    reason: Literal["raised", "bad_value", "timeout", "crashed", "away"]
    """Its kind, to count by; away: a service that the reward asks gave no answer."""
    text: str
    """What happened, to stand behind the reward's name."""
    costs: Literal["rollout", "run"] = "rollout"
    """What is lost: the rollout, or the whole run."""


Verdict = float | None | Failure
"""What one rollout got: a reward, None for "this reward says nothing of it", or a failure."""


class Outcome(NamedTuple):
    """Result of one reward call: verdicts, and the metrics that the function logged."""

    verdicts: list[Verdict]
    """One per rollout."""
    metrics: Sequence[dict[str, float]] = ()
    """What the function logged of each rollout; empty: nothing."""


class Reward(Bounded, ABC):
    """A number for one finished rollout. A frozen dataclass whose fields are its options.

    It must pickle, and never imports torch. A plain function by import path works too: ``f(rollout)``, or with TRL's
    signature ``f(completions, **columns)``, or verl's ``compute_score``; each may be async.

    Example:
        >>> import tandem
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Brief(tandem.Reward):
        ...     words: int = 5
        ...
        ...     def __call__(self, rollout: tandem.Rollout) -> float:
        ...         return float(len(rollout.text.split()) <= self.words)
        >>> Brief(words=3).full_marks
        1.0
    """

    judges_form: ClassVar[bool] = False
    """True if it looks at a reply's form alone: a gold answer without a reply around it proves nothing of it."""
    alone: ClassVar[bool] = False
    """True for one that has a process to itself, because it holds much memory or starts slowly."""
    start_seconds: ClassVar[float] = 120.0
    """How long ``prepare`` may take, imports on a busy machine included."""

    @abstractmethod
    def __call__(self, rollout: Rollout) -> float | None:
        """Reward of one rollout, unweighted; None leaves this reward out of the rollout's sum."""

    def phrase(self, answer: str) -> str:
        """A gold answer as a reply in the form that this reward asks for; one that has it stays as it is."""
        return answer

    def prepare(self) -> None:
        """Import what is needed. Called once in each worker process, before the first deadline runs.

        Raises:
            RewardError: a library is missing; names the extra to install.
        """
        return

    @property
    def full_marks(self) -> float | None:
        """What a gold reply earns, or None where a gold reply proves nothing (length, repetition)."""
        return 1.0

    @property
    def call_seconds(self) -> float | None:
        """How long one call may take, however many rollouts it is for; None: the recipe's timeout for each."""
        return None


class GroupReward(Reward):
    """A reward that scores all rollouts of a group in one call.

    Example:
        >>> import tandem
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Shortest(tandem.GroupReward):
        ...     def scores(self, rollouts):
        ...         least = min(len(rollout.text) for rollout in rollouts)
        ...         return [float(len(rollout.text) == least) for rollout in rollouts]
        >>> Shortest().full_marks
        1.0
    """

    @abstractmethod
    def scores(
        self, rollouts: Sequence[Rollout]
    ) -> Sequence[Verdict] | Outcome | Coroutine[Any, Any, Sequence[Verdict] | Outcome]:
        """One verdict per rollout, unweighted, or with metrics. Calls of an ``async def`` go on side by side."""

    def __call__(self, rollout: Rollout) -> float | None:
        """One rollout as a group of its own; raises RewardError for a failure."""
        scores = self.scores([rollout])
        outcome = asyncio.run(scores) if isinstance(scores, Coroutine) else scores
        verdict = (outcome.verdicts if isinstance(outcome, Outcome) else outcome)[0]
        if isinstance(verdict, Failure):
            raise RewardError(verdict.text)
        return verdict
