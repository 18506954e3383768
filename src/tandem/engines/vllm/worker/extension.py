"""vLLM worker extension (``--worker-extension-cls``): exports, receives and checksums weights and adapters.

Every method is called through ``collective_rpc``, those that write while the scheduler stands still, takes and returns
plain data, and touches the storage that the forward pass reads; nothing of vLLM is replaced. On a CPU alone, linear
layers are kept from being repacked for oneDNN when weights are to be written in place: the repacked copy is what would
be read.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tandem.engines.vllm.worker.adapter import InPlaceAdapters
from tandem.engines.vllm.worker.parameter_map import (
    RESTART,
    SOURCE,
    ParameterMap,
    TensorPlace,
    recorded,
    share,
    sources_of,
    tensors_of,
)
from tandem.errors import EngineError
from tandem.transport import sharing
from tandem.transport.checksums import ChecksumCache, ChecksumTally, Shard
from tandem.transport.collective import Member
from tandem.transport.daemon import resolve
from tandem.transport.rendezvous import Rendezvous, accelerator

IN_PLACE = "TANDEM_IN_PLACE"
"""Environment variable that says weights will be written in place."""


def keep_layouts() -> None:
    """Keep CPU linear layers as they are loaded, so that what is written is what is read."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


if os.environ.get(IN_PLACE) and not torch.cuda.is_available():
    keep_layouts()


