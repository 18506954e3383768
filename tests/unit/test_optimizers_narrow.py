"""Stochastic rounding is unbiased, repeatable and one stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.errors import ConfigError
from tandem.optimizers import _narrow, _precise
from tandem.optimizers._adam import Adam
from tandem.optimizers._narrow import random_bits, round_stochastically, stream, write_stochastically
from tandem.optimizers.adafactor import Adafactor
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit

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


def test_random_bits_are_uniform_and_streams_do_not_overlap() -> None:
    like = torch.zeros(1 << 16)
    draws = torch.stack([random_bits(stream(step, "w", 0), like) for step in range(64)])
    assert int(draws.min()) >= 0
    assert int(draws.max()) < 1 << 16
    counts = torch.bincount(draws.view(-1) >> 8, minlength=256).double()
    expected = draws.numel() / 256
    assert float(((counts - expected).square() / expected).sum()) < 340, "chi square of 255 degrees, 1 in 3000"
    shares = draws.double() / (1 << 16) - 0.5
    by_step = (shares[1:] * shares[:-1]).mean(1) * 12 * 256
    by_element = (shares[:, 1:] * shares[:, :-1]).mean(1) * 12 * 256
    assert float(by_step.abs().max()) < 4.5, "steps are independent: correlations in standard deviations"
    assert float(by_element.abs().max()) < 4.5
    keys = {stream(step, name, start) for step in range(20) for name in ("a", "b") for start in (0, _narrow.PIECE)}
    assert len(keys) == 80


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


def test_stochastic_does_not_hang_on_threads_or_the_global_generator() -> None:
    torch.manual_seed(0)
    one, _ = updated(AdamW(precision="stochastic"), start(300, 1000), steps=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.manual_seed(1)
        two, _ = updated(AdamW(precision="stochastic"), start(300, 1000), steps=2)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)
    name = Parameter(start(300, 1000))
    stepper = AdamW(precision="stochastic").bind([("another", name)])
    name.grad = torch.ones(300, 1000, dtype=torch.bfloat16)
    stepper.accumulate(name)
    stepper.step(1e-5, 1.0)
    assert not torch.equal(name, one), "each parameter has its stream"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AdamW, AdamW8bit, Adafactor])
def test_large_tensors_go_piece_by_piece(monkeypatch: pytest.MonkeyPatch, kind: type[AdamW]) -> None:
    """Pieces change the random stream, but nothing else."""
    options = kind(precision="stochastic")
    whole, with_whole = updated(options, start(40, 129))
    for module in (_narrow, _precise):
        monkeypatch.setattr(module, "PIECE", 512)
    pieces, with_pieces = updated(options, start(40, 129))
    for name, tensor in with_whole.items():
        assert torch.allclose(tensor.double(), with_pieces[name].double(), rtol=1e-5, atol=1.5), name
    assert torch.allclose(whole.float(), pieces.float(), rtol=2**-6, atol=1e-3)
    assert not torch.equal(whole, pieces)


def test_float32_weights_are_their_own_masters_and_float16_needs_some() -> None:
    weight = Parameter(torch.ones(3))
    for precision in ("masters", "stochastic"):
        state = AdamW(precision=precision).bind([("w", weight)]).state_dict()  # type: ignore[arg-type]
        assert set(state) == {"w/step", "w/exp_avg", "w/exp_avg_sq"}
    half = Parameter(torch.ones(3, dtype=torch.float16))
    AdamW().bind([("w", half)])
    with pytest.raises(ConfigError, match=r"stochastic is for bfloat16 weights, and w is torch\.float16"):
        AdamW(precision="stochastic").bind([("w", half)])
