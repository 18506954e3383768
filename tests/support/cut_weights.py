"""What ranks do in tests of sharded weights: each compares itself with the whole model, which it computes alone too."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.rank_states import load_whole, shares_of, whole_states
from support.vllm_workers import Worker, mapped, served, trained
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.distributed import slice_writer, state_shards
from tandem.distributed.sharded_weights import ShardedWeights
from tandem.distributed.slices import EngineSlice, Slice, shard_dimension
from tandem.distributed.weight_shards import ShardedPolicy, WeightShardStepper
from tandem.model import attention, packing
from tandem.model.layers import decoder_layers
from tandem.model.logprobs import token_logprobs
from tandem.model.plans import Packed, sequential_positions
from tandem.model.policy import Policy
from tandem.optimizers import _byte_moments
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit
from tandem.transport.checksums import checksums

MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"kind": "Qwen2", "tied": True},
    "qwen3-few-key-heads": {"kind": "Qwen3", "keys": 2},
    "qwen3-thirds": {"kind": "Qwen3", "keys": 3, "num_attention_heads": 3, "intermediate_size": 96},
    "llama-biases": {"kind": "Llama", "attention_bias": True, "mlp_bias": True, "vocabulary": 256},
    "llama-unfolded": {"kind": "Llama", "attn_implementation": "sdpa"},
    "qwen3-experts": {"kind": "Qwen3Moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
TREE = Packed(lengths=(9, 4, 7, 5), parents=(None, 0, 0, 2))
ROWS = (TREE, Packed(lengths=(3,), parents=(None,)), Packed(lengths=(6, 2), parents=(None, 0)))
"""Packed rows; ranks get unequal shares of them."""


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = trained(**{"attn_implementation": attention.NAME, **MODELS[name]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05)
    return model.to(dtype).train()


def all_of(model: Any) -> dict[str, Any]:
    """Every parameter is cut."""
    return dict(model.named_parameters())


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    names = ("shards",) if len(shape) == 1 else ("replicas", "shards")
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)


def cost(hidden: Any, head: Any, plan: Packed, seed: int) -> Tensor:
    """Summed loss of a row, already divided by the tokens of all rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 250, (sum(plan.lengths),), generator=generator) for _ in range(2))
    positions = torch.tensor(sequential_positions(plan))
    out = hidden(tokens[None], positions[None], plan)[0]
    logprobs, _ = token_logprobs(out, head.weight, targets, bias=head.bias)
    return -logprobs.sum() / sum(sum(row.lengths) for row in ROWS)


