"""Checkpoints: staged, written aside, flushed to disk, then renamed. What has its final name is whole.

A staged tensor must not change while it is written. Either it is a copy in host memory, or training waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem import machine
from tandem.algorithms.references.base import ReferenceWeights
from tandem.distributed import state_shards
from tandem.distributed.state_shards import SharesStates
from tandem.errors import CheckpointError, TandemError, command
from tandem.model.policy import Compute, Policy, WorkerThread
from tandem.observability import trace, waits
from tandem.observability.emit import Telemetry
from tandem.optimizers.base import Stepper
from tandem.together import all_ended
from tandem.trainable.full import write_index
from tandem.trainer.run_folder import RunLock
from tandem.trainer.state import TrainerState, checkpoints_in
from tandem.trainer.step import LocalWork
from tandem.trainer.world import Hold, World, Write

log = logging.getLogger(__name__)

WHOLE = "optimizer.safetensors"
"""States that one process wrote."""
SHARDS = "optimizer"
"""Folder of states of which several ranks each wrote a share."""


class Staging:
    """How the tensors of a checkpoint are kept from changing while they are written.

    Args:
        compute: the compute thread writes, and nothing is copied: nothing is trained or sampled on it meanwhile. None:
            tensors are copied to host memory, from a GPU to pinned memory, and a thread of its own writes them.
    """

    def __init__(self, compute: Compute | None):
        self.waits = compute is not None
        """Whether training waits until a checkpoint is written."""
        self.write = compute or WorkerThread("checkpoint", actor="checkpoint")
        """Runs a function that writes, one at a time, on a thread that may block."""

    @torch.no_grad()
    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as they are now, for the writer; called on the compute thread. Equal memory stays equal.

        Copies of tensors on a GPU are under way together, and there when this returns.
        """
        if self.waits:
            return dict(tensors)
        copies: dict[tuple[object, ...], Tensor] = {}
        by_name: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if not tensor.numel() or memory not in copies:
                copies[memory] = _copy(tensor)
            by_name[name] = copies[memory]
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return by_name

    def close(self) -> None:
        """Let what is being written end."""
        if not self.waits:
            self.write.close()


