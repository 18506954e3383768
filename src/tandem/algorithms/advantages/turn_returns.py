"""Reward to go from each turn, minus the group's mean of it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.advantages.base import centred, scores
from tandem.errors import Bounded, bounded
from tandem.types import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class TurnReturns(Bounded):
    """A_it = G_it - mean_j G_jt, with returns G_it = sum_k>=t discount^(k-t) r_ik over a rollout's turns.

    r_ik is what the environment gave turn k (0 where it gave nothing), and that of the last turn has the rollout's
    reward in it. A sibling that has ended before turn t counts in its mean with its last turn. Without rewards of turns
    and with discount 1 this is dr_grpo.
    """

    discount: float = bounded(1.0, most=1)
    """What a reward counts one turn earlier."""

    def __call__(self, group: Group) -> list[float]:
        """Of whole rollouts: deviations of their rewards from the mean."""
        return centred(scores(group))

    def by_turn(self, group: Group) -> list[list[float]]:
        """Of each turn with tokens of each scored rollout."""
        returns = [self._returns(rollout) for rollout in group.scored]
        longest = max(map(len, returns), default=0)
        columns = [centred([each[min(t, len(each) - 1)] for each in returns]) for t in range(longest)]
        return [[columns[t][i] for t in range(len(each))] for i, each in enumerate(returns)]

    def _returns(self, rollout: Rollout) -> list[float]:
        assert rollout.reward is not None
        returns = [turn.reward or 0.0 for turn in rollout.turns if turn.completion.tokens]
        returns[-1] += rollout.reward
        for t in range(len(returns) - 2, -1, -1):
            returns[t] += self.discount * returns[t + 1]
        return returns
