"""Tensors shared with another process without a second copy: a shared file mapping on the host, CUDA IPC on a GPU.

The lender describes what it lends as plain JSON; what attaches by that description gets tensors over the very same
bytes. Nothing here orders reads and writes: lender and borrower agree by other means on which may write when.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import TransportError
from tandem.lazy import Tensor, torch

SHARED_MEMORY = Path("/dev/shm")
"""Where files are memory."""
HEADER = 64
"""Bytes before the first tensor: the magic and the token of this lending."""
ASK_AGAIN = "the lender has ended or was restarted: ask the running one for a new description"
"""What to do about a stale description."""

_MAGIC = b"tandem lent tensors\n"


def finish(device: torch.device) -> None:
    """Return once a device has done what was queued: an engine in another process may read it from then on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def create(path: Path, size: int, token: str) -> int:
    """A new file, with all its memory reserved and its lock held; the lock is how others see that we live.

    Raises:
        OSError: there is such a file already, or no such folder.
        TransportError: there is too little memory.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # before it has a header, without which no file is taken for an orphan
    try:
        os.pwrite(lock, _header(token), 0)
        # A file with holes would be made at once, and the process killed at the first write that finds no memory.
        os.posix_fallocate(lock, 0, size)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        release(path, lock, os.getpid())
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        raise TransportError(
            f"{path.parent} has {free / 2**20:.0f} MiB free, but {size / 2**20:.0f} MiB are to be lent; make it larger "
            "(docker run --shm-size, or mount -o remount,size=)"
        ) from error
    return lock


def _header(token: str) -> bytes:
    return (_MAGIC + token.encode()).ljust(HEADER, b"\0")


def release(path: Path, lock: int, owner: int) -> None:
    """Take the file's name away, and the lock with it."""
    if os.getpid() != owner:  # a forked child that exits must not take its parent's file away
        return
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), os.fstat(lock)):  # else the name is another's by now
            path.unlink()
    os.close(lock)


def open_file(description: Mapping[str, Any]) -> mmap.mmap:
    """Map the file of a description; the mapping stays when the file's name goes.

    Raises:
        TransportError: the file is gone or is another.
    """
    path, size = Path(description["path"]), int(description["size"])
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"{path} cannot be opened ({error.strerror}); {ASK_AGAIN}") from error
    with os.fdopen(handle, "r+b"):
        if os.fstat(handle).st_size != size or os.pread(handle, HEADER, 0) != _header(description["token"]):
            raise TransportError(f"{path} is not the file that was described; {ASK_AGAIN}")
        return mmap.mmap(handle, size)


def remove_orphans(folder: Path = SHARED_MEMORY) -> None:
    """Remove this user's shared files whose lender ended without closing them."""
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                continue
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the lender lives
                    path.unlink()


ALIGNMENT = 64
"""Bytes; every tensor keeps its place relative to this, so vector loads stay as aligned as they were."""

Description = dict[str, Any]
"""JSON: ``kind``, what belongs to the kind, and ``tensors``, a mapping from name to where and how the tensor lies."""


class ExportedTensors:
    """Tensors in a shared file. Keep it for as long as another process may attach: ``close`` removes the file's name.

    The memory itself lives until the last process that maps it lets go, closed or not, whichever ends first.
    """

    def __init__(self, tensors: dict[str, Tensor], description: Description, path: Path, lock: int) -> None:
        self.tensors = tensors
        """What was given, at its new place; point ``parameter.data`` here."""
        self.description = description
        """What ``attach`` needs."""
        self._release = weakref.finalize(self, release, path, lock, os.getpid())

    def close(self) -> None:
        """Let no process attach any more; those that have are not disturbed."""
        self._release()


def export(named: Mapping[str, Tensor], path: Path) -> tuple[Description, ExportedTensors | None]:
    """Lend tensors of one device, all alive and in place from now on; those on the host move to a new file.

    Returns:
        What ``attach`` needs, and what is to be kept for as long as another process may attach.

    Raises:
        TransportError: as ``export_host`` and ``export_cuda``.
    """
    if next(iter(named.values())).is_cuda:
        return export_cuda(named), None
    exported = export_host(named, path)
    for name, tensor in named.items():
        tensor.data = exported.tensors[name]
    return exported.description, exported


