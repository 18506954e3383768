"""What ranks do in tests of context parallel: each has a run of a row's tokens, and computes the whole alone too."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support import naive_attention
from support.cut_weights import all_of, mesh_of, plain
from support.vllm_workers import trained
from torch import Tensor
from torch._dynamo.utils import counters

from tandem.distributed.context_parallel import ContextPart
from tandem.distributed.sharded_weights import ShardedWeights
from tandem.model import _varlen, attention, compilation
from tandem.model.layers import decoder_layers, tune
from tandem.model.logprobs import token_logprobs
from tandem.model.plans import Packed, sequential_positions

ROWS = {
    "tree": Packed(lengths=(9, 4, 7, 5, 6), parents=(None, 0, 0, 2, None)),  # 31: padded on 2 and on 4 ranks
    "one sequence": Packed(lengths=(24,), parents=(None,)),
    "shorter than the ranks": Packed(lengths=(3,), parents=(None,)),
}
MODELS: dict[str, dict[str, Any]] = {
    "one key head": {"kind": "Qwen2", "keys": 1, "tied": True},
    "two key heads": {"kind": "Qwen3", "keys": 2},
    "as many key heads": {"kind": "Llama", "keys": 4},
    "window": {"kind": "Qwen2", "keys": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
}


def made(name: str) -> Any:
    model = trained(**MODELS[name], attn_implementation=attention.NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05)
    return model.train()


def gradient(
    rank: int, name: str, row: str, only: tuple[int, int], checkpointing: bool, sharded: bool
) -> dict[str, float]:
    """Errors of logprobs and, as shares of the largest element, of gradients; trained tokens are those of ``only``."""
    model = made(name)
    if checkpointing:
        tune(model, compile=False, checkpointing="full")
    return compared(rank, model, made(name), ROWS[row], only, sharded)


def in_one_graph(rank: int, name: str, rows: list[str]) -> tuple[list[dict[str, float]], dict[str, int]]:
    """The same of compiled layers, for each of several rows, and what the compiler made and the kernel was asked."""
    model = made(name)
    errors = []
    with (
        patch.object(compilation, "missing", lambda device: None),
        patch.object(_varlen, "_KERNEL", naive_attention.operation),
        patch.object(_varlen, "unsupported_input", lambda dtype, device: None),
    ):
        tune(model, compile=True, checkpointing="full", backend="aot_eager")
        for row in rows:
            errors.append(compared(rank, model, made(name), ROWS[row], (0, 1000), False))
            model.zero_grad()
    counts = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    return errors, counts | {"layers": len(decoder_layers(model)), "backward": naive_attention.calls.count("backward")}


def compared(rank: int, model: Any, whole: Any, plan: Packed, only: tuple[int, int], sharded: bool) -> dict[str, float]:
    """Errors of a model whose row all ranks share, against one that computes the whole row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 250, (sum(plan.lengths),), generator=generator)
    predict = torch.arange(len(tokens))[slice(*only)]
    predict = predict[torch.randperm(len(predict), generator=generator)]  # packing promises no order
    targets = torch.randint(0, 250, (len(predict),), generator=generator)
    weights_N = torch.rand(len(predict), generator=generator)
    positions = torch.tensor(sequential_positions(plan))

    hidden = plain(whole, tokens[None], positions[None], plan)[0].index_select(0, predict)
    expected, _ = token_logprobs(hidden, whole.lm_head.weight, targets, bias=whole.lm_head.bias)
    loss(expected, weights_N).backward()

    compute = ShardedWeights(model, mesh_of((dist.get_world_size(),)), all_of).hidden if sharded else hidden_of(model)
    part = ContextPart.of(plan, tokens, positions, predict, dist.group.WORLD)
    own, _ = token_logprobs(part.hidden(compute), model.lm_head.weight, part.own(targets), bias=model.lm_head.bias)
    logprobs = part.joined(own)
    loss(logprobs, weights_N).backward()

    largest = max(float(p.grad.abs().max()) for p in whole.parameters())
    errors = {"logprobs": float((logprobs - expected).detach().abs().max())}
    for of, parameter in model.named_parameters():
        if sharded:
            grad, dimension = parameter.grad.to_local(), parameter.placements[0].dim
            theirs = whole.get_parameter(of).grad.tensor_split(1, dimension)[0]
            each = -(-theirs.shape[dimension] // dist.get_world_size())
            theirs = theirs.narrow(dimension, min(rank * each, theirs.shape[dimension]), grad.shape[dimension])
        else:
            grad, theirs = parameter.grad, whole.get_parameter(of).grad
            dist.all_reduce(grad)
        errors[of] = float((grad - theirs).abs().max()) / largest if grad.numel() else 0.0
    return errors


def hidden_of(model: Any) -> Any:
    return lambda tokens, positions, plan: plain(model, tokens, positions, plan)


def loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Not linear, so that every rank needs the logprobs of all, as losses of whole sequences do."""
    return (logprobs * weights).sum() + logprobs.mean().exp()
