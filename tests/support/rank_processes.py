"""Ranks of a process group on this machine, by gloo: each a process, forked from one that has loaded the libraries."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PRELOADED = [
    *("torch.distributed.tensor", "torch.distributed.fsdp", "transformers.generation.utils"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")),
    *(f"tandem.distributed.{name}" for name in ("context_parallel", "sharded_weights", "weight_shards")),
    *("tandem.engines.vllm.worker.extension", "tandem.optimizers.adamw", "tandem.trainer.ranks.slices"),
]
"""What bodies import, a third of a rank's time if each of them did."""


def forkserver() -> ForkServerContext:
    """What forks processes that have the libraries loaded; one for all tests of a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def on_ranks(world: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(rank, *arguments)``, a function of a module beside this one, returns on each rank."""
    context = forkserver()
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, store, rank, world, body, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            results = [_received(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    if failed := [result for result in results if isinstance(result, str)]:
        raise AssertionError("\n".join(failed))
    return [value for (value,) in results]


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv() if pipe.poll(120) else "a rank said nothing for 120 s"
    except EOFError:
        return "a rank ended without a word"


def _run(pipe: Any, store: str, rank: int, world: int, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import time
    import traceback
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        pipe.send((body(rank, *arguments),))
    except Exception:  # the test says it
        pipe.send(traceback.format_exc())
    time.sleep(120)  # until it is killed, which is when all have said theirs: others may still read from it
