"""Long lists of numbers, checked by their bytes: no object is made for a number that nobody here looks at.

A group on the wire is some thirty thousand numbers, which the broker keeps as they came. Telling that they are numbers
of the right kind, and how many, takes a few passes over the bytes; making Python objects of them takes twice the time.
This covers how programs write numbers. Whatever is unusual (a space that is a tab, an exponent above zero, an id of ten
digits) is not judged here: the answer is None, and the typed decoder decides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

INT_DIGITS = 9
"""Digits of an id at most: below 2**31 for sure."""
REAL_DIGITS = 31
"""Digits in a row at most: with no exponent above zero, such a number is finite."""

_ZERO, _NINE, _COMMA, _MINUS, _E = (np.uint8(ord(sign)) for sign in "09,-e")

Flags = npt.NDArray[np.bool_]


def rows(data: bytes, *, reals: bool, negative: bool = True) -> list[range] | None:
    """What ``list[list[int]]`` or ``list[list[float]]`` would make of a JSON value, as far as lengths go.

    Args:
        data: one value of JSON that is known to be well-formed, without whitespace around it.
        reals: finite floats rather than ints of at most ``INT_DIGITS`` digits.
        negative: whether numbers below zero are allowed; for ints.

    Returns:
        For each row a range as long as it. None: not a list of lists of numbers, or written unusually.
    """
    bounds = _bounds(data)
    if bounds is None:
        return None
    if b'"' in data or (not reals and b"." in data) or (not negative and b"-" in data):
        return None
    codes = np.frombuffer(data, np.uint8)
    words = np.count_nonzero(codes > _NINE) - 2 * len(bounds) - 2  # letters, and brackets and braces within rows
    if words and not (reals and words == _small_exponents(codes)):
        return None
    digit = (codes - _ZERO) <= _NINE - _ZERO  # what is below "0" wraps round
    if _has_run(digit, (REAL_DIGITS if reals else INT_DIGITS) + 1):
        return None
    comma = codes == _COMMA
    return [
        range(int(np.count_nonzero(comma[begin:end])) + 1 if data[begin:end].strip(b" ") else 0)
        for begin, end in bounds
    ]


def _bounds(data: bytes) -> list[tuple[int, int]] | None:
    """Where each row's numbers begin and end, if lists follow each other in a list."""
    if data[:1] != b"[":
        return None
    found: list[tuple[int, int]] = []
    place = 1
    while (opened := data.find(b"[", place)) >= 0:
        closed = data.find(b"]", opened)
        if data[place:opened].strip(b" ") != (b"," if found else b""):
            return None
        found.append((opened + 1, closed))
        place = closed + 1
    return found if data[place:].strip(b" ") == b"]" else None


def _small_exponents(codes: npt.NDArray[np.uint8]) -> int:
    """How many times ``e-`` is there."""
    return int(np.count_nonzero((codes[:-1] == _E) & (codes[1:] == _MINUS)))


def _has_run(flags: Flags, length: int) -> bool:
    """True if so many flags in a row are set: runs are doubled, then two of them are laid over each other."""
    size = 1
    while 2 * size <= length:
        flags, size = flags[:-size] & flags[size:], 2 * size
    rest = length - size
    return bool((flags[: len(flags) - rest] & flags[rest:]).any())
