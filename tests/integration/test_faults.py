"""The fault bench on a real vLLM: every fault is caught within one publish, by what should catch it, and harmless."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from integration.vllm_runs import REPOSITORY, engine, needs_engine


@needs_engine
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_fault_is_caught_within_one_publish(tmp_path: Path, ranks: int) -> None:
    """Of two ranks, each with its engine, in that of the second."""
    results = tmp_path / "faults.jsonl"
    bench = REPOSITORY / "tests" / "long" / "faults.py"
    # Rounding hides from a probe there what float32 would show.
    command = [
        sys.executable,
        str(bench),
        "--ranks",
        str(ranks),
        "--dtype",
        "bfloat16",
        "--json",
        str(results),
        "--folder",
        str(tmp_path / "run"),
    ]
    if python := engine()["python"]:
        command += ["--engine-python", python]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=560, check=False)
    outcomes = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    wrong = [outcome for outcome in outcomes if not outcome["right"]]
    assert not wrong
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(outcomes) == 44
    by = Counter(outcome["caught_by"] for outcome in outcomes)
    # Every part of the proof is what catches something.
    assert by.keys() == {
        "boot id",
        "checksum",
        "deadline",
        "prefix cache",
        "probe",
        "refused",
        "stands still",
        "started again",
        "version",
    }
