"""Adapters in the slots of a live vLLM: written in place, and read back as they are stored.

vLLM keeps, per adapted layer, one tensor for all A and one for all B, with a first dimension of slots; its kernels and
CUDA graphs hold their addresses. An adapter is therefore registered once, by vLLM's own calls and with zeros, and from
then on every version is copied into its slot: here, or by the trainer, to which the slot is lent. It never passes
through a file, and no copy is kept beside the slot.

Nothing here imports vLLM: it is handed vLLM's objects and asks for attributes, not versions.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engines.vllm.adapters import rank_of, scaling
from tandem.errors import EngineError
from tandem.transport import sharing
from tandem.transport.checksums import Shard

_PEFT = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight")


class _Target(NamedTuple):
    """Where this worker's part of a tensor goes, in whichever slot."""

    stacked: Tensor  # slots × 1 × rows × columns
    rows: range
    columns: range
    shape: tuple[int, int]  # of the whole tensor

    def part(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]

    def view(self, slot: int) -> Tensor:
        return self.stacked[slot, 0, : len(self.rows), : len(self.columns)]


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """An adapter that lives in a slot."""

    model: Any  # what vLLM registered under the id
    slot: int
    rank: int
    targets: dict[str, _Target]
    exported: dict[str, Any] | None = None  # what ``AdapterWriter`` needs, once it was lent
    kept: Any = None  # for as long as it is


class _Spent(dict[str, Any]):
    """In place of the registered zeros: filling a slot from them again would silently serve the base model."""

    def get(self, key: str, default: Any = None) -> Any:
        raise EngineError(
            f"vLLM fills an adapter's slot anew, at {key}, whose values were in that slot alone: publish it again"
        )


