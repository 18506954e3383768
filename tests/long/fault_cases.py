"""The faults that ``faults.py`` injects: what goes wrong, on which way, and what must catch it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tandem.engines.base import LoraAdapter
from tandem.engines.vllm import protocol as wire
from tandem.errors import EngineError, UnsupportedPair
from tandem.types import PolicyVersion
from tandem.weight_sync.transaction.session import WeightSyncSession

Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
V = "model.layers.1.self_attn.v_proj.weight"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
LORA_A = "base_model.model.model.layers.{}.mlp.up_proj.lora_A.weight"

Inject = Callable[[Any], AbstractAsyncContextManager[None]]
Act = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong in one publish."""

    name: str
    """For the table."""
    by: str
    """What must catch it."""
    inject: Inject
    """Around the publish: makes it go wrong and takes that back."""
    act: Act | None = None
    """Instead of a publish."""
    rebind: bool = False
    """The way itself is broken afterwards and must be formed anew."""
    vllm: bool = False
    """It is one of vLLM's parts, which a stand-in does not have."""


class NotInjected(AssertionError):
    """The fault never happened, so nothing can be said about it."""


class StartedAgain(Exception):
    """The engine died, was started again, published to and proven."""


def inside(fault: str, *, everywhere: bool = False, **options: Any) -> Inject:
    """In the processes of the faulty engine, or of all, by the subclasses of ``faulty``."""

    @asynccontextmanager
    async def inject(bench: Any) -> AsyncIterator[None]:
        servers = bench.engine.servers if everywhere else [bench.server]
        for server in servers:
            await server.post("/fault", {"fault": fault, "options": options})
        try:
            yield
        finally:
            struck = [(await server.post("/fault", {"fault": "", "options": {}}))["struck"] for server in servers]
            if min(struck) < 1:
                raise NotInjected(fault)

    return inject


def instead(owner: Callable[[Any], Any], name: str, make: Callable[[Any, Any], Any]) -> Inject:
    """On the trainer's side: a method of a live object is replaced; ``make`` gets the bench and the original."""

    @asynccontextmanager
    async def inject(bench: Any) -> AsyncIterator[None]:
        target, struck = owner(bench), []
        original = getattr(target, name)
        wrong = make(bench, original)

        def call(*args: Any, **others: Any) -> Any:
            struck.append(name)
            return wrong(*args, **others)

        object.__setattr__(target, name, call)  # a way of syncing is a frozen dataclass
        try:
            yield
        finally:
            object.__delattr__(target, name)
            if not struck:
                raise NotInjected(name)

    return inject


def _engine(bench: Any) -> Any:
    return bench.engine


def _sync(bench: Any) -> Any:
    return bench.link.sync


@asynccontextmanager
async def nothing(bench: Any) -> AsyncIterator[None]:
    """What happens is in ``act``."""
    yield


# The trainer's side


