"""The way between GPUs as nvidia-smi prints it, what a publish takes over it, and what tandem doctor says of ranks."""

from __future__ import annotations

import socket

import pytest

from tandem.distributed import interconnect
from tandem.distributed.interconnect import Interconnect, parse, publish_text, received_bytes
from tandem.tools import doctor

NVLINK = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV12\tSYS\t0-47\t0\t\tN/A
GPU2\tNV18\tNV12\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
"""
MIXED = NVLINK.replace("GPU0\t X \tNV18\tNV18", "GPU0\t X \tNV18\tPIX").replace("GPU2\tNV18\tNV12", "GPU2\tPIX\tNODE")


def test_nvlink_between_all() -> None:
    assert parse(NVLINK) == Interconnect(kind="NVLink", gpus=3, slowest="NV12")


def test_one_pair_over_pcie_makes_it_pcie() -> None:
    assert parse(MIXED) == Interconnect(kind="PCIe", gpus=3, slowest="NODE")


@pytest.mark.parametrize("topology", ["", "\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n", "NVIDIA-SMI has failed"])
def test_nothing_between_one_gpu(topology: str) -> None:
    assert parse(topology) is None


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert interconnect.interconnect() is None


def test_a_publish_is_the_bytes_of_the_others_over_bandwidth() -> None:
    """The figures of an 8B model on eight GPUs: 16 GB of weights, of which each rank receives seven eighths."""
    assert received_bytes(16_000_000_000, 8) == 14_000_000_000
    nvlink = Interconnect(kind="NVLink", gpus=8, slowest="NV18")
    assert publish_text(16_000_000_000, 8, nvlink) == (
        "each rank receives 14.00 GB a publish: about 38.9 ms over NVLink (360 GB/s)"
    )
    both = publish_text(16_000_000_000, 8, None)
    assert "38.9 ms over NVLink (360 GB/s) or 560.0 ms over PCIe (25 GB/s)" in both


RANK = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip


def test_doctor_says_nothing_of_ranks_on_one_gpu() -> None:
    assert list(doctor.ranks({"CUDA_VISIBLE_DEVICES": "0"})) == []


def test_doctor_names_the_launcher_and_its_mistakes() -> None:
    checks = {one.what: one for one in doctor.ranks(RANK | {"CUDA_VISIBLE_DEVICES": ""})}
    assert checks["ranks"].detail == "rank 1 of 2, started by environment; they meet at h"
    (wrong,) = doctor.ranks({"RANK": "1"})
    assert wrong.state == "problem"
    assert "RANK=1" in wrong.detail


def test_doctor_looks_at_the_way_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "interconnect", lambda: parse(MIXED))
    monkeypatch.setattr(doctor, "_nccl", lambda: "2.27.3, 3 GPUs")
    checks = {one.what: one for one in doctor.ranks({"CUDA_VISIBLE_DEVICES": "0,1,2"})}
    assert checks["NCCL"].detail == "2.27.3, 3 GPUs"
    assert (checks["interconnect"].state, checks["interconnect"].detail) == (
        "note", "3 GPUs over PCIe (NODE between the slowest two)",
    )  # fmt: skip


def test_doctor_says_whether_the_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "interconnect", lambda: None)
    monkeypatch.setattr(doctor, "_nccl", lambda: "2.27.3, 2 GPUs")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "DEFAULT_PORT", taken.getsockname()[1])
        checks = {one.what: one for one in doctor.ranks({"CUDA_VISIBLE_DEVICES": "0,1"})}
    assert (checks["port"].state, "in use" in checks["port"].detail) == ("note", True)
