"""Rewards on the texts that policies write."""

from __future__ import annotations

import math
import sys
from typing import Any

import math_verify
import pytest

from tandem.errors import ConfigError, RewardError
from tandem.rewards.cosine_length import CosineLength
from tandem.rewards.countdown import CountdownReward
from tandem.rewards.exact import ExactReward
from tandem.rewards.format import Format
from tandem.rewards.math_verify import MathVerify
from tandem.rewards.number import Number
from tandem.rewards.overlong import Overlong
from tandem.rewards.reasoning_gym import ReasoningGymReward
from tandem.rewards.repetition import Repetition
from tandem.types import Completion, Message, Rollout, Task, Turn


def rollout_of(*replies: str, answer: str = "", meta: dict[str, Any] | None = None, tokens: int = 1) -> Rollout:
    """A rollout of one or several turns; the prompt holds a worked example."""
    prompt = (
        Message(role="user", content="What is 1 + 1?"),
        Message(role="assistant", content="2"),
        Message(role="user", content="And now?"),
    )
    task = Task(id="t", env="e", prompt=prompt, answer=answer, meta=meta or {})
    messages = [*prompt]
    for number, reply in enumerate(replies):
        messages += [Message(role="user", content="7")] if number else []
        messages.append(Message(role="assistant", content=reply))
    completion = Completion(tokens=(5,) * tokens, logprobs=(-1.0,) * tokens, versions=(0,) * tokens, finish="stop")
    turns = (Turn(prompt=(1,), completion=completion, temperature=1.0),)
    return Rollout(id="g/0", task=task, turns=turns, messages=tuple(messages), status="ok")


# number


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("7", "7"),
        ("3 + 4 = 7.", "7"),
        ("The answer is 7, I think", "7"),
        ("**7**", "7"),
        ("\\boxed{7}", "7"),
        ("so $1,234.50.", "1234.5"),
        ("12,345,678", "12345678"),
        ("#### 18", "#### 18"),
        ("She has 18", "She sells 3.\n#### 18"),
        ("5 - 9 = -4", "-4"),
        ("= −4", "-4"),
        ("it costs -$4", "-4"),
        ("it costs $-4", "-4"),
        ("10-3", "3"),
        ("10 - 3", "3"),
        ("(2)-3", "3"),
        (".5", "0.5"),
        ("7.0", "7"),
        ("007", "7"),
        ("7%", "7"),
        ("7km", "7"),
        ("1,2", "2"),
        ("v1.2.3", "3"),
        ("0.3333333", "0.33333333"),
    ],
)
def test_number_finds_the_last_number(reply: str, gold: str) -> None:
    assert Number()(rollout_of(reply, answer=gold)) == 1.0


@pytest.mark.parametrize(
    ("reply", "gold"),
    [("", "7"), ("seven", "7"), ("7 or 8", "7"), ("4", "-4"), ("13", "3"), ("7.1", "7"), ("٧", "7"), ("9" * 9999, "7")],
)
def test_number_is_strict_about_the_value(reply: str, gold: str) -> None:
    assert Number()(rollout_of(reply, answer=gold)) == 0.0


def test_number_tolerance_is_relative_to_the_gold() -> None:
    assert Number(tolerance=0.01)(rollout_of("1009", answer="1000")) == 1.0
    assert Number(tolerance=0.01)(rollout_of("1011", answer="1000")) == 0.0
    assert Number(tolerance=0)(rollout_of("7.0", answer="7")) == 1.0


# exact, format


