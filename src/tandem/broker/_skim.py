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

_FULL = np.uint64(0x0101010101010101)  # eight flags that are set

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
    signs = codes > _NINE
    words = np.count_nonzero(signs) - 2 * len(bounds) - 2  # letters, and brackets and braces within rows
    if words and not (reals and words == _small_exponents(codes, signs)):
        return None
    digit = (codes - _ZERO) <= _NINE - _ZERO  # what is below "0" wraps round
    if reals:
        if _has_full_words(digit) and _has_run(digit, REAL_DIGITS + 1):
            return None
    elif _has_run(digit, INT_DIGITS + 1):
        return None
    comma = codes == _COMMA
    counts = [int(np.count_nonzero(comma[begin:end])) for begin, end in bounds]
    return [
        range(count + 1 if count or data[begin:end].strip(b" ") else 0)
        for count, (begin, end) in zip(counts, bounds, strict=True)
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


def _small_exponents(codes: npt.NDArray[np.uint8], signs: Flags) -> int:
    """How many times ``e-`` is there, looked for where ``signs`` are, of which the last ends the value."""
    places = np.flatnonzero(signs)[:-1]
    return int(np.count_nonzero((codes[places] == _E) & (codes[places + 1] == _MINUS)))


def _has_full_words(flags: Flags) -> bool:
    """False if no 31 flags in a row are set: of those three words of eight flags would be full, side by side."""
    full = flags[: flags.size // 8 * 8].view(np.uint64) == _FULL
    return bool((full[:-2] & full[1:-1] & full[2:]).any())


def _has_run(flags: Flags, length: int) -> bool:
    """True if so many flags in a row are set: runs are doubled, then two of them are laid over each other."""
    size = 1
    while 2 * size <= length:
        flags, size = flags[:-size] & flags[size:], 2 * size
    rest = length - size
    return bool((flags[: len(flags) - rest] & flags[rest:]).any())
