"""The base of weight syncs: ``transfer`` is how new weights reach the engine, and which state may follow which.

The transaction is the session's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from tandem.engines.base import Engine, EngineSpec
from tandem.errors import Bounded, UnsupportedPair, bounded
from tandem.types import PolicyVersion
from tandem.weight_sync.transaction.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.model.policy import Policy


class SyncState(Enum):
    """State of a weight-sync session: what the engine serves, and what an abort has to undo."""

    SERVING = "serving"
    """The engine serves the last published weights; before the first publish, those it started on."""
    PAUSED = "paused"
    """The engine is paused, or a new version lies beside the one it serves: an abort lets it go on as before."""
    WRITING = "writing"
    """The memory it samples from may hold weights that are not verified: an abort stops it."""
    STOPPED = "stopped"
    """A publish was aborted: the engine gives out nothing until one succeeds."""


TRANSITIONS: Mapping[SyncState, frozenset[SyncState]] = {
    # pause
    SyncState.SERVING: frozenset({SyncState.PAUSED}),
    # transfer; resume, where no memory was written that is served; or abort
    SyncState.PAUSED: frozenset({SyncState.WRITING, SyncState.SERVING}),
    # resume; or abort
    SyncState.WRITING: frozenset({SyncState.SERVING, SyncState.STOPPED}),
    # pause, for a publish that is repeated
    SyncState.STOPPED: frozenset({SyncState.PAUSED}),
}
"""States that may follow each state."""


class SyncStateMachine:
    """A sync state that changes only as the table of transitions allows."""

    def __init__(self) -> None:
        self.state = SyncState.SERVING

    def pause(self) -> None:
        """Begin a publish; does nothing in one that has begun."""
        if self.state in (SyncState.SERVING, SyncState.STOPPED):
            self.become(SyncState.PAUSED)

    def write(self) -> None:
        """The memory that the engine samples from is about to be written; calling it again does nothing."""
        if self.state is not SyncState.WRITING:
            self.become(SyncState.WRITING)

    def become(self, state: SyncState) -> None:
        """Change the state.

        Raises:
            RuntimeError: the table of transitions does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a weight sync that is {self.state.value} cannot become {state.value}")
        self.state = state


class TrainerRanks(Protocol):
    """The ranks that train the policy, as weight sync sees them on the first: one, or several with parts of it."""

    size: int

    def trained(self) -> Trained:
        """The weights or the adapter, wherever ranks hold them."""

    async def attach(self, exports: Sequence[Any], fresh: bool) -> None:
        """Have each other rank attach the weights of its engine, given rank by rank as plain data."""

    async def adapt(self, slots: Sequence[Any]) -> None:
        """Have each other rank write its adapter into its engine's slot, given rank by rank as plain data."""

    async def fold(self, folding: Coroutine[Any, Any, None]) -> None:
        """Have every rank bring what it computes with up to date with its parameters, this one by ``folding``."""


@dataclass(slots=True, kw_only=True)
class SyncContext:
    """Both ends of a weight-sync session, as its method of transfer sees them."""

    policy: Policy
    """Policy that is trained."""
    engine: Engine
    """Engine that is published to."""
    trainable: Any
    """The recipe's trainable, which decides the payload."""
    folder: Path
    """Folder for weights that are sent through files."""
    trained: Trained = field(init=False)
    """Tensors of the payload."""
    versions: int = 2
    """Policy versions that requests in flight may need at once."""
    member: Any = None
    """The trainer's place in a process group, where one is used."""
    copies: Sequence[Mapping[str, Tensor]] = ()
    """Weights of further engines by name, which a publish copies the policy's into."""
    ranks: TrainerRanks | None = None
    """The trainer's ranks, one or several; None only where a policy is evaluated without being trained."""
    fresh: bool = False
    """The engine was started on the very weights that the policy holds, and nothing was published to it since."""
    state: SyncStateMachine = field(default_factory=SyncStateMachine)
    """State of the session, by the table of transitions."""

    @property
    def several_ranks(self) -> TrainerRanks | None:
        """The ranks, if others train beside this one."""
        return self.ranks if self.ranks is not None and self.ranks.size > 1 else None

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        """Pause the engine until a publish, of that policy step if it is known, succeeds or is given up."""
        self.state.pause()
        await self.engine.pause(finish=finish, step=step)


