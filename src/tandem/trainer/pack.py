"""Scored groups in, micro-batches out. The causal shift happens here and nowhere else.

Turns that continue one another become one sequence. Siblings share their prompt: it is one segment of a packed row,
computed once. The last token of a sequence predicts nothing that is trained, so it is never computed.

T counts the tokens computed in a micro-batch, N the trained tokens predicted by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

import torch
from torch import Tensor

from tandem.advantages.base import Advantage, advantages
from tandem.losses.base import MicroBatch
from tandem.metrics import Histogram, Mean, Sum, Value
from tandem.policy.attention import Packed, sequential_positions
from tandem.types import Group, Rollout, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One forward and backward."""

    tokens_T: Tensor
    """int64; prompts once, completions after them."""
    positions_T: Tensor
    """int64; within each sequence."""
    plan: Packed
    """Which segment continues which."""
    predict_N: Tensor
    """int64; the place in T whose hidden state predicts each trained token."""
    targets_N: Tensor
    """int64; the trained token ids."""
    temperature_N: Tensor
    """float32; each token's sampling temperature."""
    weights_N: Tensor
    """float32; what each token's loss counts, so that the step's loss is one sum over all micro-batches."""
    batch: MicroBatch
    """What the loss reads."""
    places: tuple[tuple[str, int], ...]
    """Rollout id and number of trained tokens of each sample, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything of one optimizer step."""

    micro: tuple[Micro, ...]
    """In no particular order: the step's result does not depend on it."""
    groups: tuple[Group, ...]
    """What it was made from."""
    advantages: Mapping[str, float]
    """By rollout id; the mean over its tokens where the environment gave one for each."""
    num_loss_tokens: int
    """Trained tokens in all micro-batches."""
    num_samples: int
    """Trained sequences in all micro-batches."""
    metrics: Mapping[str, Value] = field(default_factory=dict)
    """What the batch says of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """How groups become micro-batches."""

    advantage: Advantage
    """Per group."""
    reduction: str
    """The loss's: token, sequence or constant."""
    max_tokens: int
    """Of one completion; the constant reduction divides by it."""
    budget: int
    """Most tokens computed in one micro-batch; one sequence longer than that gets a micro-batch of its own."""
    mask_truncated: bool
    """Leave answers cut by a length limit out of the loss; they still count in their group's baseline."""
    device: torch.device
    """Where the tensors go."""

    def __call__(self, groups: Sequence[Group], *, version: int) -> StepBatch:
        """Pack one step's groups. ``version`` is the policy step that will be trained; it only measures lag."""
        by_rollout: dict[str, float] = {}
        samples: list[list[Sample]] = []
        for group, values in zip(groups, advantages(self.advantage, groups), strict=True):
            mine: list[Sample] = []
            for rollout, value in zip(group.scored, values, strict=True):
                given = rollout.advantages
                by_rollout[rollout.id] = value if given is None else math.fsum(given) / len(given)
                if rollout.trained and not (self.mask_truncated and rollout.truncated):
                    mine.extend(samples_of(rollout, group, value))
            samples.append(mine)
        counts = [sum(sample.mask) for mine in samples for sample in mine]
        weigh = self._weights(sum(counts), len(counts))
        micro = tuple(self._tensors(chunk, weigh) for chunk in split(samples, self.budget))
        return StepBatch(
            micro=micro,
            groups=tuple(groups),
            advantages=by_rollout,
            num_loss_tokens=sum(counts),
            num_samples=len(counts),
            metrics={**_metrics(groups, by_rollout, version), **_work(micro)},
        )

    def _weights(self, num_tokens: int, num_samples: int) -> Callable[[int], float]:
        """Weight of each token of a sample, given how many trained tokens the sample has."""
        if self.reduction == "token":
            return lambda length: 1.0 / num_tokens
        if self.reduction == "sequence":
            return lambda length: 1.0 / (num_samples * length)
        return lambda length: 1.0 / (num_samples * self.max_tokens)

    def _tensors(self, chunk: Sequence[Sequence[Sample]], weigh: Callable[[int], float]) -> Micro:
        """Lay out one micro-batch: for each group's share its prompt, then its completions."""
        row = _Row()
        for siblings in chunk:
            row.add(siblings, weigh)
        plan = Packed(lengths=tuple(row.lengths), parents=tuple(row.parents))

        def ints(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=self.device)

        def floats(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float32, device=self.device)

        return Micro(
            tokens_T=ints(row.tokens),
            positions_T=ints(sequential_positions(plan)),
            plan=plan,
            predict_N=ints(row.predict),
            targets_N=ints(row.targets),
            temperature_N=floats(row.temperatures),
            weights_N=floats(row.weights),
            batch=MicroBatch(
                behavior_logprobs_N=floats(row.logprobs),
                advantages_N=floats(row.advantages),
                sample_N=ints(row.sample_of),
                num_samples=len(row.places),
            ),
            places=tuple(row.places),
        )


