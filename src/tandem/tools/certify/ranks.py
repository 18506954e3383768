"""A certificate's step on several ranks: the crew, the wire, the followers and the divided optimizer of a run.

Ranks are processes of this machine that compute on its CPU. Each has the recipe and makes the model of it, as in a run.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.distributed.crew import Ranks, lead
from tandem.distributed.sharding import ShardedStepper
from tandem.errors import UnsupportedPair
from tandem.metrics import flatten
from tandem.model.compilation import Compile
from tandem.model.layers import Checkpointing
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.base import Optimizer, UpdatesParts
from tandem.tools.certify import rank_records
from tandem.tools.certify.formulas import part
from tandem.tools.certify.gradients import CertifiedPolicy, Gradient, Setup
from tandem.tools.certify.optimizer_steps import Update, narrow_weights, visible
from tandem.tools.certify.rank_records import Recording
from tandem.trainer.pack import StepBatch
from tandem.trainer.rank_checks import check_division
from tandem.trainer.rank_crew import RankCrew
from tandem.trainer.rank_parts import RankParts
from tandem.trainer.rank_wire import tensor_to_plain
from tandem.trainer.step import Step

T = TypeVar("T")
By = Literal["placed", "optimizer"]
"""What moves the weights: nothing but the certificate, or the recipe's optimizer."""

SECONDS = 300.0
"""Most that ranks may take to come, or to join a collective."""
SMALLEST, BUCKET = 0, 1 << 14
"""Elements of what is divided, and of a bucket: a tiny model's matrices are divided too, and take several."""
MODULE = "tandem.tools.certify.rank_process"
"""Runs a follower."""


def check_certified(config: RunConfig, world: int) -> None:
    """Refuse what so many ranks cannot certify.

    Raises:
        UnsupportedPair: names the option.
    """
    check_division(config, world)
    if config.distributed.shard == "weights":
        raise UnsupportedPair(
            "distributed.shard: weights is not certified: each rank of a certificate has whole weights; give "
            "distributed.shard=states, whose step is the same but for where weights are"
        )


class RankStepper:
    """The stepper of what is under way; the model's hooks know this one alone."""

    inner: ShardedStepper

    def __init__(self) -> None:
        self.norms: list[float] = []
        """Of the gradient at each update so far, as it was told."""

    def bind(self, inner: ShardedStepper) -> None:
        """Begin anew with another one."""
        self.inner, self.norms = inner, []

    def accumulate(self, parameter: Parameter) -> None:
        """Hand on."""
        self.inner.accumulate(parameter)

    def flush(self) -> None:
        """Hand on."""
        self.inner.flush()

    def end_pass(self) -> None:
        """Hand on."""
        self.inner.end_pass()

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Hand on, and note the norm."""
        norm = self.inner.step(lr, max_grad_norm)
        self.norms.append(float(norm))
        return norm

    def zero_grad(self) -> None:
        """Hand on."""
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks, on the lead."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing goes on from a certificate."""
        raise NotImplementedError("records are only read")


class CertifiedRank(CertifiedPolicy):
    """A rank's policy under a certificate; the lead and its followers have one each."""

    def __init__(self, setup: Setup, config: RunConfig):
        super().__init__(setup)
        self.config = config
        self.stepper = RankStepper()
        self.work.stepper, self.work.reduce = self.stepper, self.stepper.flush
        self.work.end_pass = self.stepper.end_pass
        self._parts: RankParts

    def connect(self, parts: RankParts) -> None:
        """Be one of the ranks from now on."""
        self._parts = parts
        self.work.context = parts.context

    def started(self, by: By, tile: int | None) -> None:
        """Be as a run is when its first step begins, its updates made ``by`` this and recorded."""
        self.setup.tile = tile
        self.begin()
        optimizer: Any = AdamW() if by == "placed" else visible(self.config.optimizer)
        recording = Recording(optimizer, self.placed if by == "placed" else None)
        self.stepper.bind(self._divided(recording, list(self._parameters.items())))

    def _divided(self, optimizer: UpdatesParts, named: Sequence[tuple[str, Parameter]]) -> ShardedStepper:
        return ShardedStepper(
            optimizer,
            named,
            self._parts.group,
            replicate=self.config.trainable.folder_name != "model",
            local=self.config.distributed.gradients == "local",
            smallest=SMALLEST,
            bucket=BUCKET,
        )

    def digest(self) -> str:
        """Of all bits of what is trained."""
        bits = xxhash.xxh3_128()
        for parameter in self._parameters.values():
            bits.update(parameter.detach().view(-1).view(torch.uint8).numpy().data)
        return bits.hexdigest()

    def narrow(self, gradients: Gradient) -> dict[str, Parameter]:
        """Bfloat16 weights after the updates of ``narrow_weights``, of which this rank computed its part."""
        optimizer, group = self.config.optimizer, self._parts.group

        def bind(steady: Optimizer, named: Sequence[tuple[str, Parameter]]) -> tuple[Any, Callable[[], None]]:
            assert isinstance(steady, UpdatesParts)
            stepper = self._divided(steady, named)
            return stepper, stepper.flush

        kind, _ = part(recipes.as_json(self.config)["optimizer"])
        return narrow_weights(optimizer, kind, self.placed(0), gradients, bind, micros=group.world, mine=1)


