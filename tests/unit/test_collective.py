"""Broadcast groups: bytes arrive exactly, and whoever is missing, stalls or dies is named in time."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.second_process import Peer, described
from torch import Tensor

from tandem.errors import TransportError
from tandem.transport.buckets import BucketPlan, TensorEntry, manifest
from tandem.transport.collective import Member
from tandem.transport.rendezvous import Rendezvous

pytestmark = pytest.mark.slow

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Callable[[int], list[Peer]]]:
    """Starts processes, which end with the test."""
    started: list[Peer] = []

    def start(count: int) -> list[Peer]:
        started.extend(Peer(tmp_path / f"said-{len(started)}") for _ in range(count))
        return started

    yield start
    for child in started:
        child.kill()


Children = Callable[[int], list[Peer]]
ENDED = ("", 0)
"""What ``leave`` finds where all went well."""


def meeting(world: int = 2, seconds: float = 60.0, **options: Any) -> Rendezvous:
    return Rendezvous(host="127.0.0.1", world=world, backend="gloo", seconds=seconds, **options)


@contextmanager
def pair(seconds: float = 60.0) -> Iterator[tuple[Member, Member]]:
    """A trainer and one worker in this process."""
    trainer = Member.host(meeting(seconds=seconds))
    joined: list[Member] = []
    worker = Background(lambda: joined.append(Member.join(trainer.rendezvous, 1, who="engine http://e")))
    try:
        trainer.connect()
        assert worker.error() is None
        yield trainer, joined[0]
    finally:
        for member in [*joined, trainer]:
            member.close()


class Background:
    """A call in another thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=[call], daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def error(self) -> BaseException | None:
        self._thread.join(timeout=100)
        assert not self._thread.is_alive()
        return self._error


def weights(seed: int) -> dict[str, Tensor]:
    """Every kind of tensor: widths, one larger than a bucket, bit patterns that are no numbers, strides, a scalar."""
    generator = torch.Generator().manual_seed(seed)

    def bits(dtype: torch.dtype, *shape: int) -> Tensor:
        size = 8 * dtype.itemsize - 1
        ints = torch.randint(-(1 << size), (1 << size) - 1, shape, generator=generator)
        return ints.to(BITS[dtype.itemsize]).view(dtype)

    return {
        "embed": bits(torch.bfloat16, 130, 64),
        "norm": bits(torch.float32, 7),
        "scale": bits(torch.float32),
        "quantised": bits(torch.int8, 3, 5),
        "transposed": bits(torch.bfloat16, 16, 8).T,
        "rows": bits(torch.float32, 40, 6)[3:30:2],
        "double": bits(torch.float64, 9),
        "trained": torch.nn.Parameter(torch.randn(11, 3, generator=generator)),
        "head": bits(torch.bfloat16, 64, 33),
    }


def test_bytes_arrive_exactly_at_two_processes_publish_after_publish_group_after_group(children: Children) -> None:
    workers = children(2)
    for bucket in (1000, 1 << 20):
        trainer = Member.host(meeting(world=3))
        publishes = [weights(seed) for seed in (1, 2, 3)]
        entries = [manifest(named.items()) for named in publishes]
        for rank, worker in enumerate(workers, 1):
            worker.give("join", rendezvous=asdict(trainer.rendezvous), rank=rank, publishes=entries, bucket=bucket)
        trainer.connect()
        for named in publishes:
            size = sum(t.numel() * t.dtype.itemsize for t in named.values())
            assert trainer.send(named.items(), bucket) == size
        for worker in workers:
            assert worker.answer() == [described(*pair) for named in publishes for pair in named.items()]
        trainer.close()
    for worker in workers:
        assert worker.leave() == ENDED


def test_a_worker_whose_trainer_left_ends_quietly(children: Children) -> None:
    (worker,) = children(1)
    trainer = Member.host(meeting(seconds=10))
    worker.give("join", rendezvous=asdict(trainer.rendezvous), rank=1, publishes=[[("a", (3,), "float32")]], bucket=1)
    trainer.connect()
    trainer.close()
    assert "rank 0 (trainer) left the group" in worker.answer()
    assert worker.leave() == ENDED


def test_memory_is_reused_only_after_the_consumer_came_back() -> None:
    named = {f"t{i}": torch.full((300,), float(i)) for i in range(40)}
    named["large"] = torch.arange(5000.0)
    with pair() as (trainer, worker):
        got: dict[str, Tensor] = {}
        sending = Background(lambda: trainer.send(named.items(), 4096))
        for bucket in worker.receive(manifest(named.items()), 4096):
            time.sleep(0.02)  # time for later buckets to arrive
            got |= {name: tensor.clone() for name, tensor in bucket}
        assert sending.error() is None
    assert list(got) == list(named)
    for name, tensor in named.items():
        assert torch.equal(got[name], tensor), name


