"""Whole runs that are stalled: who is to blame is told in time, the run ends as it should, and it goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nursery import Nursery
from support.tiers import long_but

sys.path.insert(0, str(Path(__file__).parents[1] / "long"))
from stalls import measure
from stalls_cases import CASES

QUICK = ("lost rollout", "compute thread in native code", "broker never answers", "engine ends as it starts")


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(QUICK, "engine ends as it starts"))
def test_a_stalled_run_names_who_is_to_blame(name: str, tmp_path: Path, tiny_model: Path, nursery: Nursery) -> None:
    (case,) = (case for case in CASES if case.name == name)
    outcome = measure(case, tmp_path / "place", tiny_model, nursery)
    assert outcome.right, outcome


def test_there_is_a_case_for_every_kind_of_stall() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 32