class RankedPolicy(CertifiedRank):
    """The lead of several ranks under a certificate, whose every step all of them compute.

    Args:
        setup: the lead's; of a model of its own.
        config: the recipe, which the others have too.
        world: how many ranks.
        real: with the recipe's own model.

    Raises:
        RankError: one did not come, or failed.
    """

    def __init__(self, setup: Setup, config: RunConfig, world: int, *, real: bool):
        super().__init__(dataclasses.replace(setup, model=copy.deepcopy(setup.model)), config)
        self.world = world
        self._events = _Events()
        self._open = AsyncExitStack()
        try:
            self._events.run(self._connect(real))
        except BaseException:
            self.close()
            raise

    async def _connect(self, real: bool) -> None:
        logs = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="tandem-certify-")))
        command = [sys.executable, "-m", MODULE]
        ranks: Ranks
        self._ranks = ranks = await self._open.enter_async_context(lead(self.world, None, command, logs, SECONDS))
        await ranks.execute("certify", lambda rank: [recipes.dump(self.config), real], _nothing())
        distributed = self.config.distributed
        connecting = RankParts.join(ranks.rendezvous, 0, torch.device("cpu"), distributed)
        parts, _ = await ranks.execute("connect", None, connecting)
        ranks.on_failure.append(parts.abort)
        self.connect(parts)
        self._crew = RankCrew(self.work, ranks, context_parallel=distributed.context_parallel)

    def _on_all(self, command: str, body: Any, mine: Callable[[], T]) -> tuple[T, list[Any]]:
        """Have every rank do it, the lead by ``mine``; its result, and the others'."""
        return self._events.run(self._ranks.execute(command, lambda rank: body, self.policy.compute(mine)))

    def tune(self, *, compile: Compile, checkpointing: Checkpointing = "none") -> None:
        """As of one process, on all ranks."""
        options = {"compile": compile, "checkpointing": checkpointing}
        self._on_all("tune", options, lambda: super(RankedPolicy, self).tune(**options))  # type: ignore[arg-type]

    def walk(self, steps: Sequence[tuple[int, StepBatch]]) -> list[Gradient]:
        """As of one process, each step computed by all ranks."""
        states, _ = self._stepped("placed", steps, AdamW(), 1)
        return list(rank_records.of_updates(states, rank_records.GRADIENT))

    def updates(self, optimizer: Optimizer, steps: Sequence[StepBatch], total: int) -> tuple[list[Update], list[float]]:
        """As ``optimizer_steps.updates``, each by all ranks and their divided optimizer."""
        states, reported = self._stepped("optimizer", list(enumerate(steps, 1)), optimizer, total)
        kinds = (rank_records.GRADIENT, rank_records.BEFORE, rank_records.AFTER)
        kept = zip(*(rank_records.of_updates(states, kind) for kind in kinds), self.stepper.norms, strict=True)
        made = [
            Update(step=1 + i // self.setup.updates, gradients=gradients, before=before, after=after, norm=norm)
            for i, (gradients, before, after, norm) in enumerate(kept)
        ]
        return made, reported

    def _stepped(
        self, by: By, steps: Sequence[tuple[int, StepBatch]], optimizer: Optimizer, total: int
    ) -> tuple[Mapping[str, Tensor], list[float]]:
        """Records of every update of some steps, and the gradient norms that the steps reported."""
        options = (by, self.setup.tile)
        self._on_all("started", options, lambda: self.started(*options))
        step = Step(
            work=self.work, optimizer=optimizer, steps=total, updates_per_batch=self.setup.updates, crew=self._crew
        )
        reported: list[float] = []

        async def whole() -> None:
            for number, batch in steps:
                await self._crew.fold()  # as it is published
                stats = await step.forward_backward(batch)
                reported.append(flatten(await step.apply(number, batch, stats))["grad_norm"])

        self._events.run(whole())
        states, _ = self._on_all("state", None, self.stepper.state_dict)
        return states, reported

    def differing(self) -> int:
        """How many of the other ranks have weights of other bits than the lead, as the last step has left them."""
        mine, others = self._on_all("digest", None, self.digest)
        return sum(other != mine for other in others)

    def narrow_of_all(self, gradients: Gradient) -> dict[str, Parameter]:
        """Bfloat16 weights after updates by all ranks."""
        body = {name: tensor_to_plain(gradient) for name, gradient in gradients.items()}
        return self._on_all("narrow", body, lambda: self.narrow(gradients))[0]

    def close(self) -> None:
        """Let all ranks end."""
        try:
            self._events.run(self._open.aclose())
        finally:
            self._events.close()
            super().close()


class _Events:
    """An event loop in a thread of its own: ranks give signs of life also while this one computes formulas."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks of a certificate", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _nothing() -> None:
    """The lead's part in a command that is for the others."""
