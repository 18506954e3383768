"""The embedded engine against plain transformers: same logprobs whatever the batch, the cache and the rows do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import live_policy, logprobs_of, penalised, reference, support
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tandem.engines.base import Engine
from tandem.engines.embedded import engine as module
from tandem.engines.embedded.spec import Embedded
from tandem.errors import EngineError
from tandem.model.policy import Policy
from tandem.types import Completion, Sampling

PROMPTS = [[72, 105], [5, 99, 31, 7], list(range(20)), [200] * 3, [1, 2, 3, 4, 5, 6, 7, 8, 9], [17]]

ENDS = (257,)
"""The tiny model's end token."""


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model) as live:
        yield live


@pytest.fixture(scope="module")
def naive(tiny_model: Path) -> Any:
    return reference(tiny_model)


def run(policy: Policy, work: Callable[[Engine], Awaitable[Any]], *, context: int = 1024, **options: Any) -> Any:
    async def main() -> Any:
        async with Embedded(**options).open(policy, context=context) as engine:
            return await asyncio.wait_for(work(engine), 60)

    return asyncio.run(main())


def sample(policy: Policy, requests: Sequence[tuple[Sequence[int], Sampling, int]], **options: Any) -> list[Completion]:
    async def work(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    return run(policy, work, **options)  # type: ignore[no-any-return]


def assert_agrees(naive: Any, prompt: Sequence[int], completion: Completion, sampling: Sampling) -> None:
    with torch.no_grad():
        expected = logprobs_of(naive, prompt, completion.tokens, sampling, ENDS)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, max_tokens=24),
        Sampling(temperature=1.3, max_tokens=24),
        Sampling(top_p=0.6, max_tokens=24),
        Sampling(top_k=5, max_tokens=24),
        Sampling(min_p=0.2, max_tokens=24),
        Sampling(temperature=1.3, top_p=0.7, top_k=40, min_p=0.05, max_tokens=24),
        Sampling(temperature=0, max_tokens=24),
        Sampling(repetition_penalty=1.2, max_tokens=24),
        Sampling(presence_penalty=0.5, frequency_penalty=1.0, min_tokens=9, stop_token_ids=(101, 32), max_tokens=24),
        Sampling(temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=0.8, frequency_penalty=-0.2, max_tokens=24),
        Sampling(temperature=0, repetition_penalty=1.5, max_tokens=24),
    ],
    ids=[
        *("cold", "hot", "top_p", "top_k", "min_p", "all", "greedy"),
        *("repetition", "presence and frequency", "penalties and limits", "penalised and greedy"),
    ],
)
def test_logprobs_are_those_of_the_sampled_distribution(policy: Policy, naive: Any, sampling: Sampling) -> None:
    done = sample(policy, [(prompt, sampling, key) for key, prompt in enumerate(PROMPTS)])
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_agrees(naive, prompt, completion, sampling)
        if sampling.temperature == 0:
            continue
        with torch.no_grad():
            logits = naive(input_ids=torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        for i, (row, token) in enumerate(zip(logits.double(), completion.tokens, strict=True)):
            row = penalised(row, prompt, completion.tokens[:i], sampling)
            assert token in support(row / sampling.temperature, sampling)
        enders = [i for i, token in enumerate(completion.tokens) if token in (*ENDS, *sampling.stop_token_ids)]
        assert enders in ([], [len(completion.tokens) - 1])
        assert all(i >= sampling.min_tokens for i in enders)


def test_no_text_stops_an_answer_before_min_tokens(policy: Policy) -> None:
    """As in vLLM: one that is completed by the last of them does not either."""
    letters = tuple(map(chr, range(32, 127)))
    done = sample(policy, [([72], Sampling(stop=letters, min_tokens=5, max_tokens=24), key) for key in range(12)])
    assert min(len(c.tokens) for c in done) == 6
    assert {c.finish for c in done} == {"stop"}


def test_a_text_that_came_before_min_tokens_stops_nothing_after_them(policy: Policy) -> None:
    """As in vLLM: only one that is completed later does, also where the same text came before."""
    (free,) = sample(policy, [([72], Sampling(min_tokens=5, max_tokens=90), 0)])
    letters = [policy.tokenizer.decode([token], skip_special_tokens=True) for token in free.tokens]
    stops = sorted(letter for letter in set(letters) if letter.isascii() and letter.isprintable() and letter)
    later = {stop: [i for i, letter in enumerate(letters) if i >= 5 and letter == stop] for stop in stops}
    assert not all(later[letter] for letter in set(letters[:5]) & set(stops)), "some come before alone"
    requests = [([72], Sampling(min_tokens=5, max_tokens=90, stop=(stop,)), 0) for stop in stops]
    for stop, done in zip(stops, sample(policy, requests), strict=True):
        assert done.tokens == free.tokens[: later[stop][0] + 1 if later[stop] else None]


def test_greedy_takes_the_likeliest(policy: Policy, naive: Any) -> None:
    sampling = Sampling(temperature=0, max_tokens=20)
    (done,) = sample(policy, [(PROMPTS[1], sampling, 3)])
    with torch.no_grad():
        logits = naive(input_ids=torch.tensor([[*PROMPTS[1], *done.tokens]])).logits[0, len(PROMPTS[1]) - 1 : -1]
    assert list(done.tokens) == logits.argmax(-1).tolist()


@pytest.mark.slow
def test_tokens_are_drawn_with_their_probabilities(policy: Policy, naive: Any) -> None:
    """Over many keys the first token is distributed as its logprobs say."""
    n, sampling = 4000, Sampling(temperature=0.5, top_k=4, max_tokens=1)
    done = sample(policy, [([72, 105], sampling, key) for key in range(n)])
    by_token: dict[int, list[float]] = {}
    for completion in done:
        by_token.setdefault(completion.tokens[0], []).append(completion.logprobs[0])
    assert len(by_token) == 4
    for logprobs in by_token.values():
        prob = torch.tensor(logprobs[0]).exp().item()
        assert abs(len(logprobs) / n - prob) < 4.5 * (prob * (1 - prob) / n) ** 0.5


@pytest.mark.slow
def test_the_cache_grows_and_keeps_what_it_holds(policy: Policy, naive: Any) -> None:
    sampling = Sampling(max_tokens=220)
    requests = [(prompt, sampling, 10 + key) for key, prompt in enumerate(PROMPTS)]
    done = sample(policy, requests)
    assert max(len(c.tokens) for c in done) > 150, "several times its first 64 places"
    for (prompt, _, _), completion in zip(requests, done, strict=True):
        assert_agrees(naive, prompt, completion, sampling)


def test_rows_close_up_as_neighbours_end(policy: Policy, naive: Any) -> None:
    """Rows of many lengths end at many moments, first and last ones too; whoever moves keeps its past."""
    requests = [
        (PROMPTS[i % 6], Sampling(max_tokens=most), i) for i, most in enumerate((3, 40, 1, 17, 9, 40, 2, 25, 5, 33))
    ]
    for (prompt, sampling, _), completion in zip(requests, sample(policy, requests), strict=True):
        assert_agrees(naive, prompt, completion, sampling)
        if completion.finish == "length":
            assert len(completion.tokens) == sampling.max_tokens


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_rows": 1}, {"max_rows": 3}, {"max_rows": 64, "prefill_tokens": 5}])
def test_more_requests_than_rows_or_prefill_tokens(policy: Policy, options: dict[str, int]) -> None:
    requests = [(PROMPTS[i % 6] * 4, Sampling(max_tokens=4 + 3 * (i % 5)), i) for i in range(14)]
    assert sample(policy, requests, **options) == sample(policy, requests), "bit for bit, whoever comes meanwhile"


def test_rows_that_are_nobodys_take_no_cache(policy: Policy) -> None:
    assert [module._cache(policy, rows).rows for rows in (1, 4, 6, 64)] == [4, 4, 8, 64]


def test_no_more_rows_run_than_allowed(policy: Policy) -> None:
    async def work(engine: Engine) -> tuple[int, int]:
        tasks = [asyncio.create_task(engine.generate([7], Sampling(max_tokens=12), key)) for key in range(9)]
        running = waiting = 0
        while not all(task.done() for task in tasks):
            health = await engine.health()
            running, waiting = max(running, health.running), max(waiting, health.waiting)
            await asyncio.sleep(0)
        return running, waiting

    running, waiting = run(policy, work, max_rows=4)
    assert running == 4
    assert waiting >= 5


def test_siblings_share_one_prefill(policy: Policy, naive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's prompt is computed once, and each sibling goes on from it as if alone."""
    seen: list[int] = []
    hidden = policy.hidden

    def spy(tokens_BT: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tokens_BT.shape[1])
        return hidden(tokens_BT, *rest)

    monkeypatch.setattr(policy, "hidden", spy)
    long, other, sampling = list(range(1, 31)), [9, 9, 9], Sampling(max_tokens=10)
    requests = [(long, sampling, key) for key in range(5)] + [(other, sampling, key) for key in range(2)]
    done = sample(policy, requests)
    assert seen[0] == len(long) + len(other)
    assert set(seen[1:]) == {1}
    assert len({c.tokens for c in done}) == len(done), "each sibling draws from its own stream"
    for (prompt, _, _), completion in zip(requests, done, strict=True):
        assert_agrees(naive, prompt, completion, sampling)


def test_the_context_bounds_an_answer(policy: Policy) -> None:
    """The last token may end exactly at the context; the cache never needs more."""
    done = sample(policy, [([72, 105, 3], Sampling(max_tokens=500), key) for key in range(4)], context=40)
    assert {len(c.tokens) for c in done if c.finish == "length"} == {37}


def test_a_cancelled_request_gives_up_its_row(policy: Policy) -> None:
    async def work(engine: Engine) -> tuple[Completion, int]:
        long = asyncio.create_task(engine.generate([5], Sampling(max_tokens=900, top_k=1), 0))
        while (await engine.health()).running == 0:
            await asyncio.sleep(0)
        next_one = asyncio.create_task(engine.generate([72, 105], Sampling(max_tokens=5), 1))
        await asyncio.sleep(0)
        assert not next_one.done()
        long.cancel()
        done = await next_one
        return done, (await engine.health()).running

    done, running = run(policy, work, max_rows=1)
    assert done == sample(policy, [([72, 105], Sampling(max_tokens=5), 1)])[0]
    assert running == 0


def test_a_pause_that_lets_requests_end_admits_nobody_meanwhile(policy: Policy, naive: Any) -> None:
    """Rows that become free are not filled again, so that it ends when those under way have."""
    requests = [([72, 105], Sampling(max_tokens=20, top_k=20), 0), ([5, 99], Sampling(max_tokens=4), 1)]

    async def work(engine: Engine) -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        while (await engine.health()).running == 0:
            await asyncio.sleep(0)
        assert (await engine.health()).waiting == 1
        await engine.pause(finish=True)
        health = await engine.health()
        assert (health.running, health.waiting) == (0, 1)
        assert tasks[0].done()
        await engine.resume()
        return await asyncio.gather(*tasks)

    done = run(policy, work, max_rows=1)
    for (prompt, sampling, _), completion in zip(requests, done, strict=True):
        assert_agrees(naive, prompt, completion, sampling)


def test_an_engine_that_fails_while_requests_are_to_end_fails_them(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate([7], Sampling(max_tokens=900, top_k=1), 0))
        while (await engine.health()).running == 0:
            await asyncio.sleep(0)
        pause = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        monkeypatch.setattr(policy, "hidden", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await task
        await asyncio.wait_for(pause, 5)
        assert not (await engine.health()).ok

    run(policy, work)


def test_a_failing_model_fails_who_waits_and_who_comes_later(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise ZeroDivisionError("planted")

    async def work(engine: Engine) -> None:
        monkeypatch.setattr(policy, "hidden", broken)
        requests = [engine.generate([7], Sampling(), key) for key in range(3)]
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "planted" in str(outcome)
        with pytest.raises(EngineError, match="planted"):
            await engine.generate([7], Sampling(), 0)
        assert not (await engine.health()).ok

    run(policy, work)


def test_logits_that_are_not_finite_are_an_error(tiny_model: Path) -> None:
    with live_policy(tiny_model) as policy:
        with torch.no_grad():
            next(iter(policy.model.parameters()))[72] = float("nan")
        with pytest.raises(EngineError, match="not finite"):
            sample(policy, [([72], Sampling(), 0)])


def test_score_is_a_plain_forward(policy: Policy, naive: Any) -> None:
    tokens = [5, 99, 31, 7, 200, 14]
    with torch.no_grad():
        expected = logprobs_of(naive, tokens[:1], tokens[1:], Sampling())
    got = run(policy, lambda engine: engine.score(tokens))
    torch.testing.assert_close(torch.tensor(got), expected, rtol=0, atol=1e-5)


def chain_model(folder: Path, tiny_model: Path, text: str) -> Path:
    """A real model without a choice: each byte of ``text`` is followed by the next one, the last by the end token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    size = 264  # above the vocabulary, so that every token is a direction of its own
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        model.lm_head.weight.zero_()
        after = dict(zip(ids[-2::-1], ids[:0:-1], strict=True))  # the first successor of a byte that comes twice
        model.lm_head.weight[list(after.values()), list(after)] = 50.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["def", "ß" * 20, "→" * 12], ids=["ascii", "two bytes", "three bytes"])
def test_a_stop_text_ends_an_answer_and_stays_in_it(tmp_path: Path, tiny_model: Path, stop: str) -> None:
    """Also a long one whose characters take several tokens each."""
    with live_policy(chain_model(tmp_path / "chain", tiny_model, f"abc{stop}xyz")) as policy:
        first = policy.tokenizer.encode("a", add_special_tokens=False)
        stopped, free = Sampling(temperature=0, max_tokens=100, stop=("never", stop)), Sampling(temperature=0)
        done, other = sample(policy, [(first, stopped, 0), (first, free, 0)])
        assert policy.tokenizer.decode(done.tokens) == f"bc{stop}"
    assert done.finish == "stop"
    assert len(other.tokens) > len(done.tokens), "one request's stop text is not its neighbour's"


def test_the_end_token_ends_an_answer_and_stays_in_it(tmp_path: Path, tiny_model: Path) -> None:
    with live_policy(chain_model(tmp_path / "chain", tiny_model, "abcdef")) as policy:
        first = policy.tokenizer.encode("a", add_special_tokens=False)
        (done,) = sample(policy, [(first, Sampling(temperature=0, max_tokens=100), 0)])
        assert policy.tokenizer.decode(done.tokens) == "bcdef<|im_end|>"
        assert done.finish == "stop"
        assert done.logprobs == pytest.approx([0.0] * 6, abs=1e-5)
