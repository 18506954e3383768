"""A follower's process under a certificate: ``python -m tandem.tools.certify.rank_process``, started by the lead."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from tandem.config.loading import from_options
from tandem.config.tree import Branch, Problems, parse, plain
from tandem.distributed.follower import Follower, Handler
from tandem.distributed.placement import Placement
from tandem.tools.certify.gradients import setup_of
from tandem.tools.certify.made_up import certified
from tandem.tools.certify.ranks import SECONDS, CertifiedRank
from tandem.trainer.rank_crew import handlers
from tandem.trainer.rank_parts import RankParts
from tandem.trainer.rank_wire import tensor_of


class _FollowerCommands:
    """A follower's policy, as the lead's commands make it."""

    def __init__(self, follower: Follower):
        self._follower = follower
        self.rank: CertifiedRank | None = None
        self.handlers: dict[str, Handler] = {"certify": self._certify, "connect": self._connect}

    async def _certify(self, body: Any) -> None:
        """Make the model of the lead's recipe, as the lead has."""
        text, real = body
        tree = parse(text, "the lead's recipe", Problems())
        assert isinstance(tree, Branch)
        config = from_options(plain(tree), (), Path("the lead's recipe")).config
        model, _ = certified(config, real=real)
        self.rank = CertifiedRank(setup_of(config, model, real=real), config)

    async def _connect(self, body: Any) -> None:
        rank = self.rank
        assert rank is not None
        placement, rendezvous = self._follower.placement, self._follower.rendezvous
        distributed, device = rank.config.distributed, torch.device("cpu")
        rank.connect(await RankParts.join(rendezvous, placement.rank, device, distributed))
        self.handlers |= _handlers(rank) | handlers(rank.work)


def _handlers(rank: CertifiedRank) -> dict[str, Handler]:
    """What a follower does for each command around a step."""
    compute = rank.policy.compute

    async def started(body: Any) -> None:
        await compute(rank.started, *body)

    async def tune(body: Any) -> None:
        await compute(lambda: rank.tune(**body))

    async def state(body: Any) -> None:
        await compute(rank.stepper.state_dict)

    async def digest(body: Any) -> str:
        return await compute(rank.digest)

    async def narrow(body: Any) -> None:
        await compute(rank.narrow, {name: tensor_of(plain, torch.device("cpu")) for name, plain in body.items()})

    return {"started": started, "tune": tune, "state": state, "digest": digest, "narrow": narrow}


async def follow(placement: Placement) -> None:
    """Follow the lead until its certificate is made.

    Raises:
        RankError: the lead is gone, or failed.
    """
    follower = await Follower.join(placement, SECONDS)
    mine = _FollowerCommands(follower)
    try:
        await follower.serve(mine.handlers)
    finally:
        if mine.rank is not None:
            mine.rank.close()


if __name__ == "__main__":
    place = Placement.from_environment(os.environ)
    assert place is not None, "the lead starts this"
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(follow(place))
