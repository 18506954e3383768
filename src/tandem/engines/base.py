"""The engine interface: samples tokens and records which policy version each token was sampled from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from tandem.errors import EngineError
from tandem.types import Completion, PolicyVersion, Sampling

MOST_SECONDS = 7 * 24 * 3600
"""Longest time for which an engine is told to wait for something: a week."""
PROBE_SAMPLES = 4
"""Tokens sampled after a probe, unless more are asked for."""
PROBE_TEMPERATURE = 0.7
"""Temperature they are sampled at: at 1 it would not show whether logprobs have the temperature in them."""


class Health(NamedTuple):
    """An engine's health: whether it can generate, and the requests running and waiting."""

    ok: bool
    """True if it can generate."""
    running: int
    """Requests being sampled."""
    waiting: int
    """Requests queued."""
    detail: str = ""
    """Details in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """An engine's answer to a probe: logprobs of known tokens and a few samples, by the weights it holds now."""

    name: str = "the engine"
    """The engine's name."""
    scored: tuple[float, ...] | None
    """Logprob of each token of the probe but the first, at temperature 1; None where the engine has no scoring of its
    own: the trainer's pass would be compared with itself."""
    sampled: Completion | None = None
    """A few tokens sampled after it, to see the decoding path; None where that is the very code that scores."""
    temperature: float = 1.0
    """Temperature of ``sampled``."""
    cached: int = 0
    """Tokens of the probe that were taken from a prefix cache; more than 0 means keys of older weights."""


class LoraAdapter(NamedTuple):
    """A LoRA adapter as weight sync transfers it: PEFT's configuration and tensors."""

    config: Mapping[str, Any]
    """PEFT's configuration: r, lora_alpha, target_modules."""
    tensors: tuple[tuple[str, Any], ...]
    """PEFT name and tensor, live, in a fixed order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequirements:
    """What a run requires of the engine it starts: model, dtype, payload and capability."""

    model: str
    """Hugging Face id or folder."""
    dtype: str
    """Type of the weights, as torch calls it."""
    folder: Path | None = None
    """The run's folder, for logs and sockets; None outside a run."""
    weights: Path | None = None
    """Folder of the weights to start from, where they are not the model's own: a checkpoint's."""
    payload: Literal["weights", "adapter"] = "weights"
    """Payload of publishes: all weights, or an adapter."""
    rank: int = 0
    """Largest adapter rank; 0 without adapters."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of the layers that adapters change; empty: the linear layers of a Llama-like model."""
    capability: type | None = None
    """Capability that the weight sync needs."""
    versions: int = 2
    """Policy versions that requests in flight may need at once."""
    answers: int = 128
    """Answers of one training step that one engine samples."""
    seed: int = 0
    router_replay: bool = False
    """It tells which experts it routed tokens to."""
    hosts: RankHosts | None = None
    """The trainer's other ranks where each starts its engine on its own host; None: all engines are started here."""


class RankEngine(NamedTuple):
    """Where the engine of a rank on another host answers."""

    url: str
    """As this host reaches it."""
    key: str
    reattached: bool
    """It was left by an earlier trainer of the run."""


class RankHosts(Protocol):
    """The trainer's ranks that have started each engine but the first on their own hosts."""

    async def start_engines(self, requirements: EngineRequirements) -> Sequence[RankEngine]:
        """Have each start its engine, or find it; in the order of the engines."""

    async def restart_engine(self, engine: int) -> RankEngine:
        """Have one start its engine again, which has died; the first of the run is engine 0."""