def _copy(tensor: Tensor) -> Tensor:
    """A copy in host memory; torch keeps pinned memory that is freed, for the next checkpoint."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def staging_of(asynchronous: bool | Literal["auto"], policy: Policy) -> Staging:
    """The recipe's way; auto: asynchronous where weights are on a GPU, beside which host memory is cheap."""
    chosen = policy.device.type != "cpu" if asynchronous == "auto" else asynchronous
    return Staging(None if chosen else policy.compute)


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """Saves and restores the checkpoints of one run; one at a time is written.

    A checkpoint is staged first: what it holds is as it was then, whatever is trained while it is written.
    """

    world: World
    """The ranks, each with its share of the states; what of the weights this one has or can have."""
    work: LocalWork
    """That of a step: it has the optimizer, and the reference, whose weights may move too."""
    lock: RunLock
    """Of the run's folder, which must be there as long as something is saved."""
    staging: Staging
    """Whether training goes on while a checkpoint is written."""
    telemetry: Telemetry
    """Told of each finished checkpoint."""
    _writing: asyncio.Future[None] | None = field(default=None, init=False)

    @property
    def folder(self) -> Path:
        """The run's ``checkpoints`` folder."""
        return self.lock.folder / "checkpoints"

    @property
    def contents(self) -> Literal["all", "weights", "none"]:
        """What is saved; a run goes on from all of it only."""
        return self.world.config.checkpoint.save

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        config = self.world.config
        return self.contents != "none" and (step % config.checkpoint.every == 0 or step >= config.steps)

    async def begin(self, state: TrainerState, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stage a checkpoint of this state, unless its step has one, and begin to write it.

        The checkpoint before is written by then. The last step's is written when this returns, and so is every one
        where the staging has training wait. Nothing is written where nothing is to be saved.

        Args:
            state: of training now.
            then: awaited once the checkpoint has its name.

        Raises:
            CheckpointError: it, or the one before, cannot be written; older checkpoints are untouched.
            TandemError: the run's folder is gone, and is not made anew for it.
        """
        with trace.span("seconds/checkpoint"):
            self.lock.check()
            await self._settle()
            final = self.folder / f"{state.step:06d}"
            if self.contents == "none" or final.exists():
                return
            with self._whole_or_none(state.step, _aside(final)):
                reason, staging = f"step {state.step} to be copied", self._stage(state, _aside(final))
                write = await waits.wait(staging, owner="trainer", reason=reason, on=self._writer)
            self._writing = asyncio.ensure_future(self._write(state.step, write, final, then))
            if self.staging.waits or state.step >= self.world.config.steps:
                await self._settle()

    async def save(self, state: TrainerState) -> None:
        """Write a checkpoint of this state, unless its step has one; raises what ``begin`` does."""
        await self.begin(state)
        await self.done()

    async def done(self) -> None:
        """Wait until nothing is being written; raises what ``begin`` does."""
        if self._writing is not None:
            with trace.span("seconds/checkpoint"):
                await self._settle()

    async def check(self) -> None:
        """See that a write that has ended did not fail, and that the folder is there; raises what ``begin`` does."""
        self.lock.check()
        if self._writing is not None and self._writing.done():
            await self._settle()

    async def end(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Wait until nothing is being written, as the end of a run by ``error``, which is the one to tell."""
        try:
            await self.done()
        except TandemError as late:
            if error is None:
                raise
            log.error("%s", late)

    async def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await waits.wait(writing, owner="trainer", reason="what was copied to be written", on="checkpoint")

    @property
    def _writer(self) -> str:
        return f"the checkpoint writer at {self.folder}"

    async def _stage(self, state: TrainerState, aside: Path) -> Write:
        """Have every rank stage its part of a checkpoint; this rank's."""
        await self.staging.write(_make_anew, aside)
        return await self.world.save(aside, self.world.policy.compute(self._staged, state))

    async def _write(self, step: int, write: Write, final: Path, then: Callable[[], Awaitable[None]] | None) -> None:
        """Write what was staged, tell of it, and remove old ones."""
        with self._whole_or_none(step, _aside(final)):
            reason = f"step {step} to be written"
            await waits.wait(self._seal(write, final), owner="checkpoint", reason=reason, on=self._writer)
        self.telemetry.event("checkpoint_saved", step=step, path=str(final))
        if then is not None:
            await then()
        await self.staging.write(self._tidy)

    async def _seal(self, write: Write, final: Path) -> None:
        """Give a checkpoint its name once the files of every rank are on disk."""
        aside = _aside(final)
        await all_ended([self.staging.write(write, aside), self.world.written()])  # now no rank writes any more
        await self.staging.write(_seal, aside, final)

    def _tidy(self) -> None:
        """Remove the oldest; renamed first, since half of a checkpoint must not bear its name."""
        machine.trim()  # what is written was copied to the host first
        for old in list(checkpoints_in(self.folder).values())[: -self.world.config.checkpoint.keep]:
            try:
                shutil.rmtree(old.rename(_aside(old)))
            except OSError as error:
                log.warning("the old checkpoint %s cannot be removed: %s", old, error)

    @contextmanager
    def _whole_or_none(self, step: int, aside: Path) -> Iterator[None]:
        """Remove what was written by halves, and say so where it is the disk's fault."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            # tokenizers raises a bare Exception where the disk refuses.
            if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
                raise
            newest = max(checkpoints_in(self.folder), default=None)
            newest_text = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is step {newest}"
            remedy = f"Free disk space or mend the folder, then go on with: {command('train', self.folder.parent)}"
            what = f"checkpoint of step {step} cannot be written to {self.folder}: {error}"
            raise CheckpointError(f"{what}; {newest_text}. {remedy}") from error

    def _staged(self, state: TrainerState) -> Write:
        """What writes this rank's files, as everything is now."""
        hold = self.staging.hold
        parts: deque[Write] = deque([self.world.stage_weights(hold)])
        if self.contents == "all":
            parts.append(staged_states(self.work.stepper, 0, hold))
            if self.work.reference is not None and (saved := hold(self.work.reference.state_dict())):
                parts.append(lambda aside: save_file(saved, aside / "reference.safetensors"))
            rng = tuple(torch.get_rng_state().tolist())
            text = json.dumps(dataclasses.replace(state, rng=rng).to_json())
            parts.append(lambda aside: (aside / "state.json").write_text(text, encoding="utf-8"))
        return partial(_write_each, parts)

    async def restore(self, state: TrainerState) -> None:
        """Load the optimizer's states that belong to ``state``, once ``restore_weights`` has loaded its weights.

        Raises:
            CheckpointError: they cannot be read.
        """
        path = self.folder / f"{state.step:06d}"
        if not path.is_dir():
            return
        loading = self.world.policy.compute(load_states, path, self.work.stepper, self.work.reference)
        await waits.wait(loading, owner="trainer", reason="its states", on=f"the checkpoint reader at {path}")
        await self.world.load_states(path)
        if state.rng:
            torch.set_rng_state(torch.tensor(state.rng, dtype=torch.uint8))
        log.info("restored step %d from %s", state.step, path)


def staged_states(stepper: Stepper, rank: int, hold: Hold) -> Write:
    """What writes a rank's share of the optimizer's states, as they are now, into a checkpoint's folder."""
    states = hold(stepper.state_dict())
    if isinstance(stepper, SharesStates):
        shares = stepper.shares(states)
        return lambda folder: state_shards.write(folder / SHARDS, shares, rank)
    return lambda folder: save_file(states, folder / WHOLE)


def load_states(path: Path, stepper: Stepper, reference: ReferenceWeights | None) -> None:
    """Load the optimizer's states of a checkpoint, and the reference's weights where it moves.

    Raises:
        CheckpointError: they cannot be read.
    """
    # Live where they are on the host: no second optimizer state is held there.
    states = {
        name: state if state.device.type == "cpu" else torch.empty_like(state, device="cpu")
        for name, state in stepper.state_dict().items()
    }
    shares = stepper.shares(states) if isinstance(stepper, SharesStates) else state_shards.whole_shares(states)
    state_shards.read(path / SHARDS if (path / SHARDS).is_dir() else path / WHOLE, shares)
    stepper.load_state_dict(states)
    if reference is not None and (reference.state_dict() or (path / "reference.safetensors").exists()):
        file = path / "reference.safetensors"
        try:
            with safe_open(file, framework="pt") as stored:
                # Read one tensor at a time as it is copied: no second reference is held.
                reference.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(_unreadable(file, error)) from error


async def restore_weights(folder: Path, world: World, fresh: TrainerState) -> TrainerState:
    """Load the weights of the newest checkpoint in ``folder`` on every rank; its state, or ``fresh`` if there is none.

    Raises:
        CheckpointError: it cannot be read, or the recipe is not the one it was made with.
    """
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)
    steps = checkpoints_in(folder)
    if not steps:
        return fresh
    path = steps[max(steps)]
    policy, trainable = world.policy, world.config.trainable
    if not any((path / name).exists() for name in ("state.json", WHOLE, SHARDS)):
        raise CheckpointError(f"{path} holds weights alone, which no run goes on from; use tandem eval or export")
    state = _read_state(path)
    if state.config_digest != fresh.config_digest:
        recipe = folder.parent / "config.yaml"
        raise CheckpointError(f"{path} was made with other settings than {recipe}; put it back, or start a new run")
    loading = policy.compute(trainable.load, policy.model, path / trainable.folder_name)
    await waits.wait(loading, owner="trainer", reason="its weights", on=f"the checkpoint reader at {path}")
    await world.load_weights(path / trainable.folder_name)
    return state


