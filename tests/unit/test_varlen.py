"""The one-kernel attention of packed rows: with a stand-in for the kernel anywhere, with the kernel itself on a GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.naive_attention import naive
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from tandem.model import _varlen, attention
from tandem.model.attention import NAME, Packed, sequential_positions
from tandem.model.plans import Spans

PLAN = Packed(lengths=(7, 5, 1, 12, 3, 4, 9, 1, 2), parents=(None, 0, 1, None, 3, None, 0, 4, 1))
"""Prompts continued in several ways, some of which are continued in turn, and a lonely sequence."""
LONG = Packed(lengths=(300, 130, 257, 64, 1, 90, 500), parents=(None, 0, 0, 1, 3, None, None))
"""Across the borders of a kernel's tiles."""
FLAT = Packed(lengths=(4, 1, 6), parents=(None, None, None))
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows take the kernel's way on any device, and the kernel is the naive one."""

    def way(heads: _varlen.Heads, plan: Packed) -> Any:
        return _varlen.attend(heads, plan.spans(heads.query.device))

    monkeypatch.setattr(_varlen, "_KERNEL", naive)
    monkeypatch.setattr(attention, "_segments", way)


@pytest.fixture
def strict() -> Iterator[None]:
    """No call may make the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def row(plan: Packed, heads: int, groups: int, size: int, device: str = "cpu") -> list[Tensor]:
    """Query, key and value of a row, (1, heads, T, size), as a model lays them out; and a gradient to send back."""
    draw = torch.Generator().manual_seed(1)
    length = sum(plan.lengths)
    tensors = [torch.randn(1, length, h, size, generator=draw) for h in (heads, groups, groups, heads)]
    return [x.to(device).transpose(1, 2) if i < 3 else x.to(device) for i, x in enumerate(tensors)]


def both(
    way: Callable[..., Tensor], plan: Packed, tensors: list[Tensor], dtype: torch.dtype, window: int | None
) -> list[Tensor]:
    """Value and gradients of one of the two ways."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    query, key, value = leaves
    at = plan.spans(query.device) if way is _varlen.attend else plan
    out = way(_varlen.Heads(query, key, value, 0.2, window), at)
    grads = torch.autograd.grad(out, leaves, tensors[3].to(out.dtype))
    return [out.detach(), *grads]


