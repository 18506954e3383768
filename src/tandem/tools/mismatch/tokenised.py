"""Whether the tokens before each turn are what the template makes of its messages, and continue what was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.errors import EnvError
from tandem.rollout.template import Template
from tandem.tools.mismatch.recorded import Spoken
from tandem.trainer.record import shared

_CONTEXT = 6
"""Tokens shown from the first that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Where the ids before a turn are others than expected."""

    rollout: str
    """Id of the rollout."""
    turn: int
    """Which turn, from 0."""
    kind: Literal["opening", "history", "reply"]
    """opening: not the template's for the first messages; history: the turn before is not continued as it was sampled;
    reply: what lies between is not the template's."""
    at: int
    """Place of the first id that differs."""
    expected: tuple[str, ...]
    """Text of a few expected tokens from there on."""
    recorded: tuple[str, ...]
    """Text of the recorded ones."""


def breaks(turns: Sequence[Spoken], template: Template) -> Iterator[Break]:
    """Every break, in order."""
    openings: dict[str, bool] = {}
    for turn in turns:
        expected = _expected(turn, template, openings.get(turn.rollout, True))
        if expected is None:
            continue
        kind, ids = expected
        at = shared(ids, turn.prompt)
        differs = at < len(ids) if kind == "history" else ids != turn.prompt
        if kind == "opening":
            openings[turn.rollout] = not differs
        if differs:
            yield Break(
                rollout=turn.rollout,
                turn=turn.turn,
                kind=kind,
                at=at,
                expected=tuple(template.pieces(ids[at : at + _CONTEXT])),
                recorded=tuple(template.pieces(turn.prompt[at : at + _CONTEXT])),
            )


def _expected(
    turn: Spoken, template: Template, usual: bool
) -> tuple[Literal["opening", "history", "reply"], tuple[int, ...]] | None:
    """What is compared and with which ids; None where nothing can be said."""
    if turn.said and shared(turn.said, turn.prompt) < len(turn.said):
        return "history", turn.said
    if turn.before is None:
        return None
    try:
        if not turn.said:
            return "opening", tuple(template.prompt(turn.before))
        if not usual:  # the template was given more than the messages, such as tools, so its reply is unknown too
            return None
        reply = turn.before[turn.opening + 1 :]
        return "reply", (*turn.said, *template.bridge(turn.before[: turn.opening], reply, last=turn.said[-1]))
    except EnvError:
        return None


def anew(turn: Spoken, template: Template) -> tuple[int, ...]:
    """Ids before a turn if its whole conversation were tokenised anew; the recorded ones where that cannot be told."""
    if turn.before is None:
        return turn.prompt
    try:
        return tuple(template.prompt(turn.before))
    except EnvError:
        return turn.prompt
