"""Rollouts as sequences, which is what the wire knows.

A conversation whose every prompt begins with all that was said before is one sequence. A rollout that holds several
conversations (an agent that begins anew, or asks beside), or that changes its temperature, is as many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.types import Rollout, Turn

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Wired:
    """One conversation of a rollout."""

    turns: tuple[Turn, ...]
    """Each continues the one before it, at one temperature."""
    places: tuple[int, ...]
    """Of every sampled token of these turns, its place among all that the rollout sampled."""

    @property
    def tokens(self) -> list[int]:
        """Everything that was said."""
        last = self.turns[-1]
        return [*last.prompt, *last.completion.tokens]

    @property
    def temperature(self) -> float:
        """Of every turn."""
        return self.turns[0].temperature

    @property
    def logprobs(self) -> list[float]:
        """Of the sampled tokens."""
        return [value for turn in self.turns for value in turn.completion.logprobs]

    @property
    def versions(self) -> list[int]:
        """Policy step of each sampled token."""
        return [step for turn in self.turns for step in turn.completion.versions]

    def spread(self, values: Sequence[Number], elsewhere: Number) -> list[Number]:
        """One value for each sampled token, laid out over all tokens."""
        row, done = [elsewhere] * len(self.tokens), 0
        for turn in self.turns:
            start, num = len(turn.prompt), len(turn.completion.tokens)
            row[start : start + num] = values[done : done + num]
            done += num
        return row


def sequences(rollout: Rollout) -> list[Wired]:
    """The conversations of a rollout, in the order in which they began; none where nothing was sampled.

    Of several that a turn could continue it continues the longest.
    """
    found: list[tuple[list[Turn], list[int]]] = []
    done = 0
    for turn in rollout.turns:
        places = range(done, done + len(turn.completion.tokens))
        done = places.stop
        if not places:
            continue
        fits = [entry for entry in found if _continues(turn, entry[0][-1])]
        if fits:
            turns, held = max(fits, key=lambda entry: len(_said(entry[0][-1])))
        else:
            turns, held = [], []
            found.append((turns, held))
        turns.append(turn)
        held.extend(places)
    return [Wired(tuple(turns), tuple(places)) for turns, places in found]


def _continues(turn: Turn, before: Turn) -> bool:
    said = _said(before)
    return turn.temperature == before.temperature and turn.prompt[: len(said)] == said


def _said(turn: Turn) -> tuple[int, ...]:
    return turn.prompt + turn.completion.tokens
