"""Lists of numbers checked by their bytes: the verdict and what is kept are those of the typed decoder, always."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from brokers import group
from hypothesis import example, given

from tandem.broker import wire
from tandem.broker._lax import Malformed
from tandem.broker._skim import rows

NUMBERS = (
    *("0", "7", "-1", "-0", "-100", "1.0", "-0.25", "1e-5", "1.5e-07", "1e5", "1E-5", "1e+5", "1e400", "-1e400"),
    *("1e-400", "9" * 9, "9" * 10, "2147483647", "2147483648", "-2147483648", "-2147483649", "9" * 31, "9" * 400),
    *("0." + "3" * 31, "0." + "3" * 400, "true", "null", '"1"', '"]"', "[]", "[1]", "{}", "", "01", "1.", "-", "NaN"),
    *("Infinity", "1 2", "é", "\t1", " 1 ", "\n1", "e-5", "1e-", '"e-"', "1.2.3", "\x00"),
)
PLAIN = ("0", "7", "151643", "1.0", "-0.25", "1.5e-07", "-100", "9" * 9)
GAPS = ("", " ", "  ", "\t", "\n ")
HEAVY = ("tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs")


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SKIM_BYTES", 0)


def verdict(read: Any, body: bytes) -> Any:
    """All that can be seen of a reading: what is wrong, or what is kept and known."""
    try:
        found = read(body)
    except Malformed as error:
        return error.problems
    return found.size, found.env_id, found.version, json.loads(found.payload)


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


@st.composite
def bodies(draw: Any) -> bytes:
    """Groups of two sequences, of which some lists are others, some keys come twice and some bytes are broken."""
    fields = {name: json.dumps(value) for name, value in group(2).items()}
    pairs = list(fields.items())
    for name in draw(st.lists(st.sampled_from(HEAVY), max_size=3)):
        pairs.append((name, draw(list_of_rows(PLAIN) | list_of_rows(NUMBERS) | st.sampled_from(("null", "[]", "5")))))
    pairs += draw(st.lists(st.tuples(st.sampled_from(("unknown", "env_id", "scores")), st.sampled_from(NUMBERS))))[:2]
    unique = draw(st.booleans())
    space = draw(st.sampled_from(("", " ")))
    text = ("," + space).join(f'"{name}":{space}{value}' for name, value in (dict(pairs).items() if unique else pairs))
    body = bytearray(f"{{{text}}}".encode())
    for _ in range(draw(st.integers(0, 1))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.sampled_from(b'0123456789-+.eE,[]{}" \t\xff'))
    return bytes(body)


@given(bodies())
@example(b'{"tokens":"x","tokens":[[1]],"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"group_overrides":{"tandem_version":3},"x":"\xff"}')
@example(b'{"tokens":[[1,[2]]],"masks":[[1,2]],"scores":[1]}')
@example(b'{"tokens":[[1]]],"masks":[[1]],"scores":[1]}')
@example(b'{"tokens":[["1],[2"]],"masks":[[1],[1]],"scores":[1,2]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[["e-"]]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[[1e-1e5]]}')
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[[1e999]]}')
def test_the_verdict_is_that_of_the_typed_decoder(body: bytes) -> None:
    same(body)


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
        found = wire.read_group(json.dumps(sent, separators=separators).encode())
        assert (found.size, found.env_id, found.version) == (2, 4, None)
        assert json.loads(found.payload) == dict.fromkeys(wire.FIELDS) | {k: v for k, v in sent.items() if k != "later"}


def test_small_groups_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SKIM_BYTES", 1000)
    monkeypatch.setattr(wire, "_skimmed", None)
    small, large = group(2), group(2, images="x" * 1000)
    assert wire.read_group(json.dumps(small).encode()).size == 2
    with pytest.raises(TypeError):
        wire.read_group(json.dumps(large).encode())


@pytest.mark.parametrize(
    ("data", "reals", "lengths"),
    [
        ("[]", False, []),
        ("[[]]", False, [0]),
        ("[[ ]]", False, [0]),
        ("[[1,2],[],[3]]", False, [2, 0, 1]),
        ("[ [1, 2] , [3] ]", False, [2, 1]),
        ("[[-1.5e-05,2],[1]]", True, [2, 1]),
        ("[[1.5]]", False, None),
        ("[[1e5]]", True, None),
        ("[[1e-5,1e5]]", True, None),
        ("[[1],2]", False, None),
        ("[1,[2]]", False, None),
        ("[[1],null]", False, None),
        ("[[[1]]]", False, None),
        ("[[true]]", True, None),
        ("[[" + "1" * 9 + "]]", False, [1]),
        ("[[" + "1" * 10 + "]]", False, None),
        ("[[0." + "1" * 31 + "]]", True, [1]),
        ("[[" + "1" * 32 + "]]", True, None),
        ("null", False, None),
        ('"[[1]]"', False, None),
    ],
)
def test_rows(data: str, reals: bool, lengths: list[int] | None) -> None:
    found = rows(data.encode(), reals=reals)
    assert (found if found is None else list(map(len, found))) == lengths
