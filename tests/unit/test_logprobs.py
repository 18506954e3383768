"""Logprobs by tiles against float64 log-softmax: values, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiers import long_but
from support.tiny_policy import Largest
from torch import Tensor
from torch._dynamo.utils import counters

from tandem.model.compilation import forgiving, missing
from tandem.model.logprobs import token_logprobs
from tandem.model.sampling import restrict


def case(n: int, vocab: int = 300, hidden: int = 24, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    weight = torch.randn(vocab, hidden) * 0.5
    return torch.randn(n, hidden), weight, torch.randint(vocab, (n,)), torch.rand(n) + 0.5, torch.randn(n)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, upstream: Tensor, **limits: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropy and both gradients in float64, with every logit held at once."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    scale = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    logprobs_NV = restrict((hidden @ weight.T) / scale, **limits).log_softmax(-1)
    logprobs = logprobs_NV.gather(1, targets[:, None])[:, 0]
    logprobs.backward(upstream.double())
    entropy = torch.special.entr(logprobs_NV.detach().exp()).sum(-1)
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), entropy, hidden.grad, weight.grad


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


FROZEN = pytest.mark.parametrize("frozen", [False, True])
"""Whether the weight is: its gradient by the hidden states is then summed up in the forward pass."""


def run(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, upstream: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """With ``frozen``, the weight's gradient is that of another call: there it has none."""
    if options.pop("frozen", False):
        trained = run(hidden, weight, targets, temperature, upstream, **options)
        hidden = hidden.clone().requires_grad_()
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, **options)
        logprobs.backward(upstream)
        assert hidden.grad is not None
        assert torch.equal(logprobs, trained[0])
        return logprobs.detach(), entropy, hidden.grad, trained[3]
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, **options)
    logprobs.backward(upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), entropy, hidden.grad, weight.grad


@pytest.mark.parametrize("n", [1, 2, 50])
@pytest.mark.parametrize("per_token", [True, False])
@FROZEN
def test_values_and_gradients_equal_float64(n: int, per_token: bool, frozen: bool) -> None:
    hidden, weight, targets, temperatures, upstream = case(n)
    temperature = temperatures if per_token else 0.7
    want = reference(hidden, weight, targets, temperature, upstream)
    got = run(hidden, weight, targets, temperature, upstream, entropy=True, tile=50 * 64, frozen=frozen)
    for ours, theirs in zip(got, want, strict=True):
        assert ours is not None
        assert ours.dtype == torch.float32
        assert relative(ours, theirs) < 1e-6


@FROZEN
def test_gradient_of_confident_tokens_keeps_its_digits(frozen: bool) -> None:
    """Where p is near 1, 1 - p must not be the difference of two bfloat16 numbers: it would be lost entirely."""
    torch.manual_seed(0)
    hidden = torch.eye(24).bfloat16()
    weight = (torch.randn(300, 24) * 8).round().clamp(-31, 24).bfloat16() / 4  # every logit is exact in bfloat16
    targets = torch.arange(24)
    weight[targets, targets] = 14.0
    args = (hidden, weight, targets, 1.0, torch.ones(24))
    want, got = reference(*args), run(*args, frozen=frozen)
    assert 0.99 < float(want[0].exp().min()) < float(want[0].exp().max()) < 0.9999
    assert relative(got[2], want[2]) < 8e-3
    assert relative(got[3], want[3]) < 8e-3


@pytest.mark.parametrize("tile", [1, 64, 1000, 5000, 10**9])
@FROZEN
def test_result_does_not_depend_on_the_tile(tile: int, frozen: bool) -> None:
    args = case(33)
    whole = run(*args, entropy=True, frozen=frozen)
    tiled = run(*args, entropy=True, tile=tile, frozen=frozen)
    for a, b in zip(whole, tiled, strict=True):
        assert a is not None
        assert b is not None
        assert relative(b, a.double()) < 1e-6


def test_rows_do_not_depend_on_their_neighbours() -> None:
    hidden, weight, targets, temperature, upstream = case(40)
    whole = run(hidden, weight, targets, temperature, upstream)
    for rows in (slice(0, 7), slice(39, 40)):
        part = run(hidden[rows], weight, targets[rows], temperature[rows], upstream[rows])
        assert torch.allclose(part[0], whole[0][rows], rtol=1e-6, atol=1e-6)
        assert torch.allclose(part[2], whole[2][rows], rtol=1e-5, atol=1e-6)


@FROZEN
def test_bfloat16_is_within_its_rounding(frozen: bool) -> None:
    hidden, weight, targets, temperature, upstream = case(50)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    want = reference(hidden, weight, targets, temperature, upstream)
    got = run(hidden, weight, targets, temperature, upstream, entropy=True, tile=64 * 50, frozen=frozen)
    assert got[0].dtype == torch.float32
    assert got[3].dtype == torch.bfloat16
    assert relative(got[0], want[0]) < 4e-3
    assert got[1] is not None
    assert relative(got[1], want[1]) < 4e-3
    assert relative(got[2], want[2]) < 8e-3
    assert relative(got[3], want[3]) < 8e-3


@FROZEN
def test_extreme_logits_stay_finite(frozen: bool) -> None:
    hidden, weight, targets, _, upstream = case(20)
    for factor in (1e4, 1e-4):
        got = run(hidden * factor, weight, targets, 1.0, upstream, entropy=True, tile=64 * 20, frozen=frozen)
        for tensor in got:
            assert tensor is not None
            assert bool(tensor.isfinite().all())
        assert relative(got[0], reference(hidden * factor, weight, targets, 1.0, upstream)[0]) < 1e-6


