"""A live policy of a tiny model, and what transformers alone computes from the same folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM

from tandem.metrics import flatten, merge
from tandem.model.policy import Compute, Policy, load_model, load_tokenizer
from tandem.pending import PendingMetrics, settle
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.types import Sampling


@contextmanager
def live_policy(folder: Path, *, trainable: Trainable | None = None) -> Iterator[Policy]:
    """A float32 policy on a compute thread of its own; its weights are its own, its tokenizer is that of all."""
    compute = Compute(1)
    try:
        torch.manual_seed(0)
        model = copy.deepcopy(_model(str(folder)))
        model = (trainable or Full()).prepare(model).eval()
        yield Policy(model, _tokenizer(str(folder)), name=str(folder), compute=compute)
    finally:
        compute.close()


@cache
def _model(folder: str) -> Any:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


_tokenizer = cache(load_tokenizer)


def plain_metrics(*parts: PendingMetrics) -> dict[str, float]:
    """Plain numbers of metrics that may be pending, merged."""
    return flatten(merge(settle(parts)[0]))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder as transformers alone loads and runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def logprobs_of(
    model: Any, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling, ends: Sequence[int] = ()
) -> Tensor:
    """Logprob of each completion token by one plain forward pass; differentiable."""
    rows = distributions_of(model, prompt, completion, sampling, ends)
    return rows[torch.arange(len(completion)), torch.tensor(completion)]


def distributions_of(
    model: Any, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling, ends: Sequence[int] = ()
) -> Tensor:
    """Logprobs [completion tokens, vocabulary] of what each token was sampled from; differentiable.

    The support of top_k, top_p and min_p is found token by token, by sorting; a token that was sampled is in it.
    ``ends`` are the tokens that may not end an answer before ``min_tokens``.
    """
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    rows = []
    for i, (row, token) in enumerate(zip(logits, completion, strict=True)):
        row = penalised(row, prompt, completion[:i], sampling) / (sampling.temperature or 1.0)
        possible = row.detach().double()
        if i < sampling.min_tokens:
            possible[[*ends, *sampling.stop_token_ids]] = float("-inf")
        kept = support(possible, sampling) | {token}
        outside = torch.ones(len(row), dtype=torch.bool)
        outside[list(kept)] = False
        rows.append(row.masked_fill(outside, float("-inf")).log_softmax(-1))
    return torch.stack(rows)


def penalised(row: Tensor, prompt: Sequence[int], sampled: Sequence[int], sampling: Sampling) -> Tensor:
    """Logits after the penalties, by the definition of each; differentiable."""
    factor, less = torch.ones(len(row), dtype=row.dtype), torch.zeros(len(row), dtype=row.dtype)
    for token in {*prompt, *sampled}:
        factor[token] = 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
    for token in set(sampled):
        less[token] = sampling.frequency_penalty * list(sampled).count(token) + sampling.presence_penalty
    return row * factor - less


def support(logits: Tensor, sampling: Sampling) -> set[int]:
    """Token ids that one distribution may draw, by the definition of each limit: min_p, then top_k, then top_p."""
    probs = logits.softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    order = [i for i in order if probs[i] >= sampling.min_p * probs[order[0]] and probs[i] > 0]
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, kept = sum(probs[i] for i in order), 0.0, set()
    for i in order:
        kept.add(i)
        mass += probs[i]
        if mass >= sampling.top_p * total and sampling.top_p < 1:
            break
    return kept


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return out
