"""One rank's part of an optimizer step: passes over micro-batches, and updates of the weights it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem import machine
from tandem.algorithms.references.base import ReferenceWeights
from tandem.distributed.context_parallel import ContextPart
from tandem.metrics import Mean, Sum, Value
from tandem.model.logprobs import token_logprobs
from tandem.model.penalties import TokenHistory
from tandem.model.policy import Policy
from tandem.observability import trace
from tandem.optimizers.base import Stepper
from tandem.pending import Pending, PendingMetrics, fetch, settle
from tandem.trainer.objective import Objective, OldLogprobs
from tandem.trainer.pack import Micro
from tandem.types import Sampling


@dataclass(slots=True, kw_only=True)
class LocalWork:
    """What a rank computes, on its compute thread."""

    policy: Policy
    objective: Objective
    stepper: Stepper
    """The optimizer bound to the trained parameters."""
    sampling: Sampling
    """Its support limits (top_p, top_k, min_p) are part of the distribution that was sampled."""
    held: ReferenceWeights | None = None
    """The reference's weights, where the objective has a reference."""
    fold: Callable[[], None] = lambda: None
    """Brings what the model computes with up to date with what the optimizer wrote."""
    begin_pass: Callable[[int], None] = lambda num_rounds: None
    """Called before the first micro-batch of a pass, with how many every rank computes or stands in for."""
    reduce: Callable[[], None] = lambda: None
    """Called after each micro-batch: adds its gradient to that of other ranks, where there are others."""
    end_pass: Callable[[], None] = lambda: None
    """Called after the last micro-batch of a pass: adds up what is not added up yet."""
    context: Any = None
    """The group of ranks that compute each micro-batch together; None: this rank computes it alone."""
    tile: int | None = None
    """Most logits held at once; None: as fits the device."""
    _hooked: bool = field(default=False)

    def hook(self) -> None:
        """Hand every gradient to the stepper as soon as backward has made it, so that none of model size piles up."""
        if not self._hooked:
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.stepper.accumulate)
            self._hooked = True

    @trace.span("seconds/forward_backward")
    def micro(self, micro: Micro, old: OldLogprobs | None) -> tuple[PendingMetrics, Tensor, OldLogprobs]:
        """Queue one micro-batch; asking the device for anything here would hold up all that follow."""
        ref_logprobs_N = self._reference(micro) if old is None else None
        logprobs_N, entropy_N = self._distribution(micro, entropy=True)
        if old is None:
            old = OldLogprobs(recomputed_logprobs_N=logprobs_N.detach(), ref_logprobs_N=ref_logprobs_N)
        cost_N, metrics = self.objective(logprobs_N, micro.batch, old)
        loss = (cost_N * micro.weights_N).sum()
        loss.backward()
        self.reduce()
        assert entropy_N is not None
        own = {"loss": Pending(Sum, loss), "entropy": Pending(Mean, entropy_N.sum(), entropy_N.numel())}
        return {**metrics, **own}, logprobs_N.detach(), old

    @trace.span("seconds/forward_backward")
    def settle(
        self, passes: Sequence[tuple[PendingMetrics, Tensor]]
    ) -> tuple[list[dict[str, Value]], list[list[float]]]:
        """All metrics of a pass, by one copy from the device."""
        return settle([pending for pending, _ in passes], [logprobs_N for _, logprobs_N in passes])

    @trace.span("seconds/optimizer")
    def apply(self, lr: float, max_grad_norm: float) -> Tensor:
        """Update the weights; the gradient's norm, which nothing has waited for."""
        return self.stepper.step(lr, max_grad_norm)

    @trace.span("seconds/optimizer")
    def norms(self, queued: Sequence[Tensor]) -> list[float]:
        """Numbers of the norms of a step's updates."""
        norms = [norm for (norm,) in fetch(queued)]
        if self.policy.device.type == "cpu":  # activations and gradients are gone, and of other sizes the next time
            machine.trim()
        return norms

    def move(self) -> None:
        """Have the reference follow the policy."""
        assert self.held is not None
        self.held.move()

    def _reference(self, micro: Micro) -> Tensor | None:
        """The reference's logprob of each trained token, by the same pass as the policy's."""
        if self.held is None:
            return None
        with torch.no_grad(), self.held.in_place():
            return self.logprobs(micro)

    def logprobs(self, micro: Micro) -> Tensor:
        """Logprob of each trained token, float32, as it was sampled: penalised, at its temperature, in its support."""
        return self._distribution(micro)[0]

    def _distribution(self, micro: Micro, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """The same, and the entropy of what each token was sampled from, nats."""
        if self.context is not None:
            return self._shared_distribution(micro, entropy=entropy)
        hidden_TH = self.policy.hidden(micro.tokens_T[None], micro.positions_T[None], micro.plan)[0]
        hidden_NH = hidden_TH.index_select(0, micro.predict_N)
        return self._token_logprobs(hidden_NH, micro.targets_N, micro.temperature_N, micro.history, entropy=entropy)

    def _shared_distribution(self, micro: Micro, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """The same, each rank of ``context`` computing a run of the tokens."""
        part = ContextPart.of(micro.plan, micro.tokens_T, micro.positions_T, micro.predict_N, self.context)
        hidden_MH = part.hidden(self.policy.hidden)
        logprobs_M, entropy_M = self._token_logprobs(
            hidden_MH, part.own(micro.targets_N), part.own(micro.temperature_N), None, entropy=entropy
        )
        return part.joined(logprobs_M), None if entropy_M is None else part.joined(entropy_M)

    def _token_logprobs(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        history: TokenHistory | None,
        *,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        head = self.policy.head
        return token_logprobs(
            hidden_NH,
            head.weight,
            targets_N,
            temperature_N,
            bias=head.bias,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            history=history,
            entropy=entropy,
            tile=self.tile,
            compile=self.policy.compile,
        )
