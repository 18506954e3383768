"""Tensors lent to another process without a second copy: a shared file mapping on the host, CUDA IPC on a GPU.

The lender describes what it lends as plain JSON; whoever attaches by that description gets tensors over the very same
bytes. Nothing here orders reads and writes: lender and borrower agree by other means on who may write when.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import TransportError
from tandem.lazy import torch
from tandem.transport import cuda_ipc
from tandem.transport.shared_memory import ASK_AGAIN, HEADER, SHARED_MEMORY, create, open_file, release, remove_orphans

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "SHARED_MEMORY",
    "Description",
    "Lent",
    "attach",
    "lend_cuda",
    "lend_host",
    "remove_orphans",
]

ALIGNMENT = 64
"""Bytes; every tensor keeps its place relative to this, so vector loads stay as aligned as they were."""

Description = dict[str, Any]
"""JSON: ``kind``, what belongs to the kind, and ``tensors``, a mapping from name to where and how the tensor lies."""


class Lent:
    """Tensors in a shared file. Keep it for as long as somebody may attach: ``close`` removes the file's name.

    The memory itself lives until the last process that maps it lets go, closed or not, whoever ends first.
    """

    def __init__(self, tensors: dict[str, Tensor], description: Description, path: Path, lock: int) -> None:
        self.tensors = tensors
        """What was given, at its new place; point ``parameter.data`` here."""
        self.description = description
        """What ``attach`` needs."""
        self._release = weakref.finalize(self, release, path, lock, os.getpid())

    def close(self) -> None:
        """Let nobody attach any more; those who have are not disturbed."""
        self._release()


def lend_host(named: Mapping[str, Tensor], path: Path) -> Lent:
    """Copy host tensors into one new shared file; each comes back with its shape, dtype, strides and aliases.

    Tensors over one storage, such as tied weights or slices of a fused one, are over one storage afterwards too. Until
    the caller lets go of the originals, both copies exist.

    Args:
        named: the tensors.
        path: a file that does not exist, best in ``SHARED_MEMORY``; only this user can open it.

    Raises:
        TransportError: a tensor that cannot be lent, a file that exists, or too little memory.
    """
    spans: dict[int, tuple[int, int]] = {}
    for name, tensor in named.items():
        _refuse(name, tensor, "cpu")
        first, end = _span(tensor)
        # From a multiple of the alignment: relative to it, everything keeps its place.
        first -= first % ALIGNMENT
        before = spans.get(_storage_id(tensor), (first, end))
        spans[_storage_id(tensor)] = (min(first, before[0]), max(end, before[1]))
    places, size = {}, HEADER
    for storage, (first, end) in spans.items():
        places[storage] = size
        size += -(-(end - first) // ALIGNMENT) * ALIGNMENT
    token = secrets.token_hex(16)
    lock = create(path, size, token)
    try:
        memory = mmap.mmap(lock, size)
        blocks: dict[int, Tensor] = {}
        tensors, entries = {}, {}
        for name, tensor in named.items():
            storage = _storage_id(tensor)
            first, end = spans[storage]
            if storage not in blocks:
                blocks[storage] = torch.frombuffer(memory, dtype=torch.uint8, count=end - first, offset=places[storage])
                blocks[storage].copy_(_bytes(tensor.untyped_storage())[first:end])
            entries[name] = {
                "storage_size": end - first,
                "storage_offset": places[storage],
                **_layout(tensor, first // tensor.element_size()),
            }
            tensors[name] = _view(name, blocks[storage].untyped_storage(), entries[name])
    except BaseException:
        release(path, lock, os.getpid())
        raise
    description = {"kind": "host", "path": str(path.absolute()), "size": size, "token": token, "tensors": entries}
    return Lent(tensors, description, path.absolute(), lock)


def lend_cuda(named: Mapping[str, Tensor]) -> Description:
    """Describe CUDA tensors where they are; the caller keeps them alive and in place while they are lent.

    Describe once and hand out the same description again: every call costs each storage an event and a counter.

    Raises:
        TransportError: memory that CUDA IPC cannot export, and what to set.
    """
    handles: dict[int, dict[str, Any]] = {}
    entries = {}
    for name, tensor in named.items():
        _refuse(name, tensor, "cuda")
        storage = _storage_id(tensor)
        if storage not in handles:
            handles[storage] = cuda_ipc.export(name, tensor.untyped_storage())
        entries[name] = {**handles[storage], **_layout(tensor, 0)}
    return {"kind": "cuda", "tensors": entries}


def attach(description: Mapping[str, Any], *, expect: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Tensors over the lender's bytes, by name.

    Args:
        description: what ``lend_host`` or ``lend_cuda`` made, in another process.
        expect: tensors, of the meta device for example, whose names, shapes and dtypes must be among those lent.

    Raises:
        TransportError: the description is wrong or stale, or its memory cannot be reached from here.
    """
    storages: dict[tuple[Any, int], torch.UntypedStorage] = {}
    out = {}
    try:
        kind, entries = description["kind"], description["tensors"]
        if kind not in ("host", "cuda"):
            raise TransportError(f"lent tensors are of kind host or cuda, not {kind!r}")
        file = open_file(description) if kind == "host" else None
        for name, entry in entries.items():
            offset = _storage_offset(entry)
            key = entry.get("ipc_handle_b64"), offset
            if key not in storages:
                found = cuda_ipc.open_storage(entry, offset) if file is None else _mapped(name, file, entry, offset)
                storages[key] = found
            out[name] = _view(name, storages[key], entry)
    except KeyError as error:
        raise TransportError(f"a description of lent tensors lacks {error}; pass on what the lender answered") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise TransportError(f"{error} in a description of lent tensors; pass on what the lender answered") from error
    for name, wanted in (expect or {}).items():
        lent = out.get(name)
        if lent is None or lent.shape != wanted.shape or lent.dtype != wanted.dtype:
            theirs = "nothing" if lent is None else f"{lent.dtype} {tuple(lent.shape)}"
            raise TransportError(
                f"{name}: expected {wanted.dtype} {tuple(wanted.shape)}, the lender has {theirs}; both sides must load "
                "the same model in the same dtype"
            )
    return out


