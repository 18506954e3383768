"""What a loss is: one number per token, never reduced. ``trainer/step.py`` alone divides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from tandem.metrics import Metrics

Reduction = Literal["token", "sequence", "constant"]
"""What a step's loss is divided by: its trained tokens; its samples, each a mean over its own tokens; or
its samples times ``max_tokens`` (Dr. GRPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Trained tokens of some samples, flat over N tokens; no prompt token and no padding is in here."""

    behavior_logprobs_N: Tensor
    """float32; the sampling policy's logprob of each token."""
    advantages_N: Tensor
    """float32."""
    sample_N: Tensor
    """int64; which sample of this micro-batch a token belongs to, ascending from 0."""
    num_samples: int
    """Samples in this micro-batch."""
    ref_logprobs_N: Tensor | None = None
    """float32; a reference policy's, where an objective needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss before reduction."""

    loss_N: Tensor
    """float32, differentiable in the policy's logprobs."""
    metrics: Metrics = field(default_factory=dict)
    """Values that add up over micro-batches, detached."""


class Loss(Protocol):
    """A frozen dataclass whose fields are its options."""

    @property
    def reduction(self) -> Reduction:
        """How the step divides this loss."""
        ...

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss of the policy's ``logprobs_N`` (float32, at the sampling temperature)."""
        ...