@FROZEN
def test_no_tokens(frozen: bool) -> None:
    hidden, weight, targets, _, upstream = case(0)
    for limits in ({}, {"top_p": 0.9}):
        logprobs, entropy, grad_hidden, grad_weight = run(
            hidden, weight, targets, 1.0, upstream, entropy=True, frozen=frozen, **limits
        )
        assert logprobs.shape == (0,)
        assert entropy is not None
        assert entropy.shape == (0,)
        assert grad_hidden.shape == hidden.shape
        assert not grad_weight.any()


def test_frozen_weight_gets_no_gradient_and_bias_gets_its_own() -> None:
    hidden, weight, targets, temperature, upstream = case(10)
    bias = torch.randn(300)
    ours = [hidden.clone().requires_grad_(), bias.clone().requires_grad_()]
    token_logprobs(ours[0], weight, targets, temperature, bias=ours[1], tile=640)[0].backward(upstream)
    theirs = [hidden.double().requires_grad_(), bias.double().requires_grad_()]
    logits = (theirs[0] @ weight.double().T + theirs[1]) / temperature[:, None]
    logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].backward(upstream.double())
    assert weight.grad is None
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert relative(a.grad, b.grad) < 1e-6


@pytest.mark.parametrize("limits", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 20}])
@FROZEN
def test_support_is_renormalised_as_it_was_sampled(limits: dict[str, float], frozen: bool) -> None:
    hidden, weight, _, temperature, upstream = case(30)
    targets = (hidden @ weight.T).argmax(-1)
    want = reference(hidden, weight, targets, temperature, upstream, **limits)
    got = run(hidden, weight, targets, temperature, upstream, entropy=True, tile=64 * 30, frozen=frozen, **limits)
    for ours, theirs in zip(got, want, strict=True):
        assert ours is not None
        assert relative(ours, theirs) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}])
def test_the_edge_of_the_support_is_inside_whatever_the_tile(limits: dict[str, Any]) -> None:
    """The edge comes from products of another shape than the tiles', whose last bits may differ."""
    for seed in range(40):
        hidden, weight, _, temperature, upstream = case(24, vocab=1000, hidden=96, seed=seed)
        likeliest = (hidden @ weight.T).argmax(-1)
        want, *_ = reference(hidden, weight, likeliest, temperature, upstream, **limits)
        for tile in (24 * 64, 24 * 320, 1 << 20):
            got, _ = token_logprobs(hidden, weight, likeliest, temperature, tile=tile, **limits)
            assert (got.double() - want).abs().max() < 2e-5, (seed, tile)


def test_target_outside_the_recomputed_support_is_counted_in() -> None:
    """Engine and trainer may disagree on a token at the edge by a rounding; it was sampled all the same."""
    hidden, weight, _, _, upstream = case(6)
    logits = hidden.double() @ weight.double().T
    order = logits.argsort(-1, descending=True)
    got = run(hidden, weight, order[:, 5], 1.0, upstream, top_k=5)
    kept = logits.gather(1, order[:, :6]).log_softmax(-1)[:, 5]
    assert relative(got[0], kept) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}])
@FROZEN
def test_no_tensor_grows_with_tokens_times_vocabulary(limits: dict[str, int], frozen: bool) -> None:
    seen = {}
    for n, vocab in ((64, 4096), (256, 4096), (64, 16384), (256, 16384)):
        hidden, weight, targets, _, upstream = case(n, vocab, hidden=4)
        with Largest() as largest:
            run(hidden, weight, targets, 1.0, upstream, entropy=True, tile=1 << 15, frozen=frozen, **limits)
        seen[n, vocab] = largest.elements
        assert largest.elements <= max(1 << 15, vocab * 4)
    assert seen[256, 4096] == seen[64, 4096]


@pytest.mark.skipif(missing(torch.device("cpu")) is not None, reason=f"there is no {missing(torch.device('cpu'))}")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", long_but([torch.float32, torch.bfloat16], torch.float32))
@FROZEN
def test_compiled_arithmetic_gives_the_same_from_one_code_for_any_number_of_tokens(
    dtype: torch.dtype, frozen: bool
) -> None:
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for n in (50, 33, 7, 600, 520):
        hidden, weight, *rest = case(n)
        args = (hidden.to(dtype), weight.to(dtype), *rest)
        options = {"entropy": True, "tile": 64 * n, "frozen": frozen}
        eager, compiled = (run(*args, **options, compile=compile) for compile in (False, True))
        for ours, theirs in zip(compiled, eager, strict=True):
            assert ours is not None
            assert theirs is not None
            assert relative(ours, theirs.double()) < (1e-6 if dtype is torch.float32 else 2e-3)
        graphs.append(counters["stats"]["unique_graphs"])
    each = 2 + frozen  # one forward, one backward; one for both with a frozen weight
    assert graphs == [each] * 3 + [2 * each] * 2, "of few rows and of many"
    torch._dynamo.reset()


def test_a_kernel_that_cannot_be_built_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    @torch._dynamo.register_backend(name="broken")
    def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        raise RuntimeError("PassManager::run failed")

    fast = torch.compile(lambda x: (x * 2).sum(), backend=forgiving("broken", "the slope"))
    assert fast(torch.ones(3)) == 6
    assert "the slope cannot be compiled and runs uncompiled" in caplog.text
    torch._dynamo.reset()


def test_a_compiler_that_begins_once_more_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[torch.fx.GraphModule] = []

    @torch._dynamo.register_backend(name="restarting")
    def restarting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(graph)
        if len(graphs) == 1:  # as inductor does where a number becomes a constant
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis
        return graph.forward

    fast = torch.compile(lambda x: (x * 2).sum(), backend=forgiving("restarting", "the slope"))
    assert fast(torch.ones(3)) == 6
    assert len(graphs) == 2
    assert "cannot be compiled" not in caplog.text
    torch._dynamo.reset()
