"""Text of strangers, made harmless where people read it: on a terminal, in a log, as the name of a metric."""

from __future__ import annotations

MOST_NAME = 200
"""Characters of a name that a stranger gave."""


def printable(text: str) -> str:
    """A text without what a terminal would obey: control characters, also those of other scripts' directions."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def named(text: str) -> str:
    """A name that a stranger gave, of at most ``MOST_NAME`` characters."""
    return printable(text[:MOST_NAME])
