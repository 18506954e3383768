"""Stochastic rounding is unbiased, repeatable and one stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.optimizers import _narrow
from tandem.optimizers._narrow import (
    on_device,
    random_bits,
    round_stochastically,
    stream,
    write_fused,
    write_stochastically,
)

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
        eager, written = torch.zeros(num, dtype=torch.bfloat16), torch.zeros(num, dtype=torch.bfloat16, device=device)
        write_fused(eager, values, on_device(keys, 0, values))
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


def start(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
