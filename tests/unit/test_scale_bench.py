"""Steps of more cards than were at hand are computed from those that were measured, and agree with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scale


def test_a_step_of_two_cards_is_the_measured_one() -> None:
    assert scale.step(2) == scale.TWO


def test_what_travels_grows_and_what_is_divided_shrinks_with_the_cards() -> None:
    eight = scale.step(8)
    assert eight.gather == pytest.approx(scale.TWO.gather * (7 / 8) / (1 / 2))
    assert eight.compute - scale.ONE.compute == pytest.approx((scale.TWO.compute - scale.ONE.compute) * 7 / 4)
    assert scale.ONE.optimizer - eight.optimizer == pytest.approx(7 / 8 * 18), "18 ms of 52 are divided"
    assert (eight.sampling, eight.publish, eight.rest) == (scale.TWO.sampling, scale.TWO.publish, scale.TWO.rest)


def test_between_hosts_the_slower_way_counts() -> None:
    far, near = scale.step(16, slowest=45e9), scale.step(16, slowest=1e15)
    assert far.gather == pytest.approx(1000 * 6.17e9 * 15 / 16 / 45e9)
    assert far.compute - scale.ONE.compute == pytest.approx(1000 * 2 * 6.17e9 * 15 / 16 / 45e9), "float32"
    assert near == scale.step(16)
