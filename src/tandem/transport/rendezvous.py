"""Rendezvous of a process group: a key-value store served by rank 0.

The store is unencrypted and has no password: it is for a network that is trusted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from tandem.errors import TransportError
from tandem.transport.sharing import gpu_uuid

# NCCL's own watchdog answers an error by ending the process. Here errors and deadlines are this module's.
_UNSUPERVISED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # of which it sleeps four, and the process would wait for it to end
}


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address and options by which the members of a group meet; ``dataclasses.asdict`` makes it JSON."""

    host: str
    """Rank 0's address as the others reach it; it listens on no other."""
    port: int = 0
    """Its port; 0 lets rank 0 find a free one."""
    world: int
    """Members, the trainer included."""
    backend: Literal["gloo", "nccl"]
    """gloo moves bytes through host memory; nccl needs a GPU of its own for every member."""
    name: str = "weights"
    """Tells groups apart in messages and in the store."""
    seconds: float = 60.0
    """The longest wait for any rank: to join, to begin a publish, or for one bucket."""


def serve(rendezvous: Rendezvous) -> tuple[Store, Rendezvous]:
    """The store, listening on the given address alone, and the rendezvous with the port it has.

    Raises:
        TransportError: the address is not this machine's or the port is taken.
    """
    host, family = rendezvous.host, socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
    try:
        listener = socket.create_server((host, rendezvous.port), family=family, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host}:{rendezvous.port} for group {rendezvous.name!r}: {error}; expected an address of "
            "this machine that the engines reach, and a free port (0 finds one)"
        ) from error
    bound = replace(rendezvous, port=listener.getsockname()[1])
    return _store(bound, is_master=True, master_listen_fd=listener.detach()), bound


def visit(rendezvous: Rendezvous) -> Store:
    """A connection of its own to the store: one that waits inside torch then delays no other."""
    return PrefixStore(rendezvous.name, _store(rendezvous, is_master=False))


def accelerator(device: torch.device) -> str:
    """UUID of a GPU, which is the same in every process that sees it; nothing on a host."""
    return gpu_uuid(device) if device.type == "cuda" else ""


def own_address(rendezvous: Rendezvous) -> str:
    """This machine's address on the way to rank 0, the one that other members can reach it by.

    Raises:
        TransportError: nothing listens there in time.
    """
    deadline = time.monotonic() + rendezvous.seconds
    while True:
        try:
            with socket.create_connection((rendezvous.host, rendezvous.port), timeout=rendezvous.seconds) as way:
                return str(way.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"rank 0 of group {rendezvous.name!r} does not answer on {rendezvous.host}:{rendezvous.port} "
                    f"after {rendezvous.seconds:g} s ({error}); start the trainer first, and let the port through"
                ) from error
        time.sleep(0.05)


def _store(rendezvous: Rendezvous, **options: Any) -> TCPStore:
    timeout = timedelta(seconds=rendezvous.seconds)
    return TCPStore(rendezvous.host, rendezvous.port, None, timeout=timeout, wait_for_workers=False, **options)


def open_group(rendezvous: Rendezvous, rank: int, address: str, *, watched: bool = False) -> Any:
    """A process group of all ranks, which knows nothing of torch's default one. For gloo all must call it to return.

    Args:
        rendezvous: where they meet.
        rank: of this member.
        address: this machine's, at which gloo listens.
        watched: whether NCCL's watchdog notes a collective that takes longer than ``rendezvous.seconds``, which
            ``get_error`` then tells; it ends nothing by itself.
    """
    store = PrefixStore("group", visit(rendezvous))
    if rendezvous.backend == "gloo":
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=rendezvous.seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(store, rank, rendezvous.world, options)
    with unsupervised():
        # Else a transfer's few blocks wait until all of the copies' beside it have had their turn.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=rendezvous.seconds) if watched else timedelta(days=1)
        options.group_name = rendezvous.name
        return dist.ProcessGroupNCCL(store, rank, rendezvous.world, options)


def first_line(error: Exception) -> str:
    """The part of torch's message that is not a stack trace."""
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def unsupervised() -> Iterator[None]:
    """Have NCCL groups that are made meanwhile leave errors and deadlines to their maker, and never end the process."""
    before = {name: os.environ[name] for name in _UNSUPERVISED if name in os.environ}
    os.environ.update(_UNSUPERVISED)
    try:
        yield
    finally:
        for name in _UNSUPERVISED.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