class WorkerExtension:
    """Mixed into vLLM's worker class; names begin with ``tandem_`` so that they collide with none of its own."""

    model_runner: Any
    rank: int

    def tandem_info(self) -> dict[str, Any]:
        """Which worker this is."""
        device = self.tandem_device
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "device": str(device),
            "accelerator": accelerator(device),
        }

    @property
    def tandem_device(self) -> torch.device:
        """Where its weights are."""
        return next(self.tandem_model.parameters()).device

    @property
    def tandem_model(self) -> torch.nn.Module:
        """vLLM's model."""
        model: Any = self.model_runner.model
        module: torch.nn.Module = model.unwrap() if hasattr(model, "unwrap") else model  # hidden by CUDA graph wrappers
        return module

    def tandem_places(self) -> dict[str, list[TensorPlace]]:
        """Where each of the trainer's tensors lies, in the storage that the parameters have now.

        Raises:
            EngineError: vLLM's loader does more than to place them, or does not place all of them.
        """
        return self._tandem_recorded.places(self.tandem_model, self._tandem_sources)

    @cached_property
    def _tandem_sources(self) -> dict[str, Tensor]:
        """The trainer's tensors with which vLLM's loader computes, as the checkpoint has them at first.

        Raises:
            EngineError: the checkpoint has them otherwise, or what is computed of them is not what vLLM has.
        """
        if not (recorded := self._tandem_recorded).stored:
            return {}
        config = self.model_runner.vllm_config.model_config
        sources = sources_of(config.model, recorded, config.dtype, self.tandem_device)
        if recorded.stale(self.tandem_model, sources):
            raise EngineError(f"vLLM's {recorded.derived[0]!r} is not what its loader computes alone; {RESTART}")
        return sources

    def tandem_derive(self) -> None:
        """Have vLLM's loader compute what it computes of the weights that were written."""
        self._tandem_recorded.derive(self.tandem_model, self._tandem_sources)
        self.tandem_settle()

    @cached_property
    def _tandem_recorded(self) -> ParameterMap:
        from vllm.config import set_current_vllm_config

        config = self.model_runner.vllm_config
        workers = int(config.parallel_config.tensor_parallel_size)
        with set_current_vllm_config(config):  # vLLM's Transformers backend has classes of transformers ask for it
            weights, stored = tensors_of(config.model_config.model, config.model_config.dtype)
            return recorded(self.tandem_model, weights, stored, world=workers)

    def tandem_map(self) -> str:
        """JSON: where every Hugging Face tensor lies in this rank's parameters."""
        parameters = self._tandem_named()
        return json.dumps(
            {
                name: [_described(place, parameters[place.parameter]) for place in placements]
                for name, placements in self.tandem_places().items()
            }
        )

    def _tandem_named(self) -> dict[str, Tensor]:
        """Whatever is written to, by name: buffers too that are views of parameters, which move with them."""
        named: dict[str, Tensor] = dict(self.tandem_model.named_parameters())
        storages = {tensor.untyped_storage().data_ptr() for tensor in named.values()}
        buffers = [(n, b) for n, b in self.tandem_model.named_buffers() if b.untyped_storage().data_ptr() in storages]
        return {**named, **dict(buffers), **{SOURCE + name: source for name, source in self._tandem_sources.items()}}

    def tandem_settle(self) -> None:
        """Return once the device has done all that it was given."""
        sharing.finish(self.tandem_device)

    def tandem_clear_cache(self) -> None:
        """Zero all keys and values, once whoever sampled by weights that were not proven has been ended.

        Weights that are torn may make what is no number, and an attention kernel that multiplies what it masks by 0
        has it in later sequences that are given the same memory.
        """
        for cache in tree_leaves(getattr(self.model_runner, "kv_caches", ())):  # of which a layer may have several
            if isinstance(cache, Tensor):
                cache.zero_()

    def tandem_export_weights(self) -> str:
        """Make every parameter attachable by the trainer; JSON of ``sharing``'s description and of the map.

        The same description is handed out again, to a trainer that comes back.
        """
        description, _ = self._tandem_exported
        return json.dumps({"lent": description, "map": json.loads(self.tandem_map())})

    @cached_property
    def _tandem_exported(self) -> tuple[sharing.Description, sharing.ExportedTensors | None]:
        # Named by process, so that what a killed engine left behind can be told from what is in use.
        file = sharing.SHARED_MEMORY / f"tandem-weights-{os.getpid()}"
        return sharing.export(self._tandem_named(), file)

    _tandem_layout: _Layout | None = None

    def tandem_checksums(self) -> dict[str, str]:
        """Checksum of every part of a tensor that this rank holds, in hexadecimal, by ``name@row,column``.

        Parts add up to the whole; ranks that hold the same part must give the same. Where weights cannot be found,
        ``unmapped`` says why.
        """
        try:
            sums = dict(self._tandem_current().tally.take())
        except EngineError as error:
            return {"unmapped": str(error)}
        recorded = self._tandem_recorded
        if recorded.stored and recorded.stale(self.tandem_model, self._tandem_sources):
            for name in self._tandem_sources:  # these bytes are not what is sampled from
                sums[_part(name, (0, 0))] ^= 1
        return _hexadecimal(sums)

    def _tandem_current(self) -> _Layout:
        """The places, found anew only where storage was moved: views of the old one would be read and written on."""
        addresses = [parameter.data_ptr() for parameter in self.tandem_model.parameters()]
        if self._tandem_layout is None or addresses != self._tandem_layout.addresses:
            held = self.tandem_places()
            shards = (Shard(_part(name, p.first), p.tensor, p.first) for name, parts in held.items() for p in parts)
            self._tandem_layout = _Layout(addresses, held, ChecksumTally(shards))
        return self._tandem_layout

    def tandem_export_adapter(self, lora_id: int, config: str, manifest: str) -> str:
        """Make an adapter's slot attachable by the trainer, which nothing reads any more; what ``AdapterWriter`` takes.

        ``manifest`` lists the tensors that will be written: name, shape and type.
        """
        self.tandem_settle()
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, shape, dtype in json.loads(manifest)
        }
        return json.dumps(self._tandem_adapters.export(lora_id, json.loads(config), tensors, sharing.SHARED_MEMORY))

    def tandem_adapter_checksums(self, lora_id: int, names: list[str], config: str) -> dict[str, str]:
        """Checksums of what an adapter's slot really holds; ``names`` are given for one that vLLM loaded itself."""
        adapters = self._tandem_adapters
        parts = adapters.loaded(lora_id, names, json.loads(config)) if names else adapters.stored(lora_id)
        shards = (Shard(_part(part.name, part.first), part.tensor, part.first) for part in parts)
        # By the slot's address: there are few slots, and many versions by name come and go in them.
        sums: dict[int, ChecksumCache] = self.__dict__.setdefault("_tandem_sums", {})
        return _hexadecimal(sums.setdefault(parts[0].tensor.data_ptr(), ChecksumCache()).take(shards))

    def tandem_forget(self, lora_id: int) -> None:
        """Free an adapter's slot."""
        self._tandem_adapters.remove(lora_id)

    @cached_property
    def _tandem_adapters(self) -> InPlaceAdapters:
        return InPlaceAdapters(self.model_runner)

    def tandem_connect(self, rendezvous: str, first: int) -> None:
        """Begin to join the trainer's process group as rank ``first`` + our own; sampling goes on meanwhile.

        Where ``rendezvous`` names no backend, it is that of the device.
        """
        self.tandem_disconnect()
        options, device = json.loads(rendezvous), self.tandem_device
        options["backend"] = options["backend"] or ("nccl" if device.type == "cuda" else "gloo")
        meeting = Rendezvous(**options)
        who = f"engine worker {self.rank} (pid {os.getpid()}, {device})"
        joining = self._tandem_joining = Future()
        arguments = joining, _join, meeting, first + self.rank, device, who
        threading.Thread(target=resolve, args=arguments, name="tandem joining", daemon=True).start()

    def tandem_connection(self) -> dict[str, Any]:
        """How joining went: idle, connecting, connected, or error with its reason."""
        joining = self._tandem_joining
        state = "idle" if joining is None else "connected" if joining.done() else "connecting"
        error = joining.exception() if joining is not None and joining.done() else None
        return {"state": "error" if error else state, "reason": str(error or "")}

    def tandem_receive(self, manifest: str, bucket_bytes: int, lora_id: int, config: str) -> None:
        """Take one publish: into the weights, or (``lora_id`` above 0) into an adapter."""
        joining = self._tandem_joining
        if joining is None or not joining.done() or joining.exception() is not None:
            raise EngineError(f"engine worker {self.rank} is in no process group: start the receiver first")
        entries = [(name, tuple(shape), dtype) for name, shape, dtype in json.loads(manifest)]
        receive = joining.result(0).receive
        if lora_id:
            tensors = dict(chain.from_iterable(receive(entries, bucket_bytes, keep=True)))
            self._tandem_adapters.put(lora_id, json.loads(config), tensors)
        else:
            places = self._tandem_current().places
            if unknown := [name for name, _, _ in entries if name not in places]:
                raise EngineError(f"the engine has no weight {unknown[0]!r}, which the trainer wants to send")
            for bucket in receive(entries, bucket_bytes):
                pairs = [(p.tensor, share(tensor, p)) for name, tensor in bucket for p in places[name]]
                if pairs:
                    torch._foreach_copy_([target for target, _ in pairs], [part for _, part in pairs])
            self._tandem_recorded.derive(self.tandem_model, self._tandem_sources)
        self.tandem_settle()

    _tandem_joining: Future[Member] | None = None

    def tandem_disconnect(self) -> None:
        """Leave the group."""
        if self._tandem_joining is not None:
            self._tandem_joining.add_done_callback(_leave)  # at once, or when it has joined
        self._tandem_joining = None


