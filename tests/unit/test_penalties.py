"""Penalties in the trainer's logprobs: by definition in float64, by finite differences, and whatever the tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers import long_but
from support.tiny_policy import Largest, penalised, support
from torch import Tensor
from torch._dynamo.utils import counters

from tandem.model.compilation import missing
from tandem.model.logprobs import token_logprobs
from tandem.model.penalties import Events, Past, Penalties, TokenHistory, joined, penalise
from tandem.types import Sampling

VOCABULARY, ENDS = 300, (4, 130)
SAMPLINGS = {
    "repetition": Sampling(repetition_penalty=1.3),
    "less than one": Sampling(repetition_penalty=0.7),
    "presence": Sampling(presence_penalty=0.8),
    "frequency": Sampling(frequency_penalty=-0.6),
    "min_tokens": Sampling(min_tokens=3, stop_token_ids=(9,)),
    "all": Sampling(
        repetition_penalty=1.2, presence_penalty=-0.4, frequency_penalty=0.5, min_tokens=2, top_p=0.8, top_k=40,
        min_p=0.01,
    ),
}  # fmt: skip


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


class Case:
    """Two conversations, one of two turns that nothing is said between, and states that predict their answers."""

    def __init__(self, seed: int = 0, vocabulary: int = VOCABULARY, hidden: int = 24):
        draw = np.random.default_rng(seed)
        torch.manual_seed(seed)

        def random_tokens(length: int) -> list[int]:
            return [int(token) for token in draw.integers(0, 40, length)]  # few, so that tokens repeat

        self.turns = [
            (first := random_tokens(7), second := random_tokens(9)),
            ([*first, *second], random_tokens(5)),
            (random_tokens(12), random_tokens(8)),
        ]
        self.past = self.past_of(range(22))
        self.targets = torch.tensor([token for _, answer in self.turns for token in answer])
        count = len(self.targets)
        self.hidden, self.weight = torch.randn(count, hidden), torch.randn(vocabulary, hidden) * 0.5
        self.bias, self.temperature, self.upstream = (
            torch.randn(vocabulary),
            torch.rand(count) + 0.5,
            torch.randn(count),
        )

    def past_of(self, rows: Sequence[int]) -> Past:
        """What is before some of the sampled tokens: 14 of the first conversation, 8 of the second."""
        (opening, first), (_, second), (question, third) = self.turns
        whole = [np.array([*opening, *first, *second]), np.array([*question, *third])]
        places = [np.array([7 + row for row in rows if row < 14]), np.array([row - 2 for row in rows if row >= 14])]
        begins_and_ends = [([7, 16], [16, 21]), ([12], [20])]
        each = zip(whole, places, begins_and_ends, strict=True)
        return joined([Past.of(ids, at.astype(np.int64), *answers) for ids, at, answers in each])

    def history(self, sampling: Sampling) -> TokenHistory | None:
        penalties = Penalties.of(sampling, ENDS)
        assert penalties is not None
        return TokenHistory.of(penalties, [torch.from_numpy(array) for array in self.past])

    def ours(self, sampling: Sampling, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
        """Logprobs, entropy and the gradients of hidden states, weight and bias."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in (self.hidden, self.weight, self.bias)]
        hidden, weight, bias = leaves
        options |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        logprobs, entropy = token_logprobs(
            hidden, weight, self.targets, self.temperature, bias=bias, history=self.history(sampling), entropy=True,
            **options,
        )  # fmt: skip
        logprobs.backward(self.upstream)
        assert entropy is not None
        return [logprobs.detach(), entropy, *(t.grad for t in leaves if t.grad is not None)]

    def exact(self, sampling: Sampling) -> list[Tensor]:
        """The same in float64, token by token by definition."""
        leaves = [t.double().requires_grad_() for t in (self.hidden, self.weight, self.bias)]
        logits = leaves[0] @ leaves[1].t() + leaves[2]
        rows, entropies, n = [], [], 0
        for prompt, answer in self.turns:
            for i, token in enumerate(answer):
                row = penalised(logits[n], prompt, answer[:i], sampling) / self.temperature[n].double()
                possible = row.detach().clone()
                if i < sampling.min_tokens:
                    possible[[*ENDS, *sampling.stop_token_ids]] = float("-inf")
                outside = torch.ones(len(row), dtype=torch.bool)
                outside[list(support(possible, sampling) | {token})] = False
                lp = row.masked_fill(outside, float("-inf")).log_softmax(-1)
                rows.append(lp[token])
                entropies.append(torch.special.entr(lp.detach().exp()).sum())
                n += 1
        logprobs = torch.stack(rows)
        logprobs.backward(self.upstream.double())
        return [logprobs.detach(), torch.stack(entropies), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("tile", [22 * 64, 22 * 128, None])
def test_values_and_gradients_are_those_of_the_definition(name: str, tile: int | None) -> None:
    case = Case()
    for ours, exact in zip(case.ours(SAMPLINGS[name], tile=tile), case.exact(SAMPLINGS[name]), strict=True):
        assert relative(ours, exact) < 2e-6


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_penalty_changes_something(name: str) -> None:
    case = Case()
    plain = case.exact(Sampling(repetition_penalty=1 + 1e-9))[0]
    assert (case.ours(SAMPLINGS[name])[0] - plain).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["repetition", "frequency", "all"], "all"))
