"""Messages of Atropos' wire: what passes, what is refused and why, and which bytes are kept."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from brokers import ENV, RUN, group
from hypothesis import given

from tandem.broker.protocol import wire
from tandem.broker.protocol.lenient import Malformed
from tandem.broker.protocol.messages import FIELDS, EnvRegistration, RunParameters, ScoredGroup

FULL = group(
    2,
    advantages=[[0.0, 1.0, 1.5]] * 2,
    ref_logprobs=[[-1.0, -2, -0.5]] * 2,
    messages=[[{"role": "user", "content": "é", "name": "x"}, {"role": "assistant", "content": [{"type": "text"}]}]]
    * 2,
    generation_params={"temperature": 1.0},
    inference_logprobs=[[1.0, -0.1, -1e-7]] * 2,
    overrides=[{}, {"set_advantage_to_zero": True}],
    group_overrides={"group_size": 2, "tandem_version": 3},
    images=["data:", None],
    env_id=0,
    distill_token_ids=[[[], [1], [2, 3]]] * 2,
    distill_logprobs=[[[], [-0.5], [-1.0, -2.0]]] * 2,
)
ENCODINGS: tuple[wire.Encoding, ...] = ("json", "msgpack")


def encoded(value: Any, encoding: wire.Encoding) -> bytes:
    return json.dumps(value).encode() if encoding == "json" else msgspec.msgpack.encode(value)


def decoded(body: bytes, encoding: wire.Encoding) -> Any:
    return json.loads(body) if encoding == "json" else msgspec.msgpack.decode(body)


def problem(value: Any, encoding: wire.Encoding = "json") -> str:
    with pytest.raises(Malformed) as caught:
        wire.read_group(value if isinstance(value, bytes) else encoded(value, encoding), encoding)
    return str(caught.value)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("sent", [FULL, group(), group(1, advantages=[], group_overrides={}, messages=None)])
def test_a_group_comes_back_as_sent_with_14_keys(sent: dict[str, Any], encoding: wire.Encoding) -> None:
    parsed = wire.read_group(encoded(sent, encoding), encoding)
    assert decoded(parsed.payload, encoding) == dict.fromkeys(FIELDS) | sent
    assert len(FIELDS) == 14
    assert wire.encoding_of(parsed.payload) == encoding
    assert parsed.size == len(sent["tokens"])
    for other in ENCODINGS:
        assert decoded(wire.recode(parsed.payload, other), other) == dict.fromkeys(FIELDS) | sent


def test_values_stay_byte_for_byte() -> None:
    body = b' {"tokens": [[1,2]], "masks":[[-100, 2]],"scores":[1e0],"inference_logprobs":[[1.0,-0.10]]}\n'
    payload = wire.read_group(body).payload
    for part in (b'"scores":[1e0]', b"[[1.0,-0.10]]", b"[[-100, 2]]"):
        assert part in payload
    assert list(json.loads(payload)) != []


def test_a_long_messagepack_map_is_completed() -> None:
    body = b"\xdf\x00\x00\x00\x03" + encoded(group(1), "msgpack")[1:]
    assert decoded(wire.read_group(body, "msgpack").payload, "msgpack") == dict.fromkeys(FIELDS) | group(1)
    full = b"\xde\x00\x0e" + encoded(dict.fromkeys(FIELDS) | group(1), "msgpack")[1:]
    assert decoded(wire.read_group(full, "msgpack").payload, "msgpack") == dict.fromkeys(FIELDS) | group(1)


def test_numbers_are_coerced_and_unknown_fields_ignored() -> None:
    sent = group(1, tokens=[["5", 1.0, True]], scores=["0.5"], env_id="7", later={"a": 1}, masks=[[-100, 1, 1]])
    parsed = wire.read_group(encoded(sent, "json"))
    assert wire.read(parsed.payload, ScoredGroup).tokens == [[5, 1, 1]]
    assert wire.read(parsed.payload, ScoredGroup).scores == [0.5]
    kept = json.loads(parsed.payload)
    assert (kept["env_id"], kept["tokens"], set(kept)) == (7, [[5, 1, 1]], set(FIELDS))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_unknown_field_is_ignored_however_bad(encoding: wire.Encoding) -> None:
    sent = encoded(group(1), encoding)
    if encoding == "json":
        body = sent[:-1] + b',"x":"\xff"}'
        assert json.loads(wire.read_group(body).payload) == dict.fromkeys(FIELDS) | group(1)
    else:
        body = b"\x84" + sent[1:] + b"\xa1x\xa1\xff"
        assert decoded(wire.read_group(body, encoding).payload, encoding) == dict.fromkeys(FIELDS) | group(1)


def test_one_advantage_for_each_sequence_is_spread_over_its_tokens() -> None:
    parsed = wire.read_group(encoded(group(2, advantages=[1, -0.5]), "json"))
    assert json.loads(parsed.payload)["advantages"] == [[1.0] * 3, [-0.5] * 3]
    assert "advantages.0" in problem(group(2, advantages=[1]))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("no sequence", group(0), "at least one sequence"),
    ("no token", group(1, tokens=[[]], masks=[[]]), "at least one token"),
    ("masks few", group(2, masks=[[-100, 1, 2]]), "1 entries for 2 sequences"),
    ("masks short", group(2, masks=[[-100, 1, 2], [-100, 1]]), "masks.1: Value error, 2 entries for 3 tokens"),
    ("scores few", group(2, scores=[1.0]), "scores: Value error, 1 entries for 2 sequences"),
    ("scores many", group(1, scores=[1.0, 2.0]), "scores"),
    ("logprobs short", group(1, inference_logprobs=[[1.0]]), "inference_logprobs.0"),
    ("logprobs few", group(2, inference_logprobs=[[1.0] * 3]), "inference_logprobs"),
    ("advantages short", group(1, advantages=[[1.0]]), "advantages.0"),
    ("ref short", group(1, ref_logprobs=[[1.0]]), "ref_logprobs.0"),
    ("messages few", group(2, messages=[[]]), "messages"),
    ("messages int", group(1, messages=5), "messages: Input should be a valid list"),
    ("no content", group(1, messages=[[{"role": "user"}]]), "'role' and 'content'"),
    ("overrides few", group(2, overrides=[{}]), "overrides"),
    ("distill short", group(1, distill_token_ids=[[[]]]), "distill_token_ids.0"),
    ("distill apart", group(1, distill_token_ids=[[[1], [], []]], distill_logprobs=[[[], [], []]]), "distill_logprobs"),
    ("negative token", group(1, tokens=[[-1, 1, 2]]), "tokens.0.0: Input should be greater than or equal to 0"),
    ("huge token", group(1, tokens=[[2**31, 1, 2]]), "tokens.0.0: Input should be less than"),
    ("enormous token", group(1, tokens=[[10**300, 1, 2]]), "tokens.0.0"),
    ("half token", group(1, tokens=[[1.5, 1, 2]]), "fractional part"),
    ("negative env", group(1, env_id=-1), "env_id: Input should be greater than or equal to 0"),
    ("null tokens", group(1, tokens=None), "tokens: Input should be a valid list"),
    ("null score", group(1, scores=[None]), "scores.0"),
    ("word score", group(1, scores=["nan"]), "scores.0: Input should be a finite number"),
    ("huge score", group(1, scores=[10**400]), "scores.0"),
    ("big int inside", group(1, images=[10**400]), "images.0"),
    ("version", group(1, group_overrides={"tandem_version": -1}), "tandem_version"),
    ("version text", group(1, group_overrides={"tandem_version": "3"}), "tandem_version"),
    *(
        (
            f"version {step}",
            group(1, group_overrides={"tandem_version": step}),
            "a step is an int from 0 to below 2**53",
        )
        for step in (2**53, 2**63 - 1, 2**63, 2**64 - 1)
    ),
    ("1e200", group(1, scores=[1e200]), "scores.0: Input should be less than or equal to 1000000000000"),
    ("beyond float32", group(1, scores=[-1e39]), "scores.0: Input should be greater than or equal to"),
    ("logprob", group(1, inference_logprobs=[[1.0, -1e39, 0.0]]), "inference_logprobs.0.1: Input should be greater"),
    ("advantage", group(1, advantages=[[1.0, 1e39, 0.0]]), "advantages.0.1: Input should be less"),
    ("versions", group(1, group_overrides={"tandem_versions": [[[0, 10**12]]]}), "runs of [step, tokens] within 3"),
    ("more versions", group(1, group_overrides={"tandem_versions": [[[0, 1]] * 4]}), "runs of [step, tokens] within 3"),
    ("step", group(1, group_overrides={"tandem_versions": [[[2**53, 3]]]}), "runs of [step, tokens] within 3"),
    ("list overrides", group(1, group_overrides=[1]), "group_overrides: Input should be a valid dictionary"),
]


@pytest.mark.parametrize(("sent", "why"), [(sent, why) for _, sent, why in WRONG], ids=[name for name, _, _ in WRONG])
def test_what_is_wrong_is_said(sent: dict[str, Any], why: str) -> None:
    assert why in problem(sent)
    try:
        body = msgspec.msgpack.encode(sent)
    except OverflowError:
        return  # MessagePack cannot even say it
    assert why in problem(body, "msgpack")


def test_long_lists_have_the_bounds_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the numbers are judged by their bytes."""
    monkeypatch.setattr(wire, "SKIM_BYTES", 0)
    for name, number in (("inference_logprobs", -1e39), ("inference_logprobs", -10001.5), ("advantages", 1e30)):
        long = group(1, tokens=[[1] * 9000], masks=[[1] * 9000])
        assert f"{name}.0.7: Input should be" in problem({**long, name: [[0.5] * 7 + [number] + [0.5] * 8992]})
    assert wire.read_group(encoded(group(1, inference_logprobs=[[1.0, -9999.0, 0.0]]), "json")).size == 1


