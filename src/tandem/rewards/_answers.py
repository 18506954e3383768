"""Answer extraction: tags, last numbers, and whether two numbers are the same."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

_NUMBER = re.compile(
    r"(?:\$(?P<inner>[-−])|(?P<sign>(?<![\w.)\]}])[-−])?\$?)"  # a minus after a digit or a bracket subtracts
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)


def last_tag(text: str, tag: str) -> str | None:
    """Text of the last ``<tag>...</tag>``, trimmed; None if there is none."""
    start = text.rfind(f"<{tag}>", 0, text.rfind(f"</{tag}>") + 1)
    return None if start < 0 else text[start + len(tag) + 2 : text.index(f"</{tag}>", start)].strip()


def in_tag(text: str, tag: str) -> str:
    """The text in ``<tag>...</tag>``, unless it has such a tag or none is named."""
    return f"<{tag}>{text}</{tag}>" if tag and last_tag(text, tag) is None else text


def last_number(text: str) -> str | None:
    """The last number in a text, without thousands separators; None if there is none."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _plain(last[0]) if last else None


def is_number(text: str) -> bool:
    """True if the text is one number and nothing else."""
    return _NUMBER.fullmatch(text.strip()) is not None


def same_number(text: str, gold: str, tolerance: float) -> bool:
    """True if two texts as ``last_number`` gives them differ by at most ``tolerance`` times the gold (or 1)."""
    value, expected = Decimal(text), Decimal(gold)
    return abs(value - expected) <= Decimal(tolerance) * max(Decimal(1), abs(expected))


def _plain(match: re.Match[str]) -> str:
    return ("-" if match["sign"] or match["inner"] else "") + match["digits"].replace(",", "")
