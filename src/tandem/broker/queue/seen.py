"""Idempotency keys: which submissions were accepted before."""

from __future__ import annotations

from collections import OrderedDict

from tandem.broker.queue.records import Options


class Seen:
    """The keys of the last ``Options.key_seconds`` and the last ``Options.max_keys`` submissions."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._at: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)

    def add(self, key: str, now: float) -> None:
        """A submission with this key was accepted."""
        self._at[key] = now

    def forget(self, now: float) -> None:
        """Those that are too old or too many."""
        while self._at:
            oldest, at = next(iter(self._at.items()))
            if len(self._at) <= self._options.max_keys and now - at <= self._options.key_seconds:
                return
            del self._at[oldest]
