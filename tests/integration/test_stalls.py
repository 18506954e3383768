"""Whole runs that are stalled: who is to blame is told in time, the run ends as it should, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from stalls import Place, measure
from stalls_cases import CASES
from support.tiers import long_but

from tandem.config.loading import load

QUICK = ("lost rollout", "compute thread in native code", "broker never answers", "engine ends as it starts")


def test_every_case_has_options_that_there_are(tmp_path: Path) -> None:
    for case in CASES:
        place = Place(tmp_path / case.name.replace("/", "-"), case, tmp_path)
        assert load(place.folder / "recipe.yaml").config.name == "run"


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(QUICK, "engine ends as it starts"))
def test_a_stalled_run_names_who_is_to_blame(name: str, tmp_path: Path, tiny_model: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    outcome = measure(case, tmp_path / "place", tiny_model)
    assert outcome.right, outcome
