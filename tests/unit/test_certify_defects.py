"""A certificate fails on each defect that is planted in what it certifies, and says where."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tandem.algorithms.advantages import grpo as advantage_grpo
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses import grpo as loss_grpo
from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.loading import load
from tandem.metrics import Value
from tandem.model import compilation, layers
from tandem.tools.certify import ranks
from tandem.tools.certify.case import Case
from tandem.tools.certify.certificate import Certificate, certify
from tandem.trainer import pack
from tandem.trainer.objective import Known, Objective
from tandem.trainer.pack import Micro, Packer, StepBatch
from tandem.trainer.step import Step
from tandem.types import Group, Rollout, Sample

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
Patch = pytest.MonkeyPatch

FORMULAS, SIZES, ORDER, SHARED = "whole gradient", "micro-batch sizes", "order of groups", "prompts shared"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig().save_pretrained(folder)
    return folder


@pytest.fixture
def failed(model: Path, monkeypatch: Patch) -> Callable[..., list[str]]:
    """Names of the lines that fail; options that change nothing are not looked for."""
    monkeypatch.chdir(ROOT)

    def look(*overrides: str, several: int = 0) -> list[str]:
        eager = [] if "compile=true" in overrides else ["compile=false"]
        config = load(Path("recipes/arithmetic.yaml"), [f"model={model}", *eager, *overrides]).config
        with contextlib.closing(Case(config, real=False)) as case:
            found = Certificate(model="", lines=tuple(case.lines(several)), inert=(), inert_on_policy=(), seconds=0.0)
        assert found.passed == all(line.state == "pass" for line in found.lines if line.state != "skipped")
        assert [line.name for line in found.lines if line.state == "skipped"] in ([], ["layers compiled"])
        return [line.name for line in found.lines if line.state == "fail"]

    return look


def named(names: Sequence[str], *parts: str) -> bool:
    """Every part is in one of the names."""
    return all(any(part in name for name in names) for part in parts)


def rewritten(monkeypatch: Patch, change: Callable[[StepBatch], Sequence[Micro]]) -> None:
    """Plant something in every batch that is packed."""
    whole = Packer.__call__

    def wrong(self: Packer, groups: Sequence[Group], *, version: int) -> StepBatch:
        batch = whole(self, groups, version=version)
        return dataclasses.replace(batch, micro=tuple(change(batch)))

    monkeypatch.setattr(Packer, "__call__", wrong)


def samples_rewritten(monkeypatch: Patch, change: Callable[[Sample], Sample]) -> None:
    """Plant something in every sample."""
    whole = pack.samples_of

    def wrong(rollout: Rollout, group: Group, advantage: float, **options: bool) -> Iterator[Sample]:
        return map(change, whole(rollout, group, advantage, **options))

    monkeypatch.setattr(pack, "samples_of", wrong)


def own_mean(micro: Micro, share: float) -> Micro:
    """Weights that make a mean of the micro-batch alone, of which a share counts."""
    return dataclasses.replace(micro, weights_N=micro.weights_N / micro.weights_N.sum() * share)


def test_without_a_defect_nothing_fails(failed: Callable[..., list[str]]) -> None:
    assert failed() == []


@pytest.mark.slow
def test_divided_by_the_configured_instead_of_the_real_accumulation(failed: Any, monkeypatch: Patch) -> None:
    rewritten(monkeypatch, lambda batch: [own_mean(micro, 1 / 4) for micro in batch.micro])
    assert named(failed(), SIZES, FORMULAS)


@pytest.mark.slow
def test_a_mean_over_each_micro_batch(failed: Any, monkeypatch: Patch) -> None:
    def means(batch: StepBatch) -> list[Micro]:
        whole = sum(float(micro.weights_N.sum()) for micro in batch.micro)
        return [own_mean(micro, whole / len(batch.micro)) for micro in batch.micro]

    rewritten(monkeypatch, means)
    found = failed("micro_batch_tokens=4096")
    assert named(found, SIZES)
    assert not named(found, FORMULAS)  # with one micro-batch it is right, which is why it is found so late elsewhere


@pytest.mark.slow
def test_a_clip_that_is_inverted_for_negative_advantages(failed: Any, monkeypatch: Patch) -> None:
    def wrong(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None) -> Any:
        most_N = torch.where(advantages_N < 0, 1 - low, 1 + high)
        return -advantages_N * torch.minimum(ratio_N, most_N), {}

    monkeypatch.setattr(loss_grpo, "clipped", wrong)
    assert named(failed(), FORMULAS)


@pytest.mark.slow
@pytest.mark.parametrize("by", [-1, 1])
def test_an_off_by_one_shift(failed: Any, monkeypatch: Patch, by: int) -> None:
    def wrong(micro: Micro) -> Micro:
        return dataclasses.replace(micro, predict_N=(micro.predict_N + by).clamp(0, len(micro.tokens_T) - 1))

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed(), FORMULAS)


@pytest.mark.slow
def test_a_mask_that_includes_the_prompt(failed: Any, monkeypatch: Patch) -> None:
    def wrong(sample: Sample) -> Sample:
        value = next(a for a, trained in zip(sample.advantages, sample.mask, strict=True) if trained)
        mask = (False, *(True for _ in sample.mask[1:]))
        return dataclasses.replace(sample, mask=mask, advantages=(value,) * len(mask), prompt_len=1)

    samples_rewritten(monkeypatch, wrong)
    assert named(failed(), FORMULAS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sampling.temperature=1.0", "sampling.temperature=0.7"])
def test_a_temperature_that_is_ignored(failed: Any, monkeypatch: Patch, recipe: str) -> None:
    """Of a recipe that samples at 1 too: some made-up answers are not."""

    def wrong(micro: Micro) -> Micro:
        return dataclasses.replace(micro, temperature_N=torch.ones_like(micro.temperature_N))

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed(recipe), FORMULAS)


@pytest.mark.slow
def test_a_prefix_that_is_there_twice(failed: Any, monkeypatch: Patch) -> None:
    def wrong(sample: Sample) -> Sample:
        n = sample.prompt_len
        twice = {name: getattr(sample, name)[:n] + getattr(sample, name) for name in ("tokens", "mask", "logprobs")}
        return dataclasses.replace(sample, **twice, advantages=(0.0,) * n + sample.advantages, prompt_len=2 * n)

    samples_rewritten(monkeypatch, wrong)
    assert named(failed(), FORMULAS)


def test_two_processes_are_as_good_as_one(model: Path, monkeypatch: Patch) -> None:
    """In one file with what they find: the process that they are forked from takes longer to start than both do."""
    monkeypatch.chdir(ROOT)
    own = [f"model={model}", "compile=false", "trainable.merged=true", "reference=start", "updates_per_batch=2"]
    found = certify(load(Path("recipes/lora.yaml"), own).config)
    assert found.passed
    (line,) = [line for line in found.lines if "2 processes" in line.name]
    assert line.state == "pass"


def test_a_mean_over_ranks_of_means(failed: Any, monkeypatch: Patch) -> None:
    share = ranks.share

    def wrong(batch: StepBatch, rank: int, count: int) -> StepBatch:
        mine = share(batch, rank, count)
        total = float(sum(micro.weights_N.sum() for micro in mine.micro))
        return dataclasses.replace(
            mine, micro=tuple(own_mean(m, float(m.weights_N.sum()) / total / count) for m in mine.micro)
        )

    monkeypatch.setattr(ranks, "share", wrong)
    (only,) = failed(several=2)
    assert "2 processes" in only


def test_a_shared_prompt_that_siblings_do_not_see(failed: Any, monkeypatch: Patch) -> None:
    def wrong(micro: Micro) -> Micro:
        plan = dataclasses.replace(micro.plan, parents=(None,) * len(micro.plan.parents))
        return dataclasses.replace(micro, plan=plan)

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed(), FORMULAS)


def test_a_history_of_which_only_the_first_part_is_seen(failed: Any, monkeypatch: Patch) -> None:
    """It takes a tree of more than two levels to see this."""

    def wrong(micro: Micro) -> Micro:
        parents = micro.plan.parents
        above = [None if parent is None else parents[parent] for parent in parents]
        first = tuple(parent if higher is None else higher for parent, higher in zip(parents, above, strict=True))
        return dataclasses.replace(micro, plan=dataclasses.replace(micro.plan, parents=first))

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed(), SIZES, SHARED, FORMULAS)


def _shifted(run: Callable[..., Any], *_: object) -> Callable[..., Any]:
    """A layer that computes something a little different."""
    return lambda layer, hidden, *args, **kwargs: run(layer, hidden * 1.001, *args, **kwargs)


def test_layers_that_are_another_function_when_they_are_computed_again(failed: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(layers, "recomputed", _shifted)
    assert failed() == ["layers computed again"]


def test_layers_that_are_another_function_when_they_are_compiled(failed: Any, monkeypatch: Patch) -> None:
    compiled: list[str] = []

    def wrong(forward: Callable[..., Any], backend: str, checkpointing: str) -> Callable[..., Any]:
        compiled.append(checkpointing)
        return forward if checkpointing == "none" else _shifted(forward)

    monkeypatch.setattr("tandem.tools.certify.case.missing", lambda device: None)
    monkeypatch.setattr(compilation, "decide", lambda wanted, device: wanted is True)
    monkeypatch.setattr(compilation, "compiled", wrong)
    assert failed("compile=true") == ["layers compiled"]
    assert compiled == ["none", "selective"]


def test_positions_that_begin_anew_after_a_shared_prompt(failed: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pack, "sequential_positions", lambda plan: [p for n in plan.lengths for p in range(n)])
    assert named(failed(), FORMULAS)


def test_what_a_micro_batch_comes_after_matters(failed: Any, monkeypatch: Patch) -> None:
    """The last micro-batch is lost, as by a loader that drops what does not fill one."""
    rewritten(monkeypatch, lambda batch: batch.micro[: max(1, len(batch.micro) - 1)])
    found = failed()
    assert named(found, SIZES, ORDER)


def test_another_deviation(failed: Any, monkeypatch: Patch) -> None:
    whole = advantage_grpo.Grpo.__call__
    other = advantage_grpo.Grpo(std="population")
    monkeypatch.setattr(advantage_grpo.Grpo, "__call__", lambda self, group: whole(other, group))
    assert named(failed("advantage=grpo"), FORMULAS)


def test_truncated_answers_that_are_trained_against_the_recipe(failed: Any, monkeypatch: Patch) -> None:
    whole = Packer.__call__

    def wrong(self: Packer, groups: Sequence[Group], *, version: int) -> StepBatch:
        return whole(dataclasses.replace(self, mask_truncated=False), groups, version=version)

    monkeypatch.setattr(Packer, "__call__", wrong)
    assert named(failed("truncated=mask"), FORMULAS)


def test_a_support_that_is_ignored(failed: Any, monkeypatch: Patch) -> None:
    whole = Step._distribution

    def wrong(self: Step, micro: Micro, **more: Any) -> Any:
        kept = self.sampling
        self.sampling = dataclasses.replace(kept, top_p=1.0)
        try:
            return whole(self, micro, **more)
        finally:
            self.sampling = kept

    monkeypatch.setattr(Step, "_distribution", wrong)
    assert named(failed("sampling.top_p=0.8"), FORMULAS)


@pytest.mark.parametrize(
    "penalty", ["repetition_penalty=1.2", "frequency_penalty=0.5", "presence_penalty=0.5", "min_tokens=4"]
)
def test_a_penalty_that_is_not_applied(failed: Any, monkeypatch: Patch, penalty: str) -> None:
    assert failed(f"sampling.{penalty}") == []
    rewritten(monkeypatch, lambda batch: [dataclasses.replace(micro, history=None) for micro in batch.micro])
    assert named(failed(f"sampling.{penalty}"), FORMULAS)


def test_penalties_that_count_the_turns_before_as_the_same_answer(failed: Any, monkeypatch: Patch) -> None:
    samples_rewritten(monkeypatch, lambda sample: dataclasses.replace(sample, begins=sample.begins[:1]))
    assert failed("sampling.repetition_penalty=1.2") == []
    assert named(failed("sampling.frequency_penalty=0.5"), FORMULAS)


def test_penalties_of_a_sequence_that_count_for_its_neighbours(failed: Any, monkeypatch: Patch) -> None:
    def wrong(micro: Micro) -> Micro:
        assert micro.history is not None
        said = micro.history.said
        said = said._replace(end_E=torch.full_like(said.end_E, len(micro.targets_N)))
        return dataclasses.replace(micro, history=dataclasses.replace(micro.history, said=said))

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed("sampling.presence_penalty=0.5"), SIZES, FORMULAS)


def test_an_old_policy_that_is_the_one_of_now(failed: Any, monkeypatch: Patch) -> None:
    whole = Objective.__call__

    def wrong(self: Objective, logprobs_N: Tensor, batch: Any, known: Known) -> tuple[Tensor, dict[str, Value]]:
        return whole(self, logprobs_N, batch, dataclasses.replace(known, first_N=logprobs_N.detach()))

    monkeypatch.setattr(Objective, "__call__", wrong)
    assert named(failed("updates_per_batch=2", "old_logprobs=recomputed"), FORMULAS)


def test_a_reference_that_is_the_policy_itself(failed: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ReferenceWeights, "in_place", lambda self: contextlib.nullcontext())
    assert named(failed("reference={kind: start, beta: 0.1}"), FORMULAS)


def test_a_correction_that_corrects_nothing(failed: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(TokenCorrection, "__call__", lambda self, logprobs_N, micro: torch.ones_like(logprobs_N))
    assert named(failed("corrections=[{kind: token, beyond: mask}]"), FORMULAS)


def test_no_gradient_at_all(failed: Any, monkeypatch: Patch) -> None:
    def wrong(micro: Micro) -> Micro:
        return dataclasses.replace(micro, weights_N=torch.zeros_like(micro.weights_N))

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed(), "the gradient is there", FORMULAS)


def test_a_gradient_that_is_no_number(failed: Any, monkeypatch: Patch) -> None:
    def wrong(micro: Micro) -> Micro:
        return dataclasses.replace(micro, weights_N=micro.weights_N * float("nan"))

    rewritten(monkeypatch, lambda batch: map(wrong, batch.micro))
    assert named(failed(), "the gradient is there", SIZES, SHARED, FORMULAS)
