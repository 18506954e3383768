"""One copy: the optimizer writes the engine's own storage, so nothing moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tandem.engines.base import CanLend
from tandem.errors import UnsupportedPair
from tandem.sync._proof import Checksums, checksums
from tandem.sync.base import Link, WeightSync
from tandem.types import PolicyVersion


@dataclass(frozen=True, kw_only=True)
class Shared(WeightSync):
    """Trainer and engine hold the same storage. The engine stands still while the optimizer writes it."""

    carries: ClassVar[frozenset[str]] = frozenset({"full", "lora"})
    port: ClassVar[type] = CanLend
    pause: ClassVar[Literal["step", "move", "never"]] = "step"

    async def move(self, link: Link, version: PolicyVersion) -> int:
        """Nothing travels; every trained tensor must be one the engine lent, at the same address.

        Raises:
            UnsupportedPair: names the first tensor that is not.
        """
        lent = {name: tensor.data_ptr() for name, tensor in self._lent(link).items()}
        for name, tensor in link.source:
            if lent.get(name) != tensor.data_ptr():
                raise UnsupportedPair(f"sync shared: the engine does not sample from the trainer's {name!r}")
        return 0

    async def engine_checksums(self, link: Link, mine: Checksums) -> Checksums:
        """Checksums of the engine's own storage; bytes at the trainer's own address are not read a second time."""
        lent = self._lent(link)
        elsewhere = [(n, lent[n]) for n, tensor in link.source if n in lent and lent[n].data_ptr() != tensor.data_ptr()]
        theirs = {name: value for name, value in mine.items() if name in lent}
        return {**theirs, **await link.policy.compute(checksums, elsewhere)}

    @staticmethod
    def _lent(link: Link) -> dict[str, Tensor]:
        assert isinstance(link.engine, CanLend)
        return dict(link.engine.lent())
