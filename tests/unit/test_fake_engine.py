"""The engine without a model draws from what it says: penalties and limits included."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
import torch
from support.tiny_policy import penalised, support

from tandem.engines.fake import Fake
from tandem.types import Completion, Sampling

VOCABULARY = 8
PROMPT = (0, 3)


def drawn(sampling: Sampling, count: int = 1) -> list[Completion]:
    async def main() -> list[Completion]:
        async with Fake(vocab=VOCABULARY).open(None, context=200) as engine:
            return await asyncio.gather(*(engine.generate(PROMPT, sampling, key) for key in range(count)))

    return asyncio.run(main())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=1.5, max_tokens=24),
        Sampling(frequency_penalty=0.7, temperature=0.5, repetition_penalty=1.2, max_tokens=24),
        Sampling(presence_penalty=1.0, top_k=3, max_tokens=24),
        Sampling(min_tokens=20, stop_token_ids=(2,), max_tokens=24),
    ],
    ids=["presence", "frequency", "top_k", "min_tokens"],
)
def test_logprobs_are_those_of_the_penalised_distribution(sampling: Sampling) -> None:
    for answer in drawn(sampling, 8):
        assert len(answer.tokens) >= sampling.min_tokens or answer.tokens[-1] == VOCABULARY - 1
        for i, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            row = penalised(torch.zeros(VOCABULARY).double(), PROMPT, answer.tokens[:i], sampling)
            row /= sampling.temperature
            if i < sampling.min_tokens:
                row[[VOCABULARY - 1, *sampling.stop_token_ids]] = -math.inf
            least = min(row[list(support(row, sampling))])
            kept = row.masked_fill(row < least, -math.inf)  # tokens that tie at the edge are all in
            assert logprob == pytest.approx(kept.log_softmax(-1)[token].item(), abs=1e-6)


@pytest.mark.slow
def test_tokens_are_drawn_with_their_probabilities() -> None:
    sampling = Sampling(frequency_penalty=1.0, max_tokens=2, min_tokens=2)
    answers = drawn(sampling, 2000)
    again = sum(a.tokens[0] == a.tokens[1] for a in answers) / len(answers)
    expected = math.exp(-1) / (math.exp(-1) + VOCABULARY - 2)
    assert again == pytest.approx(expected, abs=0.02)
    assert VOCABULARY - 1 not in Counter(token for a in answers for token in a.tokens)


def test_a_token_that_stops_ends_an_answer() -> None:
    for answer in drawn(Sampling(stop_token_ids=(1, 2, 3), max_tokens=50), 20):
        enders = [token in (1, 2, 3, VOCABULARY - 1) for token in answer.tokens]
        assert enders.index(True) == len(enders) - 1
        assert answer.finish == "stop"
