"""Which of the waits that last become events: of those alike that overlap, the first, and the last to end.

A step's rollouts wait for the same engine at once. Written down each by itself, two lines a rollout, they would be most
of what a run's events hold, and of what its event loop writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.observability.waits import State, Wait


@dataclass(slots=True)
class _Alike:
    """Waits of one kind, of which at least one lasts."""

    open: set[Wait] = field(default_factory=set)
    count: int = 0
    """Those that began to last since there was none."""


class LastingWaits:
    """Chooses which of a run's long waits become events.

    Example:
        >>> lasting = LastingWaits()
        >>> waits = [Wait(owner=f"rollout {n}", reason="an answer", on="engine 0") for n in range(3)]
        >>> [lasting.others(wait, "waiting") for wait in waits]
        [0, None, None]
        >>> [lasting.others(wait, "done") for wait in waits]
        [None, None, 2]
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[str, str], _Alike] = {}

    def others(self, wait: Wait, state: State) -> int | None:
        """How many others like it lasted meanwhile; None where it becomes no event.

        Waits are alike by the first word of what waits and of what is waited for: "engine" of "engine http://…".
        What fails or is late always becomes one.

        Args:
            wait: lasts, or has ended.
            state: waiting, or how it ended.
        """
        kind = _word(wait.owner), _word(wait.on)
        alike = self._alike.get(kind)
        if state == "waiting":
            alike = self._alike.setdefault(kind, _Alike())
            alike.open.add(wait)
            alike.count += 1
            return 0 if alike.count == 1 else None
        if alike is None or wait not in alike.open:  # in a thread, whose waits are heard of when they end
            return 0
        alike.open.discard(wait)
        if not alike.open:
            del self._alike[kind]
        return alike.count - 1 if not alike.open or state in ("failed", "deadline") else None


def _word(name: str) -> str:
    return name.partition(" ")[0]