@dataclass(slots=True)
class _Row:
    """A packed row under construction."""

    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    predict: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    sample_of: list[int] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)

    def add(self, siblings: Sequence[Sample], weigh: Callable[[int], float]) -> None:
        """Append a shared prompt and what follows it in each sibling."""
        shared = siblings[0].prompt_len
        parent = self._segment(siblings[0].tokens[:shared], None)
        root_end = len(self.tokens)
        for sample in siblings:
            start = len(self.tokens)
            if rest := sample.tokens[shared:-1]:
                self._segment(rest, parent)
            weight = weigh(sum(sample.mask))
            before = len(self.targets)
            for at, trained in enumerate(sample.mask):
                if trained:
                    # The token at place ``at`` is predicted by the one before it.
                    self.predict.append(root_end - 1 if at == shared else start + at - 1 - shared)
                    self.targets.append(sample.tokens[at])
                    self.logprobs.append(sample.logprobs[at])
                    self.advantages.append(sample.advantages[at])
            num = len(self.targets) - before
            self.temperatures.extend([sample.temperature] * num)
            self.weights.extend([weight] * num)
            self.sample_of.extend([len(self.places)] * num)
            self.places.append((sample.rollout, num))

    def _segment(self, tokens: Sequence[int], parent: int | None) -> int:
        self.tokens.extend(tokens)
        self.lengths.append(len(tokens))
        self.parents.append(parent)
        return len(self.lengths) - 1


def samples_of(rollout: Rollout, group: Group, advantage: float) -> Iterator[Sample]:
    """The trainable sequences of a rollout: one, unless a turn's prompt does not continue the turn before it.

    ``advantage`` is that of every sampled token, unless the environment gave each its own.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    temperature, prompt_len = 1.0, 0
    each = iter(rollout.advantages if rollout.advantages is not None else repeat(advantage))

    def sample() -> Sample:
        return Sample(
            tokens=tuple(tokens),
            mask=tuple(mask),
            logprobs=tuple(logprobs),
            advantages=tuple(advantages),
            temperature=temperature,
            prompt_len=prompt_len,
            group=group.id,
            version=min(versions),
            env=group.env,
            rollout=rollout.id,
        )

    for turn in rollout.turns:
        completion = turn.completion
        if not completion.tokens:
            continue
        if not tokens or turn.temperature != temperature or tuple(tokens) != turn.prompt[: len(tokens)]:
            if tokens:
                yield sample()
            tokens, mask, logprobs, advantages, versions = [], [], [], [], []
            temperature, prompt_len = turn.temperature, len(turn.prompt)
        new = turn.prompt[len(tokens) :]
        tokens.extend((*new, *completion.tokens))
        mask.extend([False] * len(new) + [True] * len(completion.tokens))
        logprobs.extend((*(0.0 for _ in new), *completion.logprobs))
        advantages.extend((*(0.0 for _ in new), *islice(each, len(completion.tokens))))
        versions.extend(completion.versions)
    if tokens:
        yield sample()


def split(groups: Sequence[Sequence[Sample]], budget: int) -> Iterator[list[list[Sample]]]:
    """Cut a step's samples into micro-batches of at most ``budget`` computed tokens, in order.

    Samples of one group that begin with the same prompt stay together where the budget allows, since its tokens are
    computed once for each micro-batch it is in.
    """
    chunk: list[list[Sample]] = []
    used = 0
    for siblings in (alike for group in groups for alike in _alike(group)):
        prompt = siblings[0].prompt_len
        share: list[Sample] = []
        for sample in siblings:
            cost = len(sample.tokens) - 1 - prompt + (0 if share else prompt)
            if used and used + cost > budget:
                if share:
                    chunk.append(share)
                yield chunk
                chunk, share, used = [], [], 0
                cost = len(sample.tokens) - 1
            share.append(sample)
            used += cost
        chunk.append(share)
    if chunk:
        yield chunk


def _alike(samples: Sequence[Sample]) -> Iterable[list[Sample]]:
    """Samples by their prompt, in order of first appearance."""
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.tokens[: sample.prompt_len], []).append(sample)
    return by_prompt.values()


def _metrics(groups: Sequence[Group], advantages: Mapping[str, float], version: int) -> dict[str, Value]:
    """What the batch says of itself."""
    return {
        "lag": Histogram(tuple(float(version - group.version_min) for group in groups)),
        "advantage/abs": Mean.of(map(abs, advantages.values())),
        "groups/trained": Sum(float(len(groups))),
    }


def _work(micro: Sequence[Micro]) -> dict[str, Value]:
    """What the step will compute."""
    return {
        "tokens/trained": Sum(float(sum(len(m.targets_N) for m in micro))),
        "tokens/computed": Sum(float(sum(len(m.tokens_T) for m in micro))),
        "micro_batches": Sum(float(len(micro))),
    }