def test_what_was_taken_under_other_bounds_is_given_out_as_it_is() -> None:
    stored = encoded(dict.fromkeys(FIELDS) | group(1, scores=[1e200]), "json")
    assert decoded(wire.recode(stored, "msgpack"), "msgpack")["scores"] == [1e200]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs", "images"])
def test_no_number_that_is_not_finite(number: str, field: str) -> None:
    value = f"[[{number},0,0]]" if field == "inference_logprobs" else f"[{number}]"
    body = json.dumps(group(1)).replace(
        '"scores": [0.0]', f'"{field}": {value}' if field == "scores" else '"scores": [0]'
    )
    if field != "scores":
        body = body[:-1] + f', "{field}": {value}}}'
    problem(body.encode())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_such_number_in_messagepack(number: float) -> None:
    for sent in (
        group(1, scores=[number]),
        group(1, inference_logprobs=[[number, 0.0, 0.0]]),
        group(1, images={"a": [number]}),
        group(1, messages=[[{"role": "user", "content": number}]]),
    ):
        assert "finite" in problem(sent, "msgpack")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\x00",
        b"[" * 100_000,
        b'{"tokens":' + b"[" * 100_000,
        b'{"x":' * 50_000,
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"images":"\xff"}',
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"images":"\\ud800"}',
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0]} {}',
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"images":' + b"[" * 65 + b"1" + b"]" * 65 + b"}",
    ],
)
def test_bodies_that_are_none(body: bytes) -> None:
    problem(body)


