"""Every part of a step by itself against its formula, so that what is wrong has a name.

Each is given what the formulas say that the parts before it should have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tandem.algorithms.losses.base import MicroBatch
from tandem.testing import oracle
from tandem.testing.oracle import Formula, SampledSequence, Scored
from tandem.tools.certify.certificate import CertificateLine, judged
from tandem.tools.certify.policy import CertifiedPolicy
from tandem.trainer.pack import StepBatch
from tandem.trainer.work import Objective, OldLogprobs
from tandem.types import Group

EXACT = 1e-5
"""Largest distance of float32 from the float64 formulas: logprobs are exact to some 1e-6."""
PENALTY = 1e-4
"""Largest distance of a penalty, which is of the difference of logprobs that are nearly alike."""
FORMULA = "float64 formula"

Key = tuple[str, tuple[int, ...]]
"""Of a trained sequence: its rollout and its sampled tokens."""


def lines(
    live: CertifiedPolicy, batch: StepBatch, groups: Sequence[Group], known: Formula, slack: float
) -> Iterator[CertificateLine]:
    """Every part in the order that a step has them; ``slack`` is what bounds are multiplied by."""
    sequences = list(oracle.spoken(groups, known))
    wanted = dict(zip(map(_key, sequences), sequences, strict=True))
    before, first, moved = (_logprobs(live, update, sequences, known) for update in (-1, 0, 1))
    references = before if known.reference is not None else [None] * len(sequences)
    scored = {
        key: Scored(now=now, first=now, reference=reference)
        for key, now, reference in zip(wanted, first, references, strict=True)
    }
    packed = _packed(live, batch)
    # What has no advantage has no gradient, and need not be computed where nothing else has one.
    needed = {k for k, one in wanted.items() if known.reference is not None or any(one.advantages)}
    wrong = sorted((needed - packed.keys()) | (packed.keys() - wanted.keys()))
    note = f"first of {wrong[0][0]}" if wrong else ""
    yield judged("tokens that are trained", [sum(len(tokens) for _, tokens in wrong)], 0.0, "the recipe", note)
    both = [key for key in packed if key in wanted]

    def compared(name: str, part: str, formula: Callable[[Key], Tensor]) -> CertificateLine:
        figure = apart([packed[key][part] for key in both], [formula(key) for key in both])
        return judged(name, [figure], EXACT * slack, FORMULA)

    yield compared("advantages", "advantages", lambda key: _float64(wanted[key].advantages))
    counts = {key: oracle.share(known, sequences, one) for key, one in wanted.items()}
    yield compared("what each token counts", "weights", lambda key: _float64([counts[key]] * len(key[1])))
    yield compared("logprobs of the policy", "now", lambda key: scored[key].now)
    if known.reference is not None:
        yield compared("logprobs of the reference", "reference", lambda key: _required(scored[key].reference))
    yield from _costs(live.work.objective, sequences, list(scored.values()), moved, known, slack)


@torch.no_grad()
def _logprobs(live: CertifiedPolicy, update: int, sequences: Sequence[SampledSequence], known: Formula) -> list[Tensor]:
    """By the formulas alone, of the weights that are ``placed`` then."""
    live.exact.put(live.exact.held(live.placed(update)))
    return [oracle.logprobs(live.exact, one, known) for one in sequences]


def _packed(live: CertifiedPolicy, batch: StepBatch) -> dict[Key, dict[str, Tensor]]:
    """What the trainer has of each sequence."""
    packed: dict[Key, dict[str, Tensor]] = {}
    for micro, now_N, reference_N in live.scored(batch):
        values = {"targets": micro.targets_N, "advantages": micro.batch.advantages_N, "weights": micro.weights_N}
        values |= {"now": now_N} | ({} if reference_N is None else {"reference": reference_N})
        at = 0
        for rollout, count in micro.places:
            if count:
                one = {name: value_N[at : at + count] for name, value_N in values.items()}
                packed[rollout, tuple(one["targets"].tolist())] = one
            at += count
    return packed


def _costs(
    objective: Objective,
    sequences: Sequence[SampledSequence],
    scored: Sequence[Scored],
    moved: Sequence[Tensor],
    known: Formula,
    slack: float,
) -> Iterator[CertificateLine]:
    """Loss, corrections and penalty, each alone, after an update: there every ratio is another."""
    lengths = [len(one.at) for one in sequences]
    micro = MicroBatch(
        behavior_logprobs_N=_float64(value for one in sequences for value in one.sampler_logprobs).float(),
        advantages_N=_float64(value for one in sequences for value in one.advantages).float(),
        sample_N=torch.repeat_interleave(torch.tensor(lengths)),
        num_samples=len(sequences),
    )
    reference = objective.reference
    reference_N = None if reference is None else torch.cat([_required(one.reference) for one in scored]).float()
    first_N = torch.cat([one.first for one in scored]).float()
    micro = objective.informed(micro, OldLogprobs(recomputed_logprobs_N=first_N, ref_logprobs_N=reference_N))

    def line(
        name: str, part: Callable[[Tensor], Tensor], formula: Callable[[Formula, SampledSequence, Scored], Tensor]
    ) -> CertificateLine:
        """Values and slopes."""
        leaf_N = torch.cat(list(moved)).float().requires_grad_()
        actual = [each for values_N in _with_slope(part(leaf_N), leaf_N) for each in values_N.split(lengths)]
        wanted = []
        for sequence, one, after in zip(sequences, scored, moved, strict=True):
            now = after.clone().requires_grad_()
            values = formula(known, sequence, Scored(now=now, first=one.first, reference=one.reference))
            wanted.append(_with_slope(values, now))
        bound = PENALTY if formula is oracle.penalty else EXACT
        figure = apart(actual, [each for values in zip(*wanted, strict=True) for each in values])
        return judged(name, [figure], bound * slack, FORMULA)

    yield line("loss of each token", lambda now_N: objective.loss(now_N, micro).loss_N, oracle.loss)
    if objective.corrections:
        yield line("corrections", lambda now_N: objective.weights(now_N.detach(), micro)[0], oracle.weights)
    if reference is not None:
        yield line(
            "penalty of each token",
            lambda now_N: reference.beta * reference.divergence(now_N, micro)[0],
            oracle.penalty,
        )


def _with_slope(values: Tensor, by: Tensor) -> list[Tensor]:
    """Values, and the gradient of their sum."""
    if not values.requires_grad:
        return [values, torch.zeros_like(by)]
    (slope,) = torch.autograd.grad(values.sum(), by, materialize_grads=True)
    return [values.detach(), slope]


def apart(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is wanted; the first alone where that is 0."""
    if not wanted:
        return 0.0
    one, other = torch.cat([value.double() for value in actual]), torch.cat([value.double() for value in wanted])
    return float((one - other).norm()) / (float(other.norm()) or 1.0)


def _key(one: SampledSequence) -> Key:
    return one.rollout, tuple(one.ids[at] for at in one.at)


def _float64(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _required(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
