"""The collector while a run is under way."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tandem import machine


def test_what_tensors_took_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.max_memory_allocated", {"cuda:1": 5}.__getitem__)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", {"cuda:1": 7}.__getitem__)
    assert machine.peaks("cpu") == {}
    assert machine.peaks("cuda:1") == {"gpu_gb": 5, "gpu_reserved_gb": 7}


@pytest.mark.parametrize(
    ("flags", "device", "computes"),
    [
        ("flags : fpu avx512_bf16 sse", "", True),
        ("flags : fpu amx_bf16", "", True),
        ("Features : asimd bf16", "", True),
        ("flags : fpu avx512f avx512_vnni", "", False),
        ("flags : fpu avx512f", "nvidia0", True),
    ],
)
def test_bfloat16_is_computed_where_the_processor_says_so_or_a_card_is(
    tmp_path: Path, flags: str, device: str, computes: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    (tmp_path / (device or "null")).touch()
    assert machine.computes_bfloat16(tmp_path / "cpuinfo", tmp_path) == computes


def test_a_signal_to_end_the_run_does_not_end_what_the_compiler_has_started() -> None:
    """A scheduler sends it to every process; torch waits for ever for a compiler's worker that has gone."""
    from tandem.model.policy import Compute

    with closing(Compute(1)) as compute:
        child = asyncio.run(compute(subprocess.Popen, ["sleep", "60"]))
    with child:
        blocked = Path(f"/proc/{child.pid}/status").read_text().partition("SigBlk:")[2].split()[0]
        child.kill()
    assert int(blocked, 16) >> (signal.SIGTERM - 1) & 1


GROWTH = """
import ctypes
import torch
from tandem.model.policy import Compute

Compute(1).close()
torch.set_num_threads(1)


class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keep"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


ask = ctypes.CDLL(None).mallinfo2
ask.restype = Info
weight = torch.zeros(64, 64, dtype=torch.bfloat16)


def product(rows):
    torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)


for rows in range(1, 200):
    product(rows)
before = ask().used
for rows in range(200, 600):
    product(rows)
print(ask().used - before)
"""


@pytest.mark.long
@pytest.mark.skipif(getattr(ctypes.CDLL(None), "mallinfo2", None) is None, reason="asks glibc what is allocated")
def test_products_of_ever_other_shapes_take_no_more_memory() -> None:
    """Without the bound 400 shapes take 222 MB that stay."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10_000_000


def test_what_was_freed_is_given_back() -> None:
    held = [bytearray(60_000) for _ in range(3000)]  # below what glibc takes from the system one by one
    kept = held[::50]
    del held
    before = machine.resident()
    machine.trim()
    assert len(kept) == 60
    if sys.platform == "linux":
        assert before - machine.resident() > 100_000_000
