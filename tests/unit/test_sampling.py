"""Drawing tokens: frequencies, seeds, independence of the batch, and the edges of the support."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.sampling import draw, restrict, threshold, uniform


def splitmix(x: int) -> int:
    """One output of splitmix64 as its authors publish it, in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_uniform_is_two_rounds_of_splitmix() -> None:
    """A changed generator would make every recorded run impossible to replay."""
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    pairs = [(0, 0), (1, 5), (2**64 - 1, 7), (-3, 2**40), (10**30, 1)]
    want = [(splitmix((splitmix(key % 2**64) + at) % 2**64) >> 11) / 2**53 for key, at in pairs]
    assert uniform([key for key, _ in pairs], [at for _, at in pairs]).tolist() == want


def test_uniform_fills_the_interval_and_depends_on_both_numbers() -> None:
    values = uniform(list(range(1000)) * 10, [p for p in range(10) for _ in range(1000)])
    assert len(set(values.tolist())) == 10_000
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    counts = torch.histc(values.float(), 20, 0.0, 1.0)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # chi-square with 19 degrees of freedom, p = 0.001
    pairs = torch.stack((values[:-1000], values[1000:]))  # successive positions of one key
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.04


def test_uniform_of_a_request_does_not_depend_on_the_batch() -> None:
    alone = uniform([12345], [3])
    assert uniform([1, 12345, -7], [9, 3, 3])[1] == alone[0]


@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 200])
def test_frequencies_are_those_of_softmax(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(vocab)
    n = 20_000
    tokens, logprobs = draw(logits.expand(n, vocab), uniform(list(range(n)), [0] * n))
    expected = logits.double().softmax(-1)
    counts = torch.bincount(tokens, minlength=vocab)
    chi = float(((counts - n * expected) ** 2 / (n * expected)).sum())
    degrees = vocab - 1
    assert chi < degrees + 4 * math.sqrt(2 * degrees)
    assert torch.allclose(logprobs.double(), expected.log()[tokens], atol=1e-6)


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, 1000) * 3
    at = torch.rand(500, dtype=torch.float64)
    tokens, _ = draw(logits, at)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    upper = cumulative.gather(1, tokens[:, None])[:, 0]
    lower = upper - logits.double().softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert bool((at <= upper + 1e-6).all())
    assert bool((at >= lower - 1e-6).all())


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53, 1.0]), st.integers(1, 70))
def test_a_token_of_no_probability_is_never_drawn(seed: int, at: float, kept: int) -> None:
    # 1.0 is not in the interval, but what a rounding could make of the number before it
    generator = torch.Generator().manual_seed(seed)
    vocab = 200
    logits = torch.full((1, vocab), -math.inf)
    inside = torch.randperm(vocab, generator=generator)[:kept]
    logits[0, inside] = torch.randn(kept, generator=generator) * 20
    tokens, logprobs = draw(logits, torch.tensor([at], dtype=torch.float64))
    assert int(tokens[0]) in inside.tolist()
    assert bool(logprobs.isfinite().all())


def test_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 333)
    at = uniform(list(range(9)), [4] * 9)
    tokens, logprobs = draw(restrict(logits, 0.9, 40, 0.01), at)
    for row in range(9):
        token, logprob = draw(restrict(logits[row : row + 1], 0.9, 40, 0.01), at[row : row + 1])
        assert token[0] == tokens[row]
        assert logprob[0] == logprobs[row]


def test_greedy_rows_take_the_likeliest_with_its_own_logprob() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 100)
    at = uniform(range(4), [0] * 4)
    sampled, _ = draw(logits, at)
    tokens, logprobs = draw(logits, at, greedy=[True, False, True, False])
    assert tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert tokens[[1, 3]].tolist() == sampled[[1, 3]].tolist()
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-6)


def test_a_broken_row_shows_in_its_logprob() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = math.nan
    _, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert bool(logprobs[0].isfinite())
    assert not bool(logprobs[1].isfinite())


def kept(logits: torch.Tensor, **limits: float) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in restrict(logits, **limits)]


def test_support_of_each_limit() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()
    assert kept(logits) == [[0, 1, 2, 3, 4]]
    assert threshold(logits) is None
    assert kept(logits, top_k=2) == [[0, 1]]
    assert kept(logits, top_k=99) == [[0, 1, 2, 3, 4]]
    assert kept(logits, min_p=0.2) == [[0, 1, 2]]
    assert kept(logits, top_p=0.6) == [[0, 1]]
    assert kept(logits, top_p=0.01) == [[0]]
    # of the two left by top_k the first has 2/3
    assert kept(logits, top_k=2, top_p=0.6) == [[0]]
    assert kept(logits, top_k=4) == [[0, 1, 2, 3, 4]], "tokens that tie at the edge are all in"


def test_limits_per_row() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log().expand(4, 4)
    rows = restrict(logits, top_p=[1.0, 0.7, 1.0, 1.0], top_k=[0, 0, 1, 0], min_p=[0.0, 0.0, 0.0, 0.25])
    assert [row.isfinite().sum().item() for row in rows] == [4, 2, 1, 3]


@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_nucleus_of_a_large_vocabulary(spread: float) -> None:
    """Wide, middling and narrow distributions take the three widths of the search."""
    torch.manual_seed(0)
    logits = torch.randn(3, 20_000) * spread
    probs, order = logits.double().softmax(-1).sort(-1, descending=True)
    for row, count in enumerate(((probs.cumsum(-1) < 0.9).sum(-1) + 1).tolist()):
        tokens = kept(logits, top_p=0.9)[row]
        assert abs(len(tokens) - count) <= max(1, count // 10_000)
        assert set(order[row, : count - 1].tolist()) <= set(tokens)
