"""Who waits for whom: links that follow from one another. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Link(Protocol):
    """As much of a wait as a chain needs."""

    @property
    def number(self) -> int:
        """Its name in this process."""

    @property
    def within(self) -> int | None:
        """Number of the wait that it began in, if any."""

    @property
    def owner(self) -> str:
        """Who waits."""

    @property
    def on(self) -> str:
        """Who has to deliver."""

    @property
    def seconds(self) -> float:
        """How long it has lasted."""


L = TypeVar("L", bound=Link)


def chain(wait: L, every: Sequence[L]) -> list[L]:
    """From a wait along who waits for whom to the last: nobody whom that one is for waits himself, or it is a circle.

    Args:
        wait: the first.
        every: all there are, longest first; among several that explain one the longest is taken.
    """
    found = [wait]
    while True:
        last = found[-1]
        inner = [one for one in every if one.within == last.number and one not in found]
        named = inner or [one for one in every if one not in found and is_part(last.on, one.owner)]
        if not named:
            return found
        found.append(named[0])


def is_part(party: str, owner: str) -> bool:
    """Whether a party of a wait (``rollouts``) is one that waits itself, or its kind (``rollouts group 12``)."""
    return owner == party or owner.startswith(f"{party} ")
