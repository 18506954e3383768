"""Lists of numbers checked by their bytes: the verdict and what is kept are those of the typed decoder, always."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import hypothesis.strategies as st
import pytest
from brokers import group
from hypothesis import example, given
from tiers import long_but

from tandem.broker.protocol import wire
from tandem.broker.protocol.lenient import Malformed
from tandem.broker.protocol.messages import FIELDS
from tandem.broker.protocol.skim import INTS, MOST_ROWS, REALS, STAND_INS, Cut, cut

NUMBERS = (
    *("0", "7", "-1", "-0", "-100", "1.0", "-0.25", "1e-5", "1.5e-07", "1e5", "1E-5", "1e+5", "1e400", "-1e400"),
    *("1e-400", "9" * 9, "9" * 10, "2147483647", "2147483648", "-2147483648", "-2147483649", "9" * 31, "9" * 400),
    *("0." + "3" * 31, "0." + "3" * 400, "true", "null", '"1"', '"]"', "[]", "[1]", "{}", "", "01", "1.", "-", "NaN"),
    *("Infinity", "1 2", "é", "\t1", " 1 ", "\n1", "e-5", "1e-", '"e-"', "1.2.3", "\x00"),
)
PLAIN = ("0", "7", "151643", "1.0", "-0.25", "1.5e-07", "-100", "9" * 9)
GAPS = ("", " ", "  ", "\t", "\n ")
HEAVY = INTS + REALS


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SKIM_BYTES", 0)


def verdict(read: Any, body: bytes) -> Any:
    """All that can be seen of a reading: what is wrong, or what is kept and known."""
    try:
        parsed = read(body)
    except Malformed as error:
        return error.problems
    return parsed.size, parsed.env_id, parsed.version, json.loads(parsed.payload)


def same(body: bytes) -> None:
    assert verdict(wire.read_group, body) == verdict(lambda sent: wire._read_group(sent, "json"), body)


@st.composite
def list_of_rows(draw: Any, numbers: tuple[str, ...]) -> str:
    number, gap = st.sampled_from(numbers), st.sampled_from(GAPS if numbers is NUMBERS else ("", " "))
    made = []
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.lists(number, min_size=3, max_size=3) | st.lists(number, max_size=4))
        made.append(f"{draw(gap)}[{draw(gap)}{(',' + draw(gap)).join(row)}{draw(gap)}]{draw(gap)}")
    return f"[{','.join(made)}{draw(gap)}]"


DECOYS = (
    '"\\"tokens\\": [[1]]"',
    '"tokens\\": [[1]]"',
    '{"tokens": [[1, 2]]}',
    '[{"masks":[[7]]}, {"inference_logprobs": [[0.5]]}]',
    '["tokens"]',
    '"[\\"masks\\"]"',
    '{"a":[["masks"]],"masks":["tokens"]}',
    "[[1,2],[3]]",
    '"\\ud83d"',
    '"\\u00e9\\n"',
)
"""Values that look like what is cut out, or like what is put there instead."""
NAMES = ("unknown", "env_id", "scores", "messages", "images", "group_overrides", "generation_params")
ESCAPED = {"tokens": "\\u0074okens", "masks": "mas\\u006bs", "scores": "\\u0073cores"}
BYTES = b'0123456789-+.eE,[]{}":\\ \t\xff'


@st.composite
def bodies(draw: Any) -> bytes:
    """Groups of two sequences, of which some lists are others, some keys come twice and some bytes are broken."""
    fields = {name: json.dumps(value) for name, value in group(2).items()}
    pairs = list(fields.items())
    for name in draw(st.lists(st.sampled_from(HEAVY), max_size=3)):
        pairs.append((name, draw(list_of_rows(PLAIN) | list_of_rows(NUMBERS) | st.sampled_from(("null", "[]", "5")))))
    others = st.tuples(st.sampled_from(NAMES + HEAVY), st.sampled_from(NUMBERS + DECOYS * 4))
    pairs += draw(st.lists(others, max_size=2))
    if draw(st.booleans()):
        pairs = list(dict(pairs).items())
    pairs = draw(st.permutations(pairs)) if draw(st.booleans()) else pairs
    if draw(st.integers(0, 3)) == 0:
        pairs = [(ESCAPED.get(name, name), value) for name, value in pairs]
    space = draw(st.sampled_from(("", " ")))
    text = ("," + space).join(f'"{name}":{space}{value}' for name, value in pairs)
    body = bytearray(f"{{{text}}}".encode())
    for _ in range(draw(st.integers(0, 2))):
        place, new = draw(st.integers(0, len(body) - 1)), draw(st.sampled_from(BYTES))
        body[place : place + draw(st.integers(0, 1))] = bytes([new])[: draw(st.integers(0, 1))]
    return bytes(body)


@pytest.mark.slow
@given(bodies())
@example(b'{"tokens":"x","tokens":[[1]],"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"group_overrides":{"tandem_version":3},"x":"\xff"}')
@example(b'{"tokens":[[1,[2]]],"masks":[[1,2]],"scores":[1]}')
@example(b'{"tokens":[[1]]],"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[["1],[2"]],"masks":[[1],[1]],"scores":[1,2]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[["e-"]]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[[1e-1e5]]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[[1e999]]}')
@example(b'{"images":"\\"tokens\\": [[9]]","tokens": [[1]],"masks":[[1]],"scores":[1]}')
@example(b'{"images":{"tokens":[[9]]},"tokens":["tokens"],"masks":[[1]],"scores":[1]}')
@example(b'{"images":{"tokens":[[9]]},"\\u0074okens":["tokens"],"masks":[[1]],"scores":[1]}')
@example(b'{"images":["tokens"],"tokens":[[1]],"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"\\u0074okens":[[1],[2]]}')
@example(b'{"\\u0074okens":[["x"]],"tokens":[[1]],"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[[1]]x,"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"group_overrides":{"inference_logprobs":[[1]]}}')
def test_the_verdict_is_that_of_the_typed_decoder(body: bytes) -> None:
    same(body)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_in_every_list(name: str, number: str) -> None:
    sent = {key: json.dumps(value) for key, value in group(2).items()} | {name: f"[[1,1,1],[1,{number},1]]"}
    pairs = ",".join(f'"{key}":{value}' for key, value in sent.items())
    same(f"{{{pairs}}}".encode())


def test_what_programs_write_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all this would be for nothing."""
    monkeypatch.setattr(wire, "_read_group", None)
    logprobs = [[1.0, -1e-7, -12.5]] * 2
    sent = group(2, inference_logprobs=logprobs, advantages=[], ref_logprobs=None, env_id=4, later=1)
    for separators in ((",", ":"), (", ", ": ")):
        parsed = wire.read_group(json.dumps(sent, separators=separators).encode())
        assert (parsed.size, parsed.env_id, parsed.version) == (2, 4, None)
        assert json.loads(parsed.payload) == dict.fromkeys(FIELDS) | {k: v for k, v in sent.items() if k != "later"}


