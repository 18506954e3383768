"""One step by several processes, each of which computes some of its micro-batches; their gradients are summed.

Micro-batches are made from the whole step before they are dealt out, so that what divides a token's loss counts all
ranks' tokens, and gradients are added, never averaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tandem.errors import Deadline, TandemError
from tandem.tools.certify.gradients import Gradient, Live, Setup
from tandem.trainer.pack import StepBatch

SECONDS = 300.0
"""Most that the processes may take."""


def share(batch: StepBatch, rank: int, ranks: int) -> StepBatch:
    """The micro-batches of one rank."""
    return dataclasses.replace(batch, micro=batch.micro[rank::ranks])


def gradients(setup: Setup, batch: StepBatch, ranks: int) -> list[Gradient]:
    """Of every update on the batch, by as many processes.

    Raises:
        TandemError: a process failed.
        Deadline: they did not end in time.
    """
    shares = [share(batch, rank, ranks) for rank in range(ranks)]
    with tempfile.TemporaryDirectory(prefix="tandem-certify-") as folder:
        torch.save((setup, shares), Path(folder, "setup"))
        # A server that has imported torch but never run it: to fork this process would copy its threads' locks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        processes = [context.Process(target=_rank, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            _await(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()
        found: list[Gradient] = torch.load(Path(folder, "gradients"), weights_only=False)
        return found


def _await(processes: list[Any], folder: Path) -> None:
    """Until all have ended well."""
    left = {process.sentinel: process for process in processes}
    while left:
        ended = wait(list(left), timeout=SECONDS)
        if not ended:
            raise Deadline(
                f"{len(left)} ranks did not end within {SECONDS:g} s; certify on a machine that is less busy"
            )
        for process in [left.pop(sentinel) for sentinel in ended]:
            process.join()
            if process.exitcode:
                told = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("failed-*"))]
                raise TandemError(f"a rank ended with {process.exitcode}: {told[0] if told else 'it said nothing'}")


def _rank(rank: int, ranks: int, folder: str) -> None:
    """Compute one share and add the gradients up; the first rank writes them."""
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        # Ranks of one machine: its own name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        setup, shares = torch.load(Path(folder, "setup"), weights_only=False)
        meeting = f"file://{Path(folder, 'meeting')}"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
        )
        live = Live(setup, total=dist.all_reduce)
        with contextlib.closing(live):
            found = live.gradients(shares[rank])
        if rank == 0:
            torch.save(found, Path(folder, "gradients"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise
