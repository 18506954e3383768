"""Tandem's attention over packed trees against transformers' own, one sequence at a time: values and gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import live_policy
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tandem.errors import EngineError
from tandem.policy.attention import NAME, KVCache, Packed, decode_plan, sequential_positions

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, one key head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),  # 4 heads of 16 are wider than the hidden size
}


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same weights with transformers' attention and with Tandem's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = AutoModelForCausalLM.from_config(
            copy.deepcopy(CONFIGS[request.param]), attn_implementation="sdpa", dtype=torch.float32
        ).eval()
        for parameter in plain.parameters():  # biases and norms start at 0 and 1, where mistakes hide
            parameter.data += torch.randn_like(parameter) * 0.1
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation(NAME)
    return plain, ours


def hidden(ours: Any, tokens: list[int], plan: Packed) -> Tensor:
    positions = torch.tensor([sequential_positions(plan)])
    out = ours.model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False, plan=plan)
    return out.last_hidden_state[0]  # type: ignore[no-any-return]


def plain_hidden(plain: Any, tokens: list[int]) -> Tensor:
    return plain.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]


def tree() -> tuple[list[list[int]], tuple[int | None, ...], list[int]]:
    """Three sequences that share a prompt (one of them goes no further), two that share another, and a lonely one."""
    draw = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 64, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    segments = [ids(7), ids(5), ids(1), ids(12), ids(3), ids(4), ids(9), ids(1), ids(2)]
    return segments, (None, 0, 0, None, 3, None, 0, 3, 5), [len(s) for s in segments]


def test_a_packed_tree_is_its_sequences(pair: tuple[Any, Any]) -> None:
    """Every token of every segment: its hidden state, and what a loss on it does to every weight."""
    plain, ours = pair
    segments, parents, lengths = tree()
    plan = Packed(lengths=tuple(lengths), parents=parents)
    weights = [torch.randn(n, 32, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths)]

    plain.zero_grad()
    ours.zero_grad()
    packed = hidden(ours, [t for s in segments for t in s], plan).split(lengths)
    sum((x * w).sum() for x, w in zip(packed, weights, strict=True)).backward()  # type: ignore[union-attr]
    loss = torch.zeros(())
    for i, parent in enumerate(parents):
        before = [] if parent is None else segments[parent]
        alone = plain_hidden(plain, [*before, *segments[i]])[len(before) :]
        torch.testing.assert_close(packed[i], alone, rtol=1e-5, atol=1e-5)
        loss = loss + (alone * weights[i]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    expected = dict(plain.named_parameters())
    norm = torch.stack([p.grad.norm() for p in expected.values() if p.grad is not None]).norm()
    for name, parameter in ours.named_parameters():
        if expected[name].grad is None:
            assert parameter.grad is None  # the head: only hidden states are asked for
            continue
        assert (parameter.grad - expected[name].grad).norm() <= 1e-5 * norm, name


def test_a_neighbour_is_invisible(pair: tuple[Any, Any]) -> None:
    """Changing one sibling changes no other segment, not in the last bit."""
    _, ours = pair
    segments, parents, lengths = tree()
    plan = Packed(lengths=tuple(lengths), parents=parents)
    with torch.no_grad():
        first = hidden(ours, [t for s in segments for t in s], plan).split(lengths)
        segments[1] = [(t + 1) % 64 for t in segments[1]]
        second = hidden(ours, [t for s in segments for t in s], plan).split(lengths)
    assert [i for i in range(len(segments)) if not torch.equal(first[i], second[i])] == [1]


def test_decoding_from_a_stored_prompt_is_the_whole_sequence(pair: tuple[Any, Any]) -> None:
    """Two prompts in one row, one stored for two rows; then rows go on alone, past the cache's first size."""
    plain, ours = pair
    segments, _, _ = tree()
    prompts = [segments[0], segments[3]]
    rows = [0, 1, 0]  # prompt of each row
    config = ours.config
    cache = KVCache(
        layers=2,
        rows=4,
        heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or 8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.reserve(13)
    said: list[list[int]] = [[(7 * r + 3 * i) % 64 for i in range(70)] for r in range(3)]
    found: list[list[Tensor]] = [[], [], []]
    with torch.no_grad():
        plan = Packed(lengths=(7, 12), parents=(None, None), store=(cache, ((0, 2), (1,))))
        hidden(ours, [*prompts[0], *prompts[1]], plan)
        for i in range(70):
            step = decode_plan(cache, [len(prompts[p]) + i for p in rows], torch.device("cpu"), torch.float32)
            tokens = torch.tensor([[said[r][i]] for r in range(3)])
            out = ours.model(input_ids=tokens, position_ids=step.positions_R[:, None], use_cache=False, plan=step)
            for r in range(3):
                found[r].append(out.last_hidden_state[r, 0])
        for r, p in enumerate(rows):
            alone = plain_hidden(plain, [*prompts[p], *said[r]])[len(prompts[p]) :]
            torch.testing.assert_close(torch.stack(found[r]), alone, rtol=1e-5, atol=1e-5)
    assert cache.capacity >= 82


def test_positions_go_on_from_the_parent() -> None:
    plan = Packed(lengths=(3, 2, 1, 2, 2), parents=(None, 0, 0, None, 3))
    assert sequential_positions(plan) == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]


def test_a_cache_keeps_what_it_holds() -> None:
    cache = KVCache(layers=2, rows=3, heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(5)
    capacity = cache.capacity
    cache.keys[1][2, :, :5], cache.values[0][2, :, :5] = 3.0, 4.0
    cache.reserve(capacity)
    assert cache.capacity == capacity
    cache.reserve(capacity + 1)
    assert cache.capacity > capacity + 1, "it grows by more than is asked"
    assert cache.keys[1][2, :, :5].eq(3).all()
    assert cache.values[0][2, :, :5].eq(4).all()
    assert cache.keys[1][2, :, 5:].eq(0).all(), "a masked number must be a number"
    cache.move(2, 0, 4)
    assert cache.keys[1][0, :, :4].eq(3).all()
    assert cache.keys[1][0, :, 4:].eq(0).all()
    cache.clear()
    assert cache.capacity == sum(t.numel() for t in cache.keys) == 0
    cache.reserve(1)
    assert cache.keys[0].shape == (3, 2, cache.capacity, 4)


def test_a_sliding_window_is_refused() -> None:
    """It would be computed as full attention: wrong beyond the window, and nothing would say so."""
    for config in (
        MistralConfig(**SIZES, sliding_window=8),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
        with pytest.raises(EngineError, match="sliding_window"):
            hidden(model, [1, 2, 3], Packed(lengths=(3,), parents=(None,)))


def test_a_model_that_could_slide_but_does_not_is_fine() -> None:
    config = Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
    assert hidden(model, [1, 2, 3], Packed(lengths=(3,), parents=(None,))).isfinite().all()


def test_without_a_plan_it_says_what_to_call(tiny_model: Path) -> None:
    with live_policy(tiny_model) as policy, pytest.raises(EngineError, match=r"Policy\.hidden"):
        policy.model(input_ids=torch.tensor([[1, 2]]))