def test_exact() -> None:
    assert ExactReward()(rollout_of(" Paris\n", answer="Paris")) == 1.0
    assert ExactReward()(rollout_of("paris", answer="Paris")) == 0.0
    assert ExactReward(ignore_case=True)(rollout_of("paris", answer="Paris")) == 1.0
    assert ExactReward(tag="city")(rollout_of("<city>Rome</city>no: <city> Paris </city>", answer="Paris")) == 1.0
    assert ExactReward(tag="city")(rollout_of("Paris", answer="Paris")) == 0.0
    assert ExactReward().full_marks == 1.0
    assert ExactReward(tag="city").full_marks is None


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<think>a</think> <answer>b</answer>", 1.0),
        ("Well: <think>a\n</think><answer></answer> done", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_tags(reply: str, value: float) -> None:
    assert Format(tags=("think", "answer"))(rollout_of(reply)) == value


def test_format_pattern_is_searched_in_the_trimmed_reply() -> None:
    reward = Format(pattern=r"(?m)^#### \d+\Z")
    assert reward(rollout_of("Hm.\n#### 7\n\n")) == 1.0
    assert reward(rollout_of("#### 7\nI hope that helps")) == 0.0


def test_format_options() -> None:
    with pytest.raises(ConfigError, match="either pattern or tags"):
        Format()
    with pytest.raises(ConfigError, match="not both"):
        Format(pattern="a", tags=("b",))
    with pytest.raises(ConfigError, match=r"pattern '\(' is no regular expression"):
        Format(pattern="(")


# length, overlong, repetition


@pytest.mark.parametrize(("tokens", "value"), [(1, 0), (60, 0), (70, -0.25), (100, -1), (200, -1)])
def test_overlong_is_a_ramp(tokens: int, value: float) -> None:
    assert Overlong(max_tokens=100, cache=40)(rollout_of("x", tokens=tokens)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("reply", "value"),
    [("one two three four", 0.0), ("a b", 0.0), ("", 0.0), ("a a a a a", -2 / 3), ("so it is so it is", -0.25)],
)
def test_repetition(reply: str, value: float) -> None:
    assert Repetition()(rollout_of(reply)) == pytest.approx(value)


def ms_swift_cosine(tokens: int, longest: int, right: bool, values: tuple[float, float, float, float]) -> float:
    """The formula as that project has it: what it calls smallest and largest is swapped."""
    right_short, right_long, wrong_short, wrong_long = values
    smallest, largest = (right_long, right_short) if right else (wrong_long, wrong_short)
    return largest - (largest - smallest) * (1 - math.cos(tokens * math.pi / longest)) / 2


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("tokens", [0, 7, 50, 100, 200])
@pytest.mark.parametrize("values", [(1.0, 0.5, -0.5, 0.0), (2.0, 1.0, -10.0, -5.0)])
def test_cosine_length_is_ms_swifts(tokens: int, right: bool, values: tuple[float, float, float, float]) -> None:
    names = ("right_short", "right_long", "wrong_short", "wrong_long")
    reward = CosineLength(accuracy=Number(), max_tokens=100, **dict(zip(names, values, strict=True)))
    got = reward(rollout_of("7" if right else "8", answer="7", tokens=tokens))
    assert got == pytest.approx(ms_swift_cosine(min(tokens, 100), 100, right, values), abs=1e-12)


def test_options_out_of_range_are_refused() -> None:
    for make, first in [
        (lambda: Overlong(max_tokens=5, cache=6), "cache"),
        (lambda: Repetition(ngram=0), "ngram"),
        (lambda: CosineLength(accuracy=Number(), max_tokens=0), "max_tokens"),
        (lambda: CountdownReward(partial=1.0), "partial"),
        (lambda: Number(tolerance=-1), "tolerance"),
        (lambda: MathVerify(timeout_seconds=0), "timeout_seconds"),
    ]:
        with pytest.raises(ConfigError, match=f"^{first} must be"):
            make()


# countdown

PUZZLE = {"numbers": [3, 5, 8], "target": 64}


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<answer>(3 + 5) * 8</answer>", 1.0),
        ("<answer>1</answer> no, <answer>8×(5+3) = 64</answer>", 1.0),
        ("I think:\n(3+5)*8", 1.0),
        ("<answer>3 + 5 + 8</answer>", 0.1),
        ("<answer>64</answer>", 0.0),
        ("<answer>8 * 8</answer>", 0.0),
        ("<answer>(3 + 5) * 8 + 3 - 3</answer>", 0.0),
        ("<answer>8 ^ 2</answer>", 0.0),
        ("<answer>5 / (3 - 3)</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(reply: str, value: float) -> None:
    assert CountdownReward(partial=0.1)(rollout_of(reply, meta=PUZZLE)) == value


def test_countdown_may_leave_numbers_out_and_uses_none_twice() -> None:
    few, twice = (
        rollout_of(f"<answer>{text}</answer>", meta={**PUZZLE, "target": 40}) for text in ("8 * 5", "8 * 5 + 8 - 8")
    )
    assert CountdownReward(use="some")(few) == 1.0
    assert CountdownReward(use="all")(few) == 0.0
    assert CountdownReward(use="some")(twice) == 0.0


# math_verify


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("so 9 + 9 = 18\n#### 18", "18"),
        ("#### 18 eggs\n\nI hope that helps with your 3 eggs!", "#### 18"),
        ("#### $1,800", "1,800"),
        ("The answer is \\boxed{18}.", "18"),
        ("it is $\\frac{1}{2}$", "0.5"),
        ("it is 1/2", "\\frac{1}{2}"),
        ("$2\\sqrt{2}$", "\\sqrt{8}"),
        ("$x^2 + 2x + 1$", "(x+1)^2"),
        ("\\sqrt{8}", "\\sqrt{8}"),
        ("<think>4 or so</think><answer>3</answer>", "3"),
        ("<think>3</think> <answer>$\\frac{1}{2}$</answer> I think", "0.5"),
    ],
)
def test_math_verify_equal(reply: str, gold: str) -> None:
    reward = MathVerify()
    reward.prepare()
    assert reward(rollout_of(reply, answer=gold)) == 1.0


