"""Context parallel: ranks that compute one micro-batch together, each a run of its tokens.

All of them have the whole micro-batch; each computes the logprobs of the tokens that its own hidden states predict, and
all get all logprobs. The loss is then computed by each alike, and each one's backward pass is that of its own tokens:
gradients of weights are summed over these ranks as over all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from tandem.model.attention import Packed, Plan
from tandem.model.context import ContextPacked, joined
from tandem.model.plans import moved

Hidden = Callable[[Tensor, Tensor, Plan], Tensor]
"""``Policy.hidden``: tokens (B, T), positions (B, T) and their plan to hidden states (B, T, H)."""


@dataclass(frozen=True, slots=True)
class WholeRow:
    """A micro-batch that one rank computes alone."""

    plan: Packed | ContextPacked
    """Which segment continues which; of a part also which part it is."""
    tokens_T: Tensor
    """int64; those that are computed here."""
    positions_T: Tensor
    """int64; within each sequence."""
    predict_N: Tensor
    """int64; the place among them that predicts each trained token that is predicted here."""

    def hidden(self, compute: Hidden) -> Tensor:
        """Hidden states that predict the trained tokens, (N, H)."""
        return compute(self.tokens_T[None], self.positions_T[None], self.plan)[0].index_select(0, self.predict_N)

    def own(self, values_N: Tensor) -> Tensor:
        """All of them."""
        return values_N

    def joined(self, values_N: Tensor) -> Tensor:
        """All of them."""
        return values_N


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart(WholeRow):
    """What a rank computes of a micro-batch: M of its N trained tokens.

    Example:
        >>> part = ContextPart.of(plan, tokens_T, positions_T, predict_N, group)        # doctest: +SKIP
        >>> hidden_MH = part.hidden(policy.hidden)                                      # doctest: +SKIP
        >>> logprobs_M, entropy_M = token_logprobs(hidden_MH, weight, part.own(targets_N))  # doctest: +SKIP
        >>> logprobs_N = part.joined(logprobs_M)                                        # doctest: +SKIP
    """

    plan: ContextPacked
    """The row and this rank's part of it."""
    at_M: Tensor
    """int64; which of the micro-batch's N trained tokens this rank predicts. One row at least, see ``num``."""
    num: int
    """Trained tokens that are this rank's: where it has none, ``at_M`` names one that does not count, so that its
    backward pass goes through the same layers as the others'."""
    num_all: int
    """Trained tokens of all ranks, N."""

    @classmethod
    def of(
        cls, plan: Packed, tokens_T: Tensor, positions_T: Tensor, predict_N: Tensor, group: ProcessGroup
    ) -> ContextPart:
        """This rank's part of a micro-batch, which every rank of the group has; ``predict_N`` best on the host."""
        context = ContextPacked.of(plan, group)
        places_N = predict_N.cpu().numpy() - context.first
        mine_M = np.flatnonzero((places_N >= 0) & (places_N < context.each))
        num = len(mine_M)
        both = np.stack((mine_M, places_N[mine_M])) if num else np.zeros((2, 1), dtype=np.int64)
        at_M, predict_M = moved(both, tokens_T.device)
        return cls(
            plan=context,
            tokens_T=context.own(tokens_T),
            positions_T=context.own(positions_T),
            at_M=at_M,
            predict_N=predict_M,
            num=num,
            num_all=len(predict_N),
        )

    def own(self, values_N: Tensor) -> Tensor:
        """Those of this rank's trained tokens."""
        return values_N.index_select(0, self.at_M)

    def joined(self, values_M: Tensor) -> Tensor:
        """Values of the trained tokens of all ranks, (N), on every rank."""
        return joined(values_M[: self.num], self.at_M[: self.num], self.num_all, self.plan.group)