class Sampler(ABC):
    """What samples completions, wherever it runs."""

    @abstractmethod
    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        """Sample after ``prompt``. The same prompt, sampling, key and weights give the same tokens.

        Raises:
            EngineError: the prompt leaves no room in the context, or the engine failed.
        """

    @abstractmethod
    async def health(self) -> Health:
        """Load and liveness."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Most tokens of a prompt and its completion together."""

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that the completion of a prompt may have.

        Raises:
            EngineError: none, or the prompt is empty.
        """
        room = self.context - len(prompt)
        if not prompt or room < 1:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}; raise it"
            )
        return room


class Engine(Sampler):
    """A live engine: samples completions with their policy versions. All methods are called from one event loop.

    Example:
        >>> import tandem
        >>> sorted(tandem.Engine.__abstractmethods__)  # what one must have
        ['close', 'context', 'generate', 'health', 'pause', 'resume', 'score', 'set_version', 'version']
    """

    @abstractmethod
    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Logprob of each token but the first given those before it, at temperature 1: a probe."""

    async def probe(self, tokens: Sequence[int], *, samples: int = PROBE_SAMPLES) -> Sequence[ProbeResult]:
        """Score ``tokens`` and, where sampling is other code than scoring, sample up to ``samples`` more.

        Returns one answer for each engine.

        Allowed while paused: it reads the weights as they are, and releases no other request's tokens.
        """
        return [ProbeResult(scored=tuple(await self.score(tokens)))]

    @property
    def started_elsewhere(self) -> bool:
        """True if this trainer did not start it, so that its weights are unknown."""
        return False

    @property
    def sums_bytes(self) -> bool:
        """False if it cannot checksum the bytes that it holds, so that a probe alone proves a publish."""
        return True

    async def stop(self, reason: str) -> None:
        """Give out nothing until a publish succeeds: the weights are in doubt."""
        await self.pause()

    async def resume_unchanged(self, reason: str) -> None:
        """Take back a pause under which nothing was written: what was served before it is served on.

        One that served nothing then, since its weights were in doubt, gives out nothing again, and says ``reason``.
        """
        await self.resume()

    async def recover(self) -> bool:
        """Restart dead engine processes of the trainer's; True if one was and has no published weights yet."""
        return False

    @property
    def sleeps(self) -> int:
        """How deep it sleeps while a step is trained: 0 never, 1 with its weights kept, 2 with nothing kept."""
        return 0

    async def sleep(self) -> None:
        """Give the accelerator's memory back, while paused and with nothing in flight."""
        raise NotImplementedError("an engine whose ``sleeps`` is above 0 has this")

    async def wake(self) -> None:
        """Take the memory again and stay paused; does nothing to one that is awake.

        After a sleep of 2 the weights are garbage until they are published, and not served before that is verified.
        """

    @property
    def failure(self) -> Exception | None:
        """Error after which the engine cannot sample any more, for waits that make no request; None while it can."""
        return None

    @property
    def restart_count(self) -> int:
        """Count of starts: exported memory, loaded adapters and connections belong to one of them."""
        return 0

    def on_restart(self, republish: Callable[[], Awaitable[None]]) -> None:
        """``republish`` brings the current weights to an engine that was started again."""

    @abstractmethod
    def version(self) -> PolicyVersion:
        """The version last set."""

    @abstractmethod
    async def set_version(self, version: PolicyVersion) -> None:
        """Record this version on tokens sampled from now on. Called by ``WeightSync`` alone, after verification."""

    def accept_requests_for(self, step: int) -> bool:
        """From now on requests are for the policy of ``step``; those made before it is published wait for it.

        False, and nothing is changed, where they could not.
        """
        return False

    @abstractmethod
    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        """Return once no token is being sampled.

        Args:
            finish: let requests in flight end first; otherwise they are kept, wait, and go on under the next version.
            step: the policy step that is about to be published, where one is.
        """

    @abstractmethod
    async def resume(self) -> float:
        """Go on sampling and give out what was held back; returns the seconds since ``pause`` without any sampling."""

    @abstractmethod
    async def close(self) -> None:
        """End; requests in flight fail with EngineError. Safe to call twice."""


@runtime_checkable
class ExportsWeights(Protocol):
    """An engine whose own weights a trainer may write in place (``shared``)."""

    async def export_weights(self) -> Mapping[str, Any]:
        """Hugging Face name and tensor, in this process, of every weight it samples from: its own storage."""


@runtime_checkable
class ExportsToRanks(Protocol):
    """An engine of several processes: each shares its weights with a rank of the trainer, or is copied into by one."""

    async def exports_of_ranks(self) -> Sequence[Any]:
        """Where the weights of each process but the first are, as plain data."""

    async def slots_of_ranks(self, adapter: LoraAdapter) -> Sequence[Any]:
        """Where each process but the first samples this adapter from, as plain data; its rank writes it."""


