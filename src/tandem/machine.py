"""Resources of this machine: processors, memory, disk, accelerators."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.lazy import torch

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that a run may use."""

    name: str
    """For a person: ``this machine`` or the accelerator's name."""
    free: int
    """Bytes that can still be taken."""
    total: int
    """Bytes in all."""
    is_host: bool
    """True if weights live in the host's own memory, beside Python and its libraries."""


def host(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> Machine:
    """The host's memory, or what the container it runs in allows."""
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _number(cgroup / "memory.max") or _number(cgroup / "memory" / "memory.limit_in_bytes")
    if limit is not None and limit < total:
        used = _number(cgroup / "memory.current") or _number(cgroup / "memory" / "memory.usage_in_bytes") or 0
        total, free = limit, min(free, max(0, limit - used + _reclaimable(cgroup)))
    return Machine(name="this machine", free=free, total=total, is_host=True)


def accelerator() -> Machine | None:
    """The first CUDA device, or None."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return Machine(name=torch.cuda.get_device_name(0), free=free, total=total, is_host=False)


def computes_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo"), devices: Path = Path("/dev")) -> bool:
    """True if this machine has instructions for bfloat16: an accelerator, or a processor that says so; without torch.

    A processor without them emulates: steps take more than twice as long as in float32.
    """
    if any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists():  # an accelerator's devices
        return True
    words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_few_kernels() -> None:
    """Bound what torch's libraries keep on a processor of every product they computed, before the first of them.

    oneDNN and ideep each keep the code made for the last 1,024 shapes, a third of a megabyte a piece, and a step's
    micro-batches have ever other numbers of tokens: a process grew by 20 MB a step. To make it anew costs nothing that
    could be measured; a pass needs some fifteen.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def trim() -> None:
    """Give the system back what was freed.

    glibc keeps it: tensors of ever other sizes leave holes in which the next ones do not fit, so that a process holds
    the most that it ever needed and, from step to step, somewhat more.
    """
    with contextlib.suppress(AttributeError):  # another library than glibc allocates
        ctypes.CDLL(None).malloc_trim(0)


def peaks(device: str) -> dict[str, int]:
    """Most bytes of an accelerator at a time so far: for tensors, and kept by this process; empty for a host."""
    if not device.startswith("cuda"):
        return {}
    return {
        "gpu_gb": torch.cuda.max_memory_allocated(device),
        "gpu_reserved_gb": torch.cuda.max_memory_reserved(device),
    }


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Spare the garbage collector what there is now, while the block lasts, and have it look less often.

    torch and transformers are half a million objects. To look through them again takes a tenth of a second or more, in
    which an event loop stands still and neither is a request sent nor an answer read. With thousands of answers in
    flight, its usual rounds take a sixth of the loop's time and find nothing.
    """
    often = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*often)
        gc.unfreeze()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Spare the garbage collector what is imported in the block: it looks through none of it, then or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def free_disk(folder: Path) -> int:
    """Free bytes where a folder is or would be made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def apply_umask(folder: Path) -> None:
    """Give the files in a folder the mode that the umask gave the folder.

    safetensors makes its files readable by their owner alone (0600), whatever the umask (safetensors issue 782).
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o666 != mode:
            with contextlib.suppress(OSError):  # file systems without modes: what is written there is worth more
                path.chmod(mode)


def readable(amount: float) -> str:
    """Bytes as a person reads them: ``1.25 GB`` (10^9 bytes), ``38 MB`` or ``4 kB``."""
    if amount >= 1e9:
        return f"{amount / 1e9:.2f} GB"
    return f"{amount / 1e6:.0f} MB" if amount >= 1e6 else f"{amount / 1e3:.0f} kB"


def _number(path: Path) -> int | None:
    """A cgroup file's number; None if there is none or it says max."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(cgroup: Path) -> int:
    """Bytes of page cache that count as used but would be given up."""
    try:
        rows = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(rows.get("inactive_file", 0))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))
