"""Answers of the policy as lines for a terminal, and what is told of groups that were dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tandem.observability.loggers.base import parts
from tandem.printable import printable
from tandem.types import Json


def lines(sample: Mapping[str, Json], head: str) -> list[str]:
    """An answer of the policy with its reward, its task before it: a head, then ``> prompt`` and ``< answer``."""
    reward = "no reward" if sample.get("reward") is None else f"reward {float(sample['reward']):.4g}"
    rewards = sample.get("rewards") or {}
    told = f" ({parts(sample)})" if len(rewards) > 1 else ""
    cut = ", cut by a length limit" if sample.get("truncated") else ""
    gold = f", gold answer {_clean(str(sample['answer']))[:60]}" if sample.get("answer") else ""
    out = [f"{head}, {reward}{told}{cut}: task {_clean(str(sample.get('task', '')))}{gold}"]
    out += [f"  > {line}" for line in _few_lines(str(sample.get("prompt") or ""), 4)]
    out += [f"  < {line}" for line in _few_lines(str(sample.get("text") or ""), 12) or ["(nothing)"]]
    return out + ([f"  failed: {_clean(str(sample['error']))}"] if sample.get("error") else [])


def held_out_lines(record: Mapping[str, Json], config: Mapping[str, Json]) -> list[str]:
    """The first answer of an evaluation: the same task each time. None where the recipe has answers not shown."""
    shows = (config.get("print_completions") or {}).get("every", 1)
    samples = record.get("rollouts") or []
    return lines(samples[0], "  its first answer") if shows and samples else []


def ends(samples: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """The answer with the highest reward and the one with the lowest; one where all have the same."""
    ranked = sorted(samples, key=lambda sample: -math.inf if sample.get("reward") is None else float(sample["reward"]))
    if not ranked:
        return []
    return [ranked[0]] if ranked[0].get("reward") == ranked[-1].get("reward") else [ranked[-1], ranked[0]]


def _few_lines(text: str, most: int, width: int = 240) -> list[str]:
    """The first and last lines of a text, none of them long, without control characters."""
    lines = [_clean(line) for line in text.strip().splitlines() if line.strip()]
    lines = [line if len(line) <= width else f"{line[: width - 40]} [...] {line[-34:]}" for line in lines]
    if len(lines) <= most:
        return lines
    head = most // 2
    return [*lines[:head], f"[... {len(lines) - most + 1} lines ...]", *lines[head - most + 1 :]]


def _clean(text: str) -> str:
    """A text of somebody else's without what a terminal would obey; white space is one space."""
    return printable(" ".join(text.split()))


def dropped_lines(fields: Mapping[str, Json]) -> list[str]:
    """Groups that were dropped while a step was sampled: one line, or with an example and what to change."""
    why = sorted(fields["why"].items(), key=lambda item: -item[1])
    told = ", ".join(
        f"{count} with {reason}" if reason.startswith("every") else f"{count} {reason}" for reason, count in why[:3]
    )
    more = f", {sum(count for _, count in why[3:])} others" * (len(why) > 3)
    count = fields["dropped"]
    head = f"step {fields['step']}: {count} group{'s' * (count > 1)} dropped so far: {told}{more}"
    head = f"WARNING {head}" if fields["warning"] else head
    if "example" not in fields:
        return [head]
    out = [head, "  there is nothing to learn from a group without different rewards: others are sampled for them"]
    if "change" in fields:
        out += [f"  change: {_clean(fields['change'])}", "  more of them: dropped.jsonl in the run's folder"]
    return out + lines(fields["example"], "  an answer of theirs")
