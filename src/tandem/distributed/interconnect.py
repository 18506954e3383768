"""How the GPUs of a host are joined, and what a publish of weights over that way takes."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Literal

NVLINK_BYTES = 360e9
"""Bytes a second that a GPU receives in an all-gather of eight H100 over NVLink, measured by nccl-tests."""
PCIE_BYTES = 25e9
"""The same over PCIe: a guess, which no measurement of this project's backs."""
_LOOK_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """The way between a host's GPUs."""

    kind: Literal["NVLink", "PCIe"]
    """NVLink if every pair has it; the slowest pair decides."""
    gpus: int
    """GPUs of the host."""
    slowest: str
    """The slowest pair, as nvidia-smi names its way: NV18, PIX, SYS."""

    @property
    def bytes_per_second(self) -> float:
        """What one GPU receives in a collective operation over this way."""
        return NVLINK_BYTES if self.kind == "NVLink" else PCIE_BYTES


_ORDER = ("SYS", "NODE", "PHB", "PXB", "PIX")
"""Ways over PCIe, the slowest first."""


def parse(topology: str) -> Interconnect | None:
    """The way between GPUs by what ``nvidia-smi topo -m`` prints; None where there are not two."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    lines = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [words for words in lines if "X" in words]  # the header has the GPUs' names alone
    gpus = len(rows)
    if gpus < 2:
        return None
    ways = [way for index, row in enumerate(rows) for other, way in enumerate(row[1 : gpus + 1]) if other != index]
    over_pcie = sorted((way for way in ways if not way.startswith("NV")), key=_rank)
    fewest = sorted(ways, key=lambda way: int(way[2:]) if way[2:].isdigit() else 0)
    slowest = over_pcie[0] if over_pcie else fewest[0]
    return Interconnect(kind="PCIe" if over_pcie else "NVLink", gpus=gpus, slowest=slowest)


def _rank(way: str) -> int:
    return _ORDER.index(way) if way in _ORDER else 0


def interconnect() -> Interconnect | None:
    """The way between this host's GPUs; None where there are not two, or nvidia-smi does not say."""
    try:
        looked = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_LOOK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(looked.stdout)


def received_bytes(weights: int, ranks: int) -> int:
    """Bytes that each rank receives in a publish: all of the weights but its own share.

    Args:
        weights: bytes of the whole model as engines hold it.
        ranks: over which the updated shares lie.
    """
    return weights * (ranks - 1) // ranks


OWN_SLICES = "each rank writes the slices of its engine's worker: norms and what workers hold twice alone travel"
"""What a publish takes where a rank's shard is what its worker holds."""


def publish_text(weights: int, ranks: int, way: Interconnect | None) -> str:
    """What a publish is estimated to take, and by which figure: bytes received over bandwidth.

    Args:
        weights: bytes of the whole model, or of an engine's worker's slice of it.
        ranks: over which the updated shares of these lie.
        way: between the GPUs; None where it is not known, and both figures are told.
    """
    received = received_bytes(weights, ranks)
    ways: tuple[tuple[str, float], ...] = (("NVLink", NVLINK_BYTES), ("PCIe", PCIE_BYTES))
    if way is not None:
        ways = ((way.kind, way.bytes_per_second),)
    each = " or ".join(f"{1000 * received / rate:,.1f} ms over {kind} ({rate / 1e9:g} GB/s)" for kind, rate in ways)
    return f"each rank receives {received / 1e9:.2f} GB a publish: about {each}"
