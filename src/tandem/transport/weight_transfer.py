"""The trainer's end of vLLM's weight transfer by NCCL, for engines without Tandem's worker extension.

vLLM's workers take NCCL's id from a ``TCPStore`` of rank 0, reduce one number, and then receive tensor by tensor. NCCL
is called directly: a process group of torch's has a rendezvous of its own, and vLLM need not be installed here. NCCL
knows no deadline: call this from a daemon thread and ``abort`` from another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from tandem.errors import TransportError
from tandem.transport.buckets import TensorEntry
from tandem.transport.collective import Pack, Sender
from tandem.transport.rendezvous import Rendezvous, serve

KEY = "broadcast_from/0/0"
"""Where vLLM's ``StatelessProcessGroup`` looks for the first object of rank 0."""
DTYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
"""NCCL's numbers of the types that weights have."""
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    """NCCL's id of a group."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def pickled(unique_id: bytes) -> bytes:
    """The id as vLLM unpickles it: an object of its class, which is not importable here."""
    name = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    return b"c_ctypes\n_unpickle\n(" + name + b"(}C" + bytes([len(unique_id)]) + unique_id + b"ttR."


class WeightTransferGroup(Sender):
    """Rank 0 of a group whose other members are vLLM's workers."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device):
        if device.type != "cuda" or rendezvous.backend != "nccl":
            raise TransportError(
                f"stock vLLM takes weights by NCCL alone, between GPUs, and this run would send them by "
                f"{rendezvous.backend} from {device}; use trainable: lora with sync: hotswap, or start the engine by: "
                "tandem serve engine RECIPE"
            )
        self._store, self.rendezvous = serve(rendezvous)
        self._device = device
        self._nccl = ctypes.CDLL("libnccl.so.2")  # which torch has loaded
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._group = ctypes.c_void_p()

    def connect(self) -> None:
        """Wait for all workers.

        Raises:
            TransportError: NCCL's reason.
        """
        unique_id = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        self._store.set(KEY, pickled(bytes(unique_id)))  # type: ignore[arg-type]
        with torch.cuda.device(self._device):
            group = ctypes.c_void_p()
            self._call("ncclCommInitRank", ctypes.byref(group), self.rendezvous.world, unique_id, 0)
            self._group = group
            number = torch.zeros(1, device=self._device)
            place = ctypes.c_void_p(number.data_ptr())
            self._call("ncclAllReduce", place, place, ctypes.c_size_t(1), FLOAT32, SUM, self._group, self._stream())
            torch.cuda.current_stream(self._device).synchronize()

    def send_packed(self, entries: Sequence[TensorEntry], pack: Pack, bucket_bytes: int = 0) -> int:
        """Send every tensor, one by one, as ``pack`` writes it; returns the bytes.

        Raises:
            TransportError: NCCL's reason, or the group was given up.
        """
        with torch.cuda.device(self._device):
            for entry in entries:
                data = torch.empty(tuple(entry.shape), dtype=getattr(torch, entry.dtype), device=self._device)
                pack([(entry.name, data)])
                place, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
                self._call("ncclBroadcast", place, place, count, DTYPES[data.dtype], 0, self._group, self._stream())
            torch.cuda.current_stream(self._device).synchronize()
        if self._group.value is None:
            raise TransportError("the weight transfer was given up")
        return sum(entry.bytes for entry in entries)

    def abort(self) -> None:
        """Give the group up, from any thread; again does nothing."""
        group, self._group = self._group, ctypes.c_void_p()
        if group.value is not None:
            self._nccl.ncclCommAbort(group)

    close = abort

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._nccl, name)(*arguments):
            raise TransportError(f"{name}: {self._nccl.ncclGetErrorString(status).decode()}")
