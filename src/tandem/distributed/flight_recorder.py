"""NCCL's flight recorder: the last collectives of each rank, written into the run's folder when a rank is lost.

torch writes them itself only where its watchdog may end the process, which a run's groups do not let it do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

NAME = "nccl_trace_rank_"
"""What files are called, but for the rank's number: torch's own name for them."""
ENTRIES = "2000"
"""Collectives that are kept."""

_FILE = "TORCH_FR_DUMP_TEMP_FILE"


def record(logs: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the NCCL groups that this process makes from now on be recorded; what a user has set stays.

    Args:
        logs: the folder of the run in which files are written.
        environ: where torch looks.
    """
    environ.setdefault("TORCH_FR_BUFFER_SIZE", ENTRIES)
    environ.setdefault(_FILE, str(logs.absolute() / NAME))
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def write(rank: int) -> Path | None:
    """Write the last collectives of this rank; None where ``record`` was not called, or they cannot be written."""
    import torch.distributed as dist  # tandem doctor needs none of it

    if (prefix := os.environ.get(_FILE)) is None or not dist.is_nccl_available():
        return None
    # Builds without NCCL do not have it.
    from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

    path = Path(f"{prefix}{rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_dump_nccl_trace())
    except (OSError, RuntimeError) as error:
        log.warning("the last collectives of rank %d are not in %s: %s", rank, path, error)
        return None
    return path


def written(logs: Path) -> list[Path]:
    """Files of a run that there are, by rank."""
    files = [path for path in logs.glob(f"{NAME}*") if path.name.removeprefix(NAME).isdigit()]
    return sorted(files, key=lambda path: int(path.name.removeprefix(NAME)))


def command(logs: Path) -> str:
    """The command line by which torch compares the ranks' files, and names the collective at which they part."""
    return f"torchfrtrace --prefix {NAME} --allow-incomplete-ranks {logs}"