def test_small_groups_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SKIM_BYTES", 1000)
    monkeypatch.setattr(wire, "_skimmed", None)
    small, large = group(2), group(2, images="x" * 1000)
    assert wire.read_group(json.dumps(small).encode()).size == 2
    with pytest.raises(TypeError):
        wire.read_group(json.dumps(large).encode())


def test_a_list_that_only_looks_like_the_field_is_not_taken_for_it() -> None:
    """What stands where a list was may be found in another place than the field's own: then it is not its list."""
    rest = '"masks":[[1]],"scores":[1]}'
    for decoy in ('"images":{"tokens":[[1]]}', '"images":"\\"tokens\\": [[1]]"', '"x\\"tokens": [[1]]'):
        for own in ('"tokens":["tokens"]', '"\\u0074okens":["tokens"]', '"tokens":"x"'):
            assert wire._skimmed(f"{{{decoy},{own},{rest}".encode()) is None
            assert wire._skimmed(f"{{{own},{decoy},{rest}".encode()) is None


def listed(numbers: str, name: str = "tokens") -> Cut | None:
    """What is cut out of a body with one list, of which one row has these numbers."""
    return cut(f'{{"{name}":[[{numbers}]]}}'.encode())


NUMBER = {
    "tokens": r"0|[1-9][0-9]*",
    "masks": r"-?(0|[1-9][0-9]*)",
    "inference_logprobs": r"-?(0|[1-9][0-9]{0,3})(\.[0-9]+)?(e-[0-9]+)?",
}
"""What JSON has for numbers, less an exponent without a minus, and reals from 10,000 on."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokens", "masks", "inference_logprobs"])
def test_every_short_text_is_a_number_or_none(name: str) -> None:
    """Of up to five bytes, in the middle of a row, at places that differ: each word of 64 bytes is looked at alike."""
    texts = ["".join(one) for size in range(6) for one in itertools.product("01-.e", repeat=size)]
    for place, text in enumerate(texts):
        before = "7" * (place % 4 + 1) + ",12" * (place % 23)
        is_number = re.fullmatch(NUMBER[name], text) is not None
        assert (listed(f"{before},{text},3", name) is not None) == is_number, text


@pytest.mark.slow
@pytest.mark.parametrize("gap", [",", ", "])
def test_what_is_no_number_is_found_at_every_place(gap: str) -> None:
    fine = {
        "tokens": ("0", "1234567"),
        "inference_logprobs": ("-0", "9999." + "1" * 18, "-1.5e-05", "0." + "1" * 22, "1e-0007"),
    }
    for place in range(1, 140):
        before = gap.join(["1"] * (place // (len(gap) + 1)) + ["1" * (1 + place % (len(gap) + 1))])
        for name, numbers in fine.items():
            for text in numbers:
                pieces = listed(before + gap + text, name)
                assert pieces is not None
                assert len(pieces.rows[name][0]) == before.count(",") + 2
        for text in ("01", "12345678", "-1", "1.5", "", "1 2", "1,", "  1", "1 ", "[1]", "x"):
            assert listed(before + gap + text, "tokens") is None
        for text in (
            "-01",
            "00.5",
            "1.2.3",
            "1.23456789012345678.9",
            "1e-5.5",
            "1e-5e-5",
            "12345",
            "-12345.5",
            "0." + "1" * 31,
            "1e5",
            "1e-",
            "--1",
        ):
            assert listed(before + gap + text + gap + "1", "inference_logprobs") is None


@pytest.mark.slow
@pytest.mark.parametrize("separators", long_but([(",", ":"), (", ", ": ")], (",", ":")))
def test_every_byte_that_is_lost_or_changed_is_judged_alike(separators: tuple[str, str]) -> None:
    """A group in which each byte in turn goes, comes twice or becomes another, over the ends of words of 64 bytes."""
    dice = random.Random(5)
    tokens = [[dice.randrange(10 ** dice.randint(1, 7)) for _ in range(9)] for _ in range(2)]
    logprobs = [[dice.choice((1.0, -dice.random(), -1e-5, -2.5e-7, 0.0, 3)) for _ in row] for row in tokens]
    masks = [[-100, -100, *row[2:]] for row in tokens]
    sent = group(2, tokens=tokens, masks=masks, inference_logprobs=logprobs)
    body = json.dumps(sent, separators=separators).encode()
    assert wire._skimmed(body) is not None
    for place in range(len(body)):
        same(body[:place] + body[place + 1 :])
        same(body[:place] + body[place : place + 1] * 2 + body[place + 1 :])
        for other in b"05-.e, ]":
            same(body[:place] + bytes([other]) + body[place + 1 :])


def test_a_list_that_is_there_twice_is_left_to_the_decoder() -> None:
    assert cut(b'{"tokens":[[1]],"masks":[[1]],"tokens":[[1]]}') is None


def test_rows_that_are_very_many_are_decoded() -> None:
    few, many = ('{"tokens":[' + ",".join(["[1]"] * rows) + "]}" for rows in (MOST_ROWS, MOST_ROWS + 1))
    pieces = cut(few.encode())
    assert pieces is not None
    assert len(pieces.rows["tokens"]) == MOST_ROWS
    assert cut(many.encode()) is None


@pytest.mark.parametrize(
    ("data", "name", "lengths"),
    [
        ("[[1,2],[7],[3]]", "tokens", [2, 1, 1]),
        ("[[1, 2], [3]]", "masks", [2, 1]),
        ("[[-1.5e-05,2],[1]]", "advantages", [2, 1]),
        ("[[-100,5],[-1,-0]]", "masks", [2, 2]),
        ("[[-100,5]]", "tokens", None),
        ("[[1.5]]", "masks", None),
        ("[[1e-5,1e5]]", "ref_logprobs", None),
        ("[[1E-5]]", "ref_logprobs", None),
        ("[[]]", "tokens", None),
        ("[[1],[]]", "tokens", None),
        ("[[1],2]", "tokens", None),
        ("[[1],[2]", "tokens", None),
        ("[[1],null]", "tokens", None),
        ("[[[1]]]", "tokens", None),
        ("[[1, 2],[3]]", "tokens", [2, 1]),
        ("[[1, 2],[3,4]]", "tokens", None),
        ("[[1,\t2]]", "tokens", None),
        ("[[true]]", "ref_logprobs", None),
    ],
)
def test_cut(data: str, name: str, lengths: list[int] | None) -> None:
    pieces = cut(f'{{"a":1,"{name}":{data},"b":2}}'.encode())
    if lengths is None:
        assert pieces is None
        return
    assert pieces is not None
    assert [len(row) for row in pieces.rows[name]] == lengths
    assert bytes(pieces.lists[name]) == data.encode()
    assert pieces.rest == b'{"a":1,"%s":%s,"b":2}' % (name.encode(), STAND_INS[name])
