"""The engine's end of a broadcast: every tensor lands in its place, packed or as it lies, or is refused by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.engines.vllm.worker.extension import WorkerExtension
from tandem.engines.vllm.worker.parameter_map import ParameterMap, TensorPlace
from tandem.errors import EngineError, TransportError
from tandem.transport.buckets import manifest
from tandem.transport.collective import Member
from tandem.transport.rendezvous import Rendezvous

ROWS = 1025
"""Of 4 KiB: just enough to travel alone."""


class Storage(nn.Module):
    """Two tensors fused in one, and parts of others as a tensor-parallel rank has them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2 * ROWS + 1, 1024))  # the last row is of none
        self.columns = nn.Parameter(torch.zeros(ROWS, 512))
        self.rows = nn.Parameter(torch.zeros(7, 1024))
        self.bias = nn.Parameter(torch.zeros(5))
        self.copies = nn.ParameterList(torch.zeros(ROWS, 1024) for _ in range(2))


class Receiver(WorkerExtension):
    """A worker without vLLM."""

    rank, tandem_world = 0, 1
    _tandem_recorded, _tandem_sources = ParameterMap({}, {}), {}  # type: ignore[assignment]

    def __init__(self) -> None:
        self.storage = Storage()
        self.adapters: list[tuple[int, Any, dict[str, Tensor]]] = []

    @property
    def tandem_model(self) -> nn.Module:
        return self.storage

    def tandem_places(self) -> dict[str, list[TensorPlace]]:
        def place(tensor: Tensor, first: tuple[int, int], *shape: int) -> list[TensorPlace]:
            return [TensorPlace(tensor=tensor, parameter="p", first=first, shape=shape)]

        held = self.storage
        return {
            "one": place(held.fused.data[:ROWS], (0, 0), ROWS, 1024),
            "two": place(held.fused.data[ROWS:-1], (0, 0), ROWS, 1024),
            "columns": place(held.columns.data, (0, 512), ROWS, 1024),
            "rows": place(held.rows.data, (3, 0), ROWS, 1024),
            "bias": place(held.bias.data, (0, 0), 5),
            "twice": [p for copy in held.copies for p in place(copy.data, (0, 0), ROWS, 1024)],
        }

    @property
    def _tandem_adapters(self) -> Any:  # type: ignore[override]
        receiver = self

        class Adapters:
            def put(self, slot: int, config: Any, tensors: dict[str, Tensor]) -> None:
                receiver.adapters.append((slot, config, {name: t.clone() for name, t in tensors.items()}))

        return Adapters()


