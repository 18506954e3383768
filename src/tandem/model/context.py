"""Context parallel attention by Ulysses (arXiv 2309.14509): a packed row whose tokens are divided among ranks.

Each rank computes everything but attention for a run of the row's tokens. Around attention, ranks exchange: tokens of
all heads against all tokens of some heads, so that attention itself is that of the whole row, prefix tree and all. The
exchange is an operation of torch's own kind, so that a compiled layer has it, and attention, within its one graph.

Shapes: N ranks, t tokens of each, T = N * t, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import AllreduceOptions, AllToAllOptions, ProcessGroup

from tandem.errors import ConfigError
from tandem.model.plans import Packed

CONTEXT_PARALLEL = "distributed.context_parallel"
"""The option, as errors call it."""

_GROUPS: weakref.WeakValueDictionary[str, ProcessGroup] = weakref.WeakValueDictionary()
_NAMES = (f"context-{n}" for n in itertools.count())


def named(group: ProcessGroup) -> str:
    """A group's name within this process, which stands for it in compiled layers: those take no objects."""
    for name, known in _GROUPS.items():
        if known is group:
            return name
    name = next(_NAMES)
    _GROUPS[name] = group
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _size(group: str) -> int:
    return _GROUPS[group].size()


# Not frozen: see Packed.
@dataclass(slots=True, kw_only=True)
class ContextPacked:
    """A rank's part of a packed row: the same number of tokens on every rank, the row padded at its end."""

    whole: Packed
    """The row of all ranks; padding is a segment of its own, which nothing continues."""
    group: ProcessGroup
    """The ranks that share the row, in the order of its tokens."""
    name: str
    """The group's, see ``named``."""
    num_tokens: int
    """Of the row without padding."""

    @classmethod
    def of(cls, plan: Packed, group: ProcessGroup) -> ContextPacked:
        """A plan that fills no cache, divided among the ranks of a group."""
        num_tokens = sum(plan.lengths)
        padding = -num_tokens % group.size()
        whole = plan
        if padding:
            experts_TLK = plan.experts_TLK
            if experts_TLK is not None:
                experts_TLK = F.pad(experts_TLK, (0, 0, 0, 0, 0, padding), value=-1)
            lengths, parents = (*plan.lengths, padding), (*plan.parents, None)
            whole = Packed(lengths=lengths, parents=parents, experts_TLK=experts_TLK)
        return cls(whole=whole, group=group, name=named(group), num_tokens=num_tokens)

    @property
    def each(self) -> int:
        """Tokens of each rank, padding included."""
        return sum(self.whole.lengths) // self.group.size()

    @property
    def first(self) -> int:
        """Place in the row of this rank's first token."""
        return self.group.rank() * self.each

    def own(self, row_T: Tensor) -> Tensor:
        """This rank's part of something that is one for each token; padding is zeros."""
        padded = F.pad(row_T, (0, sum(self.whole.lengths) - self.num_tokens))
        return padded[self.first : self.first + self.each]


def check_heads(query_heads: int, key_heads: int, processes: int, *, option: str) -> None:
    """Refuse attention heads that so many processes cannot share: each has equal query heads, and key heads of its own.

    Fewer key heads than processes are repeated. Ulysses and the workers of a tensor-parallel vLLM divide alike.

    Args:
        query_heads: of a layer.
        key_heads: of a layer.
        processes: among which they are divided.
        option: that says so, as the error calls it.

    Raises:
        ConfigError: says how many processes can share them.
    """
    if not _shareable(query_heads, key_heads, processes):
        fit = [str(n) for n in range(1, query_heads + 1) if _shareable(query_heads, key_heads, n)]
        heads = f"{query_heads} query heads and {key_heads} key/value heads"
        raise ConfigError(f"{option}: {processes} processes cannot share {heads}; use one of {', '.join(fit)}")


def _shareable(query_heads: int, key_heads: int, processes: int) -> bool:
    return not query_heads % processes and not (key_heads % processes and processes % key_heads)


def heads_of_row(query: Tensor, key: Tensor, value: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads: (1, H, t, D) and (1, K, t, D) -> (1, H/N, T, D) and (1, max(1, K/N), T, D).

    Args:
        query: of this rank's tokens.
        key: of this rank's tokens.
        value: of this rank's tokens.
        group: the name of the ranks' group.
    """
    ranks = _size(group)
    check_heads(query.shape[1], key.shape[1], ranks, option=CONTEXT_PARALLEL)
    copies = max(1, ranks // key.shape[1])
    if copies > 1:  # of each key head there is one on every rank that has some of its query heads
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    parts_NthD = [x[0].unflatten(0, (ranks, -1)).transpose(1, 2) for x in (query, key, value)]
    # All three by one exchange: ranks meet in each, which costs more than the bytes of keys and values. A token's heads
    # lie together, so that blocks that come one after another are the row, and nothing is copied into its order.
    blocks_NthD = torch.cat(parts_NthD, dim=2)
    heads_ThD = _exchanged(blocks_NthD, group).flatten(0, 1)
    of_each = heads_ThD.split([part.shape[2] for part in parts_NthD], dim=1)
    query, key, value = (x.transpose(0, 1)[None] for x in of_each)
    return query, key, value


def tokens_of_rank(out: Tensor, group: str) -> Tensor:
    """All heads of this rank's tokens: (1, T, H/N, D) -> (1, t, H, D)."""
    blocks_NthD = out[0].unflatten(0, (_size(group), -1))
    heads_NthD: Tensor = _exchanged(blocks_NthD, group)
    return heads_NthD.transpose(0, 1).flatten(1, 2)[None]


@torch.library.custom_op("tandem::exchanged", mutates_args=(), schema="(Tensor blocks, str group) -> Tensor")
def _exchanged(blocks: Tensor, group: str) -> Tensor:
    """Block r, along the first dimension, goes to rank r; what came from rank r is block r."""
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks)
    _GROUPS[group].alltoall_base(out, blocks, [], [], AllToAllOptions()).wait()
    return out


@_exchanged.register_fake
def _(blocks: Tensor, group: str) -> Tensor:
    return blocks.new_empty(blocks.shape)


def _note_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """All-to-all is its own transpose."""
    return _exchanged(grad, ctx.group), None


_exchanged.register_autograd(_back, setup_context=_note_group)


def joined(values_M: Tensor, at_M: Tensor, num: int, group: ProcessGroup) -> Tensor:
    """Values of all ranks together, (num), on every rank; the gradient of each goes to the rank that it came from.

    Args:
        values_M: this rank's.
        at_M: int64; place of each among ``num``, of which every one is one rank's.
        num: values of all ranks.
        group: the ranks. All of them compute the same from the result, so that its gradient is theirs alike.
    """
    joined: Tensor = _Joined.apply(values_M, at_M, num, group)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    """All-gather of uneven parts: sums of values and zeros."""

    @staticmethod
    def forward(ctx: Any, values_M: Tensor, at_M: Tensor, num: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(at_M)
        whole = values_M.new_zeros(num).index_copy_(0, at_M, values_M)
        group.allreduce([whole], AllreduceOptions()).wait()
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (at_M,) = ctx.saved_tensors
        return grads[0].index_select(0, at_M), None, None, None
