"""What ranks do in tests of an engine's slices: each has a stand-in of its worker, which exports as vLLM's does."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.cut_weights import made, mesh_of
from support.vllm_workers import Worker, served

from tandem.distributed.sharded_weights import ShardedWeights
from tandem.distributed.weight_shards import ShardedPolicy
from tandem.engines.vllm.worker.extension import WorkerExtension
from tandem.model.policy import Policy
from tandem.trainer.ranks.slices import RankSlices, Skeleton
from tandem.transport.checksums import checksums, joined


def worker_of(model: Any, rank: int, world: int) -> WorkerExtension:
    """vLLM's worker with the extension, of which only its model is a stand-in."""
    worker = WorkerExtension()
    parallel = SimpleNamespace(tensor_parallel_size=world, pipeline_parallel_size=1)
    worker.rank = rank
    worker.model_runner = SimpleNamespace(
        model=served(model, Worker(rank, world)), vllm_config=SimpleNamespace(parallel_config=parallel)
    )
    return worker


def exported(worker: WorkerExtension) -> dict[str, Any]:
    export = json.loads(worker.tandem_export_weights())
    return {"parameters": export["lent"], "places": export["map"]}


def publishing(rank: int, name: str, shape: Sequence[int], world: int, dtype: str) -> dict[str, Any]:
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
    skeleton = Skeleton(model)
    policy = Policy(model, None, name=name, compute=None)  # type: ignore[arg-type]
    rows = torch.arange(dist.get_world_size()).view(-1, num_holders).tolist()
    holders = dist.new_subgroups_by_enumeration(rows)[0] if num_holders > 1 else None
    weights_of_all = ShardedWeights(skeleton.bare(), mesh_of(shape), holders)
    weights_of_all.fill(model if rank == 0 else None)
    mine = RankSlices(ShardedPolicy(policy, weights_of_all))
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
    weights: dict[str, Any] = {}
    mine.gather(lambda of, tensor: weights.__setitem__(of, tensor.clone()))
    whole: Any = skeleton.filled(weights)
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
        "bare": all(p.is_meta for p in skeleton._bare.parameters()),
    }
