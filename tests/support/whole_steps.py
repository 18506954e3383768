"""A whole step on a tiny model: objectives, ways of training, and groups to train on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.rollouts import make_group, make_rollout
from torch import Tensor
from torch.nn import Parameter

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.corrections.geometric import Geometric
from tandem.algorithms.corrections.opsm import Opsm
from tandem.algorithms.corrections.sequence import Sequence as SequenceWeight
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses.cispo import Cispo
from tandem.algorithms.losses.grpo import Grpo
from tandem.algorithms.losses.gspo import Gspo
from tandem.algorithms.losses.reinforce import Reinforce
from tandem.algorithms.losses.sapo import Sapo
from tandem.algorithms.references.average import Average
from tandem.model.policy import Policy
from tandem.optimizers.adamw import AdamW
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.step import LocalWork, Objective, Step
from tandem.types import UNKNOWN_LOGPROB, Group, Sampling

EVERY_CORRECTION = (TokenCorrection(high=1.3), SequenceWeight(low=0.2, high=4.0), Geometric(low=0.7, high=1.4), Opsm())
OBJECTIVES = {
    "grpo": Objective(loss=Grpo()),
    "gspo": Objective(loss=Gspo()),
    "gspo-token": Objective(loss=Gspo(reduction="token")),
    "cispo": Objective(loss=Cispo()),
    "sapo": Objective(loss=Sapo()),
    "reinforce": Objective(loss=Reinforce()),
    "corrections": Objective(loss=Grpo(), recomputed=True, corrections=EVERY_CORRECTION),
    "reference": Objective(loss=Grpo(), reference=Average(mixup=0.5, every=1)),
}
TRAINABLE = {"full": Full(), "lora": Lora(rank=2), "merged": Lora(rank=2, merged=True)}


@dataclass
class Keep:
    """A stepper that only adds gradients up, in float64."""

    total: dict[int, Tensor] = field(default_factory=dict)

    def accumulate(self, parameter: Parameter) -> None:
        assert parameter.grad is not None
        self.total[id(parameter)] = self.total.get(id(parameter), 0.0) + parameter.grad.double()
        parameter.grad = None

    def step(self, lr: float, max_grad_norm: float) -> float:
        raise AssertionError("nothing is applied here")

    zero_grad = state_dict = load_state_dict = step  # type: ignore[assignment]


def groups() -> list[Group]:
    """Two groups with answers of several lengths; one sampler told no logprobs."""
    made = []
    for g, (prompt, lengths) in enumerate(((9, (8, 3, 1)), (17, (5, 16)))):
        rollouts = [
            make_rollout(
                f"t{g}@0/{s}",
                [(list(range(prompt)), list(range(n)), [UNKNOWN_LOGPROB if (g, s) == (1, 1) else -1.0 - s] * n)],
                float(s),
            )
            for s, n in enumerate(lengths)
        ]
        made.append(make_group(f"t{g}@0", rollouts, index=g))
    return made


def whole_step(policy: Policy, trainable: Trainable, objective: Objective, **options: Any) -> tuple[Step, StepBatch]:
    optimizer = AdamW(lr=1e-3)
    changing = [(name, policy.model.get_parameter(name)) for name, _ in trainable.source(policy.model)]
    work = LocalWork(
        policy=policy,
        objective=objective,
        stepper=optimizer.bind(trainable.parameters(policy.model)),
        sampling=Sampling(),
        reference=None if objective.reference is None else objective.reference.hold(changing),
        fold=lambda: trainable.fold(policy.model),
    )
    step = Step(work=work, optimizer=optimizer, steps=4, **options)
    pack = Packer(
        advantage=DrGrpo(),
        reduction=objective.loss.reduction,
        max_tokens=16,
        budget=30,
        mask_truncated=False,
        device=policy.device,
    )
    batch = pack(groups(), version=0)
    assert len(batch.micro) > 1
    return step, batch
