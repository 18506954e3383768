"""Groups to micro-batches: every trained token once, after exactly the tokens it was sampled after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollouts import make_group, make_rollout
from support.tiers import examples

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.metrics import flatten
from tandem.model.penalties import Penalties
from tandem.trainer import prefix_tree
from tandem.trainer.pack import Micro, Packer, StepBatch, samples_of
from tandem.trainer.record import records
from tandem.trainer.step import StepStats
from tandem.types import Completion, Group, Rollout, Task, Turn


def packer(**changes: Any) -> Packer:
    options: dict[str, Any] = {
        "advantage": DrGrpo(),
        "reduction": "token",
        "max_tokens": 10,
        "budget": 1000,
        "mask_truncated": False,
        "device": torch.device("cpu"),
        "penalties": Penalties(repetition=1.1),
    }
    return Packer(**{**options, **changes})


def before(micro: Micro, place: int) -> tuple[int, ...]:
    """The tokens that a place of a packed row sees, its own last, by the plan alone."""
    ends = torch.tensor(micro.plan.lengths).cumsum(0).tolist()
    segment = next(i for i, end in enumerate(ends) if place < end)
    start = ends[segment] - micro.plan.lengths[segment]
    own = micro.tokens_T[start : place + 1].tolist()
    parent = micro.plan.parents[segment]
    return (*before(micro, ends[parent] - 1), *own) if parent is not None else tuple(own)


def trained(batch: StepBatch) -> Counter[tuple[Any, ...]]:
    """Every trained token: rollout, what is before it, itself, its logprob, its advantage."""
    tokens_seen: Counter[tuple[Any, ...]] = Counter()
    for micro in batch.micro:
        assert sum(micro.plan.lengths) == len(micro.tokens_T) == len(micro.positions_T)
        assert micro.batch.num_samples == len(micro.places)
        assert Counter(micro.batch.sample_N.tolist()) == Counter(
            {i: num for i, (_, num) in enumerate(micro.places) if num}
        )
        for n, place in enumerate(micro.predict_N.tolist()):
            seen = before(micro, place)
            assert micro.positions_T[place] == len(seen) - 1
            rollout = micro.places[micro.batch.sample_N[n]][0]
            logprob = micro.batch.behavior_logprobs_N[n].item()
            advantage = round(micro.batch.advantages_N[n].item(), 6)
            past = told_before(micro, n)
            assert past[0] == {*seen}
            key = (rollout, seen, past[1:], micro.targets_N[n].item(), logprob, advantage)
            tokens_seen[*key, micro.temperature_N[n].item()] += 1
    return tokens_seen


def told_before(micro: Micro, row: int) -> tuple[set[int], frozenset[tuple[int, int]], int]:
    """Tokens before a row, how often each is in its answer so far, and the length of that."""
    history = micro.history
    assert history is not None
    counts = [events.counts((row, row + 1), (0, 256))[0] for events in (history.seen, history.output)]
    seen, outputs = ({t: int(count[t]) for t in count.nonzero()[:, 0].tolist()} for count in counts)
    assert {*seen.values()} <= {1}
    return {*seen}, frozenset(outputs.items()), int(history.age_N1[row])


def sampled(groups: Sequence[Group], advantages: dict[str, float]) -> Counter[tuple[Any, ...]]:
    """The same, from the rollouts."""
    counted: Counter[tuple[Any, ...]] = Counter()
    for rollout in (r for group in groups for r in group.scored):
        for turn in rollout.turns:
            for i, (token, logprob) in enumerate(zip(turn.completion.tokens, turn.completion.logprobs, strict=True)):
                seen = (*turn.prompt, *turn.completion.tokens[:i])
                own = Counter(turn.completion.tokens[:i])
                past = (frozenset(own.items()), i)
                counted[rollout.id, seen, past, token, logprob, round(advantages[rollout.id], 6), turn.temperature] += 1
    return counted


@st.composite
def groups_of(draw: st.DrawFn) -> list[Group]:
    """Groups whose rollouts have one to three turns, some of which do not continue the turn before them."""
    token = st.integers(0, 3)  # few, so that prompts and turns often look alike
    serial = 0
    groups = []
    for g in range(draw(st.integers(1, 3))):
        opening = draw(st.lists(token, min_size=1, max_size=5))
        rollouts = []
        for s in range(draw(st.integers(1, 4))):
            turns, temperatures, so_far = [], [], list(opening)
            for _ in range(draw(st.integers(1, 3))):
                tokens = draw(st.lists(token, min_size=0 if turns else 1, max_size=4))
                logprobs = [-(serial + i) / 1024 for i in range(len(tokens))]  # exact in float32, no two alike
                serial += len(tokens)
                turns.append((list(so_far), tokens, logprobs))
                temperatures.append(draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])))
                so_far += [*tokens, *draw(st.lists(token, max_size=3))]
                if draw(st.integers(0, 3)) == 0:  # the environment rewrites what was said
                    so_far = draw(st.lists(token, min_size=1, max_size=6))
            reward = draw(st.sampled_from([0.0, 0.5, 1.0, None])) if s else 0.5  # one is always scored
            rollouts.append(make_rollout(f"t{g}@0/{s}", turns, reward, temperature=temperatures))
        groups.append(make_group(f"t{g}@0", rollouts, index=g))
    return groups


def test_a_sample_knows_where_its_answers_begin_and_end() -> None:
    turns = [([1, 2, 3, 4, 5], [6, 7], [0.0] * 2), ([1, 2, 3, 4, 5, 6, 7, 8], [9], [0.0]), ([9, 9], [5, 5], [0.0] * 2)]
    rollout = make_rollout("t0@0/0", turns, 1.0)
    samples = list(samples_of(rollout, 1.0))
    assert [sample.begins for sample in samples] == [(5, 8), (2,)]
    assert [sample.ends for sample in samples] == [(7, 9), (4,)]


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(groups=groups_of(), budget=st.sampled_from([1, 7, 16, 40, 1000]), least=st.sampled_from([1, 2, 4, 16]))
def test_every_trained_token_appears_once_after_what_it_was_sampled_after(
    groups: list[Group], budget: int, least: int
) -> None:
    """With trees of any depth: these sequences are too short to share as many tokens as it takes to be worth it."""
    with mock.patch.object(prefix_tree, "LEAST", least):
        batch = packer(budget=budget)(groups, version=0)
    assert trained(batch) == sampled(groups, dict(batch.advantages))
    tokens_of: dict[str, list[int]] = {}
    for micro in batch.micro:
        counts = [num for _, num in micro.places]
        for (rollout, _), tokens in zip(micro.places, micro.targets_N.split(counts), strict=True):
            tokens_of.setdefault(rollout, []).extend(tokens.tolist())
    for rollout in (r for group in groups for r in group.scored):
        in_order = [token for turn in rollout.turns for token in turn.completion.tokens]
        assert tokens_of.get(rollout.id, []) == in_order, "tokens of a rollout are told in order"
    assert batch.num_loss_tokens == sum(len(m.targets_N) for m in batch.micro)
    for micro in batch.micro:
        assert len(micro.tokens_T) <= budget or micro.batch.num_samples == 1


@pytest.mark.parametrize("budget", [1, 30, 1000])
@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_weights_make_the_step_one_mean(reduction: str, budget: int) -> None:
    """Over all micro-batches: of tokens, of samples that are each a mean, or over samples times max_tokens."""
    lengths = [2, 5, 1, 7, 7]
    batch = packer(reduction=reduction, budget=budget)([rows(*lengths[:3]), rows(*lengths[3:])], version=0)
    weighted = []
    for micro in batch.micro:
        for sample, (_, length) in enumerate(micro.places):
            (weight,) = set(micro.weights_N[micro.batch.sample_N == sample].tolist())
            weighted.append((length, weight))
    per_token = {
        "token": [1 / 22] * 5,
        "sequence": [1 / (5 * n) for n in lengths],
        "constant": [1 / (5 * 10)] * 5,
    }[reduction]
    assert sorted(n for n, _ in weighted) == sorted(lengths)
    weight_of = dict(zip(lengths, per_token, strict=True))
    assert [w for _, w in weighted] == pytest.approx([weight_of[n] for n, _ in weighted])
    total = sum(n * w for n, w in weighted)
    assert total == pytest.approx(22 / 50 if reduction == "constant" else 1.0)


def rows(*lengths: int, prompt: int = 3) -> Group:
    """Siblings of one prompt with answers of these lengths; rewards 0, 1, 2, ..."""
    return make_group(
        "t@0",
        [
            make_rollout(f"t@0/{i}", [(range(1, prompt + 1), [10 * i + j for j in range(n)], [-0.5] * n)], float(i))
            for i, n in enumerate(lengths)
        ],
    )


def test_the_shift_by_hand() -> None:
    """A prompt of 20, answers 0 1 and 10: the last prompt token predicts both first ones, the last token nothing."""
    (micro,) = packer()([rows(2, 1, prompt=20)], version=0).micro
    assert micro.tokens_T.tolist() == [*range(1, 21), 0]
    assert micro.positions_T.tolist() == list(range(21))
    assert (micro.plan.lengths, micro.plan.parents) == ((20, 1), (None, 0))
    assert micro.predict_N.tolist() == [19, 20, 19]
    assert micro.targets_N.tolist() == [0, 1, 10]
    assert micro.batch.advantages_N.tolist() == [-0.5, -0.5, 0.5]
    assert micro.places == (("t@0/0", 2), ("t@0/1", 1))


def test_a_prompt_is_computed_once_for_its_siblings() -> None:
    batch = packer()([rows(4, 6, 2, 1, prompt=50)], version=0)
    (micro,) = batch.micro
    assert len(micro.tokens_T) == 50 + 3 + 5 + 1 + 0
    assert flatten(batch.metrics)["tokens/computed"] == 59
    assert flatten(batch.metrics)["tokens/trained"] == 13


def test_tensors_are_of_the_kinds_that_are_promised() -> None:
    (micro,) = packer()([rows(2, 3)], version=0).micro
    ints = (micro.tokens_T, micro.positions_T, micro.predict_N, micro.targets_N, micro.batch.sample_N)
    floats = (micro.temperature_N, micro.weights_N, micro.batch.behavior_logprobs_N, micro.batch.advantages_N)
    assert {x.dtype for x in ints} == {torch.int64}
    assert {x.dtype for x in floats} == {torch.float32}


def test_turns_whose_history_was_rewritten_share_what_it_begins_with() -> None:
    """A conversation that is cut back twice, beside a sibling: they part at 20, 45 and 65 tokens."""
    opening, first, more = list(range(20)), list(range(100, 130)), list(range(200, 220))
    second = [*opening, *first[:25], 9, 9]
    exchanges = [(opening, first), (second, more), ([*second, *more[:18], 8], [1, 2])]
    turns = [(prompt, answer, [-0.5] * len(answer)) for prompt, answer in exchanges]
    sibling = make_rollout("t@0/1", [(opening, [7, 7], [-0.25] * 2)], 0.0)
    group = make_group("t@0", [make_rollout("t@0/0", turns, 1.0), sibling])
    batch = packer()([group], version=0)
    (micro,) = batch.micro
    # The sibling's answer, the last turn, the second turn, the first: in the order of their tokens.
    assert micro.plan.lengths == (20, 1, 25, 20, 2, 1, 4)
    assert micro.plan.parents == (None, 0, 0, 2, 3, 3, 2)
    assert trained(batch) == sampled([group], dict(batch.advantages))
    assert micro.places == (("t@0/0", 30), ("t@0/0", 20), ("t@0/0", 2), ("t@0/1", 2)), "as they were given"


@pytest.mark.parametrize(("alike", "segments"), [(15, 4), (16, 5)])
def test_answers_that_begin_alike_by_chance_are_not_cut_there(alike: int, segments: int) -> None:
    """Fifteen tokens in common after the prompt are computed twice, sixteen once."""
    answers = [[5] * alike + [1] * 4, [5] * alike + [2] * 4, [6] * 3]
    rollouts = [
        make_rollout(f"t@0/{i}", [(range(1, 31), one, [-0.5] * len(one))], float(i)) for i, one in enumerate(answers)
    ]
    group = make_group("t@0", rollouts)
    batch = packer()([group], version=0)
    assert len(batch.micro[0].plan.lengths) == segments
    assert trained(batch) == sampled([group], dict(batch.advantages))


def test_what_was_said_twice_or_begins_something_longer_has_no_segment_of_its_own() -> None:
    group = rows(40, 5, prompt=20)
    twice = replace(group.rollouts[0], id="t@0/9")
    beginning = make_rollout("t@0/8", [(range(1, 21), range(21), [-0.5] * 21)], 0.0)
    batch = packer()([replace(group, rollouts=(*group.rollouts, twice, beginning))], version=0)
    (micro,) = batch.micro
    assert micro.plan.lengths == (20, 20, 19, 4)
    assert micro.batch.num_samples == 4
    assert trained(batch) == sampled(batch.groups, dict(batch.advantages))


@pytest.mark.parametrize(
    ("budget", "sizes"), [(59, [59]), (58, [53, 56]), (55, [51, 53, 55]), (1, [50, 51, 53, 55])], ids=str
)
def test_a_budget_cuts_between_samples_and_repeats_the_prompt(budget: int, sizes: list[int]) -> None:
    """Evenly; a sample longer than the budget gets a micro-batch of its own."""
    batch = packer(budget=budget)([rows(4, 6, 2, 1, prompt=50)], version=0)
    assert sorted(len(m.tokens_T) for m in batch.micro) == sizes


def test_multi_turn_masks_are_exact() -> None:
    """What the environment said between two turns is in the sequence and not in the loss."""
    rollout = make_rollout("t@0/0", [([1, 2], [3, 4], [-0.1, -0.2]), ([1, 2, 3, 4, 5, 6], [7], [-0.3])], 1.0)
    (sample,) = samples_of(rollout, 2.0)
    assert sample.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert sample.mask == (False, False, True, True, False, False, True)
    assert sample.logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3)
    assert sample.advantages == (0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("second", "temperatures"),
    [([9, 2, 3, 4, 5], (1.0, 1.0)), ([1, 2, 3], (1.0, 1.0)), ([1, 2, 3, 4, 5], (1.0, 0.5))],
    ids=["rewritten", "shortened", "another temperature"],
)
def test_a_turn_that_does_not_continue_starts_a_sample(second: list[int], temperatures: tuple[float, float]) -> None:
    rollout = make_rollout(
        "t@0/0", [([1, 2], [3, 4], [-0.1, -0.2]), (second, [7], [-0.3])], 1.0, temperature=temperatures
    )
    first, other = samples_of(rollout, 2.0)
    assert (first.tokens, first.mask) == ((1, 2, 3, 4), (False, False, True, True))
    assert other.tokens == (*second, 7)
    assert other.mask == (*(False,) * len(second), True)
    assert other.temperature == temperatures[1]
    assert first.rollout == other.rollout == "t@0/0"


def test_what_a_grammar_forced_is_not_trained() -> None:
    """Tokens of probability 1, to whoever asks; and a sequence of nothing else is none."""
    rollout = make_rollout("t@0/0", [([1, 2], [3, 4, 5], [-0.1, 0.0, -2e-7])], 1.0)
    (sample,) = samples_of(rollout, 2.0, skip_forced=True)
    assert sample.mask == (False, False, True, False, False)
    assert (sample.logprobs, sample.advantages) == ((0.0, 0.0, -0.1, 0.0, 0.0), (0.0, 0.0, 2.0, 0.0, 0.0))
    (plain,) = samples_of(rollout, 2.0)
    assert plain.mask == (False, False, True, True, True)
    forced = make_rollout("t@0/1", [([1, 2], [3], [0.0])], 1.0)
    assert list(samples_of(forced, 1.0, skip_forced=True)) == []
    batch = packer(skip_forced=True, reduction="sequence")([make_group("t@0", [rollout, forced])], version=0)
    assert batch.num_loss_tokens == 1


def test_what_a_grammar_forced_is_recorded_as_not_trained_and_the_others_with_their_logprobs() -> None:
    rollout = make_rollout("t@0/0", [([1, 2], [3, 4], [0.0, -0.1]), ([1, 2, 3, 4, 6], [5, 7], [-0.3, 0.0])], 1.0)
    failed = make_rollout("t@0/1", [([1, 2], [3], [0.0])], 0.0)
    batch = packer(skip_forced=True)([make_group("t@0", [rollout, failed])], version=0)
    stats = StepStats(metrics={}, logprobs={"t@0/0": (-1.0, -2.0)})

    class Pieces:
        def pieces(self, tokens: Sequence[int]) -> list[str]:
            return [str(token) for token in tokens]

    rows = records(1, batch, stats, Pieces(), skip_forced=True)  # type: ignore[arg-type]
    assert [[(token.tp, token.m) for token in row["tokens"]] for row in rows] == [
        [(None, 0), (-1.0, 1), (-2.0, 1), (None, 0)],
        [(None, 0)],
    ]


def test_what_a_grammar_forced_counts_for_penalties() -> None:
    rollout = make_rollout("t@0/0", [([1, 2], [3, 4, 3, 5], [0.0, 0.0, -0.1, -0.2])], 1.0)
    groups, penalties = (
        [make_group("t@0", [rollout, replace(rollout, id="t@0/1", reward=0.0)])],
        Penalties(frequency=0.5),
    )
    (micro,) = packer(skip_forced=True, penalties=penalties)(groups, version=0).micro
    assert micro.history is not None
    assert micro.history.output.counts((0, 2), (3, 6)).tolist() == [[1, 1, 0], [2, 1, 0]]
    assert micro.history.age_N1[:2, 0].tolist() == [2, 3]


def test_a_turn_without_tokens_is_no_sample() -> None:
    rollout = make_rollout("t@0/0", [([1, 2], [], []), ([1, 2], [3], [-0.1])], 1.0)
    (sample,) = samples_of(rollout, 1.0)
    assert sample.tokens == (1, 2, 3)
    empty = make_rollout("t@0/0", [([1, 2], [], [])], 1.0)
    assert list(samples_of(empty, 1.0)) == []


def test_the_lag_counts_from_the_oldest_version() -> None:
    group = rows(2, 3)
    turn = group.rollouts[0].turns[0]
    mixed = replace(turn, completion=replace(turn.completion, versions=(4, 5)))
    rollouts = (replace(group.rollouts[0], turns=(mixed,)), *group.rollouts[1:])
    newer = [
        replace(r, turns=(replace(r.turns[0], completion=replace(r.turns[0].completion, versions=(5,) * 3)),))
        for r in rollouts[1:]
    ]
    batch = packer()([replace(group, rollouts=(rollouts[0], *newer))], version=6)
    assert flatten(batch.metrics)["lag/max"] == 2


def test_masked_truncated_answers_count_in_the_baseline_alone() -> None:
    group = rows(2, 3, 4)
    cut = make_rollout("t@0/1", [([1, 2, 3], [7, 7, 7], [-0.5] * 3)], 4.0, finish="length")
    group = replace(group, rollouts=(group.rollouts[0], cut, group.rollouts[2]))
    masked, kept = packer(mask_truncated=True)([group], version=0), packer()([group], version=0)
    assert masked.advantages == kept.advantages == {"t@0/0": -2.0, "t@0/1": 2.0, "t@0/2": 0.0}
    assert {rollout for m in masked.micro for rollout, _ in m.places} == {"t@0/0", "t@0/2"}
    assert masked.num_loss_tokens == 6, "the token mean is over what is trained"
    assert kept.num_loss_tokens == 9


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_nothing_but_masked_answers_has_no_micro_batch(ranks: int) -> None:
    cuts = [make_rollout(f"t@0/{i}", [([1, 2, 3], [7], [-0.5])], float(i), finish="length") for i in range(2)]
    batch = packer(mask_truncated=True, ranks=ranks)([replace(rows(2, 3), rollouts=tuple(cuts))], version=0)
    assert (batch.micro, batch.rounds, batch.num_loss_tokens) == ((), (), 0)


@pytest.mark.parametrize("second", [[1, 2, 3, 7, 7, 4], [9, 9, 4]], ids=["goes on", "begins anew"])
def test_masked_truncated_answers_of_several_turns_are_left_out_whole(second: list[int]) -> None:
    group = rows(2, 3, 4)
    turns = [([1, 2, 3], [7, 7], [-0.5] * 2), (second, [8, 8], [-0.5] * 2)]
    cut = make_rollout("t@0/1", turns, 4.0)
    first, last = cut.turns
    cut = replace(cut, turns=(first, replace(last, completion=replace(last.completion, finish="length"))))
    # What counts is the last turn: after an earlier one that was cut, the answer went on.
    went_on = replace(cut, id="t@0/2", turns=tuple(reversed([first, cut.turns[1]])))
    group = replace(group, rollouts=(group.rollouts[0], cut, went_on))
    batch = packer(mask_truncated=True)([group], version=0)
    assert {rollout for m in batch.micro for rollout, _ in m.places} == {"t@0/0", "t@0/2"}
    assert batch.num_loss_tokens == group.rollouts[0].num_tokens + 4
    assert set(batch.advantages) == {"t@0/0", "t@0/1", "t@0/2"}


def test_failed_rollouts_are_left_out() -> None:
    group = rows(2, 3, 4)
    failed: Rollout = replace(group.rollouts[1], reward=None, status="error", error="planted")
    batch = packer()([replace(group, rollouts=(group.rollouts[0], failed, group.rollouts[2]))], version=0)
    assert batch.advantages == {"t@0/0": -1.0, "t@0/2": 1.0}
    assert batch.num_loss_tokens == 6


def test_all_masked_leaves_nothing_to_compute() -> None:
    cut = [make_rollout(f"t@0/{i}", [([1], [2], [-0.5])], float(i), finish="length") for i in range(2)]
    batch = packer(mask_truncated=True)([make_group("t@0", cut)], version=0)
    assert batch.micro == ()
    assert batch.num_loss_tokens == 0


def test_a_rollout_that_is_not_to_be_trained_counts_in_the_baseline_alone() -> None:
    group = rows(2, 3, 4)
    left = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[1], trained=False), group.rollouts[2]))
    batch, whole = packer()([left], version=0), packer()([group], version=0)
    assert batch.advantages == whole.advantages
    assert {rollout for m in batch.micro for rollout, _ in m.places} == {"t@0/0", "t@0/2"}
    assert batch.num_loss_tokens == whole.num_loss_tokens - group.rollouts[1].num_tokens


def test_given_advantages_go_to_their_tokens_over_all_turns() -> None:
    two = make_rollout("t@0/0", [([1], [2, 3], [-0.5, -0.6]), ([1, 2, 3, 4], [5], [-0.7])], 1.0)
    one = make_rollout("t@0/1", [([1], [6], [-0.8])], 0.0)
    group = make_group("t@0", [replace(two, advantages=(0.25, -1.0, 3.0)), one])
    batch = packer()([group], version=0)
    assert {(token, advantage) for _, _, _, token, _, advantage, _ in trained(batch)} == {
        (2, 0.25), (3, -1.0), (5, 3.0), (6, -0.5),
    }  # fmt: skip
    assert batch.advantages == {"t@0/0": pytest.approx(0.75), "t@0/1": -0.5}


def test_given_advantages_of_turns_that_part() -> None:
    parted = make_rollout("t@0/0", [([1], [2, 3], [-0.5, -0.6]), ([9, 9], [5], [-0.7])], 1.0)
    group = make_group("t@0", [replace(parted, advantages=(1.0, 2.0, 3.0))])
    assert [s.advantages for s in samples_of(group.rollouts[0], 0.5)] == [(0.0, 1.0, 2.0), (0.0, 0.0, 3.0)]


def test_a_turn_that_is_left_out_is_read_and_not_trained() -> None:
    completion = Completion(tokens=(5, 6), logprobs=(-0.5, -0.25), versions=(0, 0), finish="stop")
    first = Turn(prompt=(1,), completion=completion, temperature=1.0, trained=False)
    second = Turn(prompt=(1, 5, 6, 2), completion=completion, temperature=1.0)
    task = Task(id="t", env="e", prompt=(), answer="")
    rollout = Rollout(id="g/0", task=task, turns=(first, second), messages=(), status="ok", reward=1.0)
    (sample,) = samples_of(rollout, 0.5)
    assert sample.tokens == (1, 5, 6, 2, 5, 6)
    assert sample.mask == (False, False, False, False, True, True)
    assert sample.logprobs == (0.0, 0.0, 0.0, 0.0, -0.5, -0.25)
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.5, 0.5)
    assert list(samples_of(replace(rollout, turns=(first,)), 0.5)) == []
