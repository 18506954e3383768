"""What the grades of gold replies and of wrong ones beside them say of the rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tandem.config.build import RewardSpec
from tandem.errors import RewardError
from tandem.rewards.base import Reward
from tandem.rewards.grading.calls import Adapter
from tandem.rewards.grading.workers import Graders
from tandem.rollout.gold import Siblings, distinct, failures_of
from tandem.types import Rollout

_SHOWN = 4
"""Kinds of failures that are told."""


def require_right(name: str, graders: Graders, graded: Sequence[Siblings]) -> None:
    """Refuse rewards of an environment that do not give its gold replies full marks, or cannot grade an answer.

    Raises:
        RewardError: one line for each kind of failure.
    """
    failures = failures_of(graded, graders)
    if not failures:
        return
    lines = distinct(failures)
    more = f"; and {len(lines) - _SHOWN} other kinds of failure" if len(lines) > _SHOWN else ""
    if all(failure.error for failure in failures):
        what, remedy = f"answers of {name} could not be graded", "mend the reward"
    else:
        what = f"{sum(not f.error for f in failures)} gold replies of {name} did not get full marks"
        remedy = "mend the reward, or what the environment's check() replies"
    raise RewardError(f"{what}: {'; '.join(lines[:_SHOWN])}{more}; {remedy}")


def told(graders: Graders, graded: Sequence[Siblings]) -> str:
    """What each reward gave; only a person can judge one that does not say what full marks are."""
    if not graded:
        return "the environment knows none: its rewards are not proven"
    each = [_told(name, full, graded) for name, full in graders.full_marks.items()]
    return f"{len(graded)} graded, each beside a wrong answer: {'; '.join(each)}"


def doubts(rewards: Mapping[str, RewardSpec], graded: Sequence[Siblings]) -> Iterator[str]:
    """What is likely a mistake, and need not be one."""
    if not graded:
        return
    for name, spec in rewards.items():
        right = _values(name, [pair.right for pair in graded])
        wrong = _values(name, [pair.wrong for pair in graded])
        own = not isinstance(spec.reward, Reward) or isinstance(spec.reward, Adapter)
        if own and not right:
            yield f"{name} gives no gold reply anything (None)"
        elif own and not any(right) and max(wrong, default=0.0) >= 0:
            yield f"{name} gives every gold reply 0: does it find the answer in its columns?"
    if all(pair.right.reward == pair.wrong.reward for pair in graded):
        yield (
            "a gold reply and a wrong one get the same reward in every task: if the policy's answers do, too, groups "
            "have no signal, and nothing is learned"
        )


def _told(name: str, full: float | None, graded: Sequence[Siblings]) -> str:
    right, wrong = (_mean(_values(name, some)) for some in ([p.right for p in graded], [p.wrong for p in graded]))
    if full is not None:
        return f"{name} gives full marks, and the wrong ones {wrong}"
    return f"{name} gives {right} on average, and the wrong ones {wrong}"


def _values(name: str, rollouts: Sequence[Rollout]) -> list[float]:
    return [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3g}" if values else "nothing"
