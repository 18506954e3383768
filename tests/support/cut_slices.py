"""What ranks do in tests of an engine's slices: each has a stand-in of its worker, which exports as vLLM's does."""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.cut_weights import ROWS, cost, made, mesh_of
from support.vllm_workers import Worker, map_of, served
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from tandem.engines.vllm.worker.extension import WorkerExtension
from tandem.model.policy import Policy
from tandem.trainable.full import Full, write_index
from tandem.trainable.lora import Lora
from tandem.trainer.ranks.parts import RankParts
from tandem.trainer.ranks.slices import RankSlices
from tandem.transport.buckets import TensorEntry
from tandem.transport.checksums import checksums, joined
from tandem.transport.collective import Member
from tandem.transport.rendezvous import Rendezvous


def worker_of(model: Any, rank: int, world: int) -> WorkerExtension:
    """vLLM's worker with the extension, of which only its model is a stand-in."""
    worker = WorkerExtension()
    parallel = SimpleNamespace(tensor_parallel_size=world, pipeline_parallel_size=1)
    worker.rank = rank
    fake = served(model, Worker(rank, world))
    worker.model_runner = SimpleNamespace(model=fake, vllm_config=SimpleNamespace(parallel_config=parallel))
    worker._tandem_recorded = map_of(fake, model, world=world)
    return worker


def exported(worker: WorkerExtension) -> dict[str, Any]:
    export = json.loads(worker.tandem_export_weights())
    return {"parameters": export["lent"], "places": export["map"]}


def cut(rank: int, model: Any, shape: Sequence[int], trainable: Any, holders: Any = None) -> RankSlices:
    """A model cut as a run cuts it: on the first rank it is emptied."""
    parts: Any = SimpleNamespace(
        group=SimpleNamespace(rank=rank), mesh=SimpleNamespace(ranks=mesh_of(shape), holders=holders)
    )
    policy = Policy(model, None, name="", compute=None)  # type: ignore[arg-type]
    return RankSlices(RankParts.cut(parts, policy, trainable), policy.causal)


def publishing(rank: int, name: str, shape: Sequence[int], world: int, dtype: str, folder: Path) -> dict[str, Any]:
    """Attach what the worker of ``world`` exports, change the masters, publish, score and gather.

    Ranks are numbered by their shards: those of the last dimension hold the model together.
    """
    num_holders = shape[-1] // world
    number = rank % shape[-1] // num_holders
    model = made(name, getattr(torch, dtype))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(-1.5)
    worker, fresh = worker_of(model, number, world), served(changed, Worker(number, world))
    rows = torch.arange(dist.get_world_size()).view(-1, num_holders).tolist()
    holders = dist.new_subgroups_by_enumeration(rows)[0] if num_holders > 1 else None
    mine = cut(rank, model, shape, Full(), holders)
    stale = mine.attach(
        {"parameters": {"kind": "host", "path": "/dev/shm/tandem-none", "size": 1, "tensors": {}}, "places": {}}
    )
    attached = mine.attach(exported(worker))
    with torch.no_grad():
        for _, parameter in mine.policy.weights.local_parameters:
            parameter.mul_(-1.5)
    received = mine.publish()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, worker.tandem_checksums())
    parts = parts[rank % num_holders + rank // shape[-1] * shape[-1] :][: shape[-1] : num_holders]
    mine_sums, expected = mine.checksums(), checksums(changed.named_parameters())
    tokens = [5, 9, 2, 77, 31, 8]
    lone = Policy(changed, None, name=name, compute=None)  # type: ignore[arg-type]
    rows, theirs = mine.scores(tokens, [1.0, 0.7]), lone.scores(tokens, 1.0, 0.7)
    mine.save(str(folder))
    dist.barrier()
    if rank == 0:
        write_index(folder)
    dist.barrier()
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return {
        "stale": stale,
        "emptied": rank > 0 or not any(p.numel() for p in model.parameters()),
        "attached": attached,
        "received": received / sum(p.numel() * p.element_size() for p in changed.parameters()),
        "wrong": [
            of
            for of, parameter in fresh.named_parameters()
            if not torch.equal(worker.tandem_model.get_parameter(of), parameter)
        ],
        "sums": joined("the stand-in", parts) == mine_sums == expected,
        "scores": max(
            abs(a - b) for one, other in zip(rows, theirs, strict=True) for a, b in zip(one, other, strict=True)
        ),
        "finite": mine.finite(),
        "whole": all(torch.equal(p, changed.get_parameter(of)) for of, p in whole.named_parameters()),
        "tied": whole.lm_head.weight is whole.model.embed_tokens.weight,
        "largest_file": max(sizes) / sum(sizes),
        "files": len(sizes),
    }


def adapting(rank: int, name: str, merged: bool) -> dict[str, Any]:
    """A gradient of all ranks' rows, then other factors and what is scored with them."""
    trainable = Lora(rank=4, merged=merged)
    model = trainable.prepare(made(name))
    drawn(trainable, model, seed=1)
    lone, mine = copy.deepcopy(model), cut(rank, model, (dist.get_world_size(),), trainable)
    whole, policy = Policy(lone, None, name=name, compute=None), mine.policy  # type: ignore[arg-type]
    for seed, row in enumerate(ROWS):
        cost(whole.hidden, whole.head, row, seed).backward()
    for at in range(2):  # as many passes on every rank
        if (seed := 2 * at + rank) < len(ROWS):
            cost(policy.hidden, policy.head, ROWS[seed], seed).backward()
        policy.stand_in()
    expected, errors = dict(trainable.parameters(lone)), []
    for of, parameter in trainable.parameters(policy.model):
        dist.all_reduce(parameter.grad)
        errors.append(float((parameter.grad - expected[of].grad).abs().max()))
    for of_model in (lone, policy.model):
        drawn(trainable, of_model, seed=2)
    base, shards, far = trainable.base_names(lone), policy.weights.shards(), 0.0
    for of, parameter in base.items():
        gathered = torch.empty_like(parameter)
        policy.weights.gather(of, shards[of], gathered)
        far = max(far, float((gathered - parameter).abs().max()) if rank == 0 else 0.0)
    tokens = [5, 9, 2, 77, 31, 8]
    return {
        "error": max(errors),
        "largest": max(float(parameter.grad.abs().max()) for parameter in expected.values()),
        "weights": far,
        "scores": max(abs(a - b) for a, b in zip(mine.scores(tokens, [1.0])[0], whole.score(tokens), strict=True)),
        "elements": sum(shard.numel() for shard in shards.values()) / sum(p.numel() for p in base.values()),
    }


def drawn(trainable: Lora, model: Any, *, seed: int) -> None:
    """Draw an adapter's factors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable.parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    trainable.fold(model)


class Allocated(TorchDispatchMode):
    """The most bytes of tensors made in this thread that are there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        taken = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in taken:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self._freed, size)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


