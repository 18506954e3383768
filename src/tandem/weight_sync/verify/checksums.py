"""Verification that trainer and engine hold the same bytes: checksums of each tensor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tandem.engines.base import Engine, ReportsChecksums, UnmappedWeights
from tandem.errors import StaleWeights, TornWeights

log = logging.getLogger(__name__)

Checksums = Mapping[str, int]
"""Checksum of each tensor by name, see ``transport/checksums.py``."""


def differing(trainer_sums: Checksums, engine_sums: Checksums) -> list[str]:
    """Names of the trainer's tensors that the engine holds otherwise, or not at all."""
    return [name for name, value in trainer_sums.items() if engine_sums.get(name) != value]


def compare_checksums(trainer_sums: Checksums, engines: Mapping[str, Checksums], what: str, what_follows: str) -> None:
    """Compare the trainer's checksums with those of each engine's own bytes.

    Raises:
        StaleWeights: none of the tensors agree.
        TornWeights: some do.
    """
    for name, engine_sums in engines.items():
        if wrong := differing(trainer_sums, engine_sums):
            kind = StaleWeights if len(wrong) == len(trainer_sums) else TornWeights
            raise kind(
                f"{len(wrong)} of {len(trainer_sums)} {what} differ between the trainer and {name}, first "
                f"{wrong[0]!r}; {what_follows}"
            )


async def compare_frozen(engine: Engine, trained: Any) -> None:
    """Compare the weights that no publish carries, once for every start of the engine: nothing else would see them.

    Args:
        engine: compared only if it checksums its own bytes.
        trained: the session's ``Trained``.

    Raises:
        StaleWeights, TornWeights: the engine holds others.
    """
    if not isinstance(engine, ReportsChecksums) or not engine.sums_bytes or not trained.frozen:
        return
    try:
        sums = await engine.checksums("weights")
    except UnmappedWeights as error:
        log.warning("weights that are not trained are not compared, only probed: %s", str(error).splitlines()[0])
        return
    advice = "both must start from the same model in the same type"
    compare_checksums(await trained.frozen_checksums(), sums, "weights that are not trained", advice)