def test_gradients_are_finite_differences(name: str) -> None:
    case, sampling = Case(hidden=4, vocabulary=90), SAMPLINGS[name]
    case.temperature = case.temperature.double()
    history = case.history(Sampling(**{n: getattr(sampling, n) for n in sampling.__slots__ if n != "min_tokens"}))
    leaves = [t.double().requires_grad_() for t in (case.hidden, case.weight, case.bias)]

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values, _ = token_logprobs(
            hidden, weight, case.targets, case.temperature, bias=bias, history=history, tile=22 * 64
        )
        return values

    assert torch.autograd.gradcheck(logprobs, leaves, eps=1e-6, atol=1e-6)


def test_bfloat16_is_within_its_rounding() -> None:
    case = Case()
    case.hidden, case.weight, case.bias = (t.bfloat16().float() for t in (case.hidden, case.weight, case.bias))
    sampling = Sampling(repetition_penalty=1.2, presence_penalty=-0.4, frequency_penalty=0.5, min_tokens=2)
    for ours, exact in zip(case.ours(sampling, torch.bfloat16, tile=22 * 64), case.exact(sampling), strict=True):
        assert relative(ours, exact) < 1e-2


def test_counts_of_any_rows_and_columns_are_those_of_all() -> None:
    case = Case(1)
    rows, columns = len(case.targets), VOCABULARY
    for arrays in (case.past[:3], case.past[3:6]):
        events = Events(*(torch.from_numpy(array) for array in arrays))
        whole = events.counts((0, rows), (0, columns))
        by_hand = torch.zeros(rows, columns, dtype=torch.int32)
        for column, first, end in zip(*(array.tolist() for array in arrays), strict=True):
            by_hand[first:end, column] += 1
        assert torch.equal(whole, by_hand)
        for r in ((0, 1), (3, 11), (9, 22), (21, 22)):
            for c in ((0, 64), (5, 6), (20, 300)):
                assert torch.equal(events.counts(r, c), whole[r[0] : r[1], c[0] : c[1]])


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rows", [range(5, 22), [1, 2, 5, 10, 12, 16, 17, 21], [8, 9, 13], [20]])
def test_tokens_that_are_not_trained_count_all_the_same(name: str, rows: Sequence[int]) -> None:
    """As a grammar forces some, also the first of an answer and all of one."""
    case, kept = Case(2), list(rows)
    whole = case.exact(SAMPLINGS[name])[0]
    case.past = case.past_of(kept)
    for field in ("hidden", "targets", "temperature", "upstream"):
        setattr(case, field, getattr(case, field)[kept])
    assert relative(case.ours(SAMPLINGS[name])[0], whole[kept]) < 2e-6


def test_a_token_that_could_not_be_sampled_is_counted_in() -> None:
    """As where an engine elsewhere did not keep to min_tokens: its logprob is a number."""
    case = Case()
    case.targets[0] = ENDS[0]
    case.turns[0][1][0] = ENDS[0]
    for ours, exact in zip(case.ours(SAMPLINGS["min_tokens"]), case.exact(SAMPLINGS["min_tokens"]), strict=True):
        assert relative(ours, exact) < 2e-6


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    for vocabulary in (4096, 16384):
        case = Case(vocabulary=vocabulary, hidden=4)
        with Largest() as largest:
            case.ours(SAMPLINGS["all"], tile=1 << 14)
        assert largest.elements <= max(1.25 * (1 << 14), 4 * vocabulary), "a tile of counts has a row more"


@pytest.mark.skipif(missing(torch.device("cpu")) is not None, reason=f"there is no {missing(torch.device('cpu'))}")
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_arithmetic_gives_the_same() -> None:
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (Case().ours(SAMPLINGS["all"], tile=22 * 64, compile=compile) for compile in (False, True))
    for a, b in zip(compiled, eager, strict=True):
        assert relative(a, b.double()) < 1e-6
    assert counters["stats"]["unique_graphs"] == 2, "one forward, one backward"
    torch._dynamo.reset()


def test_presence_is_taken_off_once_and_frequency_as_often_as_a_token_was_said() -> None:
    logits_NW = torch.zeros(1, 3)
    penalise(logits_NW, None, torch.tensor([[0, 1, 3]]), 1.0, 0.5, 0.25)
    assert logits_NW.tolist() == [[0.0, -0.75, -1.25]]