@pytest.mark.parametrize("value", [b"raw", msgspec.msgpack.Ext(5, b"x"), {1: 2}, {"a": b"raw"}])
def test_what_only_messagepack_can_say_is_refused(value: Any) -> None:
    assert "images" in problem(group(1, images=value), "msgpack")


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\xa6tokens\xdd\xff\xff\xff\xff"]
)
def test_broken_messagepack(body: bytes) -> None:
    problem(body, "msgpack")


def test_nesting_that_any_reader_can_follow_is_taken() -> None:
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    wire.read_group(encoded(group(1, images=deep), "json"))


def test_a_list_is_taken_whole_or_not_at_all() -> None:
    assert [one.size for one in wire.read_groups(encoded([group(1), group(3)], "json"))] == [1, 3]
    assert wire.read_groups(b"[]") == []
    with pytest.raises(Malformed, match=r"body\.1\.masks: Field required"):
        wire.read_groups(encoded([group(1), {"tokens": [[1]], "scores": [1]}], "json"))
    with pytest.raises(Malformed, match="valid list"):
        wire.read_groups(encoded(group(1), "json"))
    with pytest.raises(Malformed, match="at most 2"):
        wire.read_groups(encoded([group(1)] * 3, "json"), most=2)
    with pytest.raises(Malformed, match="valid dictionary"):
        wire.read_group(encoded([group(1)], "json"))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("lease", [None, {"batch": "b", "versions": [1, None]}])
