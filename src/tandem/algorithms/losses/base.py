"""The loss contract: one number per token, never reduced. ``Packer._weights`` in ``trainer/pack.py`` alone divides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem.errors import ConfigError
from tandem.lazy import Tensor, torch
from tandem.metrics import Max, Mean
from tandem.pending import Pending, PendingMetrics

MOST_LOG_RATIO = 80.0
"""Bound of log ratios, so that exp stays finite in float32; no ratio beyond it is meaningful."""
Reduction = Literal["token", "sequence", "constant"]
"""What a step's loss is divided by: its trained tokens; its samples, each a mean over its own tokens; or
its samples times ``max_tokens`` (Dr. GRPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Trained tokens of some samples, flat over N tokens, without prompts and padding.

    Example:
        >>> import tandem, torch
        >>> micro = tandem.MicroBatch(
        ...     behavior_logprobs_N=torch.tensor([-1.0, -2.0, -0.5]),
        ...     advantages_N=torch.tensor([1.0, 1.0, -1.0]),
        ...     sample_N=torch.tensor([0, 0, 1]),
        ...     num_samples=2,
        ... )
        >>> micro.means(micro.behavior_logprobs_N)
        tensor([-1.5000, -0.5000])
    """

    behavior_logprobs_N: Tensor
    """float32; the sampling policy's logprob of each token."""
    advantages_N: Tensor
    """float32."""
    sample_N: Tensor
    """int64; which sample of this micro-batch a token belongs to, ascending from 0."""
    num_samples: int
    """Samples in this micro-batch; all tokens of a sample are in one micro-batch."""
    recomputed_logprobs_N: Tensor | None = None
    """float32; the trained policy's logprobs at the start of the step, if ratios are against those."""
    ref_logprobs_N: Tensor | None = None
    """float32; a reference policy's, if the objective needs them."""

    @property
    def old_logprobs_N(self) -> Tensor:
        """Denominator of ratios: the recomputed logprobs if there are any, else the sampling policy's."""
        return self.behavior_logprobs_N if self.recomputed_logprobs_N is None else self.recomputed_logprobs_N

    def totals(self, values_N: Tensor) -> Tensor:
        """Sum over the tokens of each sample; one entry per sample, differentiable."""
        if self.num_samples == 0:
            return values_N.sum().expand(0)
        # Not index_add: on a GPU that adds in no fixed order.
        sums: Tensor = torch.segment_reduce(values_N, "sum", lengths=self._lengths(), unsafe=True)
        return sums

    def means(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each sample; one entry per sample, 0 for a sample without tokens."""
        return self.totals(values_N) / self._lengths().clamp(min=1)

    def _lengths(self) -> Tensor:
        """Tokens of each sample."""
        # Not bincount, which makes the host wait for a GPU.
        none = torch.zeros(self.num_samples, dtype=torch.int64, device=self.sample_N.device)
        return none.scatter_add_(0, self.sample_N, torch.ones_like(self.sample_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss before reduction: one number for each of N tokens.

    Example:
        >>> import tandem, torch
        >>> tandem.TokenLoss(loss_N=torch.zeros(3)).loss_N.shape
        torch.Size([3])
    """

    loss_N: Tensor
    """float32, differentiable in the policy's logprobs."""
    metrics: PendingMetrics = field(default_factory=dict)
    """Values that add up over micro-batches; ``Pending`` if they are on a device, so that nothing waits for it."""


class Loss(Protocol):
    """The objective, per token, not divided. A frozen dataclass whose fields are its options.

    Three class variables are optional: ``by_advantage``, true if a sample without an
    advantage has no gradient, so that it need not be computed; ``compares``, false if the loss has no ratio;
    ``at_ratio_one``, options that change nothing while every ratio is 1.

    Example:
        >>> import tandem, torch
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class PolicyGradient:
        ...     reduction = "token"
        ...
        ...     def __call__(self, logprobs_N, micro: tandem.MicroBatch) -> tandem.TokenLoss:
        ...         return tandem.TokenLoss(loss_N=-logprobs_N * micro.advantages_N)
        >>> loss: tandem.Loss = PolicyGradient()
        >>> one = tandem.MicroBatch(
        ...     behavior_logprobs_N=torch.tensor([-1.0]),
        ...     advantages_N=torch.tensor([2.0]),
        ...     sample_N=torch.tensor([0]),
        ...     num_samples=1,
        ... )
        >>> loss(torch.tensor([-1.0]), one).loss_N
        tensor([2.])
    """

    @property
    def reduction(self) -> Reduction:
        """How the step divides this loss."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss of the policy's ``logprobs_N`` (float32, at the sampling temperature)."""


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio clamped to stay finite; its gradient is 0 where it is clamped."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def clipped(
    ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, PendingMetrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), where A < 0 at most -dual A, and the shares that were clipped."""
    # The ratio is clamped, not the loss: where a clamp binds, its gradient is 0 and nothing infinite meets a 0.
    most = math.inf if dual is None else dual
    lowest_N = torch.where(advantages_N < 0, 1.0 - low, 0.0)
    highest_N = torch.where(advantages_N < 0, most, 1.0 + high)
    loss_N = -advantages_N * ratio_N.clamp(lowest_N, highest_N)
    with torch.no_grad():
        moves_N = advantages_N != 0
        below_N, above_N = (ratio_N < lowest_N) & moves_N, (ratio_N > highest_N) & moves_N
        return loss_N, counts(ratio_N, below_N, above_N)


def counts(ratio_N: Tensor, below_N: Tensor, above_N: Tensor) -> PendingMetrics:
    """Mean and largest ratio, and the shares of tokens that lost their gradient to a bound."""
    n = ratio_N.numel()
    if n == 0:
        return {}
    ratio_N = ratio_N.detach()
    below, above = below_N.sum(), above_N.sum()
    return {
        "ratio": Pending(Mean, ratio_N.sum(), n),
        "ratio/max": Pending(Max, ratio_N.max()),
        "clip_fraction": Pending(Mean, below + above, n),
        "clip_fraction/low": Pending(Mean, below, n),
        "clip_fraction/high": Pending(Mean, above, n),
    }


def check_loss(loss: Loss, output: object, logprobs_N: Tensor) -> None:
    """See that a loss, which may be a user's own, is one differentiable number per token.

    Raises:
        ConfigError: it is not.
    """
    name = f"loss {type(loss).__name__}"
    if not isinstance(output, TokenLoss):
        raise ConfigError(f"{name} returned a {type(output).__name__}; expected tandem.TokenLoss(loss_N=...)")
    check_shape(name, output.loss_N, logprobs_N)
    metrics: Mapping[str, object] = output.metrics
    for metric, value in metrics.items():
        if isinstance(value, int | float | torch.Tensor):
            expected = "what adds up over micro-batches, such as pending.Pending(metrics.Mean, total, count)"
            raise ConfigError(f"{name} has the metric {metric!r} as a {type(value).__name__}; expected {expected}")
    if logprobs_N.requires_grad and not output.loss_N.requires_grad:
        raise ConfigError(f"{name} does not depend on logprobs_N, or detaches it, so nothing would be learned")


def check_shape(name: str, values_N: Tensor, logprobs_N: Tensor) -> None:
    """See that there is one number per token; any other shape would be broadcast in silence.

    Raises:
        ConfigError: there is not.
    """
    if values_N.shape != logprobs_N.shape:
        shape, expected = tuple(values_N.shape), tuple(logprobs_N.shape)
        raise ConfigError(f"{name} returned a tensor of shape {shape}; expected {expected}: never sum or average")
