"""What an engine is: something that samples tokens and knows which weights it samples from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from tandem.types import Completion, PolicyVersion, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What an engine says of itself."""

    ok: bool
    """True if it can generate."""
    running: int
    """Requests being sampled."""
    waiting: int
    """Requests queued."""
    detail: str = ""
    """For a person."""


class Engine(ABC):
    """A live engine. All methods are called from one event loop; none blocks it."""

    @abstractmethod
    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        """Sample after ``prompt``. The same prompt, sampling, key and weights give the same tokens.

        Raises:
            EngineError: the prompt leaves no room in the context, or the engine failed.
        """

    @abstractmethod
    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Logprob of each token but the first given those before it, at temperature 1: a probe."""

    @abstractmethod
    def version(self) -> PolicyVersion:
        """The version last stamped."""

    @abstractmethod
    async def stamp(self, version: PolicyVersion) -> None:
        """Tokens sampled from now on carry this version. Called by ``WeightSync`` alone, after its proof."""

    @abstractmethod
    async def pause(self) -> None:
        """Return once no token is being sampled; requests in flight are kept and wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling."""

    @abstractmethod
    async def health(self) -> Health:
        """Load and liveness."""

    @abstractmethod
    async def close(self) -> None:
        """End; requests in flight fail with EngineError. Safe to call twice."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Most tokens of a prompt and its completion together."""


@runtime_checkable
class CanLend(Protocol):
    """An engine whose own weights a trainer may write in place (``shared``)."""

    def lent(self) -> Iterator[tuple[str, Any]]:
        """Hugging Face name and tensor of every weight the engine samples from, its own storage."""
        ...


class EngineSpec(ABC):
    """A frozen dataclass whose fields are the engine's options."""

    ports: ClassVar[frozenset[type]] = frozenset()
    """What its engines let a way of syncing do."""

    @abstractmethod
    def open(self, policy: Any, *, context: int) -> AbstractAsyncContextManager[Engine]:
        """Start it. ``policy`` is the trainer's ``Policy``, ``context`` the most tokens of a prompt and completion."""
