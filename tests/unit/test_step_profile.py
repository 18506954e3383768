"""What the benchmarks make of a profile and of a run's lines: sums that are known beforehand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _step_profile

    return _step_profile


@pytest.fixture
def versus(profiles: ModuleType) -> ModuleType:
    return sys.modules["_versus"]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 7, correlation: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}}


def launched(name: str, *, host: float, ts: float, dur: float, number: int) -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", host, 1, tid=1, correlation=number),
        event("kernel", name, ts, dur, correlation=number),
    ]


def test_kernels_are_told_by_what_launched_them_and_else_by_name(profiles: ModuleType) -> None:
    trace = [
        event("cpu_op", "_TokenLogprobs", 100, 50, tid=1),
        event("user_annotation", "optimizer", 200, 50, tid=1),
        event("cpu_op", "torch::autograd::AccumulateGrad", 300, 10, tid=1),
        *launched("nvjet_hsh_128x256", host=10, ts=1000, dur=400, number=1),
        *launched("flash_fwd_kernel", host=20, ts=1400, dur=300, number=2),
        *launched("nvjet_hsh_128x256", host=110, ts=1700, dur=200, number=3),
        *launched("vectorized_elementwise_kernel", host=210, ts=2000, dur=100, number=4),
        *launched("vectorized_elementwise_kernel", host=305, ts=2100, dur=50, number=5),
        *launched("triton_red_fused_norm", host=400, ts=2100, dur=100, number=6),
        event("gpu_memcpy", "Memcpy HtoD", 2900, 100),
    ]
    times = profiles.measured({"traceEvents": trace})
    assert times["ms"] == pytest.approx(
        {
            "products": 0.4,
            "attention": 0.3,
            "logprobs": 0.2,
            "optimizer": 0.1,
            "gradients": 0.05,
            "elementwise": 0.1,
            "copies": 0.1,
        }
    )
    assert times["span_ms"] == pytest.approx(2.0)
    assert times["idle_ms"] == pytest.approx(0.1 + 0.7)  # two kernels at once are busy once


@pytest.mark.long
def test_a_step_of_ranks_that_share_sequences_is_profiled(tmp_path: Path) -> None:
    lines = tmp_path / "profile.jsonl"
    options = {"shape": "tiny", "lengths": 64, "equal": 128, "groups": 1, "siblings": 2, "tokens": 16, "prompt": 40}
    options |= {"case": "divided lengths ranks=2 distributed.context_parallel=2", "out": lines}
    options |= {"trace": tmp_path / "trace.gz"}
    command = [sys.executable, str(ROOT / "benchmarks" / "step_gpu.py"), "profile"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    *_, profile = (json.loads(line) for line in lines.read_text().splitlines())
    assert profile["batch"] == "profile"
    assert profile["work"]["tokens"] == 126, "of the two sequences of 64 tokens, not of the comparison's batch"
    assert profile["ms"]["optimizer"] > 0


def test_pairs_are_those_that_attention_computes(profiles: ModuleType) -> None:
    lengths, parents = (5, 3, 4, 2, 6), (None, 0, 1, None, 0)
    above = {0: set(), 1: {0}, 2: {0, 1}, 3: set(), 4: {0}}
    places = [(s, i) for s, n in enumerate(lengths) for i in range(n)]
    seen = [
        (a, b) for a, b in itertools.product(places, places) if b[0] in above[a[0]] or (a[0] == b[0] and b[1] <= a[1])
    ]
    assert profiles.pairs(lengths, parents) == len(seen)


def test_a_trace_is_cut_to_what_may_come_back(
    profiles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = {"traceEvents": [event("kernel", f"kernel {i * i}", i, 1) for i in range(1000)]}
    assert profiles.kept(trace, tmp_path / "whole.gz") == 1000
    monkeypatch.setattr(profiles, "LARGEST", (tmp_path / "whole.gz").stat().st_size // 3)
    assert 0 < profiles.kept(trace, tmp_path / "cut.gz") < 1000
    assert (tmp_path / "cut.gz").stat().st_size <= profiles.LARGEST


def line(seconds: float, trained: float, peak: float) -> dict[str, Any]:
    parts = {"sampling": 1.0, "forward+backward": trained}
    return {"kind": "step", "seconds": seconds, "parts": parts, "peak_gb": peak, "tokens": 45056}


def test_a_setting_is_the_median_of_its_steps_after_the_first_two(versus: ModuleType) -> None:
    lines = [
        {"kind": "about", "parameters": 3_085_938_688},
        *[line(90.0, 80.0, 70.0), line(9.0, 8.0, 50.0)],
        *[line(3.0, 1.6, 50.0), line(2.9, 1.7, 51.0), line(3.2, 1.8, 50.0)],
    ]
    summary = versus.summary(lines)
    assert (summary["steps"], summary["seconds"], summary["parts"]["forward+backward"]) == (3, 3.0, 1.7)
    assert summary["tensors_gb"] == 70.0  # memory counts from the first
    assert summary["mfu_percent"] == pytest.approx(100 * 6 * 3_085_938_688 * 45056 / 1.7 / 989e12)
    assert versus.summary(lines[:3]) == {"parameters": 3_085_938_688}


def test_the_table_puts_every_setting_against_every_other_halfs(versus: ModuleType) -> None:
    common = {"parts": {"sampling": 1.0}, "mfu_percent": 52.0}
    records = [
        {"half": "tandem", "setting": "fast", "seconds": 2.0, "all_tensors_gb": 60.0, "card_gb": 70.0, **common},
        {"half": "trl", "setting": "default", "seconds": 5.0, "all_tensors_gb": 80.0, "card_gb": None, **common},
        {"half": "trl", "setting": "broken", "error": "out of memory"},
    ]
    shown = versus.table(records).splitlines()
    ratios = next(row for row in shown if row.startswith("fast / default"))
    assert ratios.split()[3:] == ["0.400", "0.750", "-", "52.0"]
    assert shown[-1] == "FAILED trl broken: out of memory"
