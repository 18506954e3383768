"""Live tensor bytes, counted as tensors are made and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """A dispatch mode that counts what every operation allocates until it is freed, fake tensors like real ones.

    A storage counts once, however many tensors look at it, under the name that ``kind`` had when it was made. Buffers
    within a kernel are no tensors and are not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """``known`` tensors were there before and do not count; they must outlive this."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind: Callable[[int], str] = lambda nbytes: "made"
        """Name that a new storage of so many bytes counts under."""
        self.stage = ""
        """What goes on; each stage has a peak of its own."""
        self.bytes: dict[str, int] = {}
        """Alive, by kind."""
        self.peaks: dict[str, Mapping[str, int]] = {}
        """By stage: what was alive, by kind, when that was most."""
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen: dict[int, Any] = {storage._cdata: None for storage in self._known}

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.bytes.values())

    def _gone(self, key: int) -> None:
        _, kind, nbytes = self._seen.pop(key)
        self.bytes[kind] -= nbytes

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        kind = self.kind(nbytes)
        self._seen[key] = (weakref.ref(storage, lambda _: self._gone(key)), kind, nbytes)
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        if self.total > sum(self.peaks.get(self.stage, {}).values()):
            self.peaks[self.stage] = dict(self.bytes)
        return out
