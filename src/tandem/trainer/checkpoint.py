"""Checkpoints: written aside, flushed to disk, then renamed. What has its final name is whole."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tandem import machine
from tandem.algorithms.references.base import ReferenceWeights
from tandem.distributed import state_shards
from tandem.distributed.state_shards import SharesStates
from tandem.errors import CheckpointError
from tandem.model.policy import Policy
from tandem.observability import trace, waits
from tandem.optimizers.base import Stepper
from tandem.trainable.base import Trainable
from tandem.trainer import digests
from tandem.trainer.state import TrainerState

log = logging.getLogger(__name__)

WHOLE = "optimizer.safetensors"
"""States that one process wrote."""
SHARDS = "optimizer"
"""Folder of states of which several ranks each wrote a share."""
FORMAT = 2
"""Of a checkpoint's files. 1, which bears no number, has no folder of shares."""


def saved_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a run's ``checkpoints`` folder, oldest first."""
    return list(digests.steps_in(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Saves and restores the checkpoints of one run."""

    folder: Path
    """The run's ``checkpoints`` folder."""
    contents: Literal["all", "weights", "none"] = "all"
    """What is saved; a run goes on from all of it only."""
    every: int
    """Steps between checkpoints."""
    keep: int
    """Newest checkpoints that are kept."""
    steps: int
    """Last step of the run, which is always saved."""
    policy: Policy
    """Whose weights."""
    trainable: Trainable
    """Which of them."""
    stepper: Stepper
    """The optimizer's states."""
    held: ReferenceWeights | None = None
    """The reference, whose weights may move too."""
    still: Callable[[], None]
    """Raises TandemError if the run's folder is not there any more."""
    on_saved: Callable[[int, Path], None]
    """Told of each finished checkpoint."""
    whole: Callable[[], Awaitable[nn.Module]] | None = None
    """Where ranks have a part of the weights each: has all of them in one model here, in host memory."""
    others: Callable[[Path, Coroutine[Any, Any, None]], Awaitable[Mapping[str, str]]] | None = None
    """Where several ranks have shares of the optimizer's states: has the others write theirs into a checkpoint's folder
    while this one writes; digests of their files."""

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        return self.contents != "none" and (step % self.every == 0 or step >= self.steps)

    async def save(self, state: TrainerState) -> bool:
        """Write a checkpoint of this state, unless its step has one, and prune old ones; True if it was written.

        Nothing is written where nothing is to be saved.

        Raises:
            CheckpointError: it cannot be written; older checkpoints are untouched.
            TandemError: the run's folder is gone, and is not made anew for it.
        """
        self.still()
        if self.contents == "none":
            return False
        final = self.folder / f"{state.step:06d}"
        is_new = not final.exists()
        if is_new:
            writer = f"the checkpoint writer at {self.folder}"
            reason = f"step {state.step} to be saved"
            with self._whole_or_none(state.step, _aside(final)):
                await waits.wait(self._save(state, final), owner="trainer", reason=reason, on=writer)
            self.on_saved(state.step, final)
        self._prune()
        return is_new

    def _prune(self) -> None:
        """Remove the oldest; renamed first, since half of a checkpoint must not bear its name."""
        for step in saved_steps(self.folder)[: -self.keep]:
            old = self.folder / f"{step:06d}"
            try:
                shutil.rmtree(old.rename(_aside(old)))
            except OSError as error:
                log.warning("the old checkpoint %s cannot be removed: %s", old, error)

    @trace.span("seconds/checkpoint")
    async def _save(self, state: TrainerState, final: Path) -> None:
        """Have every rank write its files aside, and give the folder its name once all are on disk."""
        aside, compute = _aside(final), self.policy.compute
        await compute(_make_anew, aside)
        digests: Mapping[str, str] = {}
        model = self.policy.model if self.whole is None else await self.whole()
        if self.others is None or self.contents != "all":
            await compute(self._write, state, aside, model)
        else:
            digests = await self.others(aside, self._mine(state, aside, model))
        await compute(_seal, aside, final, digests)

    async def _mine(self, state: TrainerState, aside: Path, model: nn.Module) -> None:
        await self.policy.compute(self._write, state, aside, model)

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
            newest = saved_steps(self.folder)
            kept = f"the newest checkpoint is step {newest[-1]}" if newest else "there is no checkpoint yet"
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written to {self.folder}: {error}; {kept}. "
                f"Free disk space or mend the folder, then go on with: tandem train {self.folder.parent}"
            ) from error
        finally:
            machine.trim()  # what is written was copied to the host first

    def _write(self, state: TrainerState, aside: Path, model: nn.Module) -> None:
        """Write this rank's files, the weights as ``model`` has them."""
        self.trainable.save(model, self.policy.tokenizer, aside / self.trainable.folder_name)
        if self.contents != "all":
            return
        write_states(aside, self.stepper, 0)
        if self.held is not None and (reference := self.held.state_dict()):
            save_file(reference, aside / "reference.safetensors")
        state = dataclasses.replace(state, rng=tuple(torch.get_rng_state().tolist()))
        (aside / "state.json").write_text(json.dumps({"format": FORMAT, **state.to_json()}), encoding="utf-8")

    async def restore(self, state: TrainerState) -> None:
        """Load the optimizer's states that belong to ``state``, once ``restore_weights`` has loaded its weights.

        Raises:
            CheckpointError: they cannot be read.
        """
        path = self.folder / f"{state.step:06d}"
        if not path.is_dir():
            return
        loading = self.policy.compute(load_states, path, self.stepper, self.held)
        await waits.wait(loading, owner="trainer", reason="its states", on=f"the checkpoint reader at {path}")
        if state.rng:
            torch.set_rng_state(torch.tensor(state.rng, dtype=torch.uint8))
        log.info("restored step %d from %s", state.step, path)


def write_states(folder: Path, stepper: Stepper, rank: int) -> list[Path]:
    """Write a rank's share of the optimizer's states into a checkpoint's folder, on disk when it returns; its files."""
    if isinstance(stepper, SharesStates):
        return state_shards.write(folder / SHARDS, stepper.shares(stepper.local_states()), rank)
    save_file(stepper.state_dict(), folder / WHOLE)
    return [folder / WHOLE]


def load_states(path: Path, stepper: Stepper, held: ReferenceWeights | None) -> None:
    """Load the optimizer's states of a checkpoint, and the reference's weights where it moves.

    Raises:
        CheckpointError: they cannot be read.
    """
    if not (path / SHARDS).is_dir():
        _read_tensors(path / WHOLE, stepper.load_state_dict)
    elif isinstance(stepper, SharesStates):
        own = _on_host(stepper.local_states())
        state_shards.read(path / SHARDS, stepper.shares(own))
        stepper.load_local_states(own)
    else:
        states = _on_host(stepper.state_dict())
        state_shards.read(path / SHARDS, state_shards.whole_shares(states))
        stepper.load_state_dict(states)
    if held is not None and held.state_dict():
        _read_tensors(path / "reference.safetensors", held.load_state_dict)


async def restore_weights(folder: Path, policy: Policy, trainable: Trainable, fresh: TrainerState) -> TrainerState:
    """Load the weights of the newest checkpoint in ``folder``; its state, or ``fresh`` if there is none.

    Every file of it is held against its digest first.

    Raises:
        CheckpointError: it cannot be read, is damaged, or the recipe is not the one it was made with.
    """
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)
    steps = digests.steps_in(folder)
    for other in folder.glob("*"):
        if other.name.isdigit() and other not in steps.values():
            log.warning("%s is not a checkpoint: its name is not a step of six digits; it is let be", other)
    if not steps:
        return fresh
    path = steps[max(steps)]
    reader = f"the checkpoint reader at {path}"
    looking = policy.compute(digests.damage, path)
    if damage := await waits.wait(looking, owner="trainer", reason="its files to be checked", on=reader):
        raise CheckpointError(f"{damage}; {digests.remedy(path)}")
    if not any((path / name).exists() for name in ("state.json", WHOLE, SHARDS)):
        raise CheckpointError(
            f"{path} holds weights alone (checkpoint: weights), from which no run can go on; evaluate it with tandem "
            "eval, take it out with tandem export, or start another run from the recipe"
        )
    state = _read_state(path)
    if state.config_digest != fresh.config_digest:
        raise CheckpointError(
            f"{path} was made with other settings than {folder.parent / 'config.yaml'} holds now; put the "
            "recipe back, or start a new run from it"
        )
    loading = policy.compute(trainable.load, policy.model, path / trainable.folder_name)
    await waits.wait(loading, owner="trainer", reason="its weights", on=reader)
    return state