class InPlaceAdapters:
    """Adapters put into one worker's slots from memory, by their integer ids.

    Call it only while nothing is sampled: a slot is written in place.
    """

    def __init__(self, model_runner: Any):
        worker = getattr(model_runner, "lora_manager", None)
        if worker is None:
            raise EngineError("the engine was started without adapters; start it with --enable-lora")
        self._worker = worker
        self._manager = worker._adapter_manager
        self._adapters: dict[int, _Adapter] = {}
        self._packed = {
            name: (fused, index)
            for fused, names in self._manager.packed_modules.items()
            for index, name in enumerate(names)
        }

    def put(self, lora_id: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Make adapter ``lora_id`` hold these values; the first time it takes a slot and keeps it until removed.

        ``config`` is PEFT's ``adapter_config.json``. Names are PEFT's, with or without the adapter's own; each tensor
        is the whole one, of which a worker takes its part. Either everything is written or, on an error, nothing.

        Raises:
            EngineError: vLLM cannot serve this adapter, it does not fit the model, or no slot is free.
        """
        named, adapter = self._claim(lora_id, config, tensors)
        views = {name: target.view(adapter.slot) for name, target in adapter.targets.items()}
        parts = [target.part(named[name]) for name, target in adapter.targets.items()]
        torch._foreach_copy_(list(views.values()), parts)
        for name, view in views.items():
            if ".lora_B." in name:
                view.mul_(scaling(config))  # as vLLM does when it loads a file: in float32, and rounded once

    def export(
        self, lora_id: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path
    ) -> dict[str, Any]:
        """Give adapter ``lora_id`` a slot, as ``put``, and lend it: the borrower writes what the slot holds.

        Args:
            lora_id: the adapter.
            config: as for ``put``.
            tensors: as for ``put``; their values are not looked at, and may be missing (the meta device).
            folder: where a shared file is made; read on a host alone.

        Returns:
            what ``AdapterWriter`` needs, by the names that ``stored`` gives.

        Raises:
            EngineError: as ``put``.
            TransportError: the memory cannot be lent.
        """
        _, adapter = self._claim(lora_id, config, tensors)
        if adapter.exported is None:
            stacked = {name: target.stacked for name, target in adapter.targets.items()}
            # A borrower knows by the key that it has attached this very memory.
            key = secrets.token_hex(8)
            description, adapter.kept = sharing.export(stacked, folder / f"tandem-adapter-{os.getpid()}-{key}")
            adapter.exported = {"key": key, "slot": adapter.slot, "lent": description}
        return adapter.exported

    def _claim(
        self, lora_id: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], _Adapter]:
        """The tensors under the names of PEFT's files, and the adapter in a slot, if they fit it."""
        rank = rank_of(config, self._manager.lora_config.max_lora_rank)
        named = _named(tensors)
        adapter = self._alive(lora_id)
        targets = self._targets(named, rank) if adapter is None else adapter.targets
        if adapter is not None and (rank != adapter.rank or named.keys() != targets.keys()):
            first = min(named.keys() ^ targets.keys(), default="none")
            raise EngineError(
                f"adapter {lora_id} was put with rank {adapter.rank} and {len(targets)} tensors, now it has rank "
                f"{rank} and {len(named)}, first name that differs: {first}; the engine holds the adapter of another "
                "run: have it unloaded first (POST /lora/unload)"
            )
        for name, target in targets.items():
            tensor = named[name]
            if tuple(tensor.shape) != target.shape or not tensor.is_floating_point():
                raise EngineError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the engine takes floating-point {target.shape}: "
                    "trainer and engine must run the same model, and the configuration must have the tensors' rank"
                )
        return named, adapter or self._register(lora_id, rank, targets)

    def stored(self, lora_id: int) -> list[Shard]:
        """What the slot really holds, tensor by tensor, in the order it was first put.

        Raises:
            EngineError: this adapter is in no slot.
        """
        adapter = self._alive(lora_id)
        if adapter is None:
            raise EngineError(f"adapter {lora_id} is in no slot; put it first")
        return _placed(adapter.targets, adapter.slot)

    def loaded(self, lora_id: int, names: Iterable[str], config: Mapping[str, Any]) -> list[Shard]:
        """What the slot of an adapter that vLLM loaded from a folder really holds, for the names it should have.

        Raises:
            EngineError: it is in no slot, or the model has no such module.
        """
        ids = self._manager.lora_index_to_id
        if lora_id not in ids:
            raise EngineError(f"adapter {lora_id} is in no slot; load it first")
        targets = self._targets(_named(dict.fromkeys(names)), rank_of(config, self._manager.lora_config.max_lora_rank))
        return _placed(targets, ids.index(lora_id))

    def remove(self, lora_id: int) -> bool:
        """Free its slot; False if there was none."""
        self._adapters.pop(lora_id, None)
        return bool(self._manager.remove_adapter(lora_id))

    def _alive(self, lora_id: int) -> _Adapter | None:
        """The adapter if it is still where it was put; None if vLLM has dropped it since."""
        adapter, registered = self._adapters.get(lora_id), self._manager.get_adapter(lora_id)
        ids = self._manager.lora_index_to_id
        if registered is not None and (adapter is None or registered is not adapter.model):
            raise EngineError(f"vLLM holds an adapter {lora_id} that was not put from memory; unload it")
        if registered is not None and adapter is not None and ids[adapter.slot] == lora_id:
            return adapter
        self.remove(lora_id)
        return None

    def _register(self, lora_id: int, rank: int, targets: dict[str, _Target]) -> _Adapter:
        """Let vLLM give the adapter a slot, filled with zeros, that it never takes back by itself.

        Pinned, because vLLM otherwise evicts the adapter that was used longest ago and fills a slot anew from a copy in
        host memory when it is next asked for; that copy would be of some earlier version.
        """
        manager = self._manager
        blank = manager.create_dummy_lora(lora_id, 1, self._worker.embedding_modules)
        try:
            manager.add_adapter(blank)
            manager.activate_adapter(lora_id)
            manager.pin_adapter(lora_id)
        except (RuntimeError, ValueError) as error:
            manager.remove_adapter(lora_id)
            raise EngineError(
                f"no slot is free for adapter {lora_id}: {error} The engine has {manager.lora_slots}; raise --max-loras"
            ) from error
        blank.loras = _Spent()
        slot = manager.lora_index_to_id.index(lora_id)
        adapter = self._adapters[lora_id] = _Adapter(model=blank, slot=slot, rank=rank, targets=targets)
        return adapter

    def _targets(self, tensors: Mapping[str, Any], rank: int) -> dict[str, _Target]:
        """Where each given tensor goes; both halves of every module must be there."""
        if not tensors:
            raise EngineError("the adapter has no tensors")
        targets = {}
        for name in tensors:
            module, _, half = name.removesuffix(".weight").rpartition(".lora_")
            if f"{module}.lora_{'B' if half == 'A' else 'A'}.weight" not in tensors:
                raise EngineError(f"the adapter has {name} but not its other half; A and B come in pairs")
            layer, index = self._layer(module.removeprefix(_PEFT))
            a, b = layer.lora_a_stacked[index], layer.lora_b_stacked[index]
            (inputs, num_inputs), (outputs, num_outputs) = self._inputs(layer), self._outputs(layer, index, module)
            room = a.shape[2] >= rank and b.shape[3] >= rank
            if not room or (a.shape[3], b.shape[2]) != (len(inputs), len(outputs)):
                raise EngineError(
                    f"vLLM stores the adapter of {module} as A {tuple(a.shape[2:])} and B {tuple(b.shape[2:])}, where "
                    f"A (rank, {len(inputs)}) and B ({len(outputs)}, rank) were expected: slots that are split among "
                    "workers by rank (--fully-sharded-loras) cannot be written from memory; start the engine without"
                )
            if half == "A":
                targets[name] = _Target(a, range(rank), inputs, (rank, num_inputs))
            else:
                targets[name] = _Target(b, outputs, range(rank), (num_outputs, rank))
        return targets

    def _layer(self, module: str) -> tuple[Any, int]:
        """vLLM's layer that a module is part of, and which part: q_proj is the first of qkv_proj."""
        manager = self._manager
        name = self._renamed(module)
        fused, index = self._packed.get(name, (name, 0))
        layer = manager.modules.get(fused)
        parts = len(manager.packed_modules.get(fused, [name]))
        if not hasattr(layer, "output_slices") or layer.n_slices != parts:  # embeddings and experts have no slices
            raise EngineError(
                f"the engine has no linear layer {module!r} that takes an adapter: the model has none of that name or "
                "fuses it otherwise, or --lora-target-modules leave it out; change trainable.target_modules"
            )
        return layer, index

    def _renamed(self, module: str) -> str:
        """The module's name in vLLM's model, by the renames (not the fusions) that loading a file goes through."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return module
        renames = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
        suffix = ".lora_A.weight"  # renames by suffix expect a tensor's name
        (name,) = renames().apply_list([module + suffix]) or [module + suffix]
        return str(name).removesuffix(suffix)

    def _inputs(self, layer: Any) -> tuple[range, int]:
        """Columns of A here, and of all of it: a row-parallel layer sees a part of the input, any other all."""
        base = layer.base_layer
        if not hasattr(base, "input_is_parallel"):
            return range(base.input_size), base.input_size
        return _piece(layer.tp_rank, base.input_size_per_partition), base.input_size

    def _outputs(self, layer: Any, index: int, module: str) -> tuple[range, int]:
        """Rows of B here, and of all of it: a column-parallel layer makes a part of the output, any other all."""
        base = layer.base_layer
        if not hasattr(base, "gather_output"):
            return range(base.output_size), base.output_size
        size = layer.output_slices[index]
        if layer.tp_size > 1 and layer.n_slices == 1 and len(getattr(base, "output_sizes", ())) > 1:
            raise EngineError(
                f"an adapter of {module!r}, one layer in the checkpoint, is cut into pieces by tensor parallelism and "
                "cannot be written from memory; use tensor_parallel_size: 1"
            )
        # Where there are fewer key heads than workers, several hold the same ones.
        copies = base.num_kv_head_replicas if index and hasattr(base, "num_kv_head_replicas") else 1
        return _piece(layer.tp_rank // copies, size), layer.tp_size // copies * size


def _piece(number: int, size: int) -> range:
    return range(number * size, (number + 1) * size)


def _placed(targets: Mapping[str, _Target], slot: int) -> list[Shard]:
    """What a slot holds; viewed anew each time, for lending moves storage."""
    return [Shard(name, t.view(slot), (t.rows.start, t.columns.start)) for name, t in targets.items()]


def _named(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under the names of PEFT's files: ``base_model.model.<module>.lora_A.weight``, no adapter's own."""
    named = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise EngineError(f"{name} is no lora_A.weight or lora_B.weight; vLLM serves nothing else of adapters")
        named[f"{match['module']}.lora_{match['half']}.weight"] = tensor
    return named
