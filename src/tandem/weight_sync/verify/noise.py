"""Rounding noise between an engine's logprobs and the trainer's: its scale, and what it cannot explain.

Both sides compute the same function of the same bytes with other kernels, so their logprobs of a token differ by
rounding. An error dz of the logits changes the logprob of token t by dz_t - sum_j p_j dz_j: about (1 - p_t) times the
error of one logit, over the temperature. Divided by that factor, residuals of all tokens have one scale (measured for
SmolLM2-135M: 0.09 in bfloat16 and 0.005 in float32 on an H200; docs/design/proof.md), which is measured where the
bytes of both sides were just found equal.

Two questions are then asked of an answer, each with a bound on how often chance alone says yes:

- ``excess``: are residuals larger than noise? Where those measured before and those of this answer are exchangeable,
  which of them are the largest is a matter of chance, as for balls drawn without replacement.
- ``nearer``: is the answer nearer to what other weights say? Where rounding puts a residual as often on one side as on
  the other, that is a sum of random signs (Hoeffding, JASA 1963).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FALSE_ALARMS = 1e-9
"""Chance that a publish of good weights to engines in order is refused, at most."""
SUSPICION = 0.1
"""Chance at which a probe is asked again, longer: that takes a moment and refuses nothing. One of the four tokens that
are sampled after a probe is enough."""
TAIL = 0.02
"""Share of the measured residuals above the limit that is counted against, before ``SLACK``."""
SLACK = 2.0
"""Times by which noise may grow from one publish to the next without counting as more."""
WINDOW = 2048
"""Residuals that are remembered: noise changes slowly while a model is trained."""
CERTAIN_ONE = 0.05
"""Least 1 - p that a residual is divided by: nearer to certainty, the rounding of the sum itself is what is left."""
SKEW = 1 / 16
"""Correlation that rounding may have with the difference between two versions of the weights without counting for
either: both differ by the trainer's own rounding, which is in the residual too, and need not be equal in both."""
DISTANCE = 1.8
"""Noise scales that other weights must differ by before an answer can count for them. Two passes of the trainer over
the same weights differ by at most sqrt(2) scales, see ``separation``; the rest is room for noise that grows."""
_CLIP = 4.0
"""Noise scales that one token adds to a separation, at most: a few that rounding hits hard are no evidence."""
_MAD = 1.4826
"""Standard deviation of a normal distribution over the median of its absolute values."""


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """An engine's logprobs of some tokens beside the trainer's, nats."""

    engine: tuple[float, ...]
    trainer: tuple[float, ...]
    """By the weights that were published."""
    temperature: float = 1.0
    """Both are of the distribution at this temperature."""

    @property
    def finite(self) -> bool:
        """Whether every logprob is a number, and there are as many on both sides."""
        return len(self.engine) == len(self.trainer) and all(map(math.isfinite, (*self.engine, *self.trainer)))

    def worst(self) -> float:
        """Largest absolute difference, nats; infinite where one is not a number."""
        return float(np.abs(np.subtract(self.engine, self.trainer)).max(initial=0.0)) if self.finite else math.inf

    def scales(self) -> NDArray[np.float64]:
        """What an error of one logit of size 1 makes of each token's logprob."""
        return np.maximum(-np.expm1(np.minimum(self.trainer, 0.0)), CERTAIN_ONE) / self.temperature

    def residuals(self) -> NDArray[np.float64]:
        """Differences as errors of one logit, nats."""
        return np.subtract(self.engine, self.trainer) / self.scales()