def _on_host(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes to read into."""
    return {key: torch.empty_like(state, device="cpu") for key, state in states.items()}


def _make_anew(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _seal(aside: Path, final: Path, known: Mapping[str, str]) -> None:
    """Give a folder in which everything is written its name, durably."""
    digests.write(aside, known)
    _flush(aside)
    aside.rename(final)
    _flush_folder(final.parent)


def _aside(path: Path) -> Path:
    """Where a checkpoint is while it is not whole."""
    return path.with_name(f".{path.name}.tmp")


def _read_state(path: Path) -> TrainerState:
    file = path / "state.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.get("format", 1) > FORMAT:
            raise CheckpointError(
                f"{path} was written by a later Tandem, in format {stored['format']}, and this one reads formats up to "
                f"{FORMAT}; go on with the Tandem that wrote it, or a later one"
            )
        state = TrainerState.from_json(stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(_unreadable(file, error)) from error
    if state.step != int(path.name):
        raise CheckpointError(f"{path} holds the state of step {state.step}; {digests.remedy(path)}")
    return state


def _read_tensors(file: Path, load: Callable[[dict[str, torch.Tensor]], None]) -> None:
    try:
        with safe_open(file, framework="pt") as stored:
            # Read one tensor at a time as it is copied: no second optimizer state is held.
            load({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_unreadable(file, error)) from error


def _unreadable(file: Path, error: Exception) -> str:
    return f"{file} cannot be read ({type(error).__name__}: {error}); {digests.remedy(file.parent)}"


def _flush(folder: Path) -> None:
    """Make every file's bytes and name durable: a rename that survives a power cut must not point to empty files."""
    for path in [*folder.rglob("*"), folder]:
        _flush_folder(path)


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
