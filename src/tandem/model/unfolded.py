"""A packed row by transformers' own forward: sequences in batches, padded on the right.

A causal model never sees what comes after a token. What sequences begin with in common is computed once, and what it
leaves is read by those that continue it: keys and values, windows of convolutions, states of recurrences. transformers'
own caches are written in place, which a layer that is computed again for its backward pass would do twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import Cache

from tandem.model.plans import Packed, moved
from tandem.model.routing import Routing

_MOST_PADDED = 1.25
"""Tokens of a batch, padding included, in those of its sequences."""
_MOST_AGAIN = 1.1
"""Tokens that are computed where prompts are computed together, in those where each is alone."""
_LEAST = 2
"""Tokens of a batch's rows: kernels take a row of one for decoding, which has no backward pass."""

Left = dict[tuple[Any, ...], Tensor]
"""What layers left, by its kind and where it is from."""
Places = NDArray[np.int64]
"""Where tokens stand in the packed row."""


class _Shared(NamedTuple):
    """What sequences begin with in common, and how each goes on."""

    root: Places
    rests: list[Places]

    def computed(self, prefix: int) -> int:
        """Tokens that are computed where this much of the root is once, and what follows it with each rest."""
        return prefix + sum(len(self.root) - prefix + len(rest) for rest in self.rests)


def hidden(model: nn.Module, tokens_T: Tensor, plan: Packed, experts: Routing | None, *, at_once: bool) -> Tensor:
    """Last hidden states of a packed row, (T, hidden size); of a token that is computed several times the first.

    ``at_once`` takes one pass, in which nothing is shared.
    """
    ends = np.cumsum(plan.lengths)
    segments = [np.arange(end - length, end) for end, length in zip(ends, plan.lengths, strict=True)]
    of_root: dict[int, list[tuple[int, ...]]] = {}
    for leaf in sorted(set(range(len(segments))) - set(plan.parents)):
        chain = (*plan.ancestors(leaf), leaf)
        of_root.setdefault(chain[0], []).append(chain)
    passes, alone, shared = _Passes(model, tokens_T, plan, experts), list[Places](), list[_Shared]()
    for root, chains in of_root.items():
        if at_once or len(chains) == 1 or plan.lengths[root] < _LEAST:
            alone += [np.concatenate([segments[i] for i in chain]) for chain in chains]
        else:
            shared.append(_Shared(segments[root], [np.concatenate([segments[i] for i in c[1:]]) for c in chains]))
    for together in _alike(shared):
        prefix, cache = min(len(each.root) for each in together), PrefixCache()
        passes.run([each.root[:prefix] for each in together], cache)
        rests = [np.concatenate([each.root[prefix:], rest]) for each in together for rest in each.rests]
        passes.run(rests, cache, prefix, of=[i for i, each in enumerate(together) for _ in each.rests])
    passes.run(alone, most_padded=math.inf if at_once else _MOST_PADDED)
    return passes.hidden()


def _alike(shared: list[_Shared]) -> Iterator[list[_Shared]]:
    """Those whose roots are about as long, which are computed together: few large passes are faster than many small.

    The longer roots' ends are computed with each of their rests, which is right in every model; padding would not be.
    """
    together: list[_Shared] = []
    for each in sorted(shared, key=lambda one: len(one.root), reverse=True):
        more, prefix = [*together, each], len(each.root)
        least = sum(one.computed(len(one.root)) for one in more)
        if together and sum(one.computed(prefix) for one in more) > _MOST_AGAIN * least:
            yield together
            more = [each]
        together = more
    if together:
        yield together


class _Passes:
    """Forward passes over some of a packed row's sequences each."""

    def __init__(self, model: nn.Module, tokens_T: Tensor, plan: Packed, experts: Routing | None):
        self._model, self._tokens_T, self._plan, self._experts = model, tokens_T, plan, experts
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._has_positions = "position_ids" in names
        self._outs: list[Tensor] = []
        self._computed = 0
        self._where_T = np.full(len(tokens_T), -1)
        """Of each token of the row among all that were computed."""

    def run(
        self,
        rows: list[Places],
        cache: PrefixCache | None = None,
        prefix: int = 0,
        *,
        of: Sequence[int] = (),
        most_padded: float = _MOST_PADDED,
    ) -> None:
        """Compute them in batches of like lengths, which write ``cache``, or continue what it has.

        Args:
            rows: the sequences.
            cache: of prefixes.
            prefix: tokens of each prefix that is continued.
            of: which prefix each row continues; none: the rows are prefixes, of one length.
            most_padded: tokens of a batch, padding included, in those of its sequences.
        """
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
        rows, start = [rows[i] for i in order], 0
        of_BR = np.eye(max(of) + 1, dtype=np.float32)[[of[i] for i in order]] if of else None
        while start < len(rows):
            end, longest = start + 1, max(_LEAST, len(rows[start]))
            while end < len(rows) and longest * (end + 1 - start) <= most_padded * sum(map(len, rows[start : end + 1])):
                end += 1
            batch_BL = np.zeros((end - start, longest), dtype=np.int64)
            for i, row in enumerate(rows[start:end]):
                batch_BL[i, : len(row)] = row
                new = self._where_T[row] < 0
                self._where_T[row[new]] = self._computed + i * longest + np.flatnonzero(new)
            options: dict[str, Any] = {}
            if cache is not None:
                options[self._cache_name] = cache
                if of_BR is not None:
                    rows_of_BR = moved(of_BR[start:end], self._tokens_T.device)
                    options[self._cache_name] = cache.continued(prefix, rows_of_BR)
                if self._has_positions:  # some models count from 0 if they are not told
                    options["position_ids"] = torch.arange(prefix, prefix + longest, device=self._tokens_T.device)[None]
            self._pass(batch_BL, options)
            start = end

    def _pass(self, batch_BL: Places, options: dict[str, Any]) -> None:
        places_BL = moved(batch_BL, self._tokens_T.device)
        if self._experts is not None and self._plan.experts_TLK is not None:
            self._experts.replay(self._plan.experts_TLK[places_BL.flatten()])
        out = self._model(input_ids=self._tokens_T[places_BL], use_cache=bool(options), **options)
        self._outs.append(out.last_hidden_state.flatten(0, 1))
        self._computed += batch_BL.size

    def hidden(self) -> Tensor:
        """In the packed row's order."""
        where_T = moved(self._where_T, self._tokens_T.device)
        if self._experts is not None:
            self._experts.arrange(where_T)
        return torch.cat(self._outs)[where_T]


