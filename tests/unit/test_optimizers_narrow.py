"""Stochastic rounding is unbiased, repeatable and one stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.errors import ConfigError
from tandem.optimizers import _narrow
from tandem.optimizers._adam import Adam
from tandem.optimizers._narrow import random_bits, round_stochastically, stream, write_stochastically
from tandem.optimizers.adamw import AdamW

MASK = 0xFFFFFFFF


def floats(num: int = 100_000) -> Tensor:
    """Of every exponent and both signs, with ties and the ends of binades among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (num,), generator=generator, dtype=torch.int64)
    bits[::3] = bits[::3] & ~0xFFFF  # bfloat16 already
    bits[1::3] = (bits[1::3] & ~0xFFFF) | 0x8000  # ties
    values = bits.to(torch.int32).view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3e38)]
    return torch.cat([values, torch.tensor([0.0, -0.0, 1.0, -1.0, 1.9999999, 1e-45, -1e-40])])


@pytest.mark.parametrize("num", [1, 7, 4096])
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_rounding_by_fused_operations_is_the_same_to_the_bit(
    device: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call for all pieces, each with its key."""
    monkeypatch.setattr(_narrow, "PIECE", 1000)
    values = torch.randn(num, generator=torch.Generator().manual_seed(3))
    for step in (1, 2):
        keys = [stream(step, "weight", start) for start in range(0, num, 1000)]
        expected = torch.cat(
            [round_stochastically(part, key) for part, key in zip(values.split(1000), keys, strict=True)]
        )
        words = torch.tensor([[_narrow._signed(w) for w in (key >> 32, key & MASK)] for key in keys], dtype=torch.int32)
        eager, written = torch.zeros(num, dtype=torch.bfloat16), torch.zeros(num, dtype=torch.bfloat16, device=device)
        _narrow._written.function(eager, values, *words.T)
        write_stochastically(written, values.to(device), keys)
        for one in (eager, written.cpu()):
            assert torch.equal(one.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_random_bits_are_the_hash_they_claim_to_be(device: str) -> None:
    """Computed again with Python's whole numbers, on whatever devices there are."""

    def word(key: int, index: int) -> int:
        x = (index + (key >> 32)) & MASK
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = (x + (key & MASK)) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        return x ^ (x >> 16)

    for key in (0, 1, 0xDEADBEEFCAFEF00D, 2**64 - 1, 0x80000000_80000000, stream(3, "w", 0)):
        words = [word(key, index) for index in range(50)]
        want = [half for w in words for half in (w & 0xFFFF, w >> 16)]
        assert random_bits(key, torch.zeros(100, device=device)).tolist() == want
        assert random_bits(key, torch.zeros(99, device=device)).tolist() == want[:99]


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased_between_the_two_neighbours() -> None:
    values = floats(3000)
    values = values[values.abs() > 1e-30]
    draws = torch.stack([round_stochastically(values, stream(step, "w", 0)).double() for step in range(2000)])
    exact = values.double()
    low, high = draws.min(0).values, draws.max(0).values
    below = (values.view(torch.int32) & ~0xFFFF).view(torch.float32).double()  # towards zero
    above = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    assert bool(((low == below) | (low == above)).all())
    assert bool(((high == below) | (high == above)).all())
    bit = (above - below).abs()
    already = below == exact
    assert bool((draws[:, already] == exact[already]).all()), "what is a bfloat16 stays"
    share = (exact - below).abs() / bit
    error = (draws.mean(0) - exact).abs() / bit / (share * (1 - share) / 2000).sqrt()
    assert float(error[~already].max()) < 4.5, "in standard deviations of the mean"


def updated(options: Adam, start: Tensor, steps: int = 20, lr: float = 1e-5) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight after some steps of random gradients, and the state."""
    weight = Parameter(start.clone())
    stepper = options.bind([("w", weight)])
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        weight.grad = torch.randn(start.shape, generator=generator).to(start.dtype)
        stepper.accumulate(weight)
        stepper.step(lr, 1.0)
    return weight.detach(), stepper.state_dict()


def start(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_stochastic_wanders_about_the_masters() -> None:
    """No drift: over many weights the mean of stochastic minus masters is far below a bit."""
    _, with_masters = updated(AdamW(precision="masters"), start(300, 300), steps=50)
    stochastic, state = updated(AdamW(precision="stochastic"), start(300, 300), steps=50)
    assert set(state) == {"w/step", "w/exp_avg", "w/exp_avg_sq"}
    master = with_masters["w/master"].double()
    bit = torch.exp2(torch.floor(torch.log2(master.abs().clamp_min(1e-6))) - 7)
    gap = (stochastic.double() - master) / bit
    assert 0.3 < float(gap.square().mean().sqrt()) < 5
    assert float(gap.mean().abs()) < 4.5 * float(gap.std()) / 300


def test_float32_weights_are_their_own_masters_and_float16_needs_some() -> None:
    weight = Parameter(torch.ones(3))
    for precision in ("masters", "stochastic"):
        state = AdamW(precision=precision).bind([("w", weight)]).state_dict()  # type: ignore[arg-type]
        assert set(state) == {"w/step", "w/exp_avg", "w/exp_avg_sq"}
    half = Parameter(torch.ones(3, dtype=torch.float16))
    AdamW().bind([("w", half)])
    with pytest.raises(ConfigError, match=r"stochastic is for bfloat16 weights, and w is torch\.float16"):
        AdamW(precision="stochastic").bind([("w", half)])
