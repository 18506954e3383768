"""The world of several ranks whose weights are cut."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from tandem.engines.base import Engine, EngineRequirements
from tandem.trainer.pairs import has_slices
from tandem.trainer.ranks.lead import ManyRanks
from tandem.trainer.ranks.shared_slices import SharedSlices
from tandem.trainer.ranks.slices import RankSlices, TrainedSlices
from tandem.trainer.world import Hold, Write
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.transaction.trained import Trained


class CutRanks(ManyRanks):
    """Several ranks whose weights are cut, with engines beside or apart from them: none of them has all weights."""

    _rank: RankSlices

    async def start_engine(self, stack: AsyncExitStack, requirements: EngineRequirements) -> Engine:
        """Start the engines, and cut the policy among the ranks."""
        engine, whole = await super().start_engine(stack, requirements), self.policy
        cutting = whole.compute(self.parts.cut, whole, self.config.trainable)
        self.policy = cut = await self._all("cut", None, cutting)
        self._rank = RankSlices(cut, whole.causal)
        return engine

    @property
    def sync(self) -> WeightSync:
        """The recipe's, by slices where each rank has a worker beside it."""
        return SharedSlices.of(self.config.sync) if has_slices(self.config) else self.config.sync

    def trained(self) -> Trained:
        """The weights of all ranks."""
        return TrainedSlices(self.config.trainable, self._rank, self.ranks)

    async def load_weights(self, path: Path) -> None:
        """Nothing: other ranks take theirs from this one when it is cut."""

    @property
    def saves_everywhere(self) -> bool:
        """Whether other ranks have a part of what is saved: of an adapter each has all."""
        return super().saves_everywhere or self.config.trainable.folder_name == "model"

    def stage_weights(self, hold: Hold) -> Write:
        """Gather this rank's share, and write it as one of the model's files."""
        trainable, tokenizer = self.config.trainable, self.policy.tokenizer
        if trainable.folder_name != "model":
            return super().stage_weights(hold)
        write = self._rank.stage()

        def written(folder: Path) -> None:
            write(folder / trainable.folder_name)
            tokenizer.save_pretrained(folder / trainable.folder_name)

        return written
