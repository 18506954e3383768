"""Long lists of numbers, checked by their bytes alone, without parsing numbers that the broker never reads.

A group on the wire is some thirty thousand numbers, which the broker keeps as they came. ``cut`` takes the lists that
hold them out of a body, so that a decoder reads the small rest, and proves by their bytes alone that each is a list of
rows of JSON's numbers, and how long its rows are. The bytes are looked at 64 at a time, a bit for each: which are
digits, which are commas, and what follows what. This covers how programs write numbers. Whatever is unusual (a space
that is a tab, an exponent above zero, an id of eight digits, a real of five before its dot) is not judged here: the
answer is None, and the typed decoder decides.

What it is for: groups of 8 x 1,024 tokens in JSON, accepted for each second of a core, against Atropos' server in the
same run (medians of three rounds on a busy machine of 2 cores): 4.5 times as many with ``cut``, 2.9 without. The goal
is 5 (``docs/reference/broker.md`` has the figures of an idle machine). Only ``cut`` does work here; the constants name
its lists.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

INTS, REALS = ("tokens", "masks"), ("inference_logprobs", "advantages", "ref_logprobs")
"""The lists that are cut out, by what their rows hold."""
STAND_INS = {name: f'["{name}"]'.encode() for name in INTS + REALS}
"""What is put where a list was."""
WHOLE_DIGITS = 4
"""Of a real before its dot: what has more may be beyond what is taken."""
MOST_ROWS = 4096
"""Rows of a list at most, each of which is found by a step of Python's."""
GAP_BYTES = 1 << 20
"""How far behind a list the next one is looked for."""

_LIST = re.compile(f'"({"|".join(STAND_INS)})": ?(?=\\[\\[)'.encode())
# Arrays without dimensions: numpy takes twice as long to begin with a scalar, which is most of what a step takes here.
_ZERO, _COMMA, _SPACE, _MINUS, _DOT, _E = (np.array(ord(sign), np.uint8) for sign in "0, -.e")
_NINE, _FULL = np.array(9, np.uint8), np.array(255, np.uint8)
_WORD = 64
_STEPS = [np.array(steps, np.uint64) for steps in range(_WORD)]
_U64, _U8 = np.dtype("<u8"), np.dtype(np.uint8)
_ONE = _STEPS[1]

Bits = npt.NDArray[np.uint64]
"""A flag for each byte of a text; the first is the lowest bit of the first word."""
Bounds = list[tuple[int, int]]
"""Where the numbers of each row begin and end in a body."""


class Cut(NamedTuple):
    """A body without its long lists."""

    rest: bytes
    """The body, with a list's stand-in where the list was, and nowhere else."""
    lists: dict[str, memoryview]
    """By name, the lists as they were sent: without doubt JSON, and of numbers."""
    rows: dict[str, list[range]]
    """By name, for each row of the list a range as long as it."""


def cut(body: bytes) -> Cut | None:
    """Take long lists of numbers out of a body.

    Nothing need be known of the body. If ``rest`` turns out to be JSON with a stand-in as the value of a key, then the
    body is JSON with the list there, since either is a whole array; a list that was found within a text, or within
    something else, leaves its stand-in there.

    Returns:
        What is left and what was found. None: a list is there twice, or written unusually, or is none of numbers.
    """
    lists = _find_lists(body)
    if lists is None:
        return None
    rows: dict[str, list[range]] = {}
    for names in (INTS, REALS):
        bounds = [row for name in names for row in lists.get(name, ())]
        lengths = _lengths(body, bounds, reals=names is REALS) if bounds else []
        if lengths is None:
            return None
        each = iter(map(range, lengths))
        rows |= {name: [next(each) for _ in lists[name]] for name in names if name in lists}
    view, place = memoryview(body), 0
    parts: list[bytes | memoryview] = []
    cut_lists: dict[str, memoryview] = {}
    for name, bounds in lists.items():
        begin, end = bounds[0][0] - 2, bounds[-1][1] + 2
        cut_lists[name] = view[begin:end]
        parts += (view[place:begin], STAND_INS[name])
        place = end
    rest = b"".join((*parts, view[place:]))
    return Cut(rest, cut_lists, rows) if all(rest.count(STAND_INS[name]) == 1 for name in lists) else None


def _find_lists(body: bytes) -> dict[str, Bounds] | None:
    """What looks like lists of rows; None if there is more about one of them than this."""
    lists: dict[str, Bounds] = {}
    place = 0
    while key := _LIST.search(body, place, place + GAP_BYTES):
        name = key[1].decode()
        bounds = None if name in lists else _bounds(body, key.end() + 1)
        if bounds is None or (name == "tokens" and body.find(b"-", bounds[0][0], bounds[-1][1]) >= 0):
            return None
        lists[name] = bounds
        place = bounds[-1][1] + 2
    return lists


