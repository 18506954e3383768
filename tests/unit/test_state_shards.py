"""Optimizer states on disk by every rank: whole for torch's own reader, and read by any number of ranks."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.rank_threads import on_ranks
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.nn import Parameter

from tandem.distributed import sharding, state_shards
from tandem.distributed.group import DataGroup
from tandem.distributed.sharding import ShardedStepper
from tandem.errors import CheckpointError
from tandem.optimizers import _byte_moments
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit

SHAPES = {"embed": (70, 64), "norm": (64,), "wide": (3, 1100), "even": (16, 512), "experts": (3, 40, 24)}
"""Runs that begin and end within a row, within one row, at rows, and over a leading dimension; one is not divided."""
OPTIMIZERS: dict[str, Any] = {
    "masters": AdamW(), "stochastic": AdamW(precision="stochastic"), "bytes": AdamW8bit(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which tiny tensors are divided."""
    monkeypatch.setattr(sharding, "SMALL", 1024)
    monkeypatch.setattr(_byte_moments, "SMALL", 1024)


def weights() -> list[tuple[str, Parameter]]:
    random = torch.Generator().manual_seed(1)
    return [(name, Parameter(torch.randn(shape, generator=random).bfloat16())) for name, shape in SHAPES.items()]


def trained(optimizer: Any) -> Any:
    """One process's stepper after two steps."""
    named = weights()
    stepper = optimizer.bind(named)
    for step in range(2):
        for number, (_, parameter) in enumerate(named):
            random = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=random).bfloat16()
            stepper.accumulate(parameter)
        stepper.step(1e-2, 0.0)
    return stepper


def by_ranks(optimizer: Any, world: int, source: Any, into: Path) -> None:
    """Have ranks load whole states, or those of a folder, and write theirs."""

    def rank(group: DataGroup) -> None:
        stepper = ShardedStepper(optimizer, weights(), group)
        states = {key: torch.empty_like(state) for key, state in stepper.state_dict().items()}
        state_shards.read(file, stepper.shares(states))
        stepper.load_state_dict(states)
        state_shards.write(into, stepper.shares(stepper.state_dict()), group.rank)

    file = source
    if not isinstance(source, Path):
        file = into.with_name(f"{into.name}-whole.safetensors")
        save_file(source, file)

    on_ranks(world, rank)


def equal(stored: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert stored.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(stored[key], tensor), key


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_ranks_then_three_then_one_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS[kind]
    want = trained(optimizer).state_dict()
    by_ranks(optimizer, 2, want, tmp_path / "two")
    by_ranks(optimizer, 3, tmp_path / "two", tmp_path / "three")
    alone = {key: torch.empty_like(state) for key, state in want.items()}
    state_shards.read(tmp_path / "three", state_shards.whole_shares(alone))
    equal(alone, want)


def test_torchs_own_reader_has_whole_states_of_it(tmp_path: Path) -> None:
    """Without anything of Tandem's: the reader and the planner are torch's defaults."""
    want = trained(AdamW()).state_dict()
    by_ranks(AdamW(), 3, want, tmp_path)
    shapes = {key: state.reshape(state_shards.matrix_shape(state.shape)) for key, state in want.items()}
    stored = {key: torch.empty_like(state) for key, state in shapes.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(stored, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    equal(stored, shapes)


def test_every_element_is_written_once_and_ranks_share_the_work(tmp_path: Path) -> None:
    want = trained(AdamW()).state_dict()
    by_ranks(AdamW(), 2, want, tmp_path)
    sizes = {path.name.split("-")[1]: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    ranks = [sum(size for number, size in sizes.items() if (int(number) - 1) // 6 == rank) for rank in range(2)]
    total = sum(state.nbytes for state in want.values())
    assert total < sum(ranks) < total + 20_000, "and the headers of the files"
    assert max(ranks) < 0.65 * sum(ranks)


def test_a_file_that_is_missing_is_found(tmp_path: Path) -> None:
    want = trained(AdamW()).state_dict()
    by_ranks(AdamW(), 2, want, tmp_path)
    next(tmp_path.glob("shard-00007-*")).unlink()
    with pytest.raises(CheckpointError, match=r"a part is in no file|does not match"):
        state_shards.read(tmp_path, state_shards.whole_shares(want))


def test_states_of_other_parameters_are_refused(tmp_path: Path) -> None:
    want = trained(AdamW()).state_dict()
    by_ranks(AdamW(), 2, want, tmp_path)
    with pytest.raises(CheckpointError, match="'other/exp_avg' does not match"):
        state_shards.read(tmp_path, state_shards.whole_shares({**want, "other/exp_avg": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match="'norm/exp_avg' does not match"):
        state_shards.read(tmp_path, state_shards.whole_shares({**want, "norm/exp_avg": torch.zeros(65)}))


def test_states_are_written_from_where_they_lie(tmp_path: Path) -> None:
    """A file that is made in Python's memory first holds Python's lock meanwhile, for seconds a gigabyte."""
    states = {"wide/exp_avg": torch.ones(2, 1 << 20)}
    tracemalloc.start()
    try:
        state_shards.write(tmp_path, state_shards.whole_shares(states), 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < states["wide/exp_avg"].nbytes / 4
