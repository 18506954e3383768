"""Groups on the wire and back: nothing trained changes, and what cannot be trained on says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rollouts import make_group, make_rollout

from tandem.errors import BrokerError
from tandem.types import UNKNOWN_LOGPROB, Group, Message, Rollout
from tandem_broker.protocol.convert import Notes, Rules, group_from_wire, group_to_wire
from tandem_broker.protocol.messages import ScoredGroup
from tandem_broker.protocol.submission import read_group
from tandem_broker.protocol.wire import read, write

A = [10, 11, 12, 13, 14]
MASK = [-100, -100, 12, 13, 14]
LOGPROBS = [1.0, 1.0, -0.1, -0.2, -0.3]


def scored(**changed: Any) -> ScoredGroup:
    """Two sequences of which the last three tokens are trained."""
    plain: dict[str, Any] = {
        "tokens": [A, A],
        "masks": [MASK, MASK],
        "scores": [1.0, 0.0],
        "inference_logprobs": [LOGPROBS, LOGPROBS],
    }
    made = read(write(plain), ScoredGroup)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def rollouts(made: ScoredGroup, version: int = 5, notes: Notes | None = None, **rules: Any) -> tuple[Rollout, ...]:
    return group_from_wire(made, id="g", version=version, rules=Rules(**rules), notes=notes).rollouts


def made_group(**changed: Any) -> Group:
    """Two rollouts: one of two turns over two policy steps, one of a single turn cut by its limit."""
    two = make_rollout(
        "t@1/0", [((1, 2), (3, 4), (-0.5, -1.5)), ((1, 2, 3, 4, 5, 6), (7,), (-0.25,))], 1.5, temperature=0.7, version=3
    )
    second = replace(two.turns[1].completion, versions=(4,))
    two = replace(
        two, turns=(two.turns[0], replace(two.turns[1], completion=second)), rewards={"number": 1.0, "x": 5.0}
    )
    one = make_rollout("t@1/1", [((1, 2), (9,), (-2.0,))], 0.0, temperature=0.7, finish="length", version=3)
    one = replace(one, rewards={"number": 0.0}, messages=(*one.messages, Message(role="assistant", content="hm")))
    return make_group("t@1", [two, replace(one, **changed)])


# There and back


def test_what_is_trained_survives_the_wire() -> None:
    group = made_group()
    wired = read(write(group_to_wire(group)), ScoredGroup)
    back = group_from_wire(wired, id="t@1", version=99)
    assert [r.turns for r in back.rollouts] == [r.turns for r in group.rollouts]
    for name in ("id", "reward", "rewards", "messages", "status", "trained", "advantages"):
        assert [getattr(r, name) for r in back.rollouts] == [getattr(r, name) for r in group.rollouts], name
    assert (back.env, back.rollouts[0].task.id, back.version_min) == ("made", "t", 3)


def test_the_wire_is_atropos_own() -> None:
    wired = group_to_wire(made_group())
    assert wired.tokens == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 9]]
    assert wired.masks == [[-100, -100, 3, 4, -100, -100, 7], [-100, -100, 9]]
    assert wired.inference_logprobs == [[1.0, 1.0, -0.5, -1.5, 1.0, 1.0, -0.25], [1.0, 1.0, -2.0]]
    assert wired.scores == [1.5, 0.0]
    assert wired.generation_params == {"temperature": 0.7}
    assert (wired.advantages, wired.overrides, wired.env_id) == (None, None, None)
    assert (wired.group_overrides or {})["tandem_versions"] == [[[3, 2], [4, 1]], [[3, 1]]]
    read_group(write(wired))  # a broker takes it


def test_temperatures_that_differ_go_with_their_sequence() -> None:
    group = make_group(
        "t@1", [make_rollout(f"t@1/{t}", [((1,), (2,), (-1.0,))], 0.5, temperature=t) for t in (0.5, 2.0)]
    )
    wired = group_to_wire(group)
    assert wired.overrides == [{"temperature": 0.5}, {"temperature": 2.0}]
    assert wired.generation_params is None
    assert [r.turns[0].temperature for r in rollouts(wired)] == [0.5, 2.0]


def test_untrained_and_given_advantages_travel() -> None:
    group = made_group(trained=False)
    with_advantages = replace(
        group,
        rollouts=tuple(replace(r, advantages=tuple(0.5 + n for n in range(r.num_tokens))) for r in group.rollouts),
    )
    wired = group_to_wire(with_advantages)
    assert wired.advantages == [[0.0, 0.0, 0.5, 1.5, 0.0, 0.0, 2.5], [0.0, 0.0, 0.5]]
    back = rollouts(wired, env_advantages=True)
    assert [r.trained for r in back] == [True, False]
    assert [r.advantages for r in back] == [r.advantages for r in with_advantages.rollouts]


BRANCHING = make_rollout(
    "t@1/0",
    [
        ((1, 2), (3,), (-0.1,)),  # a conversation,
        ((9,), (8, 7), (-0.2, -0.3)),  # another beside it,
        ((1, 2, 3, 4), (5,), (-0.4,)),  # the first goes on,
        ((1, 2, 3, 4, 5), (6,), (-0.5,)),  # at another temperature
    ],
    1.0,
    temperature=[1.0, 1.0, 1.0, 0.5],
)
"""Three sequences."""


def branching_group(**changed: Any) -> Group:
    return make_group("t@1", [replace(BRANCHING, **changed), make_rollout("t@1/1", [((1, 2), (4,), (-1.0,))], 0.0)])


def test_a_rollout_of_several_conversations_is_as_many_sequences_with_its_score() -> None:
    wired = group_to_wire(branching_group(trained=False, advantages=(0.1, 0.2, 0.3, 0.4, 0.5)))
    assert wired.tokens == [[1, 2, 3, 4, 5], [9, 8, 7], [1, 2, 3, 4, 5, 6], [1, 2, 4]]
    assert wired.masks == [[-100, -100, 3, -100, 5], [-100, 8, 7], [*[-100] * 5, 6], [-100, -100, 4]]
    assert wired.scores == [1.0, 1.0, 1.0, 0.0]
    assert wired.overrides == [
        {"temperature": 1.0, "set_advantage_to_zero": True},
        {"temperature": 1.0, "set_advantage_to_zero": True},
        {"temperature": 0.5, "set_advantage_to_zero": True},
        {"temperature": 1.0},
    ]
    assert wired.advantages is None, "the other has none"
    overrides = wired.group_overrides or {}
    assert (overrides["group_size"], overrides["tandem_rollouts"]) == (4, [0, 0, 0, 1])
    assert {"group_size", "tandem_rollouts"}.isdisjoint(group_to_wire(made_group()).group_overrides or {})
    read_group(write(wired))


def test_its_sequences_are_one_rollout_again() -> None:
    group = branching_group(advantages=(0.1, 0.2, 0.3, 0.4, 0.5), rewards={"number": 1.0})
    group = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[1], advantages=(0.9,))))
    back = group_from_wire(
        read(write(group_to_wire(group)), ScoredGroup), id="t@1", version=7, rules=Rules(env_advantages=True)
    )
    first, second = back.rollouts
    turns = BRANCHING.turns
    assert first.turns == (turns[0], turns[2], turns[1], turns[3])
    assert first.advantages == (0.1, 0.4, 0.2, 0.3, 0.5)
    assert (first.id, first.reward, first.rewards) == ("t@1/0", 1.0, {"number": 1.0})
    assert (second.id, second.turns, second.advantages) == ("t@1/1", group.rollouts[1].turns, (0.9,))


def test_a_turn_continues_the_longest_that_it_could() -> None:
    """Two answers to one question, of which one begins as the other: the agent went on with the longer."""
    turns = [((1,), (2,), (-0.1,)), ((1,), (2, 3), (-0.2, -0.3)), ((1, 2, 3, 4), (5,), (-0.4,)), ((1,), (), ())]
    wired = group_to_wire(make_group("t@1", [make_rollout("t@1/0", turns, 1.0)]))
    assert wired.tokens == [[1, 2], [1, 2, 3, 4, 5]]
    assert wired.masks == [[-100, 2], [-100, 2, 3, -100, 5]]


def test_one_bad_sequence_costs_its_rollout() -> None:
    wired = group_to_wire(branching_group())
    wired.masks[1] = [1, 1, 1]
    first, second = rollouts(wired)
    assert (first.status, first.turns, first.reward, first.id) == ("error", (), None, "g/0")
    assert "neither -100 nor the id" in first.error
    assert second.status == "ok"


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_every_run_of_trained_tokens_is_a_turn_after_all_before_it(mask: list[bool]) -> None:
    tokens = list(range(50, 50 + len(mask)))
    masks = [token if on else -100 for token, on in zip(tokens, mask, strict=True)]
    logprobs = [-token / 100 if on else 1.0 for token, on in zip(tokens, mask, strict=True)]
    (one,) = rollouts(scored(tokens=[tokens], masks=[masks], scores=[1.0], inference_logprobs=[logprobs]))
    by_position = {}
    for turn in one.turns:
        assert list(turn.prompt) == tokens[: len(turn.prompt)]
        for at, (token, logprob) in enumerate(
            zip(turn.completion.tokens, turn.completion.logprobs, strict=True), start=len(turn.prompt)
        ):
            by_position[at] = (token, logprob)
    assert by_position == {at: (tokens[at], -tokens[at] / 100) for at, on in enumerate(mask) if on and at > 0}
    assert (one.status == "ok") == bool(by_position)


# Tolerant reading


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"masks": [MASK, [-100, -100, 1, 1, 1]]}, "malformed", "neither -100 nor the id"),
        ({"masks": [MASK, [-100] * 5]}, "untrained", "masked"),
        ({"masks": [MASK, [10, *[-100] * 4]]}, "untrained", "masked"),
        ({"inference_logprobs": [LOGPROBS, [1.0] * 5]}, "malformed", "logprob that is none"),
        ({"tokens": [A, [*A[:-1], 999]], "masks": [MASK, [*MASK[:-1], 999]]}, "malformed", "token 999 is none"),
        ({"tokens": [A, [*A, 15]], "masks": [MASK, [*MASK, 15]]}, "too_long", "6 tokens"),
        ({"overrides": [{}, {"temperature": 1e-320}]}, "malformed", "; expected 0, or 1e-06 to 1e+06"),
    ],
)
def test_one_bad_sequence_does_not_cost_its_siblings(changed: dict[str, Any], kind: str, says: str) -> None:
    notes = Notes()
    good, bad = rollouts(scored(**changed), notes=notes, max_tokens=5, vocabulary=259, env_advantages=True)
    assert (good.status, good.reward, good.num_tokens) == ("ok", 1.0, 3)
    assert (bad.status, bad.reward, bad.turns) == ("error", None, ())
    assert says in bad.error
    assert notes.failed == {kind: 1}


def test_names_that_a_stranger_gave_move_no_cursor_and_have_an_end() -> None:
    odd = "\x1b]0;owned\x07"
    overrides = {"tandem_env": odd, "tandem_task": odd + "x" * 9999, "tandem_rewards": [{odd: 1.0}, {}]}
    (one, _) = rollouts(scored(group_overrides=overrides))
    assert one.task.env == "�]0;owned�"
    assert one.task.id == "�]0;owned�" + "x" * 190
    assert list(one.rewards) == ["�]0;owned�"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (0.9, 0.9)),
        ({"group_overrides": {"temperature": 0.3}}, (0.3, 0.3)),
        ({"group_overrides": {"temperature": 0.3}, "generation_params": {"temperature": 0.5}}, (0.5, 0.5)),
        ({"generation_params": {"temperature": 0.5}, "overrides": [{"temperature": 2}, {}]}, (2.0, 0.5)),
        ({"generation_params": {"temperature": 0.0}}, (1.0, 1.0)),
        ({"generation_params": {"temperature": None}, "group_overrides": {"temperature": "hot"}}, (0.9, 0.9)),
    ],
)
def test_temperature_of_sequence_then_generation_then_group(
    changed: dict[str, Any], expected: tuple[float, float]
) -> None:
    assert tuple(r.turns[0].temperature for r in rollouts(scored(**changed), temperature=0.9)) == expected


@pytest.mark.parametrize("rows", [None, []])
def test_missing_logprobs_are_refused_or_left_to_the_policy(rows: Any) -> None:
    bare = scored(inference_logprobs=rows)
    with pytest.raises(BrokerError, match=r"no inference_logprobs.*broker\.missing_logprobs: policy"):
        rollouts(bare)
    assert rollouts(bare, policy_logprobs=True)[0].turns[0].completion.logprobs == (UNKNOWN_LOGPROB,) * 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (5, 5, 5)),
        ({"tandem_version": 3}, (3, 3, 3)),
        ({"tandem_version": 3, "tandem_versions": [[[3, 1], [4, 2]], [[3, 3]]]}, (3, 4, 4)),
        ({"tandem_version": 3, "tandem_versions": [[[3, 1]], [[3, 3]]]}, (3, 3, 3)),
        ({"tandem_version": 3, "tandem_versions": [[["x", 3]], 7]}, (3, 3, 3)),
        ({"tandem_version": 3, "tandem_versions": "odd"}, (3, 3, 3)),
        ({"tandem_version": 3, "tandem_versions": [[[0, 10**12]], [[3, 3]]]}, (3, 3, 3)),
        ({"tandem_version": 3, "tandem_versions": [[[4, 3], [4, 10**12]], 10**12]}, (3, 3, 3)),
        ({"tandem_version": 3, "tandem_versions": [{"4": 3}, [[3, 3]]]}, (3, 3, 3)),
        ({"tandem_version": "odd"}, (5, 5, 5)),
    ],
)
def test_versions_of_tokens_then_group_then_the_brokers(overrides: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert rollouts(scored(group_overrides=overrides))[0].turns[0].completion.versions == expected


def test_what_is_not_read_is_noted() -> None:
    rows = [[0.5] * 5] * 2
    notes = Notes()
    rollouts(scored(ref_logprobs=rows, advantages=rows, overrides=[{"sft": True}, {}], images=[1]), notes=notes)
    assert notes.unread == {"ref_logprobs", "advantages", "sft", "images"}
    notes = Notes()
    assert rollouts(scored(advantages=rows), notes=notes, env_advantages=True)[0].advantages == (0.5,) * 3
    assert notes.unread == set()


def test_messages_are_theirs_or_the_text_of_the_tokens() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, {"role": "assistant", "content": "4"}]
    expected = (Message(role="user", content="2+2?"), Message(role="assistant", content="4"))
    (one, _) = rollouts(scored(messages=[chat, chat]))
    assert (one.messages, one.task.prompt, one.text) == (expected, expected[:1], "4")

    def decode(tokens: Any) -> str:
        return "".join(map(chr, tokens))

    (plain, _) = rollouts(
        scored(
            tokens=[[65, 66, 67, 68]] * 2,
            masks=[[-100, 66, -100, 68]] * 2,
            inference_logprobs=[[1.0, -1.0, 1.0, -1.0]] * 2,
        ),
        decode=decode,
    )
    assert [(m.role, m.content) for m in plain.messages] == [
        ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D"),
    ]  # fmt: skip
