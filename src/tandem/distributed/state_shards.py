"""Optimizer states on disk by every rank: torch's distributed checkpoint in safetensors, for any number of ranks.

A state has the shape that one process has it in, and a file says which rectangle of it each of its tensors is. So
``torch.distributed.checkpoint.load`` with its Hugging Face reader has whole states of such a folder, and each rank
reads nothing but what it needs. Ranks write and read alone, without a collective.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.errors import CheckpointError

OFFSETS = "DCP_SHARDING_INFO"
"""Torch's name of the metadata that say where each tensor of a file begins in its whole."""
MOST_BOXES = 6
"""Rectangles of one state that a rank writes: of each of two runs of a matrix's elements the end of a row, whole rows
and the beginning of one."""


class Box(NamedTuple):
    """A rectangle of a whole state."""

    offsets: tuple[int, ...]
    """Of its first element in each dimension."""
    tensor: Tensor
    """Its elements, a view into a rank's own state."""
    is_written: bool = True
    """Whether this rank writes it; False: another rank has the same, and does."""


class StateShare(NamedTuple):
    """A rank's share of one optimizer state."""

    name: str
    """Of the whole state, ``<parameter>/<state>``."""
    shape: tuple[int, ...]
    """Of the whole state, as a matrix where it has more than two dimensions."""
    boxes: tuple[Box, ...]
    """Where it holds elements; of a number that it holds for two parts of a parameter, twice the same."""


@runtime_checkable
class SharesStates(Protocol):
    """A stepper of which every rank has a share of the states."""

    def shares(self, states: Mapping[str, Tensor]) -> list[StateShare]:
        """Where in whole states those of ``state_dict``, or copies of them, have their place."""
        ...


def whole_shares(states: Mapping[str, Tensor]) -> list[StateShare]:
    """Shares of one process, which has all of every state."""
    shapes = {name: matrix_shape(state.shape) for name, state in states.items()}
    return [
        StateShare(name=name, shape=shapes[name], boxes=tuple(run_boxes(state, 0, shapes[name])))
        for name, state in states.items()
    ]


def matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with its leading dimensions as one, so that it has one dimension or two."""
    return tuple(shape) or (1,) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def run_boxes(state: Tensor, start: int, shape: tuple[int, ...], *, is_written: bool = True) -> Iterator[Box]:
    """A run of a whole state's elements, row after row from ``start``, as rectangles.

    Args:
        state: the run, of whatever shape.
        start: number of its first element.
        shape: of the whole state: one dimension or two.
        is_written: whether this rank writes it.
    """
    run, columns, at = state.view(-1), shape[-1], 0
    while at < len(run):
        row, column = divmod(start + at, columns)
        whole_rows = (len(run) - at) // columns if column == 0 else 0
        stop = at + (whole_rows * columns or min(columns - column, len(run) - at))
        part = run[at:stop]
        if len(shape) == 1:
            yield Box(offsets=(start + at,), tensor=part, is_written=is_written)
        else:
            yield Box(offsets=(row, column), tensor=part.view(max(1, whole_rows), -1), is_written=is_written)
        at = stop


# Writing


def write(folder: Path, shares: Sequence[StateShare], rank: int) -> None:
    """Write a rank's shares, on disk when it returns, to files whose names are no other rank's.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [(share.name, [box for box in share.boxes if box.is_written]) for share in shares]
    for number in range(MOST_BOXES):  # a file has one rectangle of each state
        if part := {name: boxes[number] for name, boxes in written if number < len(boxes)}:
            # As torch's HuggingFaceStorageWriter has it. That one makes the whole file in memory, twice, and holds
            # Python's lock meanwhile: for seconds a gigabyte, in which the thread that trains queues nothing.
            file = folder / f"shard-{MOST_BOXES * rank + number + 1:05d}-model-00001-of-00001.safetensors"
            offsets = {name: {"saved_offsets": list(box.offsets)} for name, box in part.items()}
            metadata = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)}
            save_file({name: box.tensor for name, box in part.items()}, file, metadata=metadata)
            with file.open("rb") as saved:
                os.fsync(saved.fileno())


# Reading


def read(source: Path, shares: Sequence[StateShare]) -> None:
    """Fill a rank's shares from a file of whole states, or from a folder that any number of ranks have written.

    Raises:
        CheckpointError: the states are of other parameters, or of another optimizer, or a file cannot be read.
    """
    by_name = {share.name: share for share in shares}
    ends: dict[str, tuple[int, ...]] = {}
    filled = dict.fromkeys(by_name, 0)
    try:
        for file in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
            with safe_open(file, framework="pt") as stored:
                written = json.loads((stored.metadata() or {}).get(OFFSETS, "{}"))
                for name in stored.keys():  # noqa: SIM118
                    if name not in by_name:
                        raise other_states(name)
                    tensor = stored.get_tensor(name)  # a view of the file: what no box needs is not read
                    tensor = tensor.view(matrix_shape(tensor.shape))
                    offsets = written[name]["saved_offsets"] if written else [0] * tensor.dim()
                    last = tuple(map(sum, zip(offsets, tensor.shape, strict=True)))
                    ends[name] = tuple(map(max, zip(ends.get(name, last), last, strict=True)))
                    filled[name] += sum(_fill(box, tensor, offsets) for box in by_name[name].boxes)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be read ({type(error).__name__}: {error})") from error
    for share in shares:
        if ends.get(share.name) != share.shape:
            raise other_states(share.name)
        if filled[share.name] != sum(box.tensor.numel() for box in share.boxes):
            raise CheckpointError(f"of the optimizer state {share.name!r} a part is in no file")


def _fill(box: Box, tensor: Tensor, offsets: Sequence[int]) -> int:
    """Copy what a rectangle has in common with a stored one; how many elements that is."""
    target = box.tensor
    for dimension, (here, there) in enumerate(zip(box.offsets, offsets, strict=True)):
        first = max(here, there)
        length = min(here + target.shape[dimension], there + tensor.shape[dimension]) - first
        if length <= 0:
            return 0
        target = target.narrow(dimension, first - here, length)
        tensor = tensor.narrow(dimension, first - there, length)
    target.copy_(tensor)
    return target.numel()


def other_states(name: str) -> CheckpointError:
    """The error where stored states do not fit, and which one is the first."""
    return CheckpointError(
        f"the optimizer state is of other parameters: {name!r} does not match; resume with the checkpoint's recipe"
    )