def test_batches(encoding: wire.Encoding, lease: Any) -> None:
    payloads = [wire.read_group(encoded(one, encoding), encoding).payload for one in (FULL, group(3))]
    batch = decoded(wire.write_batch(payloads, encoding, lease), encoding)
    assert batch.pop("tandem", None) == lease
    assert batch == {"batch": [dict.fromkeys(FIELDS) | one for one in (FULL, group(3))]}
    assert decoded(wire.write_batch(None, encoding), encoding) == {"batch": None}


def test_versions() -> None:
    assert wire.read_group(encoded(FULL, "json")).version == 3
    assert wire.read_group(encoded(group(), "json")).version is None


@pytest.mark.parametrize(
    ("kind", "good", "change", "why"),
    [
        (EnvRegistration, ENV, {"group_size": 0}, "group_size: Input should be greater than or equal to 1"),
        (EnvRegistration, ENV, {"min_batch_allocation": 5}, "min_batch_allocation"),
        (EnvRegistration, ENV, {"min_batch_allocation": -1}, "min_batch_allocation"),
        (EnvRegistration, ENV, {"weight": -0.5}, "weight"),
        (EnvRegistration, ENV, {"weight": None}, "weight: Input should be a valid number"),
        (EnvRegistration, ENV, {"desired_name": None}, "desired_name: Input should be a valid string"),
        (EnvRegistration, ENV, {"desired_name": "x" * 5000}, "at most 4096"),
        (EnvRegistration, ENV, {"max_token_length": 10**30}, "max_token_length"),
        (RunParameters, RUN, {"batch_size": 0}, "batch_size"),
        (RunParameters, RUN, {"batch_size": 1.5}, "fractional"),
        (RunParameters, RUN, {"wandb_project": None}, "wandb_project"),
        (RunParameters, RUN, {"starting_step": "x"}, "unable to parse"),
    ],
)
def test_registrations(kind: Any, good: dict[str, Any], change: dict[str, Any], why: str) -> None:
    wire.read(encoded(good, "json"), kind)
    with pytest.raises(Malformed, match=why):
        wire.read(encoded(good | change, "json"), kind)


@pytest.mark.parametrize("given_as", [8, "8", 8.0, "8.0"])
def test_registrations_are_coerced(given_as: Any) -> None:
    parameters = wire.read(encoded(RUN | {"batch_size": given_as, "num_steps": True, "more": 1}, "json"), RunParameters)
    assert (parameters.batch_size, parameters.num_steps) == (8, 1)


def test_every_missing_field_is_named_and_of_a_list_the_first_problem() -> None:
    with pytest.raises(Malformed) as caught:
        wire.read(b"{}", RunParameters)
    assert len(caught.value.problems) == 8
    with pytest.raises(Malformed) as caught:
        wire.read_group(encoded(group(1, scores=["x"] * 1000), "json"))
    assert [one.loc for one in caught.value.problems] == [["body", "scores", 0]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, VALUES)), st.sampled_from(ENCODINGS))
def test_anything_is_taken_or_refused(change: dict[str, Any], encoding: wire.Encoding) -> None:
    try:
        body = encoded(group(1) | change, encoding)
    except OverflowError:
        return
    try:
        parsed = wire.read_group(body, encoding)
    except Malformed as error:
        wire.write({"detail": error.problems})  # the answer can be sent
        return
    for other in ENCODINGS:  # whatever was taken can be served to everybody
        json_or_not = decoded(wire.recode(parsed.payload, other), other)
        assert set(json_or_not) == set(FIELDS)
        assert all(math.isfinite(score) for score in json_or_not["scores"])
