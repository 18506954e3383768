"""Whole optimizer states of what ranks hold, and of which each rank takes its part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.distributed import state_shards
from tandem.distributed.state_shards import StateShare


def shares_of(stepper: Any) -> list[StateShare]:
    """A rank's share of the states, as they are now."""
    return [*stepper.shares({name: state.clone() for name, state in stepper.state_dict().items()})]


def whole_states(of_ranks: Iterable[Iterable[StateShare]], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """States from all ranks' shares, in the shapes of others of the same names; each element is written once."""
    states: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for share in (share for shares in of_ranks for share in shares):
        for box in share.boxes:
            state = states.setdefault(share.name, torch.zeros(share.shape, dtype=box.tensor.dtype))
            count = counts.setdefault(share.name, torch.zeros(share.shape, dtype=torch.int64))
            if box.is_written:
                at = tuple(slice(first, first + n) for first, n in zip(box.offsets, box.tensor.shape, strict=True))
                state[at] = box.tensor
                count[at] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    return {name: state.reshape(like[name].shape) if name in like else state for name, state in states.items()}


def load_whole(stepper: Any, states: Mapping[str, Tensor], folder: Path) -> None:
    """Have a rank take its part of whole states, by way of a file of this folder."""
    file = folder / f"{id(stepper)}.safetensors"
    save_file(dict(states), file)
    taken = {name: state.clone() for name, state in stepper.state_dict().items()}
    state_shards.read(file, stepper.shares(taken))
    stepper.load_state_dict(taken)
