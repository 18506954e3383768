"""CUDA IPC handles of storages as JSON: what ``torch.multiprocessing.reductions`` does, without pickle."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from tandem.errors import TransportError
from tandem.lazy import torch
from tandem.transport.shared_memory import ASK_AGAIN

_ADVICE = (
    "CUDA IPC exports plain cudaMalloc memory only: take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF (and "
    "PYTORCH_ALLOC_CONF) and switch the engine's sleep mode off"
)


def _uuid(device: int | torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def export(name: str, storage: torch.UntypedStorage) -> dict[str, Any]:
    """The handle of a storage, by which another process opens it; ``name`` is for errors.

    Raises:
        TransportError: memory that cannot be exported.
    """
    try:
        index, handle, size, offset, counter, counter_offset, event, wait = storage._share_cuda_()
    except RuntimeError as error:
        raise TransportError(f"{name} cannot be exported ({str(error).splitlines()[0]}); {_ADVICE}") from error
    # CUDA's own 64 bytes, or a version, a letter (c for cudaMalloc, e for an expandable segment) and torch's handle.
    if len(handle) != 64 and handle[1:2] == b"e":
        raise TransportError(f"{name} lies in an expandable segment; {_ADVICE}")
    return {
        "device_index": index,
        "device_uuid": _uuid(index),
        "ipc_handle_b64": base64.b64encode(handle).decode(),
        "storage_size": size,
        "storage_offset": offset,
        "ref_counter_handle_b64": base64.b64encode(counter).decode(),
        "ref_counter_offset": counter_offset,
        "event_handle_b64": base64.b64encode(event).decode(),
        "event_sync_required": bool(wait),
    }


def _here(entry: Mapping[str, Any]) -> int:
    """Index, in this process, of the lender's GPU: CUDA_VISIBLE_DEVICES may number it differently on either side."""
    uuid = entry.get("device_uuid")
    if uuid is None:
        return int(entry["device_index"])
    visible = [_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise TransportError(
            f"the tensors lie on GPU {uuid}, but this process sees {', '.join(visible) or 'no GPU'}; let both sides "
            "see it (CUDA_VISIBLE_DEVICES)"
        )
    return visible.index(uuid)


def open_storage(entry: Mapping[str, Any], offset: int) -> torch.UntypedStorage:
    """The storage of a handle, ``offset`` bytes into its allocation.

    Raises:
        TransportError: its GPU is not visible here, or CUDA refuses.
    """
    index = _here(entry)
    arguments = (
        index,
        base64.b64decode(entry["ipc_handle_b64"]),
        int(entry["storage_size"]),
        offset,
        base64.b64decode(entry["ref_counter_handle_b64"]),
        int(entry["ref_counter_offset"]),
        base64.b64decode(entry["event_handle_b64"]),
        bool(entry["event_sync_required"]),
    )
    try:
        torch.cuda.init()
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(*arguments)
    except RuntimeError as error:
        raise TransportError(
            f"memory of GPU {index} cannot be attached ({str(error).splitlines()[0]}); lender and borrower must be two "
            f"processes of one user on one host, and if they are, {ASK_AGAIN}"
        ) from error
    return storage