def sending(rank: int, name: str, shape: Sequence[int], dtype: str, bucket_bytes: int) -> dict[str, Any]:
    """Send changed masters to a worker, a thread of the first rank's process; again after one that is lost."""
    model = made(name, getattr(torch, dtype))
    changed = copy.deepcopy(model)
    mine = cut(rank, model, shape, Full())
    with torch.no_grad():
        for parameter in [*changed.parameters(), *(p for _, p in mine.policy.weights.local_parameters)]:
            parameter.mul_(-1.5)
    expected = {of: parameter.detach() for of, parameter in changed.named_parameters()}
    entries = [TensorEntry(of, tuple(tensor.shape), dtype) for of, tensor in expected.items()]
    report: dict[str, Any] = {"whole": sum(tensor.nbytes for tensor in expected.values())}
    for lost in (True, False):
        allocated = Allocated()
        if rank:
            with allocated:
                mine.send(list(expected), bucket_bytes)
            continue
        trainer = Member.host(Rendezvous(host="127.0.0.1", port=0, world=2, backend="gloo", name="cut", seconds=60.0))
        arrived: dict[str, Any] = {}
        worker = threading.Thread(target=receive, args=(trainer.rendezvous, entries, bucket_bytes, arrived, lost))
        worker.start()
        trainer.connect()
        with allocated:
            sent, error = mine.send_all(trainer, entries, bucket_bytes)
        worker.join()
        trainer.close()
        report["lost" if lost else "error"] = "" if error is None else str(error)
    if rank == 0:
        report |= {"sent": sent, "same": all(torch.equal(arrived[of], tensor) for of, tensor in expected.items())}
    return {**report, "most": allocated.most, "largest": max(tensor.nbytes for tensor in expected.values())}


def receive(
    rendezvous: Rendezvous, entries: list[TensorEntry], bucket_bytes: int, arrived: dict[str, Any], lost: bool
) -> None:
    """What an engine's worker does; a lost one leaves after the first tensors."""
    member = Member.join(rendezvous, 1, who="worker")
    for some in member.receive(entries, bucket_bytes):
        arrived |= {of: tensor.clone() for of, tensor in some}
        if lost:
            break
    member.close()
