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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from tandem.errors import CheckpointError

if TYPE_CHECKING:
    import io

FILE_BYTES = 1 << 30
"""Of states in one file: those that are on a GPU are copied to host memory, a file of them at a time."""
MOST_BOXES = 6
"""Rectangles of one state that a rank writes: of each of two runs of a matrix's elements the end of a row, whole rows
and the beginning of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a whole state."""

    offsets: tuple[int, ...]
    """Of its first element in each dimension."""
    tensor: Tensor
    """Its elements, a view into a rank's own state."""
    is_written: bool = True
    """Whether this rank writes it; False: another rank has the same, and does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShare:
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

    def local_states(self) -> dict[str, Tensor]:
        """This rank's own states, live tensors."""
        ...

    def shares(self, states: Mapping[str, Tensor]) -> list[StateShare]:
        """Where in whole states those of ``local_states``, or copies of them, have their place."""
        ...

    def load_local_states(self, states: Mapping[str, Tensor]) -> None:
        """Take over what ``local_states`` gave."""
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


def write(folder: Path, shares: Sequence[StateShare], rank: int) -> list[Path]:
    """Write a rank's shares, on disk when it returns; its files, whose names are no other rank's.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    files: list[Path] = []
    folder.mkdir(parents=True, exist_ok=True)
    written = [(share.name, [box for box in share.boxes if box.is_written]) for share in shares]
    for number in range(MOST_BOXES):  # a file has one rectangle of each state
        shard = MOST_BOXES * rank + number + 1
        parts = list(_parted({name: boxes[number] for name, boxes in written if number < len(boxes)}))
        for index, part in enumerate(parts, 1):
            file = folder / f"shard-{shard:05d}-model-{index:05d}-of-{len(parts):05d}.safetensors"
            _write_file(file, part)
            files.append(file)
    return files


def _parted(boxes: Mapping[str, Box]) -> Iterator[dict[str, Box]]:
    """The rectangles of each file."""
    part: dict[str, Box] = {}
    size = 0
    for name, box in boxes.items():
        if part and size + box.tensor.nbytes > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = box
        size += box.tensor.nbytes
    if part:
        yield part


def _write_file(file: Path, boxes: Mapping[str, Box]) -> None:
    """Write a file as torch's ``HuggingFaceStorageWriter`` has it.

    That one makes the whole file in memory, twice, and holds Python's lock meanwhile: for seconds a gigabyte, in which
    the thread that trains queues nothing.
    """
    offsets = {name: {"saved_offsets": list(box.offsets)} for name, box in boxes.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file({name: box.tensor for name, box in boxes.items()}, file, metadata=metadata)
    with file.open("rb") as written:
        os.fsync(written.fileno())


# Reading


def read(folder: Path, shares: Sequence[StateShare]) -> None:
    """Fill a rank's shares, however many ranks have written the folder.

    Raises:
        CheckpointError: the states are of other parameters, or of another optimizer, or a file cannot be read.
    """
    try:
        _load(HuggingFaceStorageReader(str(folder)), _Wanted(shares))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error


def _load(reader: StorageReader, planner: LoadPlanner) -> None:
    """The steps of torch's ``load`` for a rank alone.

    Not ``load`` itself: without a process group it warns, and a warning cannot be silenced for one thread of several.
    """
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).value()  # done: this reader reads at once


class _Wanted(LoadPlanner):
    """Has rectangles filled from those that were written."""

    def __init__(self, shares: Sequence[StateShare]):
        self._shares = shares
        self._boxes = {share.name: share.boxes for share in shares}
        self._stored: Mapping[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take what is stored."""
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """What to read for each rectangle."""
        if others := sorted(self._stored.keys() ^ {share.name for share in self._shares}):
            raise other_states(others[0])
        return LoadPlan([item for share in self._shares for item in self._items(share)])

    def _items(self, share: StateShare) -> list[ReadItem]:
        stored = self._stored[share.name]
        if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != share.shape:
            raise other_states(share.name)
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape) for box in share.boxes]
        items: list[ReadItem] = create_read_items_for_chunk_list(share.name, stored, chunks)
        assert all(item.type == LoadItemType.TENSOR for item in items)
        num_stored = sum(math.prod(item.lengths) for item in items)
        if num_stored != sum(box.tensor.numel() for box in share.boxes):
            raise CheckpointError(f"of the optimizer state {share.name!r} a part is in no file")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: all states are tensors."""
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a rectangle that is read next."""
        number = read_item.dest_index.index
        assert number is not None
        part = self._boxes[read_item.dest_index.fqn][number].tensor
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: ``resolve_tensor`` gave a view."""


def other_states(name: str) -> CheckpointError:
    """The error where stored states do not fit, and which one is the first."""
    return CheckpointError(
        f"the optimizer state is of other parameters: {name!r} does not match; resume with the recipe that the "
        "checkpoint was made with"
    )