@pytest.mark.parametrize(
    ("reply", "paid"),
    [("#### 18", 0.0), ("18", 0.0), ("so 9 + 9 = 18\n#### 18", 1.0), ("\n \n\n   #### 18", 0.0)],
)
def test_math_verify_asks_for_working(reply: str, paid: float) -> None:
    assert MathVerify(least_working=8)(rollout_of(reply, answer="18")) == paid


@pytest.mark.slow
def test_whole_numbers_are_told_apart_as_the_library_would() -> None:
    reward = MathVerify()
    reward.prepare()
    texts = ["0", "7", "-7", "70", "007", "7.0", "7.", "+7", "1000", "1,000", "1 000", "-1000", "1e3", "7%", "$7", "10"]
    for gold in ("0", "7", "-7", "1000", "10"):
        expected = math_verify.parse(f"${gold}$") or math_verify.parse(gold)
        for text in texts:
            verdict = text == gold or math_verify.verify(expected, math_verify.parse(text))
            assert reward(rollout_of(f"#### {text}", answer=gold)) == float(verdict), (gold, text)


@pytest.mark.slow
def test_math_verify_gives_up_on_a_monster(caplog: pytest.LogCaptureFixture) -> None:
    reward = MathVerify(timeout_seconds=1)
    reward.prepare()
    assert reward(rollout_of("#### 9^9^9^9", answer="18")) == 0.0
    assert not caplog.records


def test_missing_libraries_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RewardError, match=r"tandem-rl\[math\]"):
        MathVerify().prepare()
    with pytest.raises(RewardError, match=r"tandem-rl\[reasoning-gym\]"):
        ReasoningGymReward().prepare()


# reasoning_gym


def gym(reply: str, answer: str = "7", task: str = "chain_sum", **metadata: Any) -> Rollout:
    meta = {"task": task, "config": {}, "question": "4 + 3 =", "metadata": metadata, "unsolved": False}
    return rollout_of(reply, answer=answer, meta=meta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("4 + 3 = 7", 1.0),
        ("State the final answer: 4 + 3 = ... 7", 1.0),
        ("<answer> 7 </answer> (not 8)", 1.0),
        ("<answer>8</answer> 7", 0.0),
        ("17", 0.0),
        ("", 0.0),
    ],
)
def test_reasoning_gym_extraction(reply: str, value: float) -> None:
    assert ReasoningGymReward()(gym(reply)) == value


def test_reasoning_gym_partial_credit_is_asked_for() -> None:
    assert ReasoningGymReward(partial=True)(gym("17")) == 0.5
    assert ReasoningGymReward()(gym("17")) == 0.0
