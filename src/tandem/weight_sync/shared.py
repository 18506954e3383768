"""One copy: the optimizer writes the engine's own storage, so nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from tandem.engines.base import EngineSpec, ExportsToRanks, ExportsWeights, ReportsChecksums, TakesAdapter
from tandem.errors import UnsupportedPair
from tandem.lazy import Parameter, Tensor, torch
from tandem.transport.bridge import VllmBridge, find
from tandem.transport.sharing import finish
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, WeightSync


@dataclass(frozen=True, kw_only=True)
class Shared(WeightSync):
    """Trainer and engine hold the same storage; an adapter beside it is written into the engine's slot.

    With engine: embedded that is so by itself. With engine: vllm the trainer's parameters become views into the
    engine's memory (CUDA IPC, or POSIX shared memory on a CPU), and the engine stands still while they are written. Of
    several engines the first is that one, and a publish copies its weights into the others' memory.
    """

    capability: ClassVar[type] = ExportsWeights
    pause: ClassVar[Literal["step", "transfer", "never"]] = "step"

    in_flight: Literal["continue", "finish"] = "continue"
    """Requests being sampled when weights change: go on under the new ones, token by token versioned, or end first."""

    bridge: str | None = None
    """File or folder of the vllm_bridge_config.json of an engine at urls, tried before $LOGDIR, the working directory
    and /tmp/atropos_bridge; null: ask the engine itself."""

    def check(self, *, trainable: Any, engine: EngineSpec) -> None:
        """Refuse a pair that cannot work, and a file where there can be none yet."""
        super().check(trainable=trainable, engine=engine)
        if self.bridge is not None and (number := len(getattr(engine, "urls", ()))) != 1:
            has = f"urls has {number}" if number else "there is none"
            raise UnsupportedPair(f"sync.bridge is the file of an engine at urls, and {has}: remove sync.bridge")

    async def bind(self, session: SyncContext) -> None:
        """Make the policy's weights views of the engine's storage, each compared by value or written.

        Raises:
            UnsupportedPair: names the first weight that the engine does not lend, or holds otherwise.
        """
        if not isinstance(session.engine, ReportsChecksums):
            return  # in process: it samples from the very module
        assert isinstance(session.engine, ExportsWeights)
        if self.bridge is None:
            await session.pause()
            exported = await session.engine.export_weights()
        else:
            exported = VllmBridge.read(find(Path(self.bridge))).attach()
            await session.pause()
        model, write = session.policy.model, session.state.write
        parameters = session.trainable.base_names(model)
        attaching = partial(attach, model, parameters, exported, fresh=session.fresh, write=write)
        await session.policy.compute(attaching)
        exports = await session.engine.exports_of_ranks() if isinstance(session.engine, ExportsToRanks) else ()
        if ranks := session.several_ranks:
            await ranks.attach(exports, session.fresh)
        else:
            session.copies = [msgspec.convert(export, VllmBridge).attach() for export in exports]
            for copy in session.copies:
                _check(parameters, copy)

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Nothing travels but to further engines, and an adapter; everything else must be the engine's own.

        Raises:
            UnsupportedPair: names the first tensor that is not.
        """
        if (copied := await self._adapted(session)) is not None:
            return copied
        if isinstance(session.engine, ReportsChecksums):  # bound by ``bind``; ``compare`` reads the engine's own bytes
            return await session.policy.compute(partial(_copy_weights, session)) if session.copies else 0
        assert isinstance(session.engine, ExportsWeights)
        exported = await session.engine.export_weights()
        for name, tensor in session.trainable.source(session.policy.model):
            if name not in exported or exported[name].data_ptr() != tensor.data_ptr():
                raise UnsupportedPair(f"sync shared: the engine does not sample from the trainer's {name!r}")
        return 0

    async def _adapted(self, session: SyncContext) -> int | None:
        """Write the adapter into engines' slots, each rank into its own engine's; the bytes here, None: no adapter.

        Every rank has all of it: an adapter's gradient is summed, and each updates the whole.
        """
        engine = session.engine
        if session.trainable.payload != "adapter" or not isinstance(engine, TakesAdapter):
            return None
        ranks = session.several_ranks
        copied = await engine.adapt(session.trained.adapter(), everywhere=ranks is None)
        if ranks is not None and isinstance(engine, ExportsToRanks):
            await ranks.adapt(await engine.slots_of_ranks(session.trained.adapter()))
        return copied


