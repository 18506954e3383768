"""The reference contract: an older policy that a KL penalty keeps the trained one near."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

from tandem.algorithms.losses.base import MicroBatch
from tandem.errors import CheckpointError, bounded, check_bounds
from tandem.lazy import Parameter, Tensor, torch

_MOST = 40.0
"""Bound of log ratios, so that products of two ratios stay finite in float32."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A frozen dataclass whose fields are its options. Its penalty is added to every token's loss.

    With d = logprob - reference's logprob, k1 = d, k2 = d^2 / 2 and k3 = exp(-d) - 1 + d estimate KL(policy ||
    reference) from the policy's own tokens (http://joschu.net/blog/kl-approx.html). Differentiated directly, k2
    gives that KL's gradient on policy, k3 the gradient of the reverse KL, and k1 only noise. Times
    r = exp(logprob - old logprob), which is differentiated too, k1 and k3 both give the KL's gradient, on policy and
    off (DeepSeek-V3.2, arXiv 2512.02556).
    """

    saved: ClassVar[bool] = False
    """Whether checkpoints hold its weights."""

    beta: float = bounded(0.001, above=0)
    """The penalty's weight: loss + beta * KL per token; leave reference out for no penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL; k3 is never negative and has the least variance."""
    ratio_corrected: bool = True
    """Multiply by the ratio to the old policy, so that the gradient is the KL's own; false as in arXiv 2402.03300."""
    in_reward: bool = False
    """Take beta times the KL of an answer, the sum of its tokens' k1 as sampled, off its reward instead (RLOO)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.estimator == "k1" and not self.ratio_corrected:
            raise ValueError("estimator k1 has a gradient only with ratio_corrected: true; choose k2 or k3 without it")

    def inert(self) -> Mapping[str, str]:
        """A penalty of the reward is no loss."""
        why = "in_reward is true: the penalty is k1, and no term of the loss"
        return dict.fromkeys(("estimator", "ratio_corrected"), why) if self.in_reward else {}

    def divergence(self, logprobs_N: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """The penalty of each token without beta, differentiable, and the bare estimate of the KL, detached."""
        assert micro.ref_logprobs_N is not None
        d_N = logprobs_N - micro.ref_logprobs_N
        if self.estimator == "k1":
            kl_N = d_N
        elif self.estimator == "k2":
            kl_N = d_N.square() / 2
        else:
            kl_N = torch.expm1((-d_N).clamp(-_MOST, _MOST)) + d_N
        if not self.ratio_corrected:
            return kl_N, kl_N.detach()
        ratio_N = (logprobs_N - micro.old_logprobs_N).clamp(-_MOST, _MOST).exp()
        return kl_N * ratio_N, kl_N.detach()

    def hold(self, live: Iterable[tuple[str, Parameter]]) -> ReferenceWeights:
        """Copy the live weights; ``live`` are those that training changes."""
        return ReferenceWeights(live)


class ReferenceWeights:
    """The reference's weights beside the live ones; weights that training does not change are shared."""

    def __init__(self, live: Iterable[tuple[str, Parameter]]):
        self._live = dict(live)
        self._own = {name: parameter.detach().clone() for name, parameter in self._live.items()}
        self._moved = False
        self._regather: Callable[[], None] | None = None

    def cut(self, part: Callable[[str, Tensor], tuple[Parameter, Tensor]], regather: Callable[[], None]) -> None:
        """Go on with this rank's parts, once the live weights are cut.

        Args:
            part: the live part of a weight, and the reference's part of it.
            regather: has the next pass gather what the live parts hold by then.
        """
        parts = {name: part(name, whole) for name, whole in self._own.items()}
        self._live = {name: live for name, (live, _) in parts.items()}
        self._own = {name: own for name, (_, own) in parts.items()}
        self._regather = regather

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the reference's weights in this context. No storage is written: the engine may hold it.

        Parts of cut weights change places with the live ones, since passes gather them from where they lie.
        """
        if self._regather is not None:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
            return
        live = {name: parameter.data for name, parameter in self._live.items()}
        try:
            for name, parameter in self._live.items():
                # The live weights may have moved into an engine's memory, on another device, since they were copied.
                self._own[name] = self._own[name].to(parameter.device)
                parameter.data = self._own[name]
            yield
        finally:
            for name, parameter in self._live.items():
                parameter.data = live[name]

    def _exchange(self) -> None:
        assert self._regather is not None
        with torch.no_grad():
            for name, parameter in self._live.items():
                live = parameter.detach().clone()
                parameter.copy_(self._own[name])
                self._own[name].copy_(live)
            self._regather()

    def due(self, step: int) -> bool:
        """True if the reference moves after optimizer step ``step``."""
        return False

    def move(self) -> None:
        """Follow the live weights."""

    def begin(self) -> None:
        """Be the live weights of now, as at the end of a warm start."""
        self._own = {name: parameter.detach().clone() for name, parameter in self._live.items()}
        self._moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """What a resume needs and cannot recompute: nothing while the weights are those of the model as loaded."""
        return dict(self._own) if self._moved else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``."""
        if not state and not self._moved:
            return
        shapes = {name: (weight.shape, weight.dtype) for name, weight in self._own.items()}
        if shapes != {name: (stored.shape, stored.dtype) for name, stored in state.items()}:
            raise CheckpointError("the saved reference is of other weights; resume with the checkpoint's recipe")
        self._own = {name: stored.to(self._live[name].device) for name, stored in state.items()}
        self._moved = True
