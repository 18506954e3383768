"""Defects, one at a time in what trains: a certificate fails on each, and the line that fails names it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tandem.algorithms.advantages import rloo
from tandem.algorithms.advantages.grpo import GroupStandardised as Standardised
from tandem.algorithms.corrections.opsm import Opsm
from tandem.algorithms.losses import grpo as loss_grpo
from tandem.algorithms.losses.base import MicroBatch
from tandem.algorithms.losses.sapo import Sapo
from tandem.algorithms.references import average
from tandem.algorithms.references.base import Reference, ReferenceWeights
from tandem.algorithms.references.start import Start
from tandem.config.loading import load
from tandem.distributed.sharding import ShardedStepper
from tandem.metrics import Sum
from tandem.model import compilation, layers
from tandem.optimizers import _adam, _narrow, _precise, adafactor
from tandem.optimizers.base import Optimizer
from tandem.tools.certify.case import Case, certify
from tandem.trainable import _adapted, _merged
from tandem.trainable.lora import Lora
from tandem.trainer import pack
from tandem.trainer.objective import Objective
from tandem.trainer.pack import Micro, Packer, StepBatch
from tandem.trainer.rank_crew import RankCrew
from tandem.trainer.step import SingleRank, Step
from tandem.trainer.work import LocalWork
from tandem.types import UNKNOWN_LOGPROB, Group, Rollout, Sample

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

WEIGHTS, TOKENS, ADVANTAGES, COUNTS = (
    "weights that are trained",
    "tokens that are trained",
    "advantages",
    "token counts",
)
LOGPROBS, BEFORE, LOSS, CORRECTIONS, PENALTY = "of the policy", "of the reference", "loss of", "corrections", "penalty"
GRADIENT, FOLLOWS, RATES, APPLIED, NORMS = "whole gradient", "reference as", "rates", "two optimizer", "gradient norms"
NARROW = "bfloat16 weights"

AVERAGE = "reference={kind: average, every: 3, beta: 0.01}"
START = "reference={kind: start, beta: 0.01}"


@dataclass(frozen=True)
class Defect:
    """Something wrong."""

    what: str
    plant: Plant
    fails: tuple[str, ...]
    """Parts of the names of lines that fail."""
    recipe: tuple[str, ...] = ()
    source: str = "arithmetic"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig().save_pretrained(folder)
    return folder


def failed(model: Path, defect: Defect) -> list[str]:
    """Names of the lines that fail."""
    overrides = [f"model={model}", "compile=false", *defect.recipe]
    config = load(Path(f"recipes/{defect.source}.yaml"), overrides).config
    with contextlib.closing(Case(config, real=False)) as case:
        lines = [*case.lines(0), *case.later()]
    assert [line.name for line in lines if line.state == "skipped"] in ([], ["layers compiled"])
    return [line.name for line in lines if line.state == "fail"]


def attribute(owner: object, name: str, make: Callable[[Any], Any]) -> Plant:
    """Put what ``make`` makes of an attribute in its place."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def batches(change: Callable[[StepBatch], Sequence[Micro]]) -> Plant:
    """Change every batch that is packed."""

    def make(whole: Any) -> Any:
        def wrong(self: Packer, groups: Sequence[Group], *, version: int) -> StepBatch:
            batch = whole(self, groups, version=version)
            return dataclasses.replace(batch, micro=tuple(change(batch)))

        return wrong

    return attribute(Packer, "__call__", make)


def micros(change: Callable[[Micro], Micro]) -> Plant:
    """Change every micro-batch."""
    return batches(lambda batch: [change(micro) for micro in batch.micro])


def samples(change: Callable[[Sample, Rollout], Sample]) -> Plant:
    """Change every sample."""

    def make(whole: Any) -> Any:
        def wrong(rollout: Rollout, advantage: float, **options: bool) -> Iterator[Sample]:
            return (change(sample, rollout) for sample in whole(rollout, advantage, **options))

        return wrong

    return attribute(pack, "samples_of", make)


def own_mean(micro: Micro) -> Micro:
    weights_N = micro.weights_N / micro.weights_N.sum()
    return dataclasses.replace(micro, weights_N=weights_N)


