"""The fault bench: every fault is caught within one publish, by what should catch it, and harmless."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from fault_cases import ONE_RANK, WAYS
from faults import Outcome, struck
from integration.vllm_runs import engine, needs_engine

STANDS_IN = ("broadcast full", "broadcast merged", "restart full", "restart merged")
"""Ways that are tried on a stand-in too, which starts in a fifth of the time; restarts on it alone."""
EVERY = [
    *(pytest.param(2, way, True, id=f"{way} of 2 on a stand-in") for way in STANDS_IN),
    *(
        pytest.param(ranks, way, False, id=f"{way} of {ranks}", marks=needs_engine)
        for ranks, ways in WAYS.items()
        for way in ways
        if way not in ("restart full", "restart merged")
    ),
]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "way", "stands_in"), EVERY)
def test_every_fault_is_caught_within_one_publish(tmp_path: Path, ranks: int, way: str, stands_in: bool) -> None:
    # In bfloat16 rounding hides from a probe what float32 would show; a stand-in is as exact as the trainer.
    dtype, python = ("float32", sys.executable) if stands_in else ("bfloat16", engine()["python"])

    async def strike() -> list[Outcome]:
        outcomes = []
        async with aclosing(struck(way, tmp_path, ranks=ranks, python=python, dtype=dtype)) as striking:
            async for each in striking:
                outcomes.append(each)
                row = f"{ranks} {way:17}{each.fault:57}{each.caught_by:14}{each.seconds:6.2f} s  {each.then}"
                sys.stderr.write(f"{row}{'' if each.right else '  WRONG: ' + each.error}\n")  # of pytest -s
        return outcomes

    outcomes = asyncio.run(strike())
    assert not [outcome for outcome in outcomes if not outcome.right]
    assert len(outcomes) == sum(not (stands_in and fault.vllm) for fault in WAYS[ranks][way])


def test_the_bench_has_44_faults_and_every_part_of_the_proof_catches_some() -> None:
    faults = [fault for of_way in ONE_RANK.values() for fault in of_way]
    assert len(faults) == 44
    assert {fault.by for fault in faults} == {
        *("boot id", "checksum", "deadline", "prefix cache", "probe", "refused", "stands still", "started again"),
        "version",
    }