def trained(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    large = ("two", "columns", "one", "rows", "twice")
    return {name: torch.randn(ROWS, 1024) for name in large} | {"bias": torch.randn(5)}


@contextmanager
def group(**options: Any) -> Iterator[tuple[Member, Receiver, ThreadPoolExecutor]]:
    receiver = Receiver()
    trainer = Member.host(Rendezvous(host="127.0.0.1", world=2, backend="gloo", seconds=20))
    try:
        receiver.tandem_connect(json.dumps({**asdict(trainer.rendezvous), **options}), 1)
        trainer.connect()
        assert receiver._tandem_joining is not None
        receiver._tandem_joining.result(20)
        assert receiver.tandem_connection() == {"state": "connected", "reason": ""}
        with ThreadPoolExecutor(1) as pool:
            yield trainer, receiver, pool
    finally:
        receiver.tandem_disconnect()
        trainer.close()


def receive(receiver: Receiver, named: dict[str, Tensor], bucket: int, slot: int = 0, config: Any = None) -> None:
    entries = json.dumps(manifest(named.items()))
    receiver.tandem_receive(entries, bucket, slot, json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [1 << 20, 10 << 20, 1 << 30])
def test_weights_land_in_their_places(bucket: int) -> None:
    with group() as (trainer, receiver, pool):
        for seed in (1, 2):
            named = trained(seed)
            sent: Future[int] = pool.submit(trainer.send, named.items(), bucket)
            receive(receiver, named, bucket)
            assert sent.result() == sum(t.nbytes for t in named.values())
            held = receiver.storage
            assert torch.equal(held.fused[:-1], torch.cat([named["one"], named["two"]]))
            assert not held.fused[-1].any()
            assert torch.equal(held.columns, named["columns"][:, 512:])
            assert torch.equal(held.rows, named["rows"][3:10])
            assert torch.equal(held.bias, named["bias"])
            assert all(torch.equal(copy, named["twice"]) for copy in held.copies)


def test_who_names_no_backend_gets_that_of_the_device() -> None:
    with group(backend=None) as (trainer, receiver, pool):
        sent = pool.submit(trainer.send, [("bias", torch.ones(5))], 1 << 20)
        receive(receiver, {"bias": torch.ones(5)}, 1 << 20)
        sent.result()
        assert receiver.storage.bias.eq(1).all()


def test_a_publish_may_bring_other_tensors_than_the_last() -> None:
    with group() as (trainer, receiver, pool):
        for names in (["one", "bias"], ["two", "rows"], ["bias", "twice"]):
            named = {name: trained(3)[name] for name in names}
            sent = pool.submit(trainer.send, named.items(), 1 << 30)
            receive(receiver, named, 1 << 30)
            sent.result()
        assert torch.equal(receiver.storage.fused[:-1], torch.cat([trained(3)["one"], trained(3)["two"]]))
        assert all(torch.equal(copy, trained(3)["twice"]) for copy in receiver.storage.copies)
        assert not receiver.storage.columns.any()


def test_an_adapter_is_put_whole() -> None:
    config = {"r": 8}
    with group() as (trainer, receiver, pool):
        for seed in (1, 2):
            torch.manual_seed(seed)
            named = {f"t{i}": torch.randn(100 + i, 3) for i in range(30)}
            sent = pool.submit(trainer.send, named.items(), 2000)
            receive(receiver, named, 2000, 7, config)
            sent.result()
            slot, options, tensors = receiver.adapters.pop()
            assert (slot, options, list(tensors)) == (7, config, list(named))
            assert all(torch.equal(tensors[name], tensor) for name, tensor in named.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("two", "shape"),
        ("bias", "type"),
        pytest.param("two", "type", marks=pytest.mark.long),
        pytest.param("bias", "shape", marks=pytest.mark.long),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, how: str) -> None:
    named = trained(1)
    named[name] = (
        named[name][1:] if how == "shape" else named[name].to(torch.float16 if name == "bias" else torch.int32)
    )
    with group() as (trainer, receiver, pool):
        sent = pool.submit(trainer.send, named.items(), 1 << 30)
        with pytest.raises(EngineError, match="give both the same model and dtype"):
            receive(receiver, named, 1 << 30)
        with contextlib.suppress(TransportError):  # it may have been sent by then; the receiver's error is the one
            sent.result()
        assert not receiver.storage.bias.any()
        assert not receiver.storage.fused[ROWS:].any() or name == "bias"


def test_what_is_computed_of_received_weights_is_computed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(ParameterMap, "derive", lambda _, model, sources: seen.append(model.bias.max().item()))
    with group() as (trainer, receiver, pool):
        named = {"bias": torch.full((5,), 2.0)}
        sent = pool.submit(trainer.send, named.items(), 1 << 20)
        receive(receiver, named, 1 << 20)
        sent.result()
    assert seen == [2.0]


def test_a_tensor_that_is_not_there_is_named_before_anything_comes() -> None:
    with group() as (_, receiver, _), pytest.raises(EngineError, match="no weight 'three'"):
        receive(receiver, {"three": torch.ones(3)}, 1 << 20)


@pytest.mark.parametrize("how", ["written", "other storage", "another parameter", "one more"])
def test_checksums_are_of_what_parameters_hold_now(how: str) -> None:
    """However often they were taken: a view of storage that a parameter has left would be summed for ever."""
    receiver = Receiver()
    storage, before = receiver.storage, receiver.tandem_checksums()
    assert receiver.tandem_checksums() == before
    match how:
        case "written":
            storage.rows.data.fill_(2.0)
        case "other storage":
            storage.rows.data = torch.full((7, 1024), 2.0)
        case "another parameter":
            storage.rows = nn.Parameter(torch.full((7, 1024), 2.0))
        case "one more":
            storage.copies.append(nn.Parameter(torch.full((ROWS, 1024), 2.0)))
    sums = {part for part, value in receiver.tandem_checksums().items() if before.get(part) != value}
    assert sums == ({"twice@0,0"} if how == "one more" else {"rows@3,0"})


@pytest.mark.parametrize("runner", [
    SimpleNamespace(kv_caches=[torch.full((2, 3), float("nan")), [torch.ones(4), torch.ones(2, 2)]]),
    SimpleNamespace(kv_caches=[]),
    SimpleNamespace(),  # a release that names them otherwise
])  # fmt: skip
def test_keys_and_values_of_weights_that_were_not_proven_are_zeroed(runner: Any) -> None:
    worker = Receiver()
    worker.model_runner = runner
    worker.tandem_clear_cache()
    whole, several = (*getattr(runner, "kv_caches", ()), None, None)[:2]
    assert whole is None or (not whole.any() and not any(cache.any() for cache in several))
