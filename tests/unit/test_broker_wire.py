"""Messages of Atropos' wire: what passes, what is refused and why, and which bytes are kept."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.brokers import ENV, RUN, group

from tandem_broker.protocol import submission, wire
from tandem_broker.protocol.messages import FIELDS, EnvRegistration, RunParameters, ScoredGroup
from tandem_broker.protocol.submission import read_group
from tandem_broker.protocol.wire import Malformed

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


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def problem(value: Any) -> str:
    with pytest.raises(Malformed) as caught:
        read_group(value if isinstance(value, bytes) else encoded(value))
    return str(caught.value)


@pytest.mark.parametrize("sent", [FULL, group(), group(1, advantages=[], group_overrides={}, messages=None)])
def test_a_group_comes_back_as_sent_with_14_keys(sent: dict[str, Any]) -> None:
    parsed = read_group(encoded(sent))
    assert json.loads(parsed.payload) == dict.fromkeys(FIELDS) | sent
    assert len(FIELDS) == 14
    assert parsed.size == len(sent["tokens"])


def test_numbers_are_coerced_and_unknown_fields_ignored() -> None:
    sent = group(1, tokens=[["5", 1.0, 1]], scores=["0.5"], env_id="7", later={"a": 1}, masks=[[-100, 1, 1]])
    parsed = read_group(encoded(sent))
    assert wire.read(parsed.payload, ScoredGroup).tokens == [[5, 1, 1]]
    assert wire.read(parsed.payload, ScoredGroup).scores == [0.5]
    kept = json.loads(parsed.payload)
    assert (kept["env_id"], kept["tokens"], set(kept)) == (7, [[5, 1, 1]], set(FIELDS))


def test_one_advantage_for_each_sequence_is_spread_over_its_tokens() -> None:
    parsed = read_group(encoded(group(2, advantages=[1, -0.5])))
    assert json.loads(parsed.payload)["advantages"] == [[1.0] * 3, [-0.5] * 3]
    assert "1 entries for 2 sequences" in problem(group(2, advantages=[1]))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("no sequence", group(0), "a group needs a sequence"),
    ("no token", group(1, tokens=[[]], masks=[[]]), "each sequence a token"),
    ("masks few", group(2, masks=[[-100, 1, 2]]), "1 entries for 2 sequences"),
    ("masks short", group(2, masks=[[-100, 1, 2], [-100, 1]]), "masks.1: Value error, 2 entries for 3 tokens"),
    ("scores few", group(2, scores=[1.0]), "scores: Value error, 1 entries for 2 sequences"),
    ("scores many", group(1, scores=[1.0, 2.0]), "scores"),
    ("logprobs short", group(1, inference_logprobs=[[1.0]]), "inference_logprobs.0"),
    ("logprobs few", group(2, inference_logprobs=[[1.0] * 3]), "inference_logprobs"),
    ("advantages short", group(1, advantages=[[1.0]]), "advantages.0"),
    ("ref short", group(1, ref_logprobs=[[1.0]]), "ref_logprobs.0"),
    ("messages few", group(2, messages=[[]]), "messages"),
    ("messages int", group(1, messages=5), "messages: Expected `array | null`"),
    ("no content", group(1, messages=[[{"role": "user"}]]), "'role' and 'content'"),
    ("overrides few", group(2, overrides=[{}]), "overrides"),
    ("distill short", group(1, distill_token_ids=[[[]]]), "distill_token_ids.0"),
    ("negative token", group(1, tokens=[[-1, 1, 2]]), "tokens.0.0: Expected `int` >= 0"),
    ("huge token", group(1, tokens=[[2**31, 1, 2]]), "tokens.0.0: Expected `int` <= 2147483647"),
    ("enormous token", group(1, tokens=[[10**300, 1, 2]]), "tokens.0.0"),
    ("half token", group(1, tokens=[[1.5, 1, 2]]), "Expected `int`, got `float`"),
    ("negative env", group(1, env_id=-1), "env_id: Expected `int` >= 0"),
    ("null tokens", group(1, tokens=None), "tokens: Expected `array`, got `null`"),
    ("null score", group(1, scores=[None]), "scores.0"),
    ("word score", group(1, scores=["nan"]), "scores.0: Expected `float` >="),
    ("huge score", group(1, scores=[10**400]), "scores.0"),
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
    ("1e200", group(1, scores=[1e200]), "scores.0: Expected `float` <= 1000000000000"),
    ("beyond float32", group(1, scores=[-1e39]), "scores.0: Expected `float` >="),
    ("logprob", group(1, inference_logprobs=[[1.0, -1e39, 0.0]]), "inference_logprobs.0.1: Expected `float` >="),
    ("advantage", group(1, advantages=[[1.0, 1e39, 0.0]]), "advantages.0.1: Expected `float` <="),
    ("list overrides", group(1, group_overrides=[1]), "group_overrides: Expected `object | null`"),
]


@pytest.mark.parametrize(("sent", "why"), [(sent, why) for _, sent, why in WRONG], ids=[name for name, _, _ in WRONG])
def test_what_is_wrong_is_said(sent: dict[str, Any], why: str) -> None:
    assert why in problem(sent)


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


@pytest.mark.parametrize(
    ("kind", "good", "change", "why"),
    [
        (EnvRegistration, ENV, {"group_size": 0}, "group_size: Expected `int` >= 1"),
        (EnvRegistration, ENV, {"min_batch_allocation": 5}, "min_batch_allocation"),
        (EnvRegistration, ENV, {"min_batch_allocation": -1}, "min_batch_allocation"),
        (EnvRegistration, ENV, {"weight": -0.5}, "weight"),
        (EnvRegistration, ENV, {"weight": None}, "weight: Expected `float`"),
        (EnvRegistration, ENV, {"desired_name": None}, "desired_name: Expected `str`"),
        (EnvRegistration, ENV, {"desired_name": "x" * 5000}, "length <= 4096"),
        (EnvRegistration, ENV, {"max_token_length": 10**30}, "max_token_length"),
        (RunParameters, RUN, {"batch_size": 0}, "batch_size"),
        (RunParameters, RUN, {"batch_size": 1.5}, "Expected `int`"),
        (RunParameters, RUN, {"wandb_project": None}, "wandb_project"),
        (RunParameters, RUN, {"starting_step": "x"}, "Expected `int`"),
    ],
)
def test_registrations(kind: Any, good: dict[str, Any], change: dict[str, Any], why: str) -> None:
    wire.read(encoded(good), kind)
    with pytest.raises(Malformed, match=why):
        wire.read(encoded(good | change), kind)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, VALUES)))
def test_anything_is_taken_or_refused(change: dict[str, Any]) -> None:
    try:
        parsed = read_group(encoded(group(1) | change))
    except Malformed as error:
        wire.write({"detail": [error.problem]})  # the answer can be sent
        return
    taken = json.loads(parsed.payload)
    assert set(taken) == set(FIELDS)
    assert all(math.isfinite(score) for score in taken["scores"])


HEAVY = {
    "empty lists": {"images": [[]] * 1_200_000},
    "empty objects": {"images": [{}] * 1_200_000},
    "texts": {"images": ["a"] * 1_100_000},
    "numbers": {"group_overrides": {"a": [1] * 1_100_000}},
    "messages": {"messages": [[{"role": "user", "content": ""}] * 400_000]},
    "teachers": {"distill_token_ids": [[[]] * 3_000_000]},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", HEAVY.values(), ids=HEAVY)
def test_bodies_that_would_become_gigabytes_are_refused(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "MOST_VALUES", 1_000_000)
    with pytest.raises(Malformed, match=r"more than \d+ values"):
        read_group(wire.write(group(1, **fields)))