def alone(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradient of all rows by one process."""
    for seed, row in enumerate(ROWS):
        cost(lambda t, p, plan: plain(model, t, p, plan), model.lm_head, row, seed).backward()
    grads = {name: p.grad.to(dtype) for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def plain(model: Any, tokens: Tensor, positions: Tensor, plan: Packed) -> Tensor:
    return packing.hidden(model, tokens, positions, plan)


def gradient(rank: int, name: str, shape: Sequence[int], dtype: str) -> dict[str, float]:
    """Largest error of each gradient, as a share of the largest element of all."""
    model = made(name, getattr(torch, dtype))
    expected = alone(copy.deepcopy(model), torch.float64)
    weights = ShardedWeights(model, mesh_of(shape), all_of)
    backward(weights, rank)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    errors = {}
    for of, parameter in model.named_parameters():
        local = parameter.grad.to_local()
        assert local.shape == weights.part(of).of(expected[of]).shape
        errors[of] = float((gathered(weights, of, local).double() - expected[of]).abs().max()) / largest
    return errors


def gathered(weights: ShardedWeights, name: str, part: Tensor) -> Tensor:
    """A whole tensor from every rank's part, of whatever type."""
    parts: list[Any] = [None] * weights.ranks
    dist.all_gather_object(parts, part, group=weights.group)
    return torch.cat(parts, shard_dimension(name, weights.shapes[name], weights.ranks))


def backward(weights: ShardedWeights, rank: int) -> None:
    """This rank's rows: the first two ranks have some, others a row that counts nothing."""
    world = dist.get_world_size()
    mine = [seed for seed in range(len(ROWS)) if seed % min(world, 2) == rank % world] if rank < 2 else []
    for at in range(2):  # as many passes on every rank
        seed = mine[at] if at < len(mine) else None
        loss = cost(weights.hidden, weights.model.lm_head, ROWS[seed or 0], seed or 0)
        (loss * (0.0 if seed is None else 1.0)).backward()


def publishing(rank: int, name: str, dtype: str) -> dict[str, Any]:
    """Publish to stand-ins of vLLM's workers after the masters have changed; what a fresh engine would have loaded."""
    model = made(name, getattr(torch, dtype))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(-1.5)
    world = dist.get_world_size()
    engine, fresh = (served(source, Worker(rank, world)) for source in (model, changed))
    engine_places = mapped(engine, model, world=world)
    slices = {
        of: [EngineSlice(part=Slice.at(place.first, place.tensor.shape), tensor=place.tensor) for place in parts]
        for of, parts in engine_places.items()
    }
    weights = ShardedWeights(model, mesh_of((world,)), all_of)
    stay = {of for of, parts in slices.items() if all(weights.part(of).contains(p.part) for p in parts)}
    with torch.no_grad():
        for _, parameter in weights.local_parameters:
            parameter.mul_(-1.5)
    writer = weights.writer(slices)
    with Calls("allgather") as gathers:
        received = writer.write()
    wrong = [of for of, parameter in fresh.named_parameters() if not torch.equal(engine.get_parameter(of), parameter)]
    same = weights.checksums() == checksums(changed.named_parameters())
    # Again, after a pass; and by a writer that gathers one tensor at a time.
    with mock.patch.object(slice_writer, "GATHERED_BYTES", 1):
        apart = weights.writer(slices)
    for again in (writer, apart):
        with torch.no_grad():
            cost(weights.hidden, model.lm_head, TREE, 0)
            weights.reshard()
            for parameter in [*changed.parameters(), *(p for _, p in weights.local_parameters)]:
                parameter.mul_(-2)
        again.write()
        fresh = served(changed, Worker(rank, world))
        wrong += [of for of, p in fresh.named_parameters() if not torch.equal(engine.get_parameter(of), p)]
        same &= weights.checksums() == checksums(changed.named_parameters())
    whole = {of: torch.empty_like(parameter) for of, parameter in changed.named_parameters()}
    for of, shard in weights.shards().items():
        weights.gather(of, shard, whole[of], to=1, most_bytes=1000)
    return {
        "wrong": wrong,
        "received": received,
        "gathers": gathers.num,
        "stay": sorted(stay),
        "checksums": same,
        "whole": rank != 1 or all(torch.equal(tensor, changed.get_parameter(of)) for of, tensor in whole.items()),
    }


def scoring(rank: int, name: str) -> dict[str, Any]:
    """A pass without backward leaves no gathered weight behind that a later one would compute with."""
    model = made(name)
    changed = copy.deepcopy(model)
    weights = ShardedWeights(model, mesh_of((dist.get_world_size(),)), all_of)
    with torch.no_grad():
        before = cost(weights.hidden, model.lm_head, TREE, 0)
        weights.reshard()
        for parameter in [*changed.parameters(), *(p for _, p in weights.local_parameters)]:
            parameter.mul_(1.25)
        after = cost(weights.hidden, model.lm_head, TREE, 0)
        expected = cost(lambda t, p, plan: plain(changed, t, p, plan), changed.lm_head, TREE, 0)
    return {"before": float(before), "after": float(after), "expected": float(expected)}


DEALS: dict[int, tuple[tuple[int | None, ...], ...]] = {
    2: ((0, None, 2), (None, 1, None)),
    3: ((0, 2, None), (1, None, None), (None, None, None)),
    4: ((None, 0, 2), (None, None, 1), (None, None, None), (None, None, None)),
}
"""By the number of ranks: which of ``ROWS`` each has in each round of a pass; None: it stands in."""


class Calls(TorchDispatchMode):
    """How often a collective is called."""

    def __init__(self, collective: str):
        super().__init__()
        self.collective, self.num = collective, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "c10d" in str(op) and self.collective in str(op)
        return op(*args, **(kwargs or {}))


class Dealt:
    """A rank's stepper, and its passes over what it is dealt."""

    def __init__(self, rank: int, model: Any, shape: Sequence[int], *, local: bool):
        policy = Policy(model, None, name="", compute=None)  # type: ignore[arg-type]
        self.policy = ShardedPolicy(policy, ShardedWeights(model, mesh_of(shape), all_of))
        self.weights = self.policy.weights
        self.stepper = WeightShardStepper(AdamW(), self.policy, local=local)
        self.deal = DEALS[dist.get_world_size()][rank]
        self.sums: dict[Any, Tensor] = {}  # the optimizer's own are float32
        self._add, self.stepper._inner.add = self.stepper._inner.add, self._noted  # type: ignore[method-assign]
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.stepper.accumulate)

    def _noted(self, local: Any, grad: Tensor) -> None:
        self.sums[local] = self.sums.get(local, 0.0) + grad
        self._add(local, grad)

    def forget(self) -> None:
        self.stepper.zero_grad()
        self.sums.clear()

    def passed(self, *, rounds: int | None = None, times: float = 1.0) -> int:
        """As ``RankWork`` has them, or left after so many rounds; how often gradients were reduced."""
        with Calls("reduce_scatter") as reductions:
            self.stepper.begin_pass(len(self.deal))
            for seed in self.deal[:rounds]:
                if seed is not None:
                    (cost(self.policy.hidden, self.policy.head, ROWS[seed], seed) * times).backward()
                self.stepper.flush()
            if rounds is None:
                self.stepper.end_pass()
        return reductions.num

    def errors(self, expected: dict[str, Tensor]) -> float:
        """The largest of an element of the gradient so far, as a share of the largest element of all."""
        largest = max(float(grad.abs().max()) for grad in expected.values())
        wrong = []
        for of, local in self.stepper._local.items():
            whole = gathered(self.weights, of, self.sums[local])
            wrong.append(float((whole.double() - expected[of]).abs().max()) / largest)
        return max(wrong)


