"""The policy as every rank of a run loads it, and its reference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from tandem import machine
from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.loading import RunConfig
from tandem.model import float8, layers, packing
from tandem.model.policy import Compute, Policy, load_config, load_model, load_tokenizer
from tandem.observability import progress, waits
from tandem.trainer.pairs import has_engines_beside, is_cut


@asynccontextmanager
async def live_policy(
    config: RunConfig, *, local_rank: int = 0, local_ranks: int = 1, bare: bool = False
) -> AsyncIterator[Policy]:
    """Model, adapter and tokenizer on the compute thread, for one of several ranks of this host.

    A bare one has no weights: its model is on the meta device.
    """
    with waits.blocking("trainer", "its tokenizer", model_of(config), config.timeouts.wait_seconds):
        tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    compute = Compute(config.threads or max(1, machine.cores() // local_ranks))

    def load() -> Any:
        torch.manual_seed(config.seed)
        if rank_device(local_rank).index:  # until a thread is told another device, its kernels run on the first
            torch.cuda.set_device(rank_device(local_rank))
        dtype = getattr(torch, config.dtype)
        if bare:
            model = packing.bare(load_config(config.model), dtype=dtype, packing=config.packing)
        else:
            # On the host where weights are cut, or will be those in an engine's memory.
            on_host = is_cut(config) or has_engines_beside(config)
            device = torch.device("cpu") if on_host else rank_device(local_rank)
            model = load_model(config.model, dtype=dtype, device=device, packing=config.packing)
        model = prepared(config, model)
        if config.matmul == "fp8":
            float8.convert(model)
        layers.tune(model, compile=config.compile, checkpointing=config.checkpointing)
        return model

    try:
        with progress.under_way(f"loading the weights of {config.model}"):
            model = await waits.wait(compute(load), owner="trainer", reason="its weights", on=model_of(config))
        yield Policy(model, tokenizer, name=config.model, compute=compute, compile=config.compile)
    finally:
        compute.close()


def prepared(config: RunConfig, model: Any) -> torch.nn.Module:
    """A loaded model as a run trains it: with its adapter, and without dropout."""
    whole: torch.nn.Module = config.trainable.prepare(model).eval()
    return whole


def model_of(config: RunConfig) -> str:
    """As waits call it."""
    return f"model {config.model}"


def rank_device(local_rank: int) -> torch.device:
    """Accelerator of a rank, by its number on its host."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def changing(config: RunConfig, policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    """The weights that training changes and the model computes with, as they are loaded: before any checkpoint."""
    return [(name, policy.model.get_parameter(name)) for name, _ in config.trainable.source(policy.model)]


async def reference_of(config: RunConfig, policy: Policy) -> ReferenceWeights | None:
    """The weights of the objective's reference, if it has one; taken before any checkpoint is loaded."""
    if config.reference is None:
        return None
    return await policy.compute(config.reference.hold, changing(config, policy))
