"""What launchers of several processes say in the environment: of them one trainer would be started too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_ALONE = {"NPROC_PER_NODE": "1", "NNODES": "1", "WORLD_SIZE": "1", "NODE_RANK": "0", "RANK": "0", "LOCAL_RANK": "0"}
"""What the environment says where there is one process."""


def several(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that say that there are several trainers, with what to do instead."""
    for name, alone in _ALONE.items():
        said = environ.get(name, "").strip()
        if said not in ("", alone):
            yield (
                f"{name}={said}, of the environment",
                "the trainer is one process, the same on every rank; unset it, start one, and multiply "
                "gradient_accumulation_steps by the number of GPUs instead",
            )
