"""The optimizer of sharded weights: each rank updates the masters that it holds, which nothing has to gather after.

Where an engine samples from whole weights in the lead's process, the update ends with their copy, tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.distributed.sharded_weights import ShardedWeights
from tandem.distributed.state_shards import Box, StateShare, matrix_shape
from tandem.model.attention import Packed, Plan
from tandem.model.logprobs import token_logprobs
from tandem.model.policy import Policy
from tandem.optimizers.base import ParameterPart, UpdatesParts, global_norm

MASTER = "master"
"""State under which the optimizers of narrow weights keep their float32 copy."""


class ShardedPolicy(Policy):
    """A policy that computes with sharded weights; every pass over it is one of all ranks."""

    def __init__(self, policy: Policy, weights: ShardedWeights):
        super().__init__(
            weights.model, policy.tokenizer, name=policy.name, compute=policy.compute, compile=policy.compile
        )
        self.weights = weights
        self.has_computed = False
        """Whether it has computed what a gradient follows, since the stepper looked last."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes, and publishes; the shards may be wider."""
        return self.weights.dtype

    @torch.enable_grad()  # also where an update, which is none of autograd's, has a pass to end
    def stand_in(self) -> None:
        """Take part in the others' micro-batch, where this rank had none since the last: they need its shards."""
        if not self.has_computed:
            (self.take_part().sum() * 0.0).backward()
        self.has_computed = False

    def take_part(self) -> Tensor:
        """Compute with a few tokens what the others compute with a micro-batch."""
        tokens = torch.arange(2, device=self.device)  # of a single one the compiler would make code apart
        hidden = self.hidden(tokens[None], tokens[None], Packed(lengths=(2,), parents=(None,)))[0]
        return token_logprobs(hidden, self.head.weight, tokens, bias=self.head.bias, end=self.end)[0]

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, plan: Plan) -> Tensor:
        """Last hidden states, (B, T, hidden size)."""
        self.has_computed |= torch.is_grad_enabled()
        return self.weights.hidden(tokens_BT, positions_BT, plan)


class WeightShardStepper:
    """A stepper over this rank's shards; but for ``accumulate`` all ranks call everything together.

    Args:
        optimizer: computes each element by itself.
        policy: whose weights are sharded.
        updated: called after each update, on all ranks.
        local: each rank adds up its own micro-batches, whole and in float32, and ranks sum once a pass, with its last
            micro-batch, instead of after each; weights are gathered once a pass too, and stay until its end.
    """

    def __init__(
        self,
        optimizer: UpdatesParts,
        policy: ShardedPolicy,
        updated: Callable[[], None] = lambda: None,
        *,
        local: bool = False,
    ):
        self._policy, self._weights, self._updated = policy, policy.weights, updated
        self._local = dict(self._weights.local_parameters)
        self._name_of = {p: name for name, p in self._weights.model.named_parameters() if name in self._local}
        self._inner = optimizer.bind_parts([ParameterPart(name=name, parameter=p) for name, p in self._local.items()])
        self._is_local = local
        self._num_left = 0
        """Micro-batches that are left of a pass with local sums, the one under way included; 0 between passes."""

    def begin_pass(self, num_rounds: int) -> None:
        """Say how many micro-batches each rank computes or stands in for: with local sums the last one's are summed."""
        if self._is_local and num_rounds:
            self._weights.reduce_gradients(False)
            self._weights.keep_gathered(forward=True, backward=True)
            self._go_on(num_rounds)

    def _go_on(self, num_left: int) -> None:
        """So many micro-batches of a pass with local sums are left."""
        self._num_left = num_left
        if num_left == 1:
            self._weights.reduce_gradients(True)
        if num_left < 2:
            self._weights.keep_gathered(forward=num_left == 1, backward=False)

    def accumulate(self, parameter: Parameter) -> None:
        """Add the reduced gradient of this rank's shard, which FSDP has left on its parameter."""
        if parameter.grad is not None:
            grad: Any = parameter.grad
            self._inner.add(self._local[self._name_of[parameter]], grad.to_local())
            parameter.grad = None

    def flush(self) -> None:
        """End a micro-batch, or stand in for one that this rank does not have."""
        self._policy.stand_in()
        if self._num_left:
            self._go_on(self._num_left - 1)

    def end_pass(self) -> None:
        """Sum what an unfinished pass has added up, by one more micro-batch; else nothing: the last one has done it."""
        if self._num_left:
            self._go_on(1)
            self._policy.has_computed = False
            self.flush()

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Clip and update the own shards; the norm over all ranks."""
        self.end_pass()
        self._weights.reshard()
        gradients = [gradient for gradient in self._inner.gradients().values() if gradient.numel()]
        zero = torch.zeros((), dtype=torch.float64, device=self._weights.device)
        norm = self._weights.global_norm(global_norm(gradients) if gradients else zero)
        self._inner.update_by(norm, lr, max_grad_norm)
        self.zero_grad()
        self._updated()
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients of an unfinished step.

        Those that FSDP has added up by itself it gives out by summing them alone, so they are summed and then dropped.
        """
        self.end_pass()
        self._inner.zero_grad()
        for parameter in self._name_of:
            parameter.grad = None
        self._policy.has_computed = False

    def state_dict(self) -> dict[str, Any]:
        """States of this rank's shards, and the shards themselves where they are masters; mostly live tensors."""
        states: dict[str, Tensor] = dict(self._inner.elementwise_state())
        if self._weights.dtype != torch.float32:
            states |= {f"{name}/{MASTER}": parameter.detach() for name, parameter in self._local.items()}
        return states

    def shares(self, states: Mapping[str, Tensor]) -> list[StateShare]:
        """Where in whole states those of this rank's shards have their place.

        Of what all have the first rank's is written; what every replica has, each writes some of.
        """
        shares = []
        weights = self._weights
        for number, (key, state) in enumerate(states.items()):
            is_ours = number % weights.num_replicas == weights.replica
            if not state.dim():
                box = Box(offsets=(0,), tensor=state.view(1), is_written=is_ours and weights.rank == 0)
                shares.append(StateShare(name=key, shape=(1,), boxes=(box,)))
                continue
            name = key.rpartition("/")[0]
            whole = weights.shapes[name]
            shape, (row, column) = matrix_shape(whole), weights.part(name).first
            first, shard = (row * math.prod(whole[1:-1]), column)[: len(shape)], state.view(matrix_shape(state.shape))
            boxes = (Box(offsets=first, tensor=shard, is_written=is_ours),) if state.numel() else ()
            shares.append(StateShare(name=key, shape=shape, boxes=boxes))
        return shares

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        states = dict(state)
        for name, parameter in self._local.items():
            if (master := states.pop(f"{name}/{MASTER}", None)) is not None:
                parameter.copy_(master)
        self._inner.load_elementwise_state(states)