@dataclass(frozen=True, kw_only=True)
class WeightSync(Bounded, ABC):
    """Base of weight syncs: how new weights reach the engine. A frozen dataclass whose fields are its options.

    Example:
        >>> import tandem
        >>> from tandem.weight_sync.broadcast import Broadcast
        >>> sync: tandem.WeightSync = Broadcast(every=2)
        >>> sync.due(step=1, last=False), sync.due(step=2, last=False)
        (False, True)
    """

    payloads: ClassVar[frozenset[str]] = frozenset({"weights", "adapter"})
    """Supported payloads."""
    capability: ClassVar[type]
    """The capability of an engine that it needs."""
    pause: ClassVar[Literal["step", "transfer", "never"]] = "transfer"
    """When the engine is paused: from before the optimizer, from before the transfer, or not at all."""

    sums_before_pause: ClassVar[bool] = False
    """Whether the trainer's checksums are taken while the engine samples on: what it publishes lies in memory that only
    the trainer writes, and that no restart of the engine moves."""

    tolerance: float = bounded(0.0)
    """Largest rounding error of a logit between engine and trainer, nats, as the standard deviation over a probe's
    tokens; 0 means 0.3 for weights narrower than float32; for float32 0.02 on a GPU and 0.001 on a CPU."""

    @property
    def behind(self) -> int:
        """Most steps by which what the engine serves is older than the policy, between two publishes."""
        return 0

    def due(self, step: int, *, last: bool) -> bool:
        """Whether the policy of a step is published; that of the last step always is."""
        return last or step % (self.behind + 1) == 0

    @property
    def finishes(self) -> bool:
        """True if requests in flight end before weights change; otherwise they go on under the next version."""
        return getattr(self, "in_flight", "continue") == "finish"

    def check(self, *, trainable: Any, engine: EngineSpec) -> None:
        """Refuse a pair that cannot work, before any weight is loaded.

        Raises:
            UnsupportedPair: names the ones that can.
        """
        if trainable.payload not in self.payloads:
            raise UnsupportedPair(
                f"sync: {_name(self)} carries adapters alone, and trainable: {_name(trainable)} changes whole "
                "weights; these travel by sync: shared, broadcast or restart"
            )
        if self.capability not in engine.capabilities:
            has = ", ".join(sorted(each.__name__ for each in engine.capabilities)) or "none"
            raise UnsupportedPair(
                f"sync: {_name(self)} needs an engine with the capability {self.capability.__name__}; engine: "
                f"{_name(engine)} has {has}. engine: embedded goes with sync: shared, and engine: vllm with all of them"
            )
        if reason := engine.refuses(self.capability):
            raise UnsupportedPair(f"sync: {_name(self)} and engine: {_name(engine)} do not go together here: {reason}")

    async def bind(self, session: SyncContext) -> None:
        """Called once for every start of the engine, before anything is published to it.

        One that pauses it does so by ``session.pause``, and calls ``session.state.write`` before it writes there.
        """

    @abstractmethod
    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Make the engine hold the policy's weights; returns the bytes copied."""

    async def unbind(self, session: SyncContext) -> None:
        """Called when the run ends, however it does; again does nothing."""


@dataclass(frozen=True, kw_only=True)
class Periodic(WeightSync):
    """A sync whose publishes are expensive, so that some steps may skip them; the last step never does."""

    every: int = bounded(1, least=1)
    """Steps between two publishes; there is one after the last step too."""

    @property
    def behind(self) -> int:
        """Steps by which the engine's weights may be older than the policy."""
        return self.every - 1


def _name(thing: object) -> str:
    return type(thing).__module__.removesuffix(".spec").rpartition(".")[2]