def _bounds(body: bytes, opened: int) -> Bounds | None:
    """The rows of a list whose first row is opened there, if they follow each other up to the list's end."""
    bounds: Bounds = []
    while (closed := body.find(b"]", opened)) >= 0 and len(bounds) < MOST_ROWS:
        bounds.append((opened + 1, closed))
        behind = body[closed + 1 : closed + 4]
        if behind == b", [":
            opened = closed + 3
        elif behind[:2] == b",[":
            opened = closed + 2
        else:
            return bounds if behind[:1] == b"]" else None
    return None


def _lengths(body: bytes, rows: Bounds, *, reals: bool) -> list[int] | None:
    """How many numbers are in each row; None if something is no number, or written unusually.

    All rows are looked at as one text of numbers, with the same between any two. If that is what it is, then so is each
    row: a comma that was put between two rows is one between two numbers.
    """
    comma = body.find(b",", rows[0][0])
    gap = b", " if body.startswith(b" ", comma + 1) else b","
    size = sum(end - begin for begin, end in rows) + len(gap) * len(rows)
    filler = (b"1" + (gap + b"1") * _WORD)[: -size % _WORD]  # up to a whole word
    view = memoryview(body)
    codes = np.frombuffer(gap.join([*(view[begin:end] for begin, end in rows), filler]), _U8)
    commas = codes == _COMMA
    if not _are_numbers(codes, _bits(commas), spaced=len(gap) > 1, reals=reals):
        return None
    lengths, place = [], 0
    for begin, end in rows:
        lengths.append(int(np.count_nonzero(commas[place : place + end - begin])) + 1)
        place += end - begin + len(gap)
    return lengths


def _are_numbers(codes: npt.NDArray[np.uint8], comma: Bits, *, spaced: bool, reals: bool) -> bool:
    """True if a text is JSON's numbers with a comma between any two of them, or the begin of such a text.

    What may follow a byte that is no digit is looked at for each kind of them, and none may be followed by a comma, a
    dot or an e. So these follow digits, and of what else could follow one only "e-" is let pass, and nothing unknown.

    Args:
        codes: the text, a multiple of 64 bytes.
        comma: where its commas are.
        spaced: a space follows each of them.
        reals: floats within every bound for sure: with 4 digits before the dot, 30 in a row at most (of 24 and more
            it depends on where they are) and no exponent above zero; rather than ints of 7 digits at most.
    """
    digit, zero, minus = _bits((codes - _ZERO) <= _NINE), _bits(codes == _ZERO), _bits(codes == _MINUS)
    known = digit | comma
    known |= minus
    begin = _after(comma)
    bad = np.zeros(len(comma), _U64)
    if spaced:
        space = _bits(codes == _SPACE)
        known |= space
        bad |= space ^ begin
        begin = _after(begin)
    begin[0] |= _ONE
    sign = begin & minus
    begin ^= sign
    begin |= _after(sign)  # the first digit of each number
    bad |= _after(begin & zero) & digit  # 01
    minus ^= sign
    if reals:
        dot, exponent = _bits(codes == _DOT), codes == _E
        known |= dot
        whole = begin
        for _ in range(WHOLE_DIGITS):
            whole = _after(whole) & digit
            if not np.count_nonzero(whole):  # as most often after the first
                break
        bad |= whole
        parts = _after(dot)
        if np.count_nonzero(exponent):
            e = _bits(exponent)
            known |= e
            minus ^= _after(e)  # there and nowhere else
            power = _after(e, 2)
            parts |= power
            bad |= _ends(power, digit) & e  # 1e-2e-3
        begin |= parts
        bad |= _ends(parts, digit) & dot  # 1.2.3
        full = digit.view(_U8) == _FULL
        long = full[2:] & full[1:-1] & full[:-2]
    else:
        two = digit & _after(digit)
        four = two & _after(two, 2)
        long = four & _after(four, 4)
    bad |= minus
    bad |= begin & ~digit
    bad |= ~known
    return not (np.count_nonzero(bad) or np.count_nonzero(long))


def _bits(flags: npt.NDArray[np.bool_]) -> Bits:
    """Flags, a multiple of 64 of them, as bits."""
    return np.packbits(flags, None, "little").view(_U64)


def _after(bits: Bits, steps: int = 1) -> Bits:
    """Which bytes are so many steps behind those that are set."""
    moved = bits << _STEPS[steps]
    rest = moved[1:]
    rest |= bits[:-1] >> _STEPS[_WORD - steps]
    return moved


def _ends(first: Bits, digit: Bits) -> Bits:
    """The bytes behind runs of digits: adding 1 where a run begins carries through all of it.

    Args:
        first: digits from which runs are looked at.
        digit: all digits, nowhere 64 in a row.
    """
    added = first + digit
    rest = added[1:]
    rest += added[:-1] < digit[:-1]
    return added & ~digit
