"""Alarms over series of metrics: what goes wrong is named soon, and of runs that are well nothing is told."""

from __future__ import annotations

import pytest
from alarming import HEALTHY, ONSET, SICK, watched

SOON = 20
"""Steps after its onset within which everything that goes wrong is named."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_told_of_a_healthy_run(name: str, seed: int) -> None:
    assert [(n.alarm, n.step, n.finding) for n in watched(HEALTHY[name], 200, seed)] == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SICK)
def test_what_goes_wrong_is_named_within_twenty_steps(name: str, seed: int) -> None:
    alarm, made = SICK[name]
    notices = watched(made, ONSET + SOON, seed)
    named = [notice for notice in notices if notice.alarm == alarm]
    assert named, f"told instead: {[(n.alarm, n.step) for n in notices]}"
    assert all(notice.step >= ONSET for notice in notices), [(n.alarm, n.step, n.finding) for n in notices]
    finding = named[0].finding
    assert finding is not None
    assert any(character.isdigit() for character in finding.seen)
    assert finding.means.endswith(".")
    assert finding.change.endswith(".")