def local_sums(rank: int, name: str, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """Gradients of two passes, of which each rank adds up its own micro-batches, and how often they were reduced."""
    model = made(name, getattr(torch, dtype))
    expected = alone(copy.deepcopy(model), torch.float64)
    groups = len(decoder_layers(model)) + 1
    mine = Dealt(rank, model, shape, local=True)
    with Calls("allgather") as gathers:
        first = mine.passed()
    error, dtypes = mine.errors(expected), {grad.dtype for grad in mine.sums.values()}
    left = [of for of, p in model.named_parameters() if not isinstance(p, DTensor)]
    mine.forget()
    second = mine.passed()
    twice = mine.errors(expected)
    scattered = Dealt(rank, made(name, getattr(torch, dtype)), shape, local=False)
    return {
        "error": max(error, twice),
        "dtypes": dtypes,
        "reduced": (first / groups, second / groups),
        "gathered": gathers.num / groups,
        "left_gathered": left,
        "scattered": scattered.passed() / groups,
    }


def unfinished(rank: int, name: str, dtype: str) -> dict[str, Any]:
    """Passes that end early: forgotten ones leave nothing, and ones that are ended have all that was added up."""
    model = made(name, getattr(torch, dtype))
    expected = alone(copy.deepcopy(model), torch.float64)
    mine = Dealt(rank, model, (dist.get_world_size(),), local=True)
    reduced = [mine.passed(rounds=1, times=1e3), mine.passed(rounds=2, times=float("inf"))]
    mine.forget()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    left += [name for name, grad in mine.stepper._inner.gradients().items() if bool(grad.any())]
    mine.passed()
    forgotten = mine.errors(expected)
    mine.forget()
    mine.deal = (*mine.deal, None)
    mine.passed(rounds=3)
    mine.stepper.end_pass()
    ended = mine.errors(expected)
    norm = float(torch.stack([grad.double().square().sum() for grad in expected.values()]).sum().sqrt())
    mine.forget()
    mine.passed(rounds=3)
    return {
        "reduced": reduced,
        "left": left,
        "forgotten": forgotten,
        "ended": ended,
        "norms": (float(mine.stepper.step(1e-3, 1.0)), norm),
    }


def stepping(
    rank: int,
    name: str,
    shape: Sequence[int],
    dtype: str,
    local: bool = False,
    folder: Path | None = None,
    eight_bits: bool = False,
) -> dict[str, Any]:
    """Three AdamW steps by ranks, of which one has all rows, and by one process; then the states loaded.

    With a folder ranks write their shares of the states there. With ``eight_bits`` theirs is AdamW8bit, in blocks that
    the tiny model has several of.
    """
    model = made(name, getattr(torch, dtype))
    lone, optimizer = copy.deepcopy(model), AdamW(lr=1e-2, eps=1e-4)
    stepper = optimizer.bind(list(lone.named_parameters()))
    policy = Policy(model, None, name=name, compute=None)  # type: ignore[arg-type]
    whole = {of: p.detach() for of, p in copy.deepcopy(model).named_parameters()} if rank == 0 else {}
    sharded = ShardedPolicy(policy, ShardedWeights(model, mesh_of(shape), all_of))
    if eight_bits:
        _byte_moments.SMALL, _byte_moments.BLOCK = 32, 16
    theirs = AdamW8bit(lr=1e-2, eps=1e-4) if eight_bits else optimizer
    mine = WeightShardStepper(theirs, sharded, lambda: sharded.weights.copy_to(whole), local=local)
    for parameter in sharded.model.parameters():
        parameter.register_post_accumulate_grad_hook(mine.accumulate)
    norms = []
    for _ in range(3):
        mine.begin_pass(len(ROWS))
        for seed, row in enumerate(ROWS):
            cost(lambda t, p, plan: plain(lone, t, p, plan), lone.lm_head, row, seed).backward()
            for parameter in lone.parameters():
                stepper.accumulate(parameter)
            if rank == 0:
                cost(sharded.hidden, sharded.head, row, seed).backward()
            mine.flush()
        mine.end_pass()
        norms.append((float(mine.step(1e-2, 0.5)), float(stepper.step(1e-2, 0.5))))

    def gathered(stepper: WeightShardStepper) -> dict[str, torch.Tensor]:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, shares_of(stepper))
        return whole_states(of_ranks, expected)

    expected = stepper.state_dict()
    states = gathered(mine)
    masters = {of: expected.get(f"{of}/master", p.detach()) for of, p in lone.named_parameters()}
    shards = {of: local.detach().clone() for of, local in mine._local.items()}
    lost = max(
        float((shards[of] - sharded.weights.part(of).of(master)).abs().max())
        for of, master in masters.items()
        if shards[of].numel()
    )
    if folder is not None:
        state_shards.write(folder, mine.shares(mine.state_dict()), rank)
    fresh = WeightShardStepper(theirs, sharded)
    with torch.no_grad():
        for local in fresh._local.values():
            if dtype != "float32":  # masters are states; float32 weights are loaded as weights
                local.zero_()
    with tempfile.TemporaryDirectory() as place:
        load_whole(fresh, states, Path(place))
    again = [key for key, value in gathered(fresh).items() if not torch.equal(value, states[key])]
    loaded = fresh._inner.state_dict()
    again += [key for key, value in mine._inner.state_dict().items() if not torch.equal(value, loaded[key])]
    return {
        "norms": norms,
        "lost": lost,
        "keys": sorted(states) == sorted(expected),
        "states": states,
        "norm": mine._weights.global_norm(torch.tensor(1.0 + rank)).item(),
        "far": max((float((whole[of].float() - masters[of]).abs().max()) for of in whole), default=0.0),
        "again": sorted(again),
        "restored": all(torch.equal(shards[of], local) for of, local in fresh._local.items()),
    }
