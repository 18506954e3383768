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
        text = f"What to change: {'; '.join(_changes(config))}."
        if isinstance(error, TandemError):
            error.args = (f"{error}\n{text}",)
            raise
        raise DoesNotFit(f"out of memory: {message_of(error)}\n{text}") from error


def _changes(config: RunConfig) -> Iterator[str]:
    """Options that lower memory, with values."""
    if config.micro_batch_tokens > 64:
        yield f"micro_batch_tokens={config.micro_batch_tokens // 2} (now {config.micro_batch_tokens})"
    if config.checkpointing != "full":
        yield f"checkpointing=full (now {config.checkpointing})"
    share = getattr(config.engine, "gpu_memory_utilization", None)
    if share is not None:
        yield f"engine.gpu_memory_utilization={0.8 * share:.2g} (now {share:g}; higher where the engine lacks room)"
    if (rows := getattr(config.engine, "max_rows", 0)) > 1:
        yield f"engine.max_rows={rows // 2} (now {rows})"
    if config.trainable.folder_name == "model":
        yield "trainable=lora"
    yield "sampling.max_tokens or context, lower"