def test_buckets_are_a_function_of_the_manifest() -> None:
    entries = [TensorEntry("a", (10,), "int8"), TensorEntry("b", (50,), "int8"), TensorEntry("c", (500,), "bfloat16")]
    entries += [
        TensorEntry("d", (), "float32"),
        TensorEntry("e", (30, 2), "bfloat16"),
        TensorEntry("f", (1,), "float64"),
    ]
    assert BucketPlan(entries, 200).buckets[2].size == 200  # to the last byte
    buckets = BucketPlan(entries, 199).buckets
    assert [[entry.name for entry, _ in bucket.parts] for bucket in buckets] == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert [(start, entry.bytes) for entry, start in buckets[0].parts] == [(0, 10), (64, 50)]
    assert buckets[1].size == 1000  # larger than a bucket: alone
    assert len(BucketPlan(entries, 10_000).buckets) == 1
    assert len(BucketPlan(entries, 1).buckets) == len(entries)


@pytest.mark.parametrize(
    "entry", [TensorEntry("none", (3, 0), "float32"), TensorEntry("odd", (3,), "float7"), TensorEntry("x", (3,), "nn")]
)
def test_what_cannot_travel_is_named(entry: TensorEntry) -> None:
    with pytest.raises(TransportError, match=entry.name):
        BucketPlan([TensorEntry("fine", (3,), "int8"), entry], 100)


def test_who_never_joins_is_named_on_every_side(children: Children) -> None:
    (worker,) = children(1)
    trainer = Member.host(meeting(world=3, seconds=2))
    worker.give("join", rendezvous=asdict(trainer.rendezvous), rank=1, publishes=[], bucket=1)
    with pytest.raises(TransportError, match=r"for rank 2\b"):
        trainer.connect()
    assert "rank 2" in worker.answer()
    trainer.close()


def test_a_trainer_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TransportError, match=f"127.0.0.1:{port}.*start the trainer first"):
        Member.join(meeting(seconds=0.5, port=port), 1)


def test_a_worker_killed_between_two_tensors_is_named_by_the_others(children: Children) -> None:
    named = {f"t{i}": torch.full((100_000,), float(i)) for i in range(60)}
    entries = manifest(named.items())
    workers = children(2)
    trainer = Member.host(meeting(world=3, seconds=10))
    job = {"rendezvous": asdict(trainer.rendezvous), "publishes": [entries], "bucket": 400_000}
    workers[0].give("join", rank=1, **job)
    workers[1].give("join", rank=2, dies_at="t5", **job)
    trainer.connect()
    with pytest.raises(TransportError, match=r"awaited: rank 1 \(engine 1\), rank 2 \(engine 2\)"):
        trainer.send(named.items(), 400_000)
    assert "rank 2 (engine 2)" in workers[0].answer()
    with pytest.raises(TransportError):
        trainer.send(named.items())  # a broken group stays broken
    trainer.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_dies_or_stands_still_is_named(children: Children, how: signal.Signals) -> None:
    (trainer,) = children(1)
    port = trainer("host", rendezvous=asdict(meeting(seconds=3)))
    trainer.give("connect", then=int(how))
    worker = Member.join(meeting(seconds=3, port=port), 1)
    stat = Path(f"/proc/{trainer.process.pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "TZ":
        time.sleep(0.01)
    with pytest.raises(TransportError, match="rank 0"):
        list(worker.receive([("a", (3,), "float32")]))
    worker.close()


def test_a_worker_that_does_not_begin_is_named() -> None:
    with (
        pair(seconds=1) as (trainer, _),
        pytest.raises(TransportError, match=r"bucket 2 of 4: .* rank 1 \(engine http://e\)"),
    ):
        trainer.send([(f"t{i}", torch.ones(3_000_000)) for i in range(4)], 12_000_000)


def test_a_worker_that_stalls_between_buckets_is_named() -> None:
    named = {f"t{i}": torch.ones(1_000_000) for i in range(4)}
    with pair(seconds=3) as (trainer, worker):
        sending = Background(lambda: trainer.send(named.items(), 1_000_000))
        tensors = worker.receive(manifest(named.items()), 1_000_000)
        next(tensors)
        error = sending.error()
        assert isinstance(error, TransportError)
        assert "bucket" in str(error)
        assert "rank 1 (engine http://e)" in str(error)
        with pytest.raises(TransportError):
            list(tensors)


def test_abort_from_another_thread_ends_a_wait_on_both_sides() -> None:
    with pair() as (trainer, worker):
        receiving = Background(lambda: list(worker.receive([("a", (3,), "float32")])))
        time.sleep(0.1)
        trainer.abort()
        trainer.abort()
        assert "rank 0 (trainer) left the group" in str(receiving.error())
        with pytest.raises(TransportError, match="left the group"):
            trainer.send([("a", torch.ones(3))])


def test_close_frees_the_port() -> None:
    with pair() as (trainer, worker):
        there = trainer.rendezvous
        worker.close()
        trainer.close()
        trainer.close()
        again = Member.host(there)
        assert again.rendezvous == there
        again.close()


def test_what_cannot_be_opened_is_refused() -> None:
    with pytest.raises(TransportError, match="an address of this machine"):
        Member.host(Rendezvous(host="192.0.2.1", world=2, backend="gloo"))
    with pytest.raises(TransportError, match="use backend gloo"):
        Member.host(Rendezvous(host="127.0.0.1", world=2, backend="nccl"))
