"""Arithmetic written by a policy: exact, bounded, and never executed."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.expression import BadExpression, as_text, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 + 4 * 2", Fraction(11)),
        ("(3+4)*2", Fraction(14)),
        ("7/2", Fraction(7, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("-3 - -4", Fraction(1)),
        ("3 × 4 ÷ 6", Fraction(2)),
        ("1,234 + 1", Fraction(1235)),
        ("2^10", Fraction(1024)),
        ("2 ** -1", Fraction(1, 2)),
        ("3\n+ 4", Fraction(7)),
    ],
)
def test_values(text: str, value: Fraction) -> None:
    assert evaluate(text).value == value


def test_numbers_are_listed_in_order() -> None:
    assert evaluate("5 * (3 - 1)").numbers == (5, 3, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("9^9^9^9", "too large"),
        ("9" * 299 + "*" + "9", "longer than"),
        ("2^0.5", "whole exponent"),
        ("7 // 2", "only the operators"),
        ("3 +", "well-formed"),
        ("3(4)", "well-formed"),
        ("", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("x + 1", "only numbers"),
        ("1e999", "only numbers"),
        ("(" * 250, "well-formed"),
    ],
)
def test_refusals_say_why(text: str, message: str) -> None:
    with pytest.raises(BadExpression, match=message):
        evaluate(text)


def test_only_the_given_operators() -> None:
    with pytest.raises(BadExpression, match="only the operators"):
        evaluate("2 ^ 3", "+-*/")


@pytest.mark.slow
@given(st.text(alphabet="0123456789+-*/().^ ,", max_size=40))
def test_anything_is_a_value_or_a_refusal(text: str) -> None:
    with contextlib.suppress(BadExpression):
        as_text(evaluate(text).value)


def test_as_text() -> None:
    assert as_text(Fraction(2**4000, 3)).startswith("4.39")
    assert [as_text(Fraction(8, 2)), as_text(Fraction(-1, 4)), as_text(Fraction(1, 3))] == [
        "4",
        "-0.25",
        "0.3333333333",
    ]