def _refuse(name: str, tensor: Tensor, device: str) -> None:
    """Refuse what is not an ordinary tensor with bytes on that kind of device."""
    if tensor.device.type != device:
        raise TransportError(
            f"{name} is on {tensor.device}; lend_{'host' if device == 'cpu' else device} lends {device}"
        )
    if tensor.layout is not torch.strided:
        raise TransportError(f"{name} has the layout {tensor.layout}; only ordinary strided tensors can be lent")
    if tensor.numel() == 0:
        raise TransportError(
            f"{name} has no elements (shape {tuple(tensor.shape)}): its values live elsewhere, in a packed copy for "
            "example, and could not be written; keep the layer in its plain layout"
        )


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, that a tensor touches in its storage."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    return first * size, (first + int(last) + 1) * size


def _layout(tensor: Tensor, first: int) -> dict[str, Any]:
    """How a tensor lies in a storage that begins with element ``first`` of its present one."""
    return {
        "tensor_storage_offset": tensor.storage_offset() - first,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype),
    }


def _storage_offset(entry: Mapping[str, Any]) -> int:
    """Bytes from the start of the allocation or file; Atropos writes it under a longer name."""
    return int(entry["storage_offset_orig"] if "storage_offset_orig" in entry else entry["storage_offset"])


def _mapped(name: str, file: mmap.mmap, entry: Mapping[str, Any], offset: int) -> torch.UntypedStorage:
    count = int(entry["storage_size"])
    if offset < HEADER or not 0 < count <= len(file) - offset:
        raise TransportError(f"{name}: the file has {len(file)} bytes, not {count} at {offset}; {ASK_AGAIN}")
    return torch.frombuffer(file, dtype=torch.uint8, count=count, offset=offset).untyped_storage()


def _view(name: str, storage: torch.UntypedStorage, entry: Mapping[str, Any]) -> Tensor:
    """A tensor over a storage, if all of it lies inside."""
    dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."), None)
    shape = [int(n) for n in entry["shape"]]
    stride = [int(n) for n in entry.get("stride", [math.prod(shape[i + 1 :]) for i in range(len(shape))])]
    first = int(entry.get("tensor_storage_offset", 0))
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"{name}: this torch has no dtype {entry['dtype']!r}; use one torch on both sides")
    if len(stride) != len(shape) or min([first, *stride, *(n - 1 for n in shape)]) < 0:
        raise TransportError(f"{name}: shape {shape}, stride {stride} and offset {first} describe no tensor")
    end = (first + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1) * dtype.itemsize
    if storage.nbytes() != entry["storage_size"] or end > storage.nbytes():
        raise TransportError(
            f"{name} needs {end} bytes of a storage of {entry['storage_size']}, but {storage.nbytes()} are there; "
            f"{ASK_AGAIN}"
        )
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first, shape, stride)