def _exported(change: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    """The weights that a rank's engine lends it: the only rank's, or the second's."""

    def of_engine(bench: Any, lend: Any) -> Any:
        async def wrong() -> Mapping[str, Any]:
            weights = dict(await lend())
            return {**weights, Q: change(weights[Q])}

        return wrong

    def of_second(bench: Any, views: Any) -> Any:
        def wrong(export: Any) -> Mapping[str, Any]:
            weights = views(export)
            return {**weights, Q: change(weights[Q])}

        return wrong

    return _of_rank(
        instead(_engine, "export_weights", of_engine), instead(lambda bench: bench.second, "views", of_second)
    )


def _of_rank(only: Inject, second: Inject) -> Inject:
    """As a rank does it where it is the only one, or where it is the second of two."""
    return lambda bench: (only if bench.second is None else second)(bench)


def _row_down(view: torch.Tensor) -> torch.Tensor:
    return view.as_strided(view.shape, view.stride(), view.storage_offset() + view.stride(0))


async def _bind(bench: Any) -> None:
    await bench.link.bind(fresh=True)


def _stamped_first(bench: Any, move: Any) -> Any:
    async def wrong(link: WeightSyncSession, version: PolicyVersion) -> int:
        await link.engine.set_version(version)
        return 0  # what was to follow comes after the proof

    return wrong


def _skipped(bench: Any, move: Any) -> Any:
    async def wrong(link: WeightSyncSession, version: PolicyVersion) -> int:
        return 0

    return wrong


async def _nan(bench: Any) -> None:
    def spoil() -> None:
        with torch.no_grad():
            next(p for name, p in bench.parameters() if "q_proj" in name).view(-1)[5] = float("nan")

    await bench.publish(then=spoil)


async def _optimizer_dies(bench: Any) -> None:
    def die() -> None:
        raise MemoryError("the optimizer died halfway")

    await bench.publish(then=die)


async def _never_resumed(bench: Any) -> None:
    """What an engine does whose trainer was killed in the middle of a publish."""
    await bench.server.post("/bridge/pause", wire.Pause(seconds=0.2))
    await asyncio.sleep(0.5)
    await bench.answer()


async def _greeted(bench: Any) -> None:
    await bench.greet()


def _stalled(bench: Any, connected: Any) -> Any:
    """The sender goes silent before its last bucket."""
    member = bench.link.member
    launch = member._launch

    def wrong(plan: Any, index: int, *others: Any, **how: Any) -> Any:
        if index == len(plan.buckets) - 1:
            time.sleep(member.rendezvous.seconds + 1)
        return launch(plan, index, *others, **how)

    return wrong


async def _killed(bench: Any) -> None:
    """Tandem mends this itself: what is asked for is that it knows, and that the new engine is proven."""
    restart_count, seconds = bench.engine.restart_count, time.monotonic()
    await bench.server.post("/fault", {"fault": "die", "options": {"after": 6}})
    await bench.publish()
    if bench.engine.restart_count != restart_count + 1:
        raise NotInjected("die")
    raise StartedAgain(f"after {time.monotonic() - seconds:.0f} s")


@asynccontextmanager
async def _replaced(bench: Any) -> AsyncIterator[None]:
    await bench.replace_engine()
    try:
        yield
    finally:
        await bench.find_engine()


def _other_folder(change: Callable[[Any, Path, PolicyVersion], Path]) -> Inject:
    def make(bench: Any, swap: Any) -> Any:
        async def wrong(folder: Path, version: PolicyVersion, adapter: LoraAdapter) -> int:
            return int(await swap(change(bench, folder, version), version, adapter))

        return wrong

    return instead(_engine, "swap", make)


def _previous(bench: Any, folder: Path, version: PolicyVersion) -> Path:
    earlier = sorted(p for p in folder.parent.iterdir() if p.name < folder.name)
    return earlier[-1]


def _other_alpha(bench: Any, folder: Path, version: PolicyVersion) -> Path:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    return folder


def _slot(make: Callable[[Any, Any], Any]) -> Inject:
    """How an adapter is written into the slot that the engine lends."""
    return instead(lambda bench: bench.slot, "copy", make)


def _unwritten(bench: Any, copy: Any) -> Any:
    return lambda description, stored: sum(tensor.nbytes for _, tensor in stored)


def _elsewhere(bench: Any, copy: Any) -> Any:
    def wrong(description: Any, stored: Any) -> int:
        memory = bench.slot
        right = list(memory._views)
        # All slots of a tensor lie one after another.
        memory._views[:] = [v.as_strided(v.shape, v.stride(), _next_slot(v)) for v in right]
        try:
            return int(copy(description, stored))
        finally:
            memory._views[:] = right

    return wrong


def _next_slot(view: torch.Tensor) -> int:
    size = view.untyped_storage().nbytes() // view.element_size()
    assert size >= 2 * (view.storage_offset() + view.numel()), "the engine has one slot only"
    return int(view.storage_offset() + size // 2)


def _layers_swapped(bench: Any, copy: Any) -> Any:
    def wrong(description: Any, stored: Any) -> int:
        first, second = LORA_A.format(0), LORA_A.format(1)
        held = dict(stored)
        return int(copy(description, [(n, held[{first: second, second: first}.get(n, n)]) for n in held]))

    return wrong


def _adapter(**factors: float) -> Inject:
    """Its configuration says otherwise than the policy's."""

    def other(adapter: LoraAdapter) -> LoraAdapter:
        config = {**adapter.config, **{name: int(adapter.config[name] * by) for name, by in factors.items()}}
        return adapter._replace(config=config)

    def asynchronous(bench: Any, adapt: Any) -> Any:
        async def wrong(adapter: LoraAdapter, **where: bool) -> Any:
            return await adapt(other(adapter), **where)

        return wrong

    def of_second(bench: Any, adapter: Any) -> Any:
        return lambda: other(adapter())

    lent = instead(_engine, "slots_of_ranks", asynchronous)
    own = instead(lambda bench: bench.second.own, "adapter", of_second)
    return _of_rank(instead(_engine, "adapt", asynchronous), lent if "r" in factors else own)


def _lora(weight: str) -> str:
    """Name of the adapter's first factor of a weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_A.default.weight"


def _not_loaded(bench: Any, swap: Any) -> Any:
    async def wrong(folder: Path, version: PolicyVersion, adapter: LoraAdapter) -> int:
        bench.engine._pending = bench.engine._swapped[-1]
        return 1  # "done", and it was the adapter of before that came

    return wrong


async def _not_gathered() -> None:
    """The other rank does not learn what the lead trained."""


def _relaunched(change: Callable[[Any, Any, Any], Path | None] | None) -> Inject:
    """The engine starts again on something else, or (None) does not."""

    def make(bench: Any, relaunch: Any) -> Any:
        async def wrong(folder: Path | None) -> None:
            if change is not None:
                await relaunch(change(bench, folder, None))

        return wrong

    return instead(_engine, "relaunch", make)


def _bit_on_disk(bench: Any, folder: Path | None, version: Any) -> Path | None:
    assert folder is not None
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[V].view(torch.int8).view(-1)[7] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _loaded(change: Callable[[Any, Path, Any], Path]) -> Inject:
    """After a restart another adapter is loaded than was saved."""

    def make(bench: Any, load: Any) -> Any:
        async def wrong(folder: Path, adapter: LoraAdapter) -> None:
            await load(change(bench, folder, None), adapter)

        return wrong

    return instead(_engine, "load", make)


OPTIMIZER_DIES = Fault(name="optimizer dies halfway", by="stands still", inject=nothing, act=_optimizer_dies)
TRAINER_DIES = Fault(name="trainer dies while the engine is paused", by="deadline", inject=nothing, act=_never_resumed)
NUMBERLESS = Fault(name="NaN in a weight", by="probe", inject=inside("cache", everywhere=True), act=_nan)
SAMPLER = (
    Fault(name="temperature left out of logprobs", by="probe", inject=inside("sampler", how="temperature"), vllm=True),
    Fault(name="raw logprobs instead of processed ones", by="probe", inject=inside("sampler", how="raw"), vllm=True),
    Fault(name="engine says its logprobs are raw", by="refused", inject=inside("admits raw"), act=_greeted),
)
PAUSED = (
    Fault(name="prefix cache outlives its weights", by="prefix cache", inject=inside("old salt"), vllm=True),
    *SAMPLER,
    NUMBERLESS,
    OPTIMIZER_DIES,
    TRAINER_DIES,
    Fault(name="the stamp is lost", by="version", inject=inside("lost stamp")),
)
"""What can go wrong in every way that pauses an engine which goes on."""
SHARED = (
    Fault(name="engine keeps its weights elsewhere: writes reach nobody", by="checksum", inject=inside("moved")),
    Fault(name="one tensor lies elsewhere", by="checksum", inject=inside("moved", names=[NORM])),
    Fault(name="lent view of q off by one row", by="refused", inject=_exported(_row_down), act=_bind, rebind=True),
    Fault(
        name="lent in another type",
        by="refused",
        inject=_exported(lambda view: view.to(torch.float16)),
        act=_bind,
        rebind=True,
    ),
    *PAUSED,
)


def transported(small: str, v: str, gate: str, up: str, *, lacking: str = "checksum") -> tuple[Fault, ...]:
    """What can go wrong on the way of tensors that have these names; who notices that some lack."""
    anew = lacking == "refused"  # in the midst of a transfer
    return (
        Fault(name="tensor not sent", by=lacking, inject=inside("drop", names=[small]), rebind=anew),
        Fault(name="transport silently does nothing", by=lacking, inject=inside("drop"), rebind=anew),
        Fault(name="torn write: the second half is lost", by=lacking, inject=inside("half", after=6), rebind=anew),
        Fault(name="two tensors swapped on the way", by="checksum", inject=inside("swap", names=[gate, up])),
        Fault(name="v written one row off", by="checksum", inject=inside("alter", name=v, how="row")),
        Fault(name="one bit of one element flips", by="checksum", inject=inside("alter", name=v, how="bit")),
        Fault(name="NaN arrives", by="checksum", inject=inside("alter", name=v, how="nan")),
        Fault(name="narrowed to another type on the way", by="checksum", inject=inside("alter", name=up, how="narrow")),
        Fault(name="two publishes swapped: the last one arrives again", by="checksum", inject=inside("late")),
        Fault(name="publish skipped", by="checksum", inject=instead(_sync, "transfer", _skipped)),
        Fault(name="version stamped before the move", by="checksum", inject=instead(_sync, "transfer", _stamped_first)),
        Fault(
            name="sender goes silent in the middle",
            by="deadline",
            inject=instead(lambda bench: bench.link.member, "_launch", _stalled),
            rebind=True,
        ),
        Fault(name="engine killed in the middle", by="started again", inject=nothing, act=_killed),
    )


MAPPED = (
    Fault(name="two tensors swapped in the map, both ends", by="probe", inject=inside("map swap", names=[GATE, UP])),
    Fault(name="q one row off in the map, both ends", by="checksum", inject=inside("map row", name=Q), vllm=True),
    Fault(name="k one row off in the map, both ends", by="checksum", inject=inside("map row", name=K), vllm=True),
)
BROADCAST = (
    *transported(NORM, V, GATE, UP),
    *MAPPED,
    Fault(name="untied head written with the embedding", by="checksum", inject=inside("tie", name=HEAD, to=EMBED)),
    Fault(
        name="rows shifted by the vocabulary's padding",
        by="checksum",
        inject=inside("alter", name=EMBED, how="padding"),
    ),
)
ADAPTER = (
    Fault(name="stale adapter: said to be written, and was not", by="checksum", inject=_slot(_unwritten)),
    Fault(name="adapter written to another slot", by="checksum", inject=_slot(_elsewhere)),
    Fault(name="two layers of the adapter swapped", by="checksum", inject=_slot(_layers_swapped)),
    Fault(name="adapter scaled by another alpha", by="checksum", inject=_adapter(lora_alpha=2)),
    Fault(name="adapter of another rank", by="refused", inject=_adapter(r=0.5)),
    Fault(name="base-only routing", by="probe", inject=inside("no adapter")),
)
HOTSWAP = (
    Fault(name="folder of the version before, under the new name", by="checksum", inject=_other_folder(_previous)),
    Fault(name="another alpha in the adapter's folder", by="checksum", inject=_other_folder(_other_alpha)),
    Fault(name="swap answered, nothing loaded", by="checksum", inject=instead(_engine, "swap", _not_loaded)),
    Fault(name="requests routed to the adapter before", by="probe", inject=inside("older adapter")),
    Fault(name="requests routed to the base alone", by="probe", inject=inside("no adapter")),
    Fault(name="the stamp of a swap is lost", by="version", inject=inside("lost stamp")),
    Fault(name="engine restarted behind our back", by="boot id", inject=_replaced),
    Fault(
        name="one bit of a frozen base weight differs",
        by="checksum",
        inject=inside("held", name=V, how="bit"),
        act=lambda bench: bench.opened(),
    ),
)
RESTART = (TRAINER_DIES, OPTIMIZER_DIES)
RESTART_WEIGHTS = (
    *RESTART,
    Fault(name="engine not restarted", by="checksum", inject=_relaunched(None)),
    Fault(name="started on the weights of before", by="checksum", inject=_relaunched(_previous)),
    Fault(name="started on the model of the start", by="checksum", inject=_relaunched(lambda *_: None)),
    Fault(name="one bit of what was saved differs", by="checksum", inject=_relaunched(_bit_on_disk)),
    Fault(name="NaN in a weight", by="probe", inject=nothing, act=_nan),
)
ALIKE = (
    Fault(
        name="the second rank trained nothing",
        by="checksum",
        inject=instead(lambda bench: bench, "gather", lambda *_: _not_gathered),
    ),
)
ONE_RANK: Mapping[str, tuple[Fault, ...]] = {
    "shared full": SHARED,
    "broadcast full": BROADCAST,
    "shared lora": ADAPTER,
    "hotswap lora": HOTSWAP,
}
WAYS: Mapping[int, Mapping[str, tuple[Fault, ...]]] = {
    1: ONE_RANK,
    2: {
        "shared full": SHARED,
        "shared lora": ADAPTER,
        "broadcast full": (*BROADCAST, *PAUSED, *ALIKE),
        "broadcast merged": (*transported(DOWN, V, GATE, UP), *MAPPED, *PAUSED, *ALIKE),
        "broadcast lora": (*transported(*map(_lora, (DOWN, V, GATE, UP)), lacking="refused"), *PAUSED, *ALIKE),
        "hotswap lora": (*HOTSWAP, *SAMPLER, OPTIMIZER_DIES, *ALIKE),
        "restart full": (*RESTART_WEIGHTS, *ALIKE),
        "restart merged": (*RESTART_WEIGHTS, *ALIKE),
        "restart lora": (
            *RESTART,
            Fault(name="nothing loaded after the restart", by="refused", inject=instead(_engine, "load", _skipped)),
            Fault(name="another alpha in the adapter's folder", by="checksum", inject=_loaded(_other_alpha)),
            *ALIKE,
        ),
    },
}
"""Faults by the number of ranks and the way: how weights travel, and what is trained."""

CAUGHT: tuple[tuple[str, str], ...] = (
    ("new instance id", "boot id"),
    ("prefix cache", "prefix cache"),
    ("published tensors differ", "checksum"),
    ("trained tensors differ", "checksum"),
    ("weights that are not trained differ", "checksum"),
    ("nats", "probe"),
    ("answers a probe as", "probe"),
    ("logprobs are not finite", "probe"),
    ("never resumed", "deadline"),
    ("waited", "deadline"),
    ("nobody says whose", "version"),
    ("stamped", "version"),
    ("give", "refused"),
    ("was put with rank", "refused"),
    ("engine takes floating-point", "refused"),
    ("laid out otherwise", "refused"),
)


def caught_by(error: BaseException) -> str:
    """Which part of the proof raised it."""
    if isinstance(error, MemoryError):
        return "stands still"
    if isinstance(error, StartedAgain):
        return "started again"
    message = str(error)
    for text, by in CAUGHT:
        if text in message:
            return by
    return "refused" if isinstance(error, UnsupportedPair | EngineError) else type(error).__name__