def export_host(named: Mapping[str, Tensor], path: Path) -> ExportedTensors:
    """Copy host tensors into one new shared file; each comes back with its shape, dtype, strides and aliases.

    Tensors over one storage, such as tied weights or slices of a fused one, are over one storage afterwards too. Until
    the caller lets go of the originals, both copies exist.

    Args:
        named: the tensors.
        path: a file that does not exist, best in ``SHARED_MEMORY``; only this user can open it.

    Raises:
        OSError: the file exists.
        TransportError: a tensor that cannot be lent, or too little memory.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for name, tensor in named.items():
        _refuse(name, tensor, "cpu")
        storages[_storage_id(tensor)] = tensor.untyped_storage()
    places, size = {}, HEADER
    for key, storage in storages.items():
        places[key] = size
        size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    token = secrets.token_hex(16)
    lock = create(path, size, token)
    try:
        memory = mmap.mmap(lock, size)
        for key, storage in storages.items():
            block = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=places[key])
            storages[key] = block.copy_(torch.empty(0, dtype=torch.uint8).set_(storage)).untyped_storage()
        tensors, entries = {}, {}
        for name, tensor in named.items():
            key = _storage_id(tensor)
            place = {"storage_size": storages[key].nbytes(), "storage_offset": places[key]}
            entries[name] = {**place, **_layout(tensor)}
            tensors[name] = _view(name, storages[key], entries[name])
    except BaseException:
        release(path, lock, os.getpid())
        raise
    description = {"kind": "host", "path": str(path.absolute()), "size": size, "token": token, "tensors": entries}
    return ExportedTensors(tensors, description, path.absolute(), lock)


def export_cuda(named: Mapping[str, Tensor]) -> Description:
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
            handles[storage] = _handle(name, tensor.untyped_storage())
        entries[name] = {**handles[storage], **_layout(tensor)}
    return {"kind": "cuda", "tensors": entries}


def _handle(name: str, storage: torch.UntypedStorage) -> dict[str, Any]:
    """By which another process opens a storage."""
    try:
        entry = dict(zip(_HANDLE, storage._share_cuda_(), strict=True))
    except RuntimeError as error:
        raise TransportError(f"{name} cannot be exported ({str(error).splitlines()[0]}); {_ADVICE}") from error
    handle = entry["ipc_handle_b64"]
    # CUDA's own 64 bytes, or a version, a letter (c for cudaMalloc, e for an expandable segment) and torch's handle.
    if len(handle) != 64 and handle[1:2] == b"e":
        raise TransportError(f"{name} lies in an expandable segment; {_ADVICE}")
    encoded = {key: base64.b64encode(value).decode() for key, value in entry.items() if key.endswith("_b64")}
    return {**entry, **encoded, "device_uuid": gpu_uuid(entry["device_index"])}


_HANDLE = (
    "device_index", "ipc_handle_b64", "storage_size", "storage_offset", "ref_counter_handle_b64", "ref_counter_offset",
    "event_handle_b64", "event_sync_required",
)  # fmt: skip
"""What torch tells of a shared storage and takes to open it, in its order; bytes are in base64."""


def attach(description: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors over the lender's bytes, by name.

    Args:
        description: what ``export_host`` or ``export_cuda`` made, in another process.

    Raises:
        TransportError: the description is wrong or stale, or its memory cannot be reached from here.
    """
    storages: dict[tuple[Any, int], torch.UntypedStorage] = {}
    out = {}
    try:
        file = open_file(description) if description["kind"] == "host" else None
        for name, entry in description["tensors"].items():
            offset = int(entry["storage_offset"])  # bytes from the start of the allocation or file
            key = entry.get("ipc_handle_b64"), offset
            if key not in storages:
                storage = open_storage(entry, offset) if file is None else _mapped(name, file, entry, offset)
                storages[key] = storage
            out[name] = _view(name, storages[key], entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TransportError(f"a description of lent tensors is not as expected: {error!r}") from error
    return out


def _refuse(name: str, tensor: Tensor, device: str) -> None:
    """Refuse what is not an ordinary tensor with bytes on that kind of device."""
    if tensor.device.type != device or tensor.layout is not torch.strided or tensor.numel() == 0:
        raise TransportError(
            f"{name} ({tensor.layout} {tuple(tensor.shape)} on {tensor.device}) cannot be lent: only ordinary tensors "
            f"on {device} with elements can; where a packed copy has the values, keep the layer in its plain layout"
        )


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> dict[str, Any]:
    """How a tensor lies in its storage."""
    return {
        "tensor_storage_offset": tensor.storage_offset(),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype),
    }


def _mapped(name: str, file: mmap.mmap, entry: Mapping[str, Any], offset: int) -> torch.UntypedStorage:
    count = int(entry["storage_size"])
    if offset < HEADER or not 0 < count <= len(file) - offset:
        raise TransportError(f"{name}: the file has {len(file)} bytes, not {count} at {offset}; {ASK_AGAIN}")
    return torch.frombuffer(file, dtype=torch.uint8, count=count, offset=offset).untyped_storage()


def _view(name: str, storage: torch.UntypedStorage, entry: Mapping[str, Any]) -> Tensor:
    """A tensor over a storage, if all of it lies inside."""
    dtype: torch.dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."))
    shape = [int(n) for n in entry["shape"]]
    stride = [int(n) for n in entry["stride"]]
    first = int(entry["tensor_storage_offset"])
    end = (first + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1) * dtype.itemsize
    if storage.nbytes() != entry["storage_size"] or end > storage.nbytes():
        raise TransportError(
            f"{name} needs {end} bytes of a storage of {entry['storage_size']}, but {storage.nbytes()} are there; "
            f"{ASK_AGAIN}"
        )
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first, shape, stride)


_ADVICE = (
    "CUDA IPC exports plain cudaMalloc memory only: take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF (and "
    "PYTORCH_ALLOC_CONF) and switch the engine's sleep mode off"
)


def gpu_uuid(device: int | torch.device) -> str:
    """The same in every process that sees the GPU, however it numbers it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_index(entry: Mapping[str, Any]) -> int:
    """Index, in this process, of the lender's GPU: CUDA_VISIBLE_DEVICES may number it differently on either side."""
    uuid = entry["device_uuid"]
    visible = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise TransportError(
            f"tensors lie on GPU {uuid}, but this process sees {', '.join(visible) or 'none'} (CUDA_VISIBLE_DEVICES)"
        )
    return visible.index(uuid)


def open_storage(entry: Mapping[str, Any], offset: int) -> torch.UntypedStorage:
    """The storage of a handle, ``offset`` bytes into its allocation.

    Raises:
        TransportError: its GPU is not visible here, or CUDA refuses.
    """
    index = _device_index(entry)
    values = {**entry, "device_index": index, "storage_offset": offset}
    arguments = [base64.b64decode(values[key]) if key.endswith("_b64") else values[key] for key in _HANDLE]
    try:
        torch.cuda.init()
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(*arguments)
    except RuntimeError as error:
        raise TransportError(
            f"memory of GPU {index} cannot be attached ({str(error).splitlines()[0]}); lender and borrower must be two "
            f"processes of one user on one host, and if they are, {ASK_AGAIN}"
        ) from error
    return storage
