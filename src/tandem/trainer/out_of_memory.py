"""Out of memory, in the trainer or an engine: what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.config.loading import RunConfig
from tandem.errors import DoesNotFit, TandemError, message_of

_PHRASES = re.compile(
    r"out of memory|can't allocate memory|No available memory for the cache blocks|less than desired GPU memory", re.I
)
"""What torch, its CPU allocator and vLLM say of it, quoted in an error of an engine or another rank too."""


@contextmanager
def explained(config: RunConfig) -> Iterator[None]:
    """End an error that is for want of memory with what to change.

    Raises:
        DoesNotFit: the trainer is out of memory. Errors of other processes stay what they are.
    """
    try:
        yield
    except DoesNotFit:
        raise
    except Exception as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _PHRASES.search(str(error)):
            raise
        lower = f"lower micro_batch_tokens (now {config.micro_batch_tokens}), sampling.max_tokens or context"
        engine = "of an engine gpu_memory_utilization or max_rows"
        text = f"What to change: {lower}, {engine}, or set checkpointing: full or trainable: lora."
        if isinstance(error, TandemError):
            error.args = (f"{error}\n{text}",)
            raise
        raise DoesNotFit(f"out of memory: {message_of(error)}\n{text}") from error
