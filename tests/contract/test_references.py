"""What every reference keeps, whatever it follows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from tandem.algorithms.losses.base import MicroBatch
from tandem.algorithms.references.base import Reference
from tandem.config.registry import find, names


@pytest.fixture(params=names("references"))
def part(request: pytest.FixtureRequest) -> Reference:
    return find("references", request.param)()  # type: ignore[no-any-return]


def live(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    return {name: Parameter(torch.randn(5, 3).to(dtype)) for name in ("a", "b")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_model_has_the_held_weights_and_after_it_its_own(part: Reference, dtype: torch.dtype) -> None:
    weights = live(dtype)
    first = {name: w.detach().clone() for name, w in weights.items()}
    held = part.hold(weights.items())
    with torch.no_grad():
        for weight in weights.values():
            weight += 1
    now = {name: (w.data_ptr(), w.detach().clone()) for name, w in weights.items()}
    with held.in_place():
        assert all(torch.equal(weights[name], first[name]) for name in weights)
    for name, weight in weights.items():
        assert weight.data_ptr() == now[name][0]
        assert torch.equal(weight, now[name][1])


def test_what_is_saved_brings_it_back(part: Reference) -> None:
    """Into one that was made, as a resumed run makes it, from the weights as they are loaded."""
    weights = live()
    loaded = {name: Parameter(w.detach().clone()) for name, w in weights.items()}
    held, again = part.hold(weights.items()), part.hold(loaded.items())
    with torch.no_grad():
        for weight in weights.values():
            weight += torch.randn_like(weight)
    if any(held.due(step) for step in range(1, 2000)):
        held.move()
    saved = {name: value.clone() for name, value in held.state_dict().items()}
    assert bool(saved) == part.saved
    again.load_state_dict(saved)
    with held.in_place():
        want = {name: w.detach().clone() for name, w in weights.items()}
    with again.in_place():
        assert all(torch.equal(loaded[name], want[name]) for name in want)


def test_a_policy_that_is_its_reference_pays_nothing(part: Reference) -> None:
    logprobs = (-torch.rand(4)).requires_grad_()
    micro = MicroBatch(
        behavior_logprobs_N=logprobs.detach(),
        advantages_N=torch.zeros(4),
        sample_N=torch.zeros(4, dtype=torch.int64),
        num_samples=1,
        ref_logprobs_N=logprobs.detach(),
    )
    penalty, bare = part.divergence(logprobs, micro)
    penalty.sum().backward()
    assert logprobs.grad is not None
    assert penalty.tolist() == bare.tolist() == logprobs.grad.tolist() == [0.0] * 4
