"""Optimizer states on disk by every rank: torch's distributed checkpoint in safetensors, for any number of ranks.

A state has the shape that one process has it in, and a file says which rectangle of it each of its tensors is. So
``torch.distributed.checkpoint.load`` with its Hugging Face reader has whole states of such a folder, and each rank
reads nothing but what it needs. Ranks write and read alone, without a collective.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tandem.errors import CheckpointError

if TYPE_CHECKING:
    import io

FILE_BYTES = 1 << 30
"""Of states in one file: torch holds a second copy of a file while it writes it."""
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
    written = [(share, [box for box in share.boxes if box.is_written]) for share in shares]
    for number in range(MOST_BOXES):  # a file has one rectangle of each state
        some = {share.name: (share, boxes[number]) for share, boxes in written if number < len(boxes)}
        if not some:
            break
        shard = MOST_BOXES * rank + number + 1
        _alone(save, {}, storage_writer=_RankWriter(folder, some, shard), planner=_Planned(some))
        files += sorted(folder.glob(f"shard-{shard:05d}-*"))
    return files


class _RankWriter(HuggingFaceStorageWriter):
    """Writes files whose names bear a number, ``shard-00001-…``."""

    def __init__(self, folder: Path, boxes: Mapping[str, tuple[StateShare, Box]], number: int):
        index, size = 1, 0
        files = {}
        for name, (_, box) in boxes.items():
            if size and size + box.tensor.nbytes > FILE_BYTES:
                index, size = index + 1, 0
            files[name] = index
            size += box.tensor.nbytes
        super().__init__(str(folder), files, save_distributed=True)
        self._number = number

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As there, with this writer's number, since it plans alone."""
        plans = super().prepare_global_plan(plans)
        return [replace(plan, storage_data={**plan.storage_data, "shard_index": self._number}) for plan in plans]


class _Planned(SavePlanner):
    """Has rectangles written as they are."""

    def __init__(self, boxes: Mapping[str, tuple[StateShare, Box]]):
        self._boxes = boxes

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the rectangles are known."""

    def create_local_plan(self) -> SavePlan:
        """One item for each rectangle."""
        return SavePlan([_item(share, box) for share, box in self._boxes.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan as it is: where rectangles lie is in the files."""
        return all_plans, Metadata(state_dict_metadata={})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The elements of a rectangle."""
        return self._boxes[write_item.index.fqn][1].tensor


def _item(share: StateShare, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.tensor.shape),
        properties=TensorProperties.create_from_tensor(box.tensor),
        size=torch.Size(share.shape),
    )
    return WriteItem(index=MetadataIndex(share.name, offsets), type=WriteItemType.SHARD, tensor_data=data)


# Reading


def read(folder: Path, shares: Sequence[StateShare]) -> None:
    """Fill a rank's shares, however many ranks have written the folder.

    Raises:
        CheckpointError: the states are of other parameters, or of another optimizer, or a file cannot be read.
    """
    try:
        _alone(load, {}, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_Wanted(shares))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error


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


def _alone(call: Any, *arguments: Any, **options: Any) -> None:
    """Call torch's save or load for this rank alone; what went wrong is raised as it was, which torch wraps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            call(*arguments, **options, no_dist=True)
        except CheckpointException as error:
            ((failure, _),) = error.failures.values()
            raise failure from error
