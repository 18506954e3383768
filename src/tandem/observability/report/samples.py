"""Rollouts for the page: steps chosen evenly, each token a few bytes, the whole below a limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from tandem.observability.report.folder import Row, RunFolder
from tandem.types import Json

MOST_STEPS = 40
"""Steps whose rollouts are embedded at most."""
MOST_BYTES = 4_500_000
"""Size of all embedded rollouts at most; the rest of the page is small."""
PACKED = 0.3
"""Size of a step on the page, as a share of its file: tokens pack to some 16 bytes of 60."""
MOST_TOKENS = 4096
"""Tokens of one rollout that are embedded at most."""


def collect(run: RunFolder, most_bytes: int = MOST_BYTES) -> Row:
    """Choose steps evenly, first and last included, as many as fit; if even two do not, groups are left out.

    Returns:
        ``total``: steps whose rollouts the run folder holds. ``pieces``: every distinct token, its id and text, by
        whose place here rollouts refer to it. ``steps``: of each
        ``{"step", "groups": [{"id", "env", "prompt", "answer", "rollouts": [...]}], "left_out": groups}``.
    """
    sizes = [run.rollout_file(step).stat().st_size for step in run.rollout_steps]
    expected = PACKED * sum(sizes) / max(1, len(sizes))
    chosen, most = run.rollout_steps, min(MOST_STEPS, max(2, int(most_bytes / max(1.0, expected))))
    if len(chosen) > most:
        chosen = [chosen[round(i * (len(chosen) - 1) / (most - 1))] for i in range(most)]
    pieces: dict[tuple[int, str], int] = {}
    steps: list[Row] = []
    room = most_bytes
    for left, step in zip(range(len(chosen), 0, -1), chosen, strict=True):
        packed, size = _step(step, run.rollouts(step), pieces, most=room // left)
        steps.append(packed)
        room -= size
    return {"total": len(run.rollout_steps), "pieces": list(pieces), "steps": steps}


def of_step(run: RunFolder, step: int) -> Row:
    """The rollouts of one step in the shape of those of ``collect``, with ``pieces`` of its own."""
    pieces: dict[tuple[int, str], int] = {}
    packed, _ = _step(step, run.rollouts(step), pieces, MOST_BYTES)
    return {**packed, "pieces": list(pieces)}


def _step(step: int, records: list[Row], pieces: dict[tuple[int, str], int], most: int) -> tuple[Row, int]:
    """A step as the page reads it, and its bytes: groups in order while they fit, at least one.

    Args:
        step: its number.
        records: its rollouts.
        pieces: distinct tokens so far; grows.
        most: bytes it may take.
    """
    groups: dict[str, list[Row]] = {}
    for record in records:
        groups.setdefault(str(record.get("group", "")), []).append(record)
    kept: list[Row] = []
    used = 0
    for name, members in groups.items():
        if kept and used >= most:
            break
        kept.append(_group(name, members, pieces))
        used += len(msgspec.json.encode(kept[-1]))
    return {"step": step, "groups": kept, "left_out": len(groups) - len(kept)}, used


def _group(name: str, members: list[Row], pieces: dict[tuple[int, str], int]) -> Row:
    first = members[0]
    prompt = first.get("prompt") or []
    ranked = sorted(members, key=lambda m: -m["reward"] if m.get("reward") is not None else float("inf"))
    return {
        "id": name,
        "env": first.get("env", ""),
        "task": first.get("task", ""),
        "prompt": prompt,
        "answer": first.get("answer", ""),
        "rollouts": [_rollout(member, len(prompt), pieces) for member in ranked],
    }


def _rollout(record: Row, prompt_messages: int, pieces: dict[tuple[int, str], int]) -> Row:
    tokens = (record.get("tokens") or [])[:MOST_TOKENS]
    messages = (record.get("messages") or [])[prompt_messages:]
    if not messages and record.get("text"):
        messages = [{"role": "assistant", "content": record["text"]}]
    return {
        "id": str(record.get("rollout", "")).rpartition("/")[2],
        "reward": record.get("reward"),
        "rewards": record.get("rewards") or {},
        "advantage": record.get("advantage"),
        "status": record.get("status", "ok"),
        "error": record.get("error", ""),
        "truncated": bool(record.get("truncated")),
        "versions": record.get("versions") or None,  # of nothing sampled there is none
        "said": place_tokens(messages, tokens, record.get("turns")),
        "cut": len(record.get("tokens") or []) - len(tokens),
        **_pack_tokens(tokens, pieces),
    }


def _pack_tokens(tokens: list[Row], pieces: dict[tuple[int, str], int]) -> Row:
    """Columns of whole numbers: logprobs in 1e-4 nats, differences in 1e-6; one number where all are equal."""
    places = [pieces.setdefault((token.get("id", -1), token.get("t", "")), len(pieces)) for token in tokens]
    advantages = [round(token.get("adv") or 0.0, 4) for token in tokens]
    trained = [1 if token.get("m", 1) else 0 for token in tokens]
    return {
        "p": places,
        "l": [_scaled(token.get("lp"), 1e4) for token in tokens],
        "d": [_scaled(token.get("tp"), 1e6, token.get("lp")) for token in tokens],
        "a": advantages[0] if len(set(advantages)) == 1 else advantages,
        "m": 1 if all(trained) else trained,
    }


def _scaled(value: float | None, by: float, less: float | None = 0.0) -> int | None:
    """A difference as a whole number; None where either is unknown."""
    return None if value is None or less is None else round((value - less) * by)


def place_tokens(messages: list[Row], tokens: list[Row], turns: Sequence[int] | None = None) -> list[Row]:
    """Tokens of each message: ``{"role", "content"}``, or ``{"role", "tokens": [from, to]}`` for the policy's.

    Args:
        messages: the messages after the prompt.
        tokens: what was sampled, all turns in a row.
        turns: tokens of each turn, where the record says so.
    """
    turn_places = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    ends = [min(end, len(tokens)) for end in accumulate(turns or [len(tokens)])]
    if tokens and (len(ends) != len(turn_places) or ends[-1] != len(tokens)):  # messages are no turns: show both
        return [*map(_message, messages), {"role": "sampled tokens", "tokens": [0, len(tokens)]}]
    spans = dict(zip(turn_places, zip([0, *ends], ends, strict=False), strict=True)) if tokens else {}
    return [
        {"role": message.get("role", ""), "tokens": list(spans[i])} if i in spans else _message(message)
        for i, message in enumerate(messages)
    ]


def _message(message: Row) -> Row:
    return {"role": message.get("role", ""), "content": message.get("content", "")}


def answers(run: RunFolder, most_bytes: int = 600_000) -> list[Json]:
    """Held-out answers of the first and the last evaluation, task by task: ``[{task, prompt, answer, before, after}]``.

    Of as many tasks, at equal distances, as fit.
    ``before`` and ``after`` are ``{"reward", "text"}``; after a single evaluation ``after`` is None.
    """
    rows = [row for row in run.evaluations if row.get("rollouts")]
    rows = [row for row in rows if row.get("env") == rows[0].get("env")]
    if not rows:
        return []
    before, after = _by_task(rows[0]), _by_task(rows[-1]) if len(rows) > 1 else {}
    out: list[Json] = [
        {
            "task": task,
            "prompt": sample.get("prompt", ""),
            "answer": sample.get("answer", ""),
            "before": _answer(sample),
            "after": _answer(after[task]) if after else None,
        }
        for task, sample in before.items()
        if task in after or not after
    ]
    while len(out) > 1 and len(msgspec.json.encode(out)) > most_bytes:
        out = out[::2]
    return out


def _by_task(row: Row) -> dict[str, Row]:
    return {str(sample.get("task", "")): sample for sample in row["rollouts"]}


def _answer(sample: Row) -> Row:
    return {"reward": sample.get("reward"), "text": sample.get("text", "")}
