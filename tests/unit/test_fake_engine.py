"""The engine without a model draws uniformly, and refuses what would not be."""

from __future__ import annotations

import asyncio

import pytest

from tandem.engines.fake import Fake
from tandem.errors import EngineError
from tandem.types import Completion, Sampling

VOCABULARY = 8
PROMPT = (0, 3)


def drawn(sampling: Sampling, count: int = 1) -> list[Completion]:
    async def main() -> list[Completion]:
        async with Fake(vocab=VOCABULARY).open(None, context=200) as engine:
            return await asyncio.gather(*(engine.generate(PROMPT, sampling, key) for key in range(count)))

    return asyncio.run(main())


@pytest.mark.parametrize(
    "sampling", [Sampling(presence_penalty=1.5), Sampling(repetition_penalty=1.2), Sampling(min_tokens=2)]
)
def test_sampling_that_is_not_uniform_is_refused(sampling: Sampling) -> None:
    with pytest.raises(EngineError, match="fake draws uniformly"):
        drawn(sampling)


def test_a_token_that_stops_ends_an_answer() -> None:
    for answer in drawn(Sampling(stop_token_ids=(1, 2, 3), max_tokens=50), 20):
        enders = [token in (1, 2, 3, VOCABULARY - 1) for token in answer.tokens]
        assert enders.index(True) == len(enders) - 1
        assert answer.finish == "stop"
