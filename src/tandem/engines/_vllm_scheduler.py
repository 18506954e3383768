"""The engine's scheduler (``--scheduler-cls``): the logprobs of an answer leave its process in pieces of many tokens.

vLLM hands over a token's logprob as three arrays of one number each. To encode them takes the process that samples
forty times as long as the token itself, under the lock that the next forward pass needs to be launched, and the HTTP
process as long again to read them. Who waits for a whole answer needs none of it before its end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ASKED = "tandem_pieces"
"""In a request's ``extra_args``: it is answered whole, so its logprobs may come in pieces."""
PIECE = 32
"""Tokens of a piece: enough that a token costs little, few enough that answers that end together end at once."""
FIELDS = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
"""Of vLLM's ``LogprobsLists``, as far as they are known here; the last is None for what is of one request."""


def scheduler(**given: Any) -> Any:
    """The scheduler that vLLM would take by itself, with logprobs in pieces if this version's are known here."""
    from vllm.v1.outputs import LogprobsLists

    config = copy.copy(given["vllm_config"].scheduler_config)
    config.scheduler_cls = None
    chosen = config.get_scheduler_cls()
    known = getattr(LogprobsLists, "_fields", None) == FIELDS
    return (type("Scheduler", (Pieces, chosen), {}) if known else chosen)(**given)


class Pieces:
    """What comes before one of vLLM's schedulers in the order of bases."""

    requests: Mapping[str, Any]
    """Those that have not ended, by id."""

    def __init__(self, **given: Any):
        self._held: dict[str, list[Any]] = {}
        super().__init__(**given)

    def update_from_output(self, *given: Any, **more: Any) -> Any:
        """What a forward pass gave, for each client."""
        found = super().update_from_output(*given, **more)  # type: ignore[misc]
        for client in found.values():
            for output in client.outputs:
                output.new_logprobs = self._due(output)
        return found

    def finish_requests(self, *given: Any, **more: Any) -> Any:
        """End requests from without: what is held of them goes with them."""
        found = super().finish_requests(*given, **more)  # type: ignore[misc]
        for key in [key for key in self._held if self._over(key)]:
            del self._held[key]
        return found

    def _over(self, key: str) -> bool:
        request = self.requests.get(key)
        return request is None or request.is_finished()

    def _due(self, output: Any) -> Any:
        """The logprobs that go with this output; None while they are held."""
        held = self._held.get(output.request_id)
        if held is None:
            if output.new_logprobs is None or not self._asked(output.request_id):
                return output.new_logprobs
            held = self._held[output.request_id] = []
        if output.new_logprobs is not None:
            held.append(output.new_logprobs)
        if output.finish_reason is None and len(held) < PIECE:
            return None
        del self._held[output.request_id]
        return joined(held)

    def _asked(self, key: str) -> bool:
        """Whether it wants pieces and gets another token: one that has ended is no longer known."""
        request = self.requests.get(key)
        return request is not None and bool((request.sampling_params.extra_args or {}).get(ASKED))


def joined(parts: Sequence[Any]) -> Any:
    """One ``LogprobsLists`` of many.

    Its rows are as wide as the narrowest: what other requests of a batch asked for made the others wider.
    """
    width = min(part.logprobs.shape[1] for part in parts)
    ids, logprobs = [part.logprob_token_ids for part in parts], [part.logprobs for part in parts]
    if any(row.shape[1] != width for row in logprobs):
        ids, logprobs = [row[:, :width] for row in ids], [row[:, :width] for row in logprobs]
    ranks = np.concatenate([part.sampled_token_ranks for part in parts])
    return type(parts[0])(np.concatenate(ids), np.concatenate(logprobs), ranks, None)