class PrefixCache(Cache):
    """Written by the pass of a prefix; ``continued`` is what the passes of its continuations read.

    Of R prefixes of one length: keys and values (R, K, L, D), windows of convolutions (R, C, width), states (R, ...).
    """

    def __init__(self, left: Left | None = None, length: int = 0, of_BR: Tensor | None = None) -> None:
        # Not transformers' own, which sets layers.
        self.left: Left = {} if left is None else left
        self.length, self.of_BR = length, of_BR
        self._of_layer: dict[nn.Module, Left] = {}

    def continued(self, length: int, of_BR: Tensor) -> Self:
        """The same of prefixes of ``length`` tokens, for a batch of continuations: 1 at the prefix that each is of."""
        reader = type(self)(self.left, length, of_BR)
        reader._of_layer = self._of_layer
        return reader

    def of(self, layer: nn.Module) -> Left:
        """What the pass of the prefix left in a layer that has a ``LayerPrefix``."""
        return self._of_layer.setdefault(layer, {})

    def _key(self, kind: str, layer_idx: int, state_idx: int) -> tuple[Any, ...]:
        return kind, layer_idx, state_idx

    def _read(self, kind: str, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if self.of_BR is None:
            return None
        left = self.left[self._key(kind, layer_idx, state_idx)]
        # A product, whose backward pass adds up the continuations' gradients in one order.
        rows: Tensor = (self.of_BR.to(left.dtype) @ left.flatten(1)).unflatten(1, left.shape[1:])
        return rows

    def _write(self, left: Tensor, kind: str, layer_idx: int, state_idx: int = 0) -> None:
        if self.of_BR is None:
            self.left.setdefault(self._key(kind, layer_idx, state_idx), left)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """All keys and values that a layer's attention is of."""
        whole = []
        for name, own in (("keys", key_states), ("values", value_states)):
            before = self._read(name, layer_idx)
            self._write(own, name, layer_idx)
            whole.append(own if before is None else torch.cat([before, own], dim=2))
        return tuple(whole)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The window before a layer's next token; None at the beginning."""
        return self._read("window", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """What a layer's convolution is of: the window before, and the new tokens."""
        width, before = conv_kernel_size or conv_states.shape[-1], self.get_conv_state(layer_idx, state_idx)
        if before is not None:
            return torch.cat([before, conv_states], dim=-1)
        padded = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._write(padded[..., -width:], "window", layer_idx, state_idx)
        return padded

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's state before its next token; None at the beginning."""
        state = self._read("state", layer_idx, state_idx)
        return None if state is None else state.contiguous()

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """A layer's state behind its last token."""
        self._write(recurrent_states, "state", layer_idx, state_idx)
        return recurrent_states

    @property
    def layers(self) -> Any:  # type: ignore[override]
        """From which models read in transformers below 5.21, by ``layers[layer_idx]``."""
        return _Layers(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether something came before."""
        return self.of_BR is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: no layer may write into the window that it reads."""
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that came before."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.length + query_length, 0


class _Layers(list[Any]):
    """Views of a cache's layers, made when one is read: a cache that held them would not end with its pass."""

    def __init__(self, cache: PrefixCache):
        super().__init__()
        self._cache = cache

    def __getitem__(self, layer_idx: Any) -> Any:
        return _Layer(self._cache, layer_idx)


@dataclass(frozen=True)
class _Layer:
    cache: PrefixCache
    layer_idx: int
    record_past: ClassVar[bool] = True

    @property
    def conv_states(self) -> list[Tensor | None]:
        return [self.cache.get_conv_state(self.layer_idx)]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        return [self.cache.get_recurrent_state(self.layer_idx)]


class LayerPrefix(PrefixCache):
    """What one layer reads and writes, whichever it is: the compiler would make code for each that asks for its own."""

    def _key(self, kind: str, layer_idx: int, state_idx: int) -> tuple[Any, ...]:
        return kind, state_idx


def prefixed(forward: Callable[..., Any]) -> Callable[..., tuple[Any, Left]]:
    """A layer's forward by values alone, as a compiler wants it: what a prefix left comes in, or what is left goes out.

    ``prefix`` is the name of the cache's argument, what was left, tokens of a prefix, and which one each row continues.
    """

    def run(
        layer: nn.Module, hidden: Tensor, *args: Any, prefix: tuple[str, Left, int, Tensor | None], **options: Any
    ) -> tuple[Any, Left]:
        name, left, length, of_BR = prefix
        cache = LayerPrefix(dict(left), length, of_BR)  # what came in stays so: it may be computed again
        out = forward(layer, hidden, *args, **{name: cache}, **options)
        return out, cache.left if of_BR is None else {}

    return run
