"""What must hold of a group on the wire beyond the types of its fields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tandem.broker.protocol.lax import Loc, refuse
from tandem.broker.protocol.messages import MOST_STEP, ScoredGroup

MOST_DEPTH = 64
"""Lists and objects inside one another in a free field; a reader's own recursion limit lies far above."""


def check(group: ScoredGroup) -> None:
    """What types cannot say: lengths agree, and free fields hold nothing that another reader would choke on.

    Raises:
        Malformed: one does not.
    """
    sizes = [len(ids) for ids in group.tokens]
    if not sizes:
        raise refuse("value_error", ("tokens",), "Value error, a group needs at least one sequence", [])
    if 0 in sizes:
        raise refuse("value_error", ("tokens", sizes.index(0)), "Value error, a sequence needs at least one token", [])
    _per_token("masks", group.masks, sizes)
    _per_sequence("scores", group.scores, sizes)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        if values := getattr(group, name):
            _per_token(name, values, sizes)
    for name in ("messages", "overrides"):
        if values := getattr(group, name):
            _per_sequence(name, values, sizes)
    for chat in group.messages or ():
        if not all("role" in message and "content" in message for message in chat):
            msg = "Value error, Message must have 'role' and 'content' fields"
            raise refuse("value_error", ("messages",), msg, group.messages)
    _check_distill(group, sizes)
    for name in ("messages", "generation_params", "overrides", "group_overrides", "images"):
        if (value := getattr(group, name)) is not None:
            _check_free(value, (name,), MOST_DEPTH)
    version = (group.group_overrides or {}).get("tandem_version", 0)
    if type(version) is not int or not 0 <= version < MOST_STEP:
        loc = ("group_overrides", "tandem_version")
        raise refuse("value_error", loc, "Value error, a step is an int from 0 to below 2**53", version)
    _check_versions((group.group_overrides or {}).get("tandem_versions"), sizes)


def _check_versions(found: Any, sizes: Sequence[int]) -> None:
    """Runs of ``[step, tokens]`` for each sequence, where they are that: no run is longer than its sequence."""
    rows = found if isinstance(found, list) and len(found) == len(sizes) else ()
    for place, (runs, size) in enumerate(zip(rows, sizes, strict=False)):
        if isinstance(runs, list) and (len(runs) > size or any(_beyond(run, size) for run in runs)):
            loc = ("group_overrides", "tandem_versions", place)
            raise refuse("value_error", loc, f"Value error, runs of [step, tokens] within {size} tokens are expected")


def _beyond(run: Any, size: int) -> bool:
    """True if something is a run of a step's tokens that no sequence of this length has."""
    if not isinstance(run, list) or len(run) != 2 or not all(type(value) is int for value in run):
        return False
    step, count = run
    return not (0 <= step < MOST_STEP and 0 <= count <= size)


def _per_sequence(name: str, values: Sequence[Any], sizes: Sequence[int]) -> None:
    if len(values) != len(sizes):
        msg = f"Value error, {len(values)} entries for {len(sizes)} sequences of tokens"
        raise refuse("value_error", (name,), msg)


def _per_token(name: str, values: Sequence[Sequence[Any]], sizes: Sequence[int]) -> None:
    _per_sequence(name, values, sizes)
    for place, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if len(value) != size:
            raise refuse("value_error", (name, place), f"Value error, {len(value)} entries for {size} tokens")


def _check_distill(group: ScoredGroup, sizes: Sequence[int]) -> None:
    ids, logprobs = group.distill_token_ids or (), group.distill_logprobs or ()
    for name, values in (("distill_token_ids", ids), ("distill_logprobs", logprobs)):
        if values:
            _per_token(name, values, sizes)
    if ids and logprobs:
        for place, (ours, theirs) in enumerate(zip(ids, logprobs, strict=True)):
            if _lengths(ours) != _lengths(theirs):
                msg = "Value error, each position needs as many logprobs as token ids"
                raise refuse("value_error", ("distill_logprobs", place), msg)


def _lengths(values: Iterable[Sequence[Any]]) -> list[int]:
    return [len(value) for value in values]


def _check_free(value: Any, loc: Loc, depth: int) -> None:
    """Only what both encodings can say: null, booleans, 64-bit ints, finite floats, text, lists, objects."""
    if value is None or isinstance(value, bool | str):
        return
    if depth == 0:
        raise refuse("value_error", loc, f"Value error, nested deeper than {MOST_DEPTH}")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise refuse("value_error", loc, "Value error, an int beyond 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise refuse("finite_number", loc, "Input should be a finite number")
    elif isinstance(value, list):
        for place, one in enumerate(value):
            _check_free(one, (*loc, place), depth - 1)
    elif isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise refuse("value_error", loc, "Value error, a key that is no text")
            _check_free(one, (*loc, key), depth - 1)
    else:
        raise refuse("value_error", loc, f"Value error, {type(value).__name__} has no place in JSON")
