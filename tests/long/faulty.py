"""An engine that misbehaves when it is told to: subclasses of Tandem's own two parts inside vLLM, for the fault bench.

The engine is started with ``--worker-extension-cls faulty.Worker --middleware faulty.Routes``. One more route, POST
/fault, names what goes wrong from then on; it answers how often the last fault struck, so that one that never happened
is not taken for one that was caught.
"""

from __future__ import annotations

import json
import os
import signal
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.server import routes
from tandem.engines.vllm.server.frontend import Frontend
from tandem.engines.vllm.worker import extension as worker
from tandem.engines.vllm.worker.parameter_map import TensorPlace

Named = Iterator[tuple[str, Tensor]]
_to_base: ContextVar[bool] = ContextVar("_to_base", default=False)
"""Whether the request that is served goes to the base model."""


class Worker(worker.WorkerExtension):
    """Faults of the transport, of the map, of the memory, of adapters and of the sampler."""

    _tandem_fault = ""
    _tandem_options: Mapping[str, Any] = {}
    _tandem_struck = 0
    _tandem_undo: Callable[[], None] | None = None
    _tandem_last: tuple[tuple[str, Tensor], ...] = ()

    def tandem_misbehave(self, fault: str, options: str) -> int:
        """From now on; returns how often the fault before struck."""
        if self._tandem_undo is not None:
            self._tandem_undo()
        struck, self._tandem_struck, self._tandem_undo = self._tandem_struck, 0, None
        self._tandem_fault, self._tandem_options = fault, json.loads(options)
        at_once = {
            "moved": self._tandem_move,
            "held": self._tandem_damage,
            "sampler": self._tandem_sample,
            "cache": self._tandem_clean,
            "map row": self._tandem_mapped,
            "map swap": self._tandem_mapped,
        }
        if fault in at_once:
            self._tandem_undo = at_once[fault]()
            self._tandem_struck = 1
        return struck

    # Memory

    def _tandem_move(self) -> Callable[[], None]:
        """Parameters lie elsewhere than where the trainer writes."""
        wanted = self._tandem_options.get("names")
        moved = {n: p for n, p in self.tandem_model.named_parameters() if wanted is None or n in wanted}
        before = {name: p.data for name, p in moved.items()}
        for p in moved.values():
            p.data = p.data.clone()

        def back() -> None:
            for name, p in moved.items():
                p.data = before[name]

        return back

    def _tandem_damage(self) -> Callable[[], None]:
        """One element of a weight is not what was loaded."""
        (place, *_) = self.tandem_places()[self._tandem_options["name"]]
        before = place.tensor.clone()
        place.tensor.copy_(_altered(before, self._tandem_options["how"]))

        def back() -> None:
            place.tensor.copy_(before)

        return back

    def _tandem_clean(self) -> Callable[[], None]:
        """No fault, but the end of one: keys and values that are not numbers outlive the weights that made them."""

        def clean() -> None:
            for cache in self.model_runner.kv_caches:
                cache.zero_()

        return clean

    # The sampler

    def _tandem_sample(self) -> Callable[[], None]:
        sampler = self.model_runner.sampler
        if self._tandem_options["how"] == "raw":
            owners = [o for o in (sampler, getattr(sampler, "topk_topp_sampler", None)) if hasattr(o, "logprobs_mode")]
            mode = sampler.logprobs_mode
            _set(owners, "raw_logprobs")
            return lambda: _set(owners, mode)
        # One release has it on the sampler itself, another on what the sampler keeps.
        owner = sampler if hasattr(sampler, "apply_temperature") else sampler.sampling_states
        owner.apply_temperature = lambda logits, *_: logits
        return lambda: delattr(owner, "apply_temperature")

    # The transport

    def tandem_receive(self, manifest: str, bucket_bytes: int, lora_id: int, config: str) -> None:
        joining = self._tandem_joining
        assert joining is not None
        member = joining.result()

        def through(*arguments: Any, keep: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
            arriving = (pair for bucket in member.receive(*arguments, keep=keep) for pair in bucket)
            return ([pair] for pair in self._tandem_through(arriving))

        self._tandem_joining = Future()
        self._tandem_joining.set_result(types.SimpleNamespace(receive=through))  # type: ignore[arg-type]
        try:
            super().tandem_receive(manifest, bucket_bytes, lora_id, config)
        finally:
            self._tandem_joining = joining

    def _tandem_through(self, arriving: Named) -> Named:
        """What arrives, as the fault lets it through; what arrived is remembered for the one that comes too late."""
        options, late, seen = self._tandem_options, dict(self._tandem_last), []
        whole: dict[str, Tensor] = {}
        for number, (name, tensor) in enumerate(arriving):
            seen.append((name, tensor.clone()))
            whole[name] = seen[-1][1]
            match self._tandem_fault:
                case "drop" if options.get("names") is None or name in options["names"]:
                    self._tandem_struck += 1
                case "half" if number >= options["after"]:
                    self._tandem_struck += 1
                case "swap" if name in options["names"]:
                    self._tandem_struck += 1
                    first, second = options["names"]
                    yield second if name == first else first, tensor
                case "alter" if name == options["name"]:
                    self._tandem_struck += 1
                    yield name, _altered(tensor, options["how"])
                case "tie" if name == options["name"]:
                    self._tandem_struck += 1
                    yield name, whole[options["to"]]
                case "late" if name in late:
                    self._tandem_struck += 1
                    yield name, late[name]
                case "die" if number == options["after"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                case _:
                    yield name, tensor
        self._tandem_last = tuple(seen)

    # The map, at both ends: what is written and what is checksummed is the same wrong place

    def _tandem_mapped(self) -> Callable[[], None]:
        def forget() -> None:
            self._tandem_layout = None  # what was found by the other map is found anew

        forget()
        return forget

    def tandem_places(self) -> dict[str, list[TensorPlace]]:
        places, options = super().tandem_places(), self._tandem_options
        if self._tandem_fault == "map row":
            self._tandem_struck += 1
            places[options["name"]] = [_one_row_down(place) for place in places[options["name"]]]
        if self._tandem_fault == "map swap":
            self._tandem_struck += 1
            first, second = options["names"]
            places[first], places[second] = places[second], places[first]
        return places


def _set(owners: list[Any], mode: str) -> None:
    for owner in owners:
        owner.logprobs_mode = mode


def _one_row_down(place: TensorPlace) -> TensorPlace:
    view = place.tensor
    moved = view.as_strided(view.shape, view.stride(), view.storage_offset() + view.stride(0))
    return place._replace(tensor=moved)


def _altered(tensor: Tensor, how: str) -> Tensor:
    """A copy in which something is wrong."""
    out = tensor.clone()
    if how == "row":
        return out.roll(1, 0)
    if how == "padding":  # as if the padding of the vocabulary came first
        return out.roll(-len(out) % 64, 0)
    if how == "narrow":
        narrow = torch.bfloat16 if out.dtype == torch.float32 else torch.float8_e4m3fn
        return out.to(narrow).to(out.dtype)
    if how == "nan":
        out.view(-1)[out.numel() // 2] = float("nan")
        return out
    assert how == "bit"
    bits = out.view({2: torch.int16, 4: torch.int32}[out.element_size()]).view(-1)
    bits[out.numel() // 2] ^= 1
    return out


class Routes(routes.Routes):
    """Faults of the HTTP process: prefix cache, routing of adapters, stamps."""

    def _engine(self, scope: Any) -> Any:
        fresh = self._live is None
        live: Any = super()._engine(scope)
        if fresh:
            live.frontend.__class__ = FaultyFrontend
            stamp = live.routes["/bridge/stamp"].handler

            async def fault(request: dict[str, Any]) -> Any:
                struck = live.frontend.misbehave(request["fault"], request["options"])
                ranks = await live.frontend.rpc("tandem_misbehave", request["fault"], json.dumps(request["options"]))
                return {"struck": struck + max(ranks)}

            async def lost(request: wire.SetVersion) -> Any:
                if live.frontend.fault != "lost stamp":
                    return await stamp(request)
                live.frontend.struck += 1
                return {"step": request.step, "engine": live.frontend.id}

            live.routes |= {
                "/fault": routes.Endpoint("POST", fault, dict),
                "/bridge/stamp": routes.Endpoint("POST", lost, wire.SetVersion),
            }
        return live


class FaultyFrontend(Frontend):
    """Keeps a prefix cache too long, or sends requests to another adapter than theirs."""

    fault = ""
    struck = 0
    options: Mapping[str, Any] = {}
    _kept = ""
    _mode: Any = None

    def misbehave(self, fault: str, options: Mapping[str, Any]) -> int:
        """From now on; returns how often the fault before struck."""
        struck, self.struck = self.struck, 0
        self._kept = self.salt
        self.fault, self.options = fault, options
        model = self.client.vllm_config.model_config
        if fault == "admits raw":
            self._mode, model.logprobs_mode = model.logprobs_mode, "raw_logprobs"
            self.struck = 1
        elif self._mode is not None:
            model.logprobs_mode, self._mode = self._mode, None
        return struck

    @property
    def salt(self) -> str:
        if self.fault == "old salt":
            self.struck += 1
            return self._kept
        return Frontend.salt.fget(self)  # type: ignore[attr-defined,no-any-return]

    @property
    def adapter(self) -> Any:
        """What requests are sampled with; none within a request that is sent to the base model."""
        return None if _to_base.get() else self.__dict__["adapter"]

    @adapter.setter
    def adapter(self, served: Any) -> None:
        self.__dict__["adapter"] = served

    async def generate(self, *args: Any, adapter: Any = None, **others: Any) -> Any:
        if self.fault not in ("no adapter", "older adapter"):
            return await super().generate(*args, adapter=adapter, **others)
        self.struck += 1
        # Of this request alone: others overlap with it.
        before = _to_base.set(self.fault == "no adapter")
        try:
            return await super().generate(*args, adapter=None, **others)
        finally:
            _to_base.reset(before)
