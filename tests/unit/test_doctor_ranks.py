"""What tandem doctor says of ranks."""

from __future__ import annotations

import pytest

from tandem.tools import doctor

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


def test_doctor_tries_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nccl", lambda: "2.27.3, 3 GPUs")
    checks = {one.what: one for one in doctor.ranks({"CUDA_VISIBLE_DEVICES": "0,1,2"})}
    assert checks["NCCL"].detail == "2.27.3, 3 GPUs"