def sides_swapped(whole: Any) -> Any:
    return lambda ratio_N, advantages_N, low, high, dual: whole(ratio_N, advantages_N, high, low, dual)


def k3_the_other_way(self: Reference, logprobs_N: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    assert micro.ref_logprobs_N is not None
    d_N = micro.ref_logprobs_N - logprobs_N
    kl_N = torch.expm1(-d_N) + d_N
    return kl_N * (logprobs_N - micro.old_logprobs_N).exp(), kl_N.detach()


def with_prompt(sample: Sample, rollout: Rollout) -> Sample:
    value = next(a for a, trained in zip(sample.advantages, sample.mask, strict=True) if trained)
    return dataclasses.replace(
        sample, mask=(False, *(True for _ in sample.mask[1:])), advantages=(value,) * len(sample.mask)
    )


def with_replies(sample: Sample, rollout: Rollout) -> Sample:
    """Trains what stands between turns."""
    start = sample.begins[0]
    value = sample.advantages[start]
    after = len(sample.mask) - start
    return dataclasses.replace(
        sample,
        mask=sample.mask[:start] + (True,) * after,
        advantages=sample.advantages[:start] + (value,) * after,
    )


def last_turn_alone(sample: Sample, rollout: Rollout) -> Sample:
    last = sample.begins[-1]
    return dataclasses.replace(sample, mask=tuple(on and at >= last for at, on in enumerate(sample.mask)))


def first_temperature(sample: Sample, rollout: Rollout) -> Sample:
    return dataclasses.replace(sample, temperature=rollout.turns[0].temperature)


def forgets_several_turns(whole: property) -> property:
    return property(lambda rollout: len(rollout.turns) == 1 and whole.fget(rollout))  # type: ignore[misc]


def out_of_the_baseline(whole: Any) -> Any:
    """Truncated answers lose their place in their group's mean."""

    def wrong(self: Packer, groups: Sequence[Group], *, version: int) -> StepBatch:
        kept = [dataclasses.replace(g, rollouts=tuple(r for r in g.rollouts if not r.truncated)) for g in groups]
        return whole(self, kept, version=version)  # type: ignore[no-any-return]

    return wrong


def mixed_the_other_way(self: Any) -> None:
    for name, parameter in self._live.items():
        share = 1 - self._options.mixup
        self._own[name] = self._own[name] * (1 - share) + parameter.detach() * share


def mixed_with_the_first(whole: Any) -> Any:
    def wrong(self: Any) -> None:
        if not hasattr(self, "first"):
            self.first = {name: own.clone() for name, own in self._own.items()}
        self._own = {name: own.clone() for name, own in self.first.items()}
        whole(self)

    return wrong


class _Alias(ReferenceWeights):
    """Holds the live weights instead of a copy."""

    def __init__(self, live: Any):
        super().__init__(live)
        self._own = {name: parameter.data for name, parameter in self._live.items()}


def without_scale(position: int) -> Callable[[Any], Any]:
    """The gradient of one of an adapter's factors lacks alpha/rank."""

    def make(whole: Any) -> Any:
        def wrong(ctx: Any, dy: Tensor) -> Any:
            gradients = list(whole(ctx, dy))
            gradients[position] = gradients[position] / ctx.scale
            return tuple(gradients)

        return staticmethod(wrong)

    return make


def rank_stabilised(whole: Any) -> Any:
    def wrong(x: Tensor, w: Tensor, bias: Any, a: Tensor, b: Tensor, scale: float) -> Any:
        return whole(x, w, bias, a, b, scale * math.sqrt(a.shape[0]))

    return wrong


def fold_without_scale(self: Any) -> None:
    with torch.no_grad():
        self.weight.copy_(self._w0 + self.lora_B @ self.lora_A)


def one_layer_less(whole: Any) -> Any:
    return lambda self, model: [name for name in whole(self, model) if name != "v_proj"]


def last_alone(self: Any, grad: Tensor) -> None:
    self.buffer, self.started = grad.clone(), True


def step_of(change: Callable[[Any, float, float], tuple[float, float]]) -> Plant:
    """Another rate or another norm to clip to."""

    def make(whole: Any) -> Any:
        return lambda self, lr, most: whole(self, *change(self, lr, most))

    return attribute(_precise.PreciseStepper, "step", make)


def each_alone(whole: Any) -> Any:
    """Every weight's gradient is clipped by its own norm."""

    def wrong(self: Any, lr: float, most: float) -> Tensor:
        for weight in self.weights:
            if weight.started:
                weight.gradient.mul_((most / weight.gradient.norm()).clamp(max=1.0))
        norm: Tensor = whole(self, lr, most)
        return norm

    return wrong


def each_micro_batch(whole: Any) -> Any:
    def wrong(self: Any, grad: Tensor) -> None:
        whole(self, grad * (0.01 / grad.norm()).clamp(max=1.0))

    return wrong


def adamw(**options: Any) -> Plant:
    """Other options of the update than the recipe's."""

    def make(whole: Any) -> Any:
        def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
            kept = self._options
            self._options = dataclasses.replace(kept, **options)
            try:
                whole(self, *args, **kwargs)
            finally:
                self._options = kept

        return wrong

    return attribute(_adam.FloatMoments, "_adamw", make)


def not_counted(whole: Any) -> Any:
    """Every step is corrected as the first."""

    def wrong(self: Any, values: Any, grads: Any, means: Any, squares: Any, steps: Any, **kwargs: Any) -> None:
        whole(self, values, grads, means, squares, [step.clone().zero_() for step in steps], **kwargs)

    return wrong


def not_forgotten(self: Any) -> None:
    """The last update's gradient is in the next one's."""


def masters_rounded(whole: Any) -> Any:
    def wrong(self: Any, weights: Any) -> None:
        whole(self, weights)
        for weight in weights:
            weight.master.detach().copy_(weight.parameter.detach())

    return wrong


async def not_folded(self: SingleRank) -> None:
    """Weights stay those that the step began with."""


def told_clipped(whole: Any) -> Any:
    async def wrong(self: Step, *args: Any) -> Any:
        metrics = await whole(self, *args)
        return {**metrics, "grad_norm": Sum(min(metrics["grad_norm"].value, 1.0))}

    return wrong


def no_slope_of_the_ratio(whole: Any) -> Any:
    def wrong(self: Reference, logprobs_N: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        _, kl_N = whole(self, logprobs_N, micro)
        bare = dataclasses.replace(self, ratio_corrected=False) if self.estimator != "k1" else self
        slope_N, _ = whole(bare, logprobs_N, micro)
        return slope_N * (logprobs_N.detach() - micro.old_logprobs_N).exp(), kl_N

    return wrong


def unknown_is_nothing(whole: Any) -> Any:
    def wrong(self: Objective, batch: MicroBatch, known: Any) -> MicroBatch:
        told_N = batch.behavior_logprobs_N
        held = dataclasses.replace(batch, behavior_logprobs_N=torch.where(told_N == UNKNOWN_LOGPROB, 0.0, told_N))
        prepared: MicroBatch = whole(self, held, known)
        return prepared

    return wrong


def token_ratios(self: Any, values_N: Tensor) -> Tensor:
    """The first token's value instead of an answer's mean."""
    firsts = torch.searchsorted(self.sample_N, torch.arange(self.num_samples))
    return values_N[firsts]


def others_with_oneself(whole: Any) -> Any:
    """The mean that RLOO takes of the others has the answer in it."""
    return lambda self, group: [value * (1 - 1 / len(group.scored)) for value in whole(self, group)]


SIXTEEN = [
    Defect(
        "the deviation that advantages are divided by is the population's",
        attribute(
            Standardised, "__call__", lambda w: lambda self, g: w(dataclasses.replace(self, std="population"), g)
        ),
        (ADVANTAGES, GRADIENT),
        ("advantage=grpo",),
    ),
    Defect("clips swap their sides", attribute(loss_grpo, "clipped", sides_swapped), (LOSS, GRADIENT)),
    Defect(
        "no dual clip",
        attribute(loss_grpo, "clipped", lambda w: lambda r, a, low, high, dual: w(r, a, low, high, None)),
        (LOSS, GRADIENT),
        ("max_lag=1",),
    ),
    Defect(
        "the KL is that of the reference to the policy",
        attribute(Reference, "divergence", lambda w: k3_the_other_way),
        (PENALTY, GRADIENT),
        (START,),
    ),
    Defect(
        "a mean over each micro-batch",
        micros(own_mean),
        ("micro-batch sizes", COUNTS, GRADIENT),
        ("micro_batch_tokens=40",),
    ),
    Defect("the prompt is trained", samples(with_prompt), (TOKENS, GRADIENT)),
    Defect(
        "the temperature is ignored",
        micros(lambda micro: dataclasses.replace(micro, temperature_N=torch.ones_like(micro.temperature_N))),
        (LOGPROBS, GRADIENT),
    ),
    Defect(
        "positions begin anew after what is shared",
        attribute(pack, "sequential_positions", lambda w: lambda plan: [p for n in plan.lengths for p in range(n)]),
        (LOGPROBS, GRADIENT),
    ),
    Defect(
        "a correction that corrects nothing",
        attribute(Opsm, "__call__", lambda w: lambda self, logprobs_N, micro: torch.ones_like(logprobs_N)),
        (CORRECTIONS,),
        ("corrections=[opsm]",),
    ),
    Defect(
        "the average never follows",
        attribute(average._Moving, "due", lambda w: lambda self, step: False),
        (FOLLOWS,),
        (AVERAGE,),
    ),
    Defect(
        "the average mixes the wrong way round",
        attribute(average._Moving, "move", lambda w: mixed_the_other_way),
        (FOLLOWS,),
        (AVERAGE, "reference.mixup=0.9"),
    ),
    Defect(
        "truncated: mask forgets answers of several turns",
        attribute(Rollout, "truncated", forgets_several_turns),
        (TOKENS, COUNTS, GRADIENT),
        ("truncated=mask",),
    ),
    Defect(
        "the gradient of LoRA's A lacks alpha/rank",
        attribute(_adapted._Sum, "backward", without_scale(3)),
        (GRADIENT,),
        source="lora",
    ),
    Defect(
        "the gradient of a merged LoRA's A lacks alpha/rank",
        attribute(_merged._Product, "backward", without_scale(3)),
        (GRADIENT,),
        ("trainable.merged=true",),
        source="lora",
    ),
    Defect(
        "the optimizer keeps only the last micro-batch",
        attribute(_precise.TrainedWeight, "add", lambda w: last_alone),
        (APPLIED, NORMS),
    ),
    Defect("clipping at twice the norm", step_of(lambda self, lr, most: (lr, 2 * most)), (APPLIED,)),
]

OWN = [
    Defect(
        "the gradient of LoRA's B lacks alpha/rank",
        attribute(_adapted._Sum, "backward", without_scale(4)),
        (GRADIENT,),
        source="lora",
    ),
    Defect(
        "an adapter's output is multiplied by alpha/sqrt(rank)",
        attribute(_adapted, "_sum", rank_stabilised),
        (LOGPROBS, GRADIENT),
        source="lora",
    ),
    Defect(
        "the merged sum lacks alpha/rank",
        attribute(_merged.MergedLinear, "fold", lambda w: fold_without_scale),
        (LOGPROBS, GRADIENT),
        ("trainable.merged=true",),
        source="lora",
    ),
    Defect(
        "merged weights stay behind between the updates of a step",
        attribute(SingleRank, "fold", lambda w: not_folded),
        (GRADIENT,),
        ("trainable.merged=true", "updates_per_batch=3"),
        source="lora",
    ),
    Defect(
        "one kind of layer has no adapter",
        attribute(Lora, "targets", one_layer_less),
        (WEIGHTS, GRADIENT),
        source="lora",
    ),
    Defect(
        "the average follows a step late",
        attribute(average._Moving, "due", lambda w: lambda self, step: w(self, step - 1)),
        (FOLLOWS,),
        (AVERAGE,),
    ),
    Defect(
        "the average follows at every step",
        attribute(average._Moving, "due", lambda w: lambda self, step: True),
        (FOLLOWS,),
        (AVERAGE,),
    ),
    Defect(
        "the average mixes with the model as loaded each time",
        attribute(average._Moving, "move", mixed_with_the_first),
        (FOLLOWS,),
        (AVERAGE,),
    ),
    Defect(
        "the average of an adapter never follows",
        attribute(average._Moving, "move", lambda w: lambda self: None),
        (FOLLOWS,),
        (AVERAGE, "trainable.merged=true"),
        source="lora",
    ),
    Defect(
        "the reference is the policy itself",
        attribute(Start, "hold", lambda w: lambda self, live: _Alias(live)),
        (BEFORE, GRADIENT, FOLLOWS),
        (START,),
    ),
    Defect(
        "the penalty's ratio has no slope",
        attribute(Reference, "divergence", no_slope_of_the_ratio),
        (PENALTY, GRADIENT),
        (START,),
    ),
    Defect(
        "each weight is clipped by its own norm", attribute(_precise.PreciseStepper, "step", each_alone), (APPLIED,)
    ),
    Defect("each micro-batch is clipped", attribute(_precise.TrainedWeight, "add", each_micro_batch), (APPLIED,)),
    Defect("nothing is clipped", step_of(lambda self, lr, most: (lr, 0.0)), (APPLIED,)),
    Defect(
        "all is clipped to 1, also what the recipe says is not",
        step_of(lambda self, lr, most: (lr, 1.0)),
        (APPLIED,),
        ("optimizer.max_grad_norm=0",),
    ),
    Defect("betas are swapped", adamw(beta1=0.999, beta2=0.9), (APPLIED,)),
    Defect("no weight decay", adamw(weight_decay=0.0), (APPLIED,), ("optimizer.weight_decay=0.1",)),
    Defect("bias is corrected as in the first step", attribute(_adam.FloatMoments, "_adamw", not_counted), (APPLIED,)),
    Defect(
        "the gradient of the update before is not forgotten",
        attribute(_precise.TrainedWeight, "forget", lambda w: not_forgotten),
        (APPLIED,),
    ),
    Defect(
        "the rate rises one step late",
        attribute(Optimizer, "rate", lambda w: lambda self, step, total: w(self, max(1, step - 1), total)),
        (RATES, APPLIED),
        ("optimizer.warmup_steps=5",),
    ),
    Defect(
        "the cosine is a line",
        attribute(
            Optimizer,
            "rate",
            lambda w: lambda self, s, total: w(dataclasses.replace(self, schedule="linear"), s, total),
        ),
        (RATES,),
        ("optimizer.schedule=cosine",),
    ),
    Defect("the norm is told after clipping", attribute(Step, "apply", told_clipped), (NORMS,)),
    Defect(
        "adafactor's rate is no share of the weights",
        attribute(adafactor, "_rms", lambda w: lambda values: torch.ones(())),
        (APPLIED,),
        ("optimizer=adafactor",),
    ),
    Defect(
        "the master is rounded with its weight",
        attribute(_adam.FloatMoments, "write", masters_rounded),
        (NARROW,),
        ("dtype=bfloat16",),
    ),
    Defect(
        "what rounding took off a weight is forgotten",
        attribute(_narrow, "join", lambda w: lambda weight, rest: w(weight, torch.zeros_like(rest))),
        (NARROW,),
        ("dtype=bfloat16", "optimizer.precision=kahan"),
    ),
    Defect(
        "rounding at random always rounds to zero",
        attribute(_narrow, "random_bits", lambda w: lambda key, like, first=0: torch.zeros_like(like)),
        (NARROW,),
        ("dtype=bfloat16", "optimizer.precision=stochastic"),
    ),
    Defect("only the last turn is trained", samples(last_turn_alone), (TOKENS, COUNTS, GRADIENT)),
    Defect("what stands between turns is trained", samples(with_replies), (TOKENS, GRADIENT)),
    Defect("later turns have the first one's temperature", samples(first_temperature), (LOGPROBS, GRADIENT)),
    Defect(
        "answers that are masked leave their group's mean too",
        attribute(Packer, "__call__", out_of_the_baseline),
        (ADVANTAGES, GRADIENT),
        ("truncated=mask",),
    ),
    Defect(
        "RLOO's others have oneself among them",
        attribute(rloo.Rloo, "__call__", others_with_oneself),
        (ADVANTAGES, GRADIENT),
        ("advantage=rloo",),
    ),
    Defect(
        "an unknown logprob counts as certain",
        attribute(Objective, "informed", unknown_is_nothing),
        (LOSS, GRADIENT),
        source="broker",
    ),
    Defect(
        "GSPO's ratio is one token's",
        attribute(MicroBatch, "means", lambda w: token_ratios),
        (LOSS, GRADIENT),
        ("loss=gspo",),
    ),
    Defect(
        "SAPO's gates swap their temperatures",
        attribute(
            Sapo,
            "__call__",
            lambda w: (
                lambda self, logprobs_N, micro: w(
                    dataclasses.replace(
                        self,
                        temperature_positive=self.temperature_negative,
                        temperature_negative=self.temperature_positive,
                    ),
                    logprobs_N,
                    micro,
                )
            ),
        ),
        (LOSS, GRADIENT),
        ("loss=sapo",),
    ),
]


def shifted(by: int) -> Plant:
    """Every token is predicted from another place."""
    return micros(
        lambda micro: dataclasses.replace(micro, predict_N=(micro.predict_N + by).clamp(0, len(micro.tokens_T) - 1))
    )


def prefix_twice(sample: Sample, rollout: Rollout) -> Sample:
    n = sample.begins[0]
    twice = {name: getattr(sample, name)[:n] + getattr(sample, name) for name in ("tokens", "mask", "logprobs")}
    return dataclasses.replace(sample, **twice, advantages=(0.0,) * n + sample.advantages)


def parents_of(change: Callable[[tuple[int | None, ...]], Sequence[int | None]]) -> Plant:
    """Another tree of what sequences share."""

    def wrong(micro: Micro) -> Micro:
        plan = dataclasses.replace(micro.plan, parents=tuple(change(micro.plan.parents)))
        return dataclasses.replace(micro, plan=plan)

    return micros(wrong)


def first_part_alone(parents: tuple[int | None, ...]) -> list[int | None]:
    """Of a history only the first part is seen; it takes a tree of more than two levels to notice."""
    above = [None if parent is None else parents[parent] for parent in parents]
    return [parent if higher is None else higher for parent, higher in zip(parents, above, strict=True)]


def slightly_other(run: Callable[..., Any], *_: object) -> Callable[..., Any]:
    """A layer that computes something a little different."""
    return lambda layer, hidden, *args, **kwargs: run(layer, hidden * 1.001, *args, **kwargs)


def support_ignored(whole: Any) -> Any:
    def wrong(self: LocalWork, micro: Micro, **more: Any) -> Any:
        kept = self.sampling
        self.sampling = dataclasses.replace(kept, top_p=1.0)
        try:
            return whole(self, micro, **more)
        finally:
            self.sampling = kept

    return wrong


def whole_blocks_are_other(whole: Any) -> Any:
    """Rows that fill their blocks of 64 tokens are computed a little differently."""

    def wrong(self: LocalWork, micro: Micro, **more: Any) -> Any:
        logprobs_N, entropy_N = whole(self, micro, **more)
        return logprobs_N * (1.0 if len(micro.tokens_T) % 64 else 1.001), entropy_N

    return wrong


def penalties_of_neighbours(micro: Micro) -> Micro:
    assert micro.history is not None
    output = micro.history.output
    output = output._replace(end_E=torch.full_like(output.end_E, len(micro.targets_N)))
    return dataclasses.replace(micro, history=dataclasses.replace(micro.history, output=output))


def old_is_now(whole: Any) -> Any:
    def wrong(self: Objective, logprobs_N: Tensor, batch: Any, known: Any) -> Any:
        return whole(self, logprobs_N, batch, dataclasses.replace(known, recomputed_logprobs_N=logprobs_N.detach()))

    return wrong


def scaled(by: float) -> Plant:
    return micros(lambda micro: dataclasses.replace(micro, weights_N=micro.weights_N * by))


SIZES, ORDER, SHARED, THERE = "micro-batch sizes", "order of groups", "prompts shared", "the gradient is there"
PADDING = "padding"
NO_HISTORY = micros(lambda micro: dataclasses.replace(micro, history=None))

CUTS = [
    Defect(
        "divided by the configured accumulation",
        micros(lambda micro: dataclasses.replace(own_mean(micro), weights_N=own_mean(micro).weights_N / 4)),
        (SIZES, GRADIENT),
    ),
    Defect("predicted from the token before", shifted(-1), (GRADIENT,)),
    Defect("predicted from the token after", shifted(1), (GRADIENT,)),
    Defect("a prefix is there twice", samples(prefix_twice), (GRADIENT,)),
    Defect("siblings do not see what they share", parents_of(lambda parents: [None] * len(parents)), (GRADIENT,)),
    Defect("of a history only the first part is seen", parents_of(first_part_alone), (SIZES, SHARED, GRADIENT)),
    Defect(
        "layers that are computed again are another function",
        attribute(layers, "recomputed", lambda whole: slightly_other),
        ("layers computed again",),
    ),
    Defect(
        "rows that fill their blocks are computed otherwise",
        attribute(LocalWork, "_distribution", whole_blocks_are_other),
        (PADDING,),
    ),
    Defect(
        "the last micro-batch is lost",
        batches(lambda batch: batch.micro[: max(1, len(batch.micro) - 1)]),
        (SIZES, ORDER),
    ),
    Defect(
        "truncated answers are trained against the recipe",
        attribute(
            Packer,
            "__call__",
            lambda w: (
                lambda self, groups, *, version: w(
                    dataclasses.replace(self, mask_truncated=False), groups, version=version
                )
            ),
        ),
        (GRADIENT,),
        ("truncated=mask",),
    ),
    Defect(
        "the support is ignored",
        attribute(LocalWork, "_distribution", support_ignored),
        (GRADIENT,),
        ("sampling.top_p=0.8",),
    ),
    *(
        Defect(f"{penalty} is not applied", NO_HISTORY, (GRADIENT,), (f"sampling.{penalty}",))
        for penalty in ("repetition_penalty=1.2", "frequency_penalty=0.5", "presence_penalty=0.5", "min_tokens=4")
    ),
    Defect(
        "penalties count turns before as the same answer",
        samples(lambda sample, rollout: dataclasses.replace(sample, begins=sample.begins[:1], ends=sample.ends[-1:])),
        (GRADIENT,),
        ("sampling.frequency_penalty=0.5",),
    ),
    Defect(
        "penalties of a sequence count for its neighbours",
        micros(penalties_of_neighbours),
        (SIZES, GRADIENT),
        ("sampling.presence_penalty=0.5",),
    ),
    Defect(
        "the old policy is the one of now",
        attribute(Objective, "__call__", old_is_now),
        (GRADIENT,),
        ("updates_per_batch=2", "old_logprobs=recomputed"),
    ),
    Defect("there is no gradient", scaled(0.0), (THERE, GRADIENT)),
    Defect("the gradient is no number", scaled(math.nan), (THERE, SIZES, SHARED, GRADIENT)),
]
"""What the first of these lines notice: how a step is cut, and what is sampled."""


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(defect, id=defect.what, marks=[] if defect in SIXTEEN[::8] else [pytest.mark.long])
        for defect in [*SIXTEEN, *OWN, *CUTS]
    ],
)
def test_a_defect_is_found_and_named(defect: Defect, model: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    if not {SIZES, ORDER, SHARED, PADDING, "layers computed again"} & set(defect.fails):
        monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    defect.plant(monkeypatch)
    failures = failed(model, defect)
    assert [part for part in defect.fails if not any(part in name for name in failures)] == []


@pytest.mark.long
def test_a_mean_over_micro_batches_is_right_where_there_is_one(model: Path, monkeypatch: Patch) -> None:
    """Which is why it is found so late elsewhere."""

    def means(batch: StepBatch) -> list[Micro]:
        whole = sum(float(micro.weights_N.sum()) for micro in batch.micro)
        return [
            dataclasses.replace(own_mean(m), weights_N=own_mean(m).weights_N * whole / len(batch.micro))
            for m in batch.micro
        ]

    monkeypatch.chdir(ROOT)
    batches(means)(monkeypatch)
    failures = failed(model, Defect("", batches(means), (), ("micro_batch_tokens=4096",)))
    assert any(SIZES in name for name in failures)
    assert not any(GRADIENT in name for name in failures)


@pytest.mark.long
def test_compiled_layers_that_are_another_function(model: Path, monkeypatch: Patch) -> None:
    made: list[str] = []

    def wrong(forward: Callable[..., Any], backend: str, checkpointing: str) -> Callable[..., Any]:
        made.append(checkpointing)
        return forward if checkpointing == "none" else slightly_other(forward)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tandem.tools.certify.case.missing", lambda device: None)
    monkeypatch.setattr(compilation, "decide", lambda wanted, device: wanted is True)
    monkeypatch.setattr(compilation, "compiled", wrong)
    config = load(Path("recipes/arithmetic.yaml"), [f"model={model}", "compile=true"]).config
    with contextlib.closing(Case(config, real=False)) as case:
        assert [line.name for line in case.lines(0) if line.state == "fail"] == ["layers compiled"]
    assert made == ["none", "selective"]


def mean_of_means(whole: Any) -> Any:
    """Each rank's gradient is the mean over its own tokens."""

    async def wrong(self: RankCrew, batch: StepBatch, *others: Any) -> Any:
        micros = list(batch.micro)
        for dealt in zip(*batch.rounds, strict=True):
            mine = [i for i in dealt if i is not None]
            total = sum(float(micros[i].weights_N.sum()) for i in mine) * len(batch.rounds[0])
            for i in mine:
                micros[i] = dataclasses.replace(micros[i], weights_N=micros[i].weights_N / total)
        return await whole(self, dataclasses.replace(batch, micro=tuple(micros)), *others)

    return wrong


def own_norm(whole: Any) -> Any:
    """The lead clips by another norm than the other ranks."""
    return lambda self, gradients: whole(self, gradients) * 0.5


def not_gathered(whole: Any) -> Any:
    """The lead has not all of what the other rank wrote."""

    def wrong(self: ShardedStepper, lr: float, most: float) -> Tensor:
        (cut,) = (cut for (name, _), cut in zip(self._named, self._cuts, strict=True) if "layers.0.mlp.up" in name)
        theirs = cut.parameter.detach().view(-1)[cut.width : cut.width + 3]
        before = theirs.clone()
        norm: Tensor = whole(self, lr, most)
        theirs.copy_(before)
        return norm

    return wrong


OF_TWO, THEIR_WEIGHTS, THEIR_STEPS = (
    "2 processes",
    "weights of 2 processes",
    "weights of 2 processes after two steps",
)
MEANS, CLIPPED = attribute(RankCrew, "passed", mean_of_means), attribute(ShardedStepper, "_norm", own_norm)
LOST = attribute(ShardedStepper, "step", not_gathered)
RANKED: list[tuple[str, Plant, set[str], str]] = [
    ("a mean of the ranks' means", MEANS, {OF_TWO, "whole gradient by formulas"}, "2"),
    ("the same in a recipe without ranks", MEANS, {OF_TWO}, "null"),
    ("clipped by the own norm", CLIPPED, {THEIR_STEPS, "gradient norms as told"}, "2"),
    ("weights that are not gathered", LOST, {THEIR_WEIGHTS, THEIR_STEPS}, "2"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "plant", "caught", "ranks"), RANKED, ids=[name for name, *_ in RANKED])
def test_a_defect_among_ranks_is_named(
    name: str, plant: Plant, caught: set[str], ranks: str, model: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    monkeypatch.setattr(Case, "inert", lambda self: ((), ()))
    own = [f"model={model}", "compile=false", "reference=start", "updates_per_batch=2", f"ranks={ranks}"]
    config = load(Path("recipes/arithmetic.yaml"), own).config
    plant(monkeypatch)
    assert caught <= {line.name for line in certify(config).lines if line.state == "fail"}


@pytest.mark.long
def test_ranks_without_a_defect_pass(model: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    monkeypatch.setattr(Case, "inert", lambda self: ((), ()))
    own = [f"model={model}", "compile=false", "trainable.merged=true", "reference=start", "updates_per_batch=2"]
    certificate = certify(load(Path("recipes/lora.yaml"), own).config)
    assert {line.name: line.state for line in certificate.lines}["2 processes"] == "pass"
    assert certificate.passed


def recipes() -> list[Defect]:
    """What the defects are planted in, each once and whole."""
    by = {(defect.source, defect.recipe): defect for defect in [*SIXTEEN, *OWN, *CUTS]}
    return list(by.values())


@pytest.mark.long
@pytest.mark.parametrize("whole", recipes(), ids=lambda defect: " ".join([defect.source, *defect.recipe]))
def test_without_a_defect_the_same_recipe_passes(whole: Defect, model: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    assert failed(model, whole) == []