def _copy_weights(session: SyncContext) -> int:
    """Copy every weight into further engines' memory; the bytes."""
    parameters: Mapping[str, Parameter] = session.trainable.base_names(session.policy.model)
    with torch.no_grad():
        for copy in session.copies:
            torch._foreach_copy_([copy[name] for name in parameters], list(parameters.values()))
    finish(session.policy.device)  # streams order nothing between processes
    return len(session.copies) * sum(parameter.nbytes for parameter in parameters.values())


def attach_export(model: torch.nn.Module, parameters: Mapping[str, Parameter], export: Any, *, fresh: bool) -> None:
    """``attach`` to what ``ExportsToRanks`` said of a rank's engine."""
    attach(model, parameters, msgspec.convert(export, VllmBridge).attach(), fresh=fresh, write=lambda: None)


def attach(
    model: torch.nn.Module,
    parameters: Mapping[str, Parameter],
    exported: Mapping[str, Any],
    *,
    fresh: bool,
    write: Callable[[], None],
) -> None:
    """Point every parameter at the engine's storage, and bring what else the model has to the engine's device.

    Args:
        model: the policy's.
        parameters: its parameters by the engine's names.
        exported: the engine's tensors.
        fresh: they must hold the same values already; otherwise the engine gets the model's.
        write: called before values are written there.

    Raises:
        UnsupportedPair: names the first weight that the engine does not lend, or holds otherwise.
    """
    _check(parameters, exported)
    with torch.no_grad():
        for name, parameter in parameters.items():
            view: Tensor = exported[name]
            if not fresh:  # an engine that was started anew, or that served on without us: it gets our values
                if not _same_bits(view, parameter.to(view.device)):
                    write()
                    view.copy_(parameter)
            elif not torch.equal(view, parameter.to(view.device)):
                raise UnsupportedPair(
                    f"sync shared: the engine's {name!r} has other values than the model's: it is laid out otherwise, "
                    "or was loaded from elsewhere; use sync: broadcast"
                )
            parameter.data = view
    device = next(iter(exported.values())).device
    if any(p.device != device for p in [*model.parameters(), *model.buffers()]):
        model.to(device)


def _same_bits(first: Tensor, other: Tensor) -> bool:
    """Two tensors of one type and shape, by their bytes: a negative zero is not a zero, and a NaN is itself."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.view(bits), other.view(bits))


def _check(parameters: Mapping[str, Parameter], exported: Mapping[str, Any]) -> None:
    """See that an engine lends every weight, each as it is here, and no other.

    Raises:
        UnsupportedPair: names the first that is otherwise.
    """
    for name, parameter in parameters.items():
        if name not in exported:
            raise UnsupportedPair(f"sync shared: the engine has no weight {name!r}; use sync: broadcast or restart")
        view = exported[name]
        if view.shape != parameter.shape or view.dtype != parameter.dtype:
            what = "dtype" if view.dtype != parameter.dtype else "model"
            raise UnsupportedPair(
                f"sync shared: {name!r} is {tuple(parameter.shape)} of {parameter.dtype} here and {tuple(view.shape)} "
                f"of {view.dtype} in the engine; give both the same {what}"
            )
    if rest := sorted(exported.keys() - parameters.keys()):
        raise UnsupportedPair(f"sync shared: the engine samples from {rest[0]!r}, which the model does not have")
