"""Recorded tokens of a run: the ids before each, its policy version, and both sides' logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.errors import EnvError, TandemError
from tandem.observability.report.folder import Row
from tandem.rollout.template import Template
from tandem.trainer.record import shared
from tandem.types import Json, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One turn of one rollout. Sequences with one entry for each sampled token say so."""

    rollout: str
    """Id of its rollout."""
    turn: int
    """Which turn, from 0."""
    prompt: tuple[int, ...]
    """Ids before it, as the engine is said to have been given them."""
    tokens: tuple[int, ...]
    """Sampled ids."""
    pieces: tuple[str, ...]
    """Text of each token."""
    engine: tuple[float, ...]
    """The engine's logprob of each token."""
    trainer: tuple[float, ...]
    """The trainer's logprob of each token, at the weights it trained."""
    versions: tuple[int, ...]
    """Policy step stamped on each token."""
    previous: tuple[int, ...]
    """The turn before it, prompt and sampled ids; empty for the first."""
    before: tuple[Message, ...] | None
    """The conversation up to it; None where the record does not tell which message is which turn."""
    opening: int
    """Messages of ``before`` up to the turn before it; of the first turn 0."""


def spoken(rows: Iterable[Row]) -> tuple[list[RecordedTurn], int]:
    """Every turn that has a gap, and how many rollouts have none: not trained, or their sampler told no logprobs.

    Raises:
        TandemError: the record is of a Tandem that did not write what is needed.
    """
    turns: list[RecordedTurn] = []
    passed = 0
    for row in rows:
        if _has_gap(row):
            turns += _turns(row)
        else:
            passed += 1
    return turns, passed


def _has_gap(row: Row) -> bool:
    tokens = row.get("tokens") or []
    return bool(tokens) and all(token.get("lp") is not None and token.get("tp") is not None for token in tokens)


def _turns(row: Row) -> Iterator[RecordedTurn]:
    tokens: list[Row] = row["tokens"]
    if not {"prompts", "stamps"} <= row.keys():
        raise TandemError(
            f"the record of rollout {row.get('rollout')} has no prompt tokens: an older Tandem wrote it. "
            "Take a few more steps with this one (tandem train RUN steps=N) and look at those"
        )
    versions = [version for version, count in row["stamps"] for _ in range(count)]
    conversations = _conversations(row)
    previous: tuple[int, ...] = ()
    at = 0
    for turn, (count, (kept, added)) in enumerate(zip(row["turns"], row["prompts"], strict=True)):
        own = tokens[at : at + count]
        prompt = (*previous[:kept], *added)
        if own:
            before, opening = conversations[turn] if conversations else (None, 0)
            yield RecordedTurn(
                rollout=str(row["rollout"]),
                turn=turn,
                prompt=prompt,
                tokens=tuple(token["id"] for token in own),
                pieces=tuple(token["t"] for token in own),
                engine=tuple(token["lp"] for token in own),
                trainer=tuple(token["tp"] for token in own),
                versions=tuple(versions[at : at + count]),
                previous=previous,
                before=before,
                opening=opening,
            )
        previous = (*prompt, *(token["id"] for token in own))
        at += count


def _conversations(row: Row) -> list[tuple[tuple[Message, ...] | None, int]] | None:
    """Before each turn: all that was said, and how much of it was said before the turn before; None if unknown."""
    messages = [_message(message) for message in row.get("messages") or []]
    first = len(row.get("prompt") or [])
    own = [i for i, message in enumerate(messages) if i >= first and message.role == "assistant"]
    if len(own) != len(row["turns"]) or not own or own[0] != first:
        return None
    return [(tuple(messages[:end]), own[turn - 1] if turn else 0) for turn, end in enumerate(own)]


def _message(plain: Json) -> Message:
    fields = {name: value for name, value in plain.items() if name not in ("role", "content")}
    return Message(role=str(plain.get("role", "")), content=str(plain.get("content", "")), fields=fields)


_CONTEXT = 6
"""Tokens shown from the first that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A place where the ids before a turn are others than expected."""

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


def breaks(turns: Sequence[RecordedTurn], template: Template) -> Iterator[Break]:
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
    turn: RecordedTurn, template: Template, usual: bool
) -> tuple[Literal["opening", "history", "reply"], tuple[int, ...]] | None:
    """What is compared and with which ids; None where nothing can be said."""
    if turn.previous and shared(turn.previous, turn.prompt) < len(turn.previous):
        return "history", turn.previous
    if turn.before is None:
        return None
    try:
        if not turn.previous:
            return "opening", tuple(template.prompt(turn.before))
        if not usual:  # the template was given more than the messages, such as tools, so its reply is unknown too
            return None
        reply = turn.before[turn.opening + 1 :]
        return "reply", (*turn.previous, *template.bridge(turn.before[: turn.opening], reply, last=turn.previous[-1]))
    except EnvError:
        return None
