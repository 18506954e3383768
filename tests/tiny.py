"""A live policy of a tiny model, and what transformers alone computes from the same folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.metrics import flatten, merge
from tandem.pending import Told, settle
from tandem.policy.policy import Compute, Policy, load_model, load_tokenizer
from tandem.trains.base import Trains
from tandem.trains.full import Full
from tandem.types import Sampling


@contextmanager
def live_policy(folder: Path, *, trains: Trains | None = None) -> Iterator[Policy]:
    """A float32 policy on a compute thread of its own."""
    compute = Compute(1)
    try:
        torch.manual_seed(0)
        model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
        model = (trains or Full()).prepare(model).eval()
        yield Policy(model, load_tokenizer(str(folder)), name=str(folder), compute=compute)
    finally:
        compute.close()


def told(*parts: Told) -> dict[str, float]:
    """Plain numbers of metrics that may be pending, merged."""
    return flatten(merge(settle(parts)[0]))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder as transformers alone loads and runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def logprobs_of(model: Any, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling) -> Tensor:
    """Logprob of each completion token by one plain forward pass; differentiable.

    The support of top_k, top_p and min_p is found token by token, by sorting; a token that was sampled is in it.
    """
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / (sampling.temperature or 1.0)
    rows = []
    for row, token in zip(logits, completion, strict=True):
        kept = support(row.detach().double(), sampling) | {token}
        outside = torch.ones(len(row), dtype=torch.bool)
        outside[list(kept)] = False
        rows.append(row.masked_fill(outside, float("-inf")).log_softmax(-1)[token])
    return torch.stack(rows)


def support(logits: Tensor, sampling: Sampling) -> set[int]:
    """Token ids that one distribution may draw, by the definition of each limit: min_p, then top_k, then top_p."""
    probs = logits.softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    order = [i for i in order if probs[i] >= sampling.min_p * probs[order[0]]]
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, kept = sum(probs[i] for i in order), 0.0, set()
    for i in order:
        kept.add(i)
        mass += probs[i]
        if mass >= sampling.top_p * total and sampling.top_p < 1:
            break
    return kept
