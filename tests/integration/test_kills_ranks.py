"""Ranks, engines and the network are lost at every boundary and moment: each by name, and nothing is trained twice."""

from __future__ import annotations

import sys
from itertools import cycle, islice
from pathlib import Path

import pytest
from kills_ranks import Ranks, losses, wide_model

BUSY_SECONDS = 35.0
"""For an end, beside other tests; alone all come within 20."""


@pytest.mark.long
@pytest.mark.timeout(5500)
@pytest.mark.parametrize(("ranks", "apart", "trials"), [(3, 0, 40), (2, 2, 40)], ids=["ranks", "ranks and engines"])
def test_forty_losses_are_named_and_nothing_is_trained_twice(
    tmp_path: Path, ranks: int, apart: int, trials: int
) -> None:
    run = Ranks(tmp_path / "run", 0, 2, wide_model(tmp_path), ranks=ranks, apart=apart, limit=BUSY_SECONDS)
    outcomes = []
    try:
        run.trained(to=2)
        for loss in islice(cycle(losses(ranks, apart=apart)), trials):
            outcomes.append(run.loses(loss))
            sys.stderr.write(f"{outcomes[-1]}\n")  # of pytest -s
        wrong = run.compared()
    finally:
        run.stop()
    assert not [f"{outcome.loss}: {outcome.wrong}" for outcome in outcomes if outcome.wrong]
    assert not wrong