@pytest.mark.parametrize("plan", [PLAN, FLAT], ids=["tree", "flat"])
@pytest.mark.parametrize("window", [None, 6, 1])
def test_the_kernels_way_is_that_of_segments(plan: Packed, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, so that places, ends, alignment and windows are exact or wrong."""
    monkeypatch.setattr(_varlen, "_KERNEL", naive)
    tensors = row(plan, 4, 2, 8)
    outputs, expected = (
        both(way, plan, tensors, torch.float32, window) for way in (_varlen.attend, attention._segments)
    )
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [PLAN, FLAT, LONG], ids=["tree", "flat", "long"])
def test_sequence_by_sequence_is_the_way_of_segments(plan: Packed) -> None:
    """With torch's plain attention in the place of cuDNN's, which has no CPU kernel."""

    def squares(heads: _varlen.Heads, plan: Packed) -> Tensor:
        return attention.by_sequence(heads, plan, SDPBackend.MATH)

    tensors = row(plan, 4, 2, 8)
    outputs, expected = (both(way, plan, tensors, torch.float32, None) for way in (squares, attention._segments))
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "parents", "long"),
    [
        ((8192,), (None,), True),
        ((4000, 300), (None, None), False),
        ((500, 8000, 8000), (None, 0, 0), True),
        ((9000, 500, 500), (None, 0, 0), False),
        ((6000, 100, 100, 100), (None, None, None, None), True),
    ],
    ids=["one", "nearly", "a short prompt", "a long prompt", "most of it"],
)
def test_rows_are_long_by_where_their_attention_is(
    lengths: tuple[int, ...], parents: tuple[int | None, ...], long: bool
) -> None:
    assert Packed(lengths=lengths, parents=parents).long == long


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig], ids=["llama", "mistral"])
def test_a_model_on_the_kernels_way_is_its_sequences(kind: Any) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = kind(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    if kind is MistralConfig:
        config.sliding_window = 6
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
    tokens = torch.arange(sum(PLAN.lengths)) % 61
    positions = torch.tensor(sequential_positions(PLAN))[None]
    with torch.no_grad():
        whole = model.model(input_ids=tokens[None], position_ids=positions, use_cache=False, plan=PLAN)
        outputs, pieces = whole.last_hidden_state[0].split(PLAN.lengths), tokens.split(PLAN.lengths)
        model.set_attn_implementation("eager")
        for i, length in enumerate(PLAN.lengths):
            ids = torch.cat([pieces[a] for a in (*PLAN.ancestors(i), i)])
            alone = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -length:]
            torch.testing.assert_close(outputs[i], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_shapes_alone_go_the_kernels_way_too(device: str) -> None:
    """Memory is planned by tensors that hold nothing."""
    plan = dataclasses.replace(PLAN)  # what it builds holds nothing either
    shapes = [(1, heads, sum(plan.lengths), 64) for heads in (4, 2, 2)]
    with FakeTensorMode():
        tensors = [torch.empty(shape, device=device) for shape in shapes]
        sent = tensors[0].transpose(1, 2)
        outputs = both(_varlen.attend, plan, [*tensors, sent], torch.bfloat16, None)
    assert [tuple(x.shape) for x in outputs] == [tuple(sent.shape), *shapes]


def test_a_row_without_shared_parts_is_not_copied() -> None:
    assert FLAT.spans(torch.device("cpu")).keys is None


def test_a_bound_of_one_query_is_never_given() -> None:
    """Kernels take it for decoding, and lay their results out in a way that has no backward pass."""
    ones = Packed(lengths=(1, 1), parents=(None, 0))
    spans: Spans = ones.spans(torch.device("cpu"))
    assert spans.most_queries == 2
    assert spans.most_keys == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_copies_of_a_row_send_their_gradients_back_in_float32(device: str) -> None:
    """300 times 1 is 300; a GPU that added one by one in bfloat16 would find 256."""
    rows = torch.zeros(2, 1, 8, dtype=torch.bfloat16, requires_grad=True, device=device)
    _varlen.repeated(rows, torch.tensor([0] * 300 + [1], device=device)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == torch.bfloat16
    assert rows.grad[:, 0, 0].tolist() == [300.0, 1.0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "bfloat16 and float16, not float32"),
        ({"size": 12}, "steps of 8, not 12"),
        ({"size": 264}, "up to 256"),
        ({"capability": (7, 5)}, "capability 8.0"),
        ({"has_kernel": False}, "no variable-length"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_what_the_kernel_cannot_take_is_said(
    change: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"dtype": torch.bfloat16, "size": 16, "window": None, "scaling": 0.3, **change}
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: case.get("has_kernel", True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case.get("capability", (9, 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    x: Any = SimpleNamespace(dtype=case["dtype"], device=torch.device("cuda"), shape=(1, 2, 3, case["size"]))
    heads = _varlen.Heads(x, x, x, case["scaling"], case["window"])
    refusal = _varlen.unsupported_input(x.dtype, x.device) or _varlen.misfit(heads)
    assert refusal is None if why is None else why in (refusal or "")


def test_the_slow_way_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    attention._notice.cache_clear()
    with caplog.at_level(logging.WARNING):
        for why in ("its kernel runs on a GPU", "its kernel runs on a GPU"):
            attention._notice(why)
    (record,) = caplog.records
    assert "segment by segment" in record.message
    assert record.message.endswith("since its kernel runs on a GPU")


@CUDA
@pytest.mark.parametrize("plan", [PLAN, LONG, FLAT], ids=["tree", "long", "flat"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 2, 128), (9, 3, 64), (4, 4, 32)])
def test_the_kernel_computes_what_segments_do(
    plan: Packed, window: int | None, heads: int, groups: int, size: int
) -> None:
    """In bfloat16, against float32: as near as segments in bfloat16 are, and alignment is nothing to be near."""
    tensors = row(plan, heads, groups, size, "cuda")
    exact = both(attention._segments, plan, [x.bfloat16() for x in tensors], torch.float32, window)
    outputs = both(_varlen.attend, plan, tensors, torch.bfloat16, window)
    for name, one, other in zip(("out", "query", "key", "value"), outputs, exact, strict=True):
        assert (one.float() - other).norm() <= 0.01 * other.norm(), name


@CUDA
def test_the_kernel_is_what_a_model_on_a_gpu_runs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    calls: list[int] = []
    whole = _varlen.attend

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return whole(*args)

    monkeypatch.setattr(_varlen, "attend", counted)
    query, key, value, _ = (x.bfloat16() for x in row(PLAN, 4, 2, 64, "cuda"))
    module, plan = torch.nn.Identity(), dataclasses.replace(PLAN)
    request.getfixturevalue("strict")
    attention.attend(module, query, key, value, None, scaling=0.125, plan=plan)
    assert calls == [1]
    torch.cuda.set_sync_debug_mode("default")  # segments may wait
    attention.attend(module, query.float(), key.float(), value.float(), None, scaling=0.125, plan=PLAN)
    assert calls == [1], "float32 goes segment by segment"


def test_kernels_are_compared_apart_from_a_layer_that_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpointed forward records must be what its recomputation does, which finds the comparison made."""

    def compare(*shape: Any) -> bool:
        leaf = torch.ones(3, requires_grad=True)
        (leaf.exp() * leaf).sum().backward()
        return True

    def layer(x: Tensor) -> Tensor:
        return x.exp() if attention._cudnn_is_faster(4, 2, 8, torch.bfloat16) else x

    monkeypatch.setattr(attention, "_compare_kernels", compare)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    attention._cudnn_is_faster.cache_clear()
    x = torch.ones(3, requires_grad=True)
    try:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    finally:
        attention._cudnn_is_faster.cache_clear()
    torch.testing.assert_close(x.grad, x.exp().detach())
