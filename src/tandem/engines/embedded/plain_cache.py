"""transformers' own caches, for models that are not computed as packed trees."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.model import packing
from tandem.model.attention import KVCache
from tandem.model.policy import Policy


class PlainCache(KVCache):
    """One cache for each distinct prompt: its rows are of equal length, so nothing is padded."""

    def __init__(self, policy: Policy, rows: int):
        super().__init__(rows)
        self._model = packing.backbone(policy.causal)
        self._has_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self._at: dict[int, tuple[Any, int]] = {}
        """Cache of each row, and its place there."""
        self._name = ""
        """The cache's in the model's code."""

    def reserve(self, length: int) -> None:
        """They grow by themselves."""

    def move(self, source: int, target: int, length: int) -> None:
        self._at[target] = self._at[source]

    def clear(self) -> None:
        self._at.clear()

    def prefilled(self, rows_of: Mapping[tuple[int, ...], Sequence[int]], device: torch.device) -> Tensor:
        """Hidden states of all prompts, one after the other."""
        hidden = []
        for prompt, rows in rows_of.items():
            out = self._model(input_ids=torch.tensor([prompt], device=device), use_cache=True)
            self._name = next(name for name in ("past_key_values", "cache_params") if name in out)
            cache = out[self._name]
            _take(cache, torch.zeros(len(rows), dtype=torch.int64, device=device))
            self._at |= {row: (cache, place) for place, row in enumerate(rows)}
            hidden.append(out.last_hidden_state[0])
        return torch.cat(hidden)

    def decoded(self, tokens_R1: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden state of one more token of each row, which has ``lengths`` before it."""
        rows_of: dict[int, list[int]] = {}
        for row in range(len(tokens_R1)):
            rows_of.setdefault(id(self._at[row][0]), []).append(row)
        hidden: list[Tensor] = []
        at: dict[int, tuple[Any, int]] = {}
        for rows in rows_of.values():
            cache, places = self._at[rows[0]][0], [self._at[row][1] for row in rows]
            at |= {row: (cache, place) for place, row in enumerate(rows)}
            _take(cache, torch.tensor(places, device=tokens_R1.device))  # those that have ended are left out
            options = {self._name: cache}
            if self._has_positions:  # some models count from 0 if they are not told
                options["position_ids"] = torch.full_like(tokens_R1[rows], lengths[rows[0]])
            out = self._model(input_ids=tokens_R1[rows], **options, use_cache=True)
            hidden.append(out.last_hidden_state[:, 0])
        self._at = at
        order = [row for rows in rows_of.values() for row in rows]
        return torch.cat(hidden)[np.argsort(order)]


def _take(cache: Any, places: Tensor) -> None:
    """Make these rows of transformers' cache all that it has."""
    if "batch_select_indices" in vars(type(cache)):  # one with a state beside its layers
        cache.batch_select_indices(places)
    else:
        cache.reorder_cache(places)