@runtime_checkable
class ExportsSlices(Protocol):
    """Engines whose tensor-parallel workers each share their slices of the weights with one of the trainer's ranks.

    The ranks' weights are cut as the workers' are (``distributed.shard: weights``).
    """

    async def exports_of_workers(self) -> Sequence[Sequence[Any]]:
        """Where slices are, engine by engine and worker by worker, as plain data for ``attach_parts``."""


@runtime_checkable
class TakesAdapter(Protocol):
    """An engine that takes a LoRA adapter in memory."""

    async def adapt(self, adapter: LoraAdapter, *, everywhere: bool = True) -> int:
        """Sample with this adapter from now on; returns the bytes copied.

        Args:
            adapter: the trainer's.
            everywhere: into every process of the engine; otherwise the first alone, for ranks write the others'.
        """


@runtime_checkable
class LoadsVersions(Protocol):
    """An engine that holds several versions of an adapter, by name (``hotswap``)."""

    async def swap(self, folder: Path, version: PolicyVersion, adapter: LoraAdapter) -> int:
        """Load a PEFT folder as this version; new requests use it once its version is set. Returns the bytes loaded."""


@runtime_checkable
class Relaunches(Protocol):
    """An engine that can be ended and started on other weights (``restart``)."""

    async def relaunch(self, weights: Path | None) -> None:
        """End it and, once its memory is free, start it anew: on a model folder, or on the weights it had."""

    async def load(self, folder: Path, adapter: LoraAdapter) -> None:
        """Load a PEFT folder, which holds ``adapter``, into the engine as it runs."""


@runtime_checkable
class ReceivesBroadcast(Protocol):
    """An engine that takes tensors from a process group (``broadcast``)."""

    async def workers(self) -> Sequence[Sequence[str]]:
        """For each engine the accelerator of each of its ranks: its UUID, or nothing on a host."""

    async def addresses(self) -> Sequence[str]:
        """For each engine the trainer's own address on the way to it."""

    async def connect(self, rendezvous: Mapping[str, Any], first: Sequence[int]) -> None:
        """Begin to join a group whose rank 0 is the trainer; ``first`` is the rank of each engine's first worker."""

    async def receive(
        self, manifest: Sequence[tuple[str, tuple[int, ...], str]], bucket_bytes: int, adapter: LoraAdapter | None
    ) -> None:
        """Take one publish from the group into the weights, or into the adapter."""

    async def disconnect(self) -> None:
        """Leave the group."""


class UnmappedWeights(EngineError):
    """The engine loads this model in a way that hides where its weights are: it cannot checksum them."""


@runtime_checkable
class ReportsChecksums(Protocol):
    """An engine in another process that checksums the bytes it holds."""

    async def checksums(self, payload: Literal["weights", "adapter"]) -> Mapping[str, Mapping[str, int]]:
        """For each engine by name: checksum of each tensor it samples from, by its name in the payload.

        Raises:
            UnmappedWeights: it cannot; ``sums_bytes`` is false from now on, if weights are what is published.
        """

    def as_stored(self, adapter: LoraAdapter) -> Iterable[tuple[str, Any]]:
        """An adapter's tensors under the names and with the values that the engine stores them."""


class EngineSpec(ABC):
    """A frozen dataclass whose fields are the engine's options."""

    capabilities: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that its engines offer to weight syncs."""
    tells_experts: ClassVar[bool] = False
    """Its engines can tell which experts they routed tokens to."""
    most_rank: ClassVar[int | None] = None
    """Largest rank of an adapter that they have room for; None: any."""

    def refuses(self, capability: type) -> str:
        """Reason why, with these options, its engines lack this capability; empty if they have it."""
        return ""

    def check(self, *, folder: Path) -> str:
        """Check, before anything is loaded, that this engine can run here; returns the findings as text.

        Args:
            folder: the run's, which need not exist yet.

        Raises:
            ConfigError: it cannot, and what to do.
        """
        return "in the trainer's process"

    @abstractmethod
    def open(
        self, policy: Any, *, context: int, requirements: EngineRequirements | None = None
    ) -> AbstractAsyncContextManager[Engine]:
        """Start it. ``policy`` is the trainer's ``Policy``, ``context`` the most tokens of a prompt and completion."""
