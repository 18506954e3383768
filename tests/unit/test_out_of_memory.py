"""Errors for want of memory end with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.config.loading import RunConfig, from_options
from tandem.errors import DoesNotFit, EngineError, TandemError
from tandem.trainer.memory_plan import explained


@pytest.fixture
def config() -> RunConfig:
    return from_options({"model": "m", "steps": 3, "env": "arithmetic"}, [], Path("recipe")).config


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), DoesNotFit),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), DoesNotFit),
        (MemoryError(), DoesNotFit),
        (EngineError("ended; its first error was: No available memory for the cache blocks."), EngineError),
        (EngineError("ended; torch.OutOfMemoryError: CUDA out of memory."), EngineError),
    ],
)
def test_out_of_memory_ends_with_what_to_change(
    config: RunConfig, error: Exception, becomes: type[TandemError]
) -> None:
    with pytest.raises(becomes) as caught, explained(config):
        raise error
    assert str(error) in str(caught.value)
    assert "lower micro_batch_tokens (now 1024)" in str(caught.value)


def test_other_errors_stay_as_they_are(config: RunConfig) -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$"), explained(config):
        raise RuntimeError("shapes")