@dataclass(slots=True)
class Noise:
    """Logprob residuals of one engine while its weights were verified equal to the trainer's by checksum.

    Example:
        >>> noise = Noise(floor=0.001)
        >>> noise.learn([LogprobComparison(engine=(-1.0, -2.01), trainer=(-1.01, -2.0))])
        >>> noise.excess(LogprobComparison(engine=(-1.0, -2.5), trainer=(-1.01, -2.0))) < 1
        True
    """

    floor: float
    """Scale below which differences are never counted, nats: an engine may be exact at one publish by chance."""
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Absolute residuals, the newest last."""

    def learn(self, answers: Iterable[LogprobComparison]) -> None:
        """Remember answers of an engine that was found in order."""
        for answer in answers:
            if answer.finite:
                self.seen.extend(np.abs(answer.residuals()).tolist())

    @property
    def scale(self) -> float:
        """Standard deviation of residuals, robustly, at least the floor; nats."""
        return max(scale(self.seen), self.floor)

    def excess(self, answer: LogprobComparison) -> float:
        """Chance, at most, that noise as measured makes so many residuals of an answer so large; 1 while unmeasured.

        With N residuals measured and n new ones, all exchangeable, the newest are a random n of the N + n. So of the
        k + m - 1 largest at least k are new with the probability of drawing that many without replacement. The limit
        is the m-th largest measured one times ``SLACK``, which only makes it rarer. (Precedence test; Nelson 1963.)
        """
        if not self.seen:
            return 1.0
        m = max(1, round(TAIL * len(self.seen)))
        limit = SLACK * max(sorted(self.seen)[-m], self.floor)
        new = np.abs(answer.residuals())
        return drawn(len(self.seen), len(new), m, int((new > limit).sum()))


def scale(residuals: Iterable[float]) -> float:
    """Standard deviation of residuals around zero by their median, which a few outliers do not move."""
    absolute = sorted(map(abs, residuals))
    return _MAD * absolute[len(absolute) // 2] if absolute else 0.0


def drawn(old: int, new: int, m: int, k: int) -> float:
    """Probability that at least ``k`` of ``new`` values exceed the ``m``-th largest of ``old``, all exchangeable."""
    if k <= 0:
        return 1.0
    top = k + m - 1
    ways = sum(math.comb(new, j) * math.comb(old, top - j) for j in range(k, min(new, top) + 1))
    return ways / math.comb(old + new, top) if top <= old + new else 0.0


def nearer(answer: LogprobComparison, other: Sequence[float], noise: float) -> float:
    """Chance, at most, that rounding alone puts an answer so far beyond the middle towards other weights.

    For each token, how far the engine is beyond the middle between what the trainer computes with the published
    weights and with others, in units of the noise, is clipped to 1 and weighed by how far these two are apart. Rounding
    knows no weights: it puts a token no more often beyond the middle than short of it, and given the sizes x_i the sum
    of signs exceeds s * sqrt(sum x_i^2) with a probability of at most exp(-s^2 / 2).

    That statistic has no scale: it is as sure of 1e-6 nats as of 1. Where both sides are the same weights, computed
    in two ways, their difference is rounding, and an engine that rounds as the other one does is on its side at every
    token. So weights that are not ``DISTANCE`` apart cannot be told by this, and the answer is 1.

    Args:
        answer: an engine's.
        other: the trainer's logprobs of the same tokens by other weights (or as another mistake has them).
        noise: scale of residuals, nats.
    """
    if separation(answer, other, noise) < DISTANCE:
        return 1.0
    apart, unit = np.subtract(other, answer.trainer), noise * answer.scales()
    x = np.sign(apart) * (np.subtract(answer.engine, answer.trainer) - apart / 2) / unit
    beyond = (np.minimum(1.0, np.abs(apart) / (2 * unit)) * np.clip(x, -1.0, 1.0))[apart != 0]
    if not (squares := float(np.square(beyond).sum())):
        return 1.0
    s = float(beyond.sum()) / math.sqrt(squares) - SKEW * math.sqrt(len(beyond))
    return math.exp(-s * s / 2) if s > 0 else 1.0


def separation(answer: LogprobComparison, other: Sequence[float], noise: float) -> float:
    """Root mean square difference between two hypotheses of the trainer, in units of the noise.

    Rounding of the engine and of the trainer is independent or shared. Independent: noise^2 = engine^2 + trainer^2, and
    two passes of the trainer differ by sqrt(2) * trainer <= sqrt(2) * noise. Shared with the other pass: the engine's
    residual is the difference of the passes, which is 1 noise by definition. So above sqrt(2) it is not rounding.
    """
    apart = np.abs(np.subtract(other, answer.trainer)) / (noise * answer.scales())
    return math.sqrt(np.square(np.minimum(_CLIP, apart)).mean()) if apart.size else 0.0


def likelihood(answer: LogprobComparison, other: Sequence[float], noise: float) -> float:
    """Likelihood ratio of the published weights to another hypothesis, were noise normal; at most 1.

    Below x by chance in x of all cases at most (Markov), under that assumption: enough to ask again, for which a few
    tokens must do, and not to refuse. Differences count up to three times the noise. The hypothesis is to be
    computed by the same pass as the trainer's answer, so that both are rounded alike.
    """
    distances = (np.abs(np.subtract(answer.engine, x)) / (noise * answer.scales()) for x in (answer.trainer, other))
    ours, others = (np.square(np.minimum(3.0, distance)).sum() for distance in distances)
    return math.exp(-max(float(ours - others) / 2, 0.0))