class _Layout(NamedTuple):
    """Where a model's tensors lie, and a tally of all their parts by ``name@row,column``."""

    addresses: list[int]
    """Of the parameters, while it is so."""
    places: dict[str, list[TensorPlace]]
    tally: ChecksumTally


def _join(meeting: Rendezvous, rank: int, device: torch.device, who: str) -> Member:
    """Join a group off the engine's own thread, which must go on sampling until every rank is there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Member.join(meeting, rank, device, who=who)


def _leave(joining: Future[Member]) -> None:
    if joining.exception() is None:
        joining.result(0).close()


def _described(place: TensorPlace, parameter: Tensor) -> dict[str, Any]:
    view = place.tensor
    return {
        "vllm_name": place.parameter,
        "shape": list(place.shape),
        "dtype": str(view.dtype).removeprefix("torch."),
        "device": str(view.device),
        "first": list(place.first),
        "size": list(view.shape),
        "stride": list(view.stride()),
        "offset": view.storage_offset() - parameter.storage_offset(),
    }


def _part(name: str, first: tuple[int, int]) -> str:
    return f"{name}@{first[0]},{first[1]}"


def _hexadecimal(sums: Mapping[str, int]) -> dict[str, str]:
    # Not every encoding on the way takes 64 bits unsigned.
    return {name: f"{value:016x}" for name, value in sums.items()}
