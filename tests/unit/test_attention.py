"""Tandem's attention over packed trees against transformers' own, one sequence at a time: values and gradients."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import live_policy
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tandem.errors import ConfigError, EngineError
from tandem.model import packing
from tandem.model.attention import NAME, KVCache, Packed, decode_plan, sequential_positions

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
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
WINDOW = 8
"""Shorter than most of the sequences, and than what some of their segments come after."""
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, one key head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "smollm": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**SIZES, pad_token_id=0),  # some layers know no positions
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, some layers with a window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),  # 4 heads of 16 are wider than the hidden size
    "qwen3 moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2),
    "olmo2": Olmo2Config(**SIZES),
    "glm": GlmConfig(**SIZES, head_dim=8, pad_token_id=0),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "granite": GraniteConfig(**SIZES, attention_multiplier=0.3),  # another scale than a head's size gives
}


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same weights with transformers' attention and with Tandem's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = AutoModelForCausalLM.from_config(
            copy.deepcopy(CONFIGS[request.param]), attn_implementation="eager", dtype=torch.float32
        ).eval()
        for parameter in plain.parameters():  # biases and norms start at 0 and 1, where mistakes hide
            parameter.data += torch.randn_like(parameter) * 0.1
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation(NAME)
    return plain, ours


def body(model: Any) -> Any:
    """Without its head."""
    return getattr(model, model.base_model_prefix)


def hidden(ours: Any, tokens: list[int], plan: Packed) -> Tensor:
    positions = torch.tensor(sequential_positions(plan))[None]
    out = body(ours)(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False, plan=plan)
    return out.last_hidden_state[0]  # type: ignore[no-any-return]


def plain_hidden(plain: Any, tokens: list[int]) -> Tensor:
    return body(plain)(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]


def tree() -> tuple[list[list[int]], tuple[int | None, ...], list[int]]:
    """Two prompts, each continued in several ways, some of which are continued in turn, and a lonely sequence."""
    draw = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 64, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    segments = [ids(7), ids(5), ids(1), ids(12), ids(3), ids(4), ids(9), ids(1), ids(2)]
    return segments, (None, 0, 1, None, 3, None, 0, 4, 1), [len(s) for s in segments]


@pytest.mark.slow
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
    for i in range(len(segments)):
        before = [t for a in plan.ancestors(i) for t in segments[a]]
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


@pytest.mark.slow
def test_a_neighbour_is_invisible(pair: tuple[Any, Any]) -> None:
    """Changing one sibling changes nothing but it and what continues it, not in the last bit.

    Experts multiply the rows they are given together, so those of others may round otherwise.
    """
    _, ours = pair
    segments, parents, lengths = tree()
    plan = Packed(lengths=tuple(lengths), parents=parents)
    with torch.no_grad():
        first = hidden(ours, [t for s in segments for t in s], plan).split(lengths)
        segments[4] = [(t + 1) % 64 for t in segments[4]]
        second = hidden(ours, [t for s in segments for t in s], plan).split(lengths)
    rounding = 1e-5 if any(hasattr(ours.config, name) for name in ("num_experts", "num_local_experts")) else 0.0
    assert [i for i in range(len(segments)) if float((first[i] - second[i]).abs().max()) > rounding] == [4, 7]


@pytest.mark.slow
def test_decoding_from_a_stored_prompt_is_the_whole_sequence(pair: tuple[Any, Any]) -> None:
    """Two prompts in one row, one stored for two rows; then rows go on alone, past the cache's first size."""
    plain, ours = pair
    segments, _, _ = tree()
    prompts = [segments[0], segments[3]]
    rows = [0, 1, 0]  # prompt of each row
    cache = KVCache(4)
    cache.reserve(13)
    continuations: list[list[int]] = [[(7 * r + 3 * i) % 64 for i in range(70)] for r in range(3)]
    hidden_states: list[list[Tensor]] = [[], [], []]
    with torch.no_grad():
        plan = Packed(lengths=(7, 12), parents=(None, None), store=(cache, ((0, 2), (1,))))
        hidden(ours, [*prompts[0], *prompts[1]], plan)
        for i in range(70):
            step = decode_plan(cache, [len(prompts[p]) + i for p in rows], torch.device("cpu"), torch.float32)
            tokens = torch.tensor([[continuations[r][i]] for r in range(3)])
            out = body(ours)(input_ids=tokens, position_ids=step.positions_R[:, None], use_cache=False, plan=step)
            for r in range(3):
                hidden_states[r].append(out.last_hidden_state[r, 0])
        for r, p in enumerate(rows):
            alone = plain_hidden(plain, [*prompts[p], *continuations[r]])[len(prompts[p]) :]
            torch.testing.assert_close(torch.stack(hidden_states[r]), alone, rtol=1e-5, atol=1e-5)
    assert cache.capacity >= 82