def _write_each(parts: deque[Write], aside: Path) -> None:
    """Write one part after another; each is forgotten once it is on disk."""
    while parts:
        aside.stat()  # raises where the run's folder is gone, which no writer is to make anew
        parts.popleft()(aside)


def _make_anew(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _seal(aside: Path, final: Path) -> None:
    """Give a folder in which everything is written its name, durably."""
    if any((aside / "model").glob("model-*-of-*.safetensors")):
        write_index(aside / "model")
    machine.apply_umask(aside)
    # A rename that survives a power cut must not point to empty files.
    for path in [*aside.rglob("*"), aside]:
        _flush(path)
    aside.rename(final)
    _flush(final.parent)


def _aside(path: Path) -> Path:
    """Where a checkpoint is while it is not whole."""
    return path.with_name(f".{path.name}.tmp")


def _read_state(path: Path) -> TrainerState:
    file = path / "state.json"
    try:
        state = TrainerState.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(_unreadable(file, error)) from error
    if state.step != int(path.name):
        raise CheckpointError(f"{path} holds the state of step {state.step}; remove it, and go on from an older one")
    return state


def _unreadable(file: Path, error: Exception) -> str:
    remedy = f"remove {file.parent}, and go on from an older checkpoint"
    return f"{file} cannot be read ({type(error).__name__}: {error}); {remedy}"


def _flush(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