def test_positions_go_on_from_the_parent() -> None:
    plan = Packed(lengths=(3, 2, 1, 2, 2, 2), parents=(None, 0, 0, None, 3, 1))
    assert sequential_positions(plan).tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 5, 6]
    assert plan.longest == 7
    assert plan.ancestors(5) == [0, 1]


@pytest.mark.parametrize("parents", [(1, None), (None, 1), (None, -1)])
def test_a_segment_continues_an_earlier_one(parents: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match="earlier"):
        Packed(lengths=(2, 2), parents=parents)


def test_a_plan_with_other_parents_keeps_nothing_of_the_old() -> None:
    plan = Packed(lengths=(2, 2), parents=(None, 0))
    cpu = torch.device("cpu")
    assert plan.spans(cpu).key_ends.tolist() == [0, 2, 6]
    assert dataclasses.replace(plan, parents=(None, None)).spans(cpu).key_ends.tolist() == [0, 2, 4]


def test_a_cache_keeps_what_it_holds() -> None:
    cache = KVCache(3)
    cache.reserve(5)
    capacity, like = cache.capacity, torch.ones(1, 2, 1, 4)
    cache.of(1, like, like[..., :3])
    cache.keys[1][2, :, :5], cache.values[1][2, :, :5] = 3.0, 4.0
    cache.reserve(capacity)
    assert cache.capacity == capacity
    cache.reserve(capacity + 1)
    assert cache.capacity > capacity + 1, "it grows by more than is asked"
    assert cache.keys[1][2, :, :5].eq(3).all()
    assert cache.values[1][2, :, :5].eq(4).all()
    assert cache.keys[1][2, :, 5:].eq(0).all(), "a masked number must be a number"
    cache.move(2, 0, 4)
    assert cache.keys[1][0, :, :4].eq(3).all()
    assert cache.keys[1][0, :, 4:].eq(0).all()
    cache.clear()
    assert (cache.capacity, cache.keys) == (0, {})
    cache.reserve(1)
    assert cache.of(0, like, like[..., :3])[1].shape == (3, 2, cache.capacity, 3), "values may be of another width"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Gemma2Config(**SIZES), "softcap"),
        (GptOssConfig(**SIZES, num_local_experts=4, head_dim=8), "s_aux"),
        (DogeConfig(**SIZES), "mask of its own"),
    ],
    ids=["softcap", "sinks", "mask"],
)
def test_an_attention_with_terms_of_its_own_is_refused_when_it_runs(config: PretrainedConfig, why: str) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
    with pytest.raises(EngineError, match=why):
        hidden(model, [1, 2, 3], Packed(lengths=(3,), parents=(None,)))


def test_a_model_with_more_than_its_head_behind_its_layers_is_refused() -> None:
    config = ModernBertDecoderConfig(**{**SIZES, "vocab_size": 50_368})
    with pytest.raises(ConfigError, match="from its head's, scaled and capped"):
        packing.chosen(config)


def test_a_model_that_could_slide_but_does_not_is_fine() -> None:
    config = Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
    assert hidden(model, [1, 2, 3], Packed(lengths=(3,), parents=(None,))).isfinite().all()


def test_without_a_plan_it_says_what_to_call(tiny_model: Path) -> None:
    with live_policy(tiny_model) as policy, pytest.raises(EngineError, match=r"Policy\.hidden"):
        policy.model(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's tracer looks at it
def test_compiled_layers_are_compiled_once_for_all_plans() -> None:
    """What attention is told differs from one micro-batch to the next; the graphs around it must not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(**SIZES)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
    compiled = copy.deepcopy(plain)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("eager")
    for layer in compiled.model.layers:
        layer.compile(backend=counted, dynamic=True)
    graphs = []
    for lengths, parents in [((7, 5, 3), (None, 0, 0)), ((30,), (None,)), ((12, 5, 6, 1), (None, 0, 1, None))]:
        plan = Packed(lengths=lengths, parents=parents)
        tokens = [(7 * t) % 64 for t in range(sum(lengths))]
        actual, expected = (hidden(model, tokens, plan) for model in (compiled, plain))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        for out in (actual, expected):
            (out.sin()).sum().backward()  # type: ignore[no-untyped-call]
        graphs.append(counted.frame_count)
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}, "another plan was compiled for"
    for one, other in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
