"""Which sequences are computed together, and how many tokens that takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from tandem.trainer import balance, prefix_tree
from tandem.trainer.balance import Balance, GroupSamples, Load
from tandem.trainer.prefix_tree import PackedRow, PrefixTree


def family(sequences: Sequence[Sequence[int]], rollouts: Sequence[str] | None = None) -> GroupSamples:
    tree = PrefixTree([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    return GroupSamples(tree=tree, rollouts=rollouts or [str(i) for i in range(len(sequences))])


def siblings(serial: int, prompt: int, *answers: int) -> GroupSamples:
    """Answers of these lengths to one prompt; nothing else is alike."""
    start = serial * 1_000_000
    opening = range(start, start + prompt)
    return family(
        [[*opening, *range(start + 10_000 * (i + 1), start + 10_000 * (i + 1) + n)] for i, n in enumerate(answers)]
    )


def dealt(families: Sequence[GroupSamples], budget: int, reach: float = 1e9) -> list[Load]:
    """The micro-batches, once it is seen that every sample is in one of them and that they are what they say."""
    loads = Balance(families, budget=budget, reach=reach).loads()
    members = [(g, i) for load in loads for g, mine in load.members.items() for i in mine]
    assert sorted(members) == [(g, i) for g, one in enumerate(families) for i in range(len(one.rollouts))]
    for load in loads:
        row = PackedRow()
        for g, mine in load.members.items():
            row.add(families[g].tree, mine)
        assert row.size == load.tokens == sum(row.lengths)
        assert load.tokens <= budget or sum(map(len, load.members.values())) == 1
    return loads


def sizes(loads: Sequence[Load]) -> list[int]:
    return sorted(load.tokens for load in loads)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(sequences=st.lists(tokens, min_size=1, max_size=8))
def test_a_tree_has_every_beginning_once(sequences: list[list[int]]) -> None:
    """Where every shared token counts, a row is as long as there are different beginnings."""
    with mock.patch.object(prefix_tree, "LEAST", 1):
        tree = family(sequences).tree
    row = PackedRow()
    places = row.add(tree, range(len(sequences)))
    assert row.size == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    laid = np.concatenate(row.tokens)
    starts = np.cumsum([0, *row.lengths])
    segment_of = np.repeat(np.arange(len(row.lengths)), row.lengths)
    for i, sequence in enumerate(sequences):
        assert laid[places[i]].tolist() == sequence
        chain, segment = [], int(segment_of[places[i][-1]])
        while True:
            chain.append(segment)
            if (parent := row.parents[segment]) is None:
                break
            segment = parent
        seen = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in chain[::-1]])
        assert seen[: len(sequence)].tolist() == places[i].tolist(), "what its last token sees is the sequence"


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    groups=st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6),
    budget=st.integers(1, 60),
    least=st.sampled_from([1, 3]),
)
def test_a_budget_is_never_exceeded(groups: list[list[list[int]]], budget: int, least: int) -> None:
    with mock.patch.object(prefix_tree, "LEAST", least):
        families = [family(sequences) for sequences in groups]
    dealt(families, budget)


def test_a_step_that_fits_is_one() -> None:
    assert sizes(dealt([siblings(g, 50, 10, 20, 30) for g in range(4)], 4 * 110)) == [440]


def test_groups_stay_whole_where_they_fit_and_none_is_left_over() -> None:
    """Sixteen groups of 300 of which three fit: six micro-batches, not five full ones and a small one."""
    assert sizes(dealt([siblings(g, 100, 50, 50, 50, 50) for g in range(16)], 1000)) == [600, 600, 900, 900, 900, 900]


def test_what_cannot_be_alike_still_fits() -> None:
    """Dealt to whichever has least, the last would find no place."""
    groups = [siblings(g, 100, n - 100) for g, n in enumerate((300, 300, 200, 200, 200))]
    assert sizes(dealt(groups, 600)) == [600, 600]


def test_large_and_small_groups_fill_each_other_up() -> None:
    """In order it would take three."""
    lengths = (600, 500, 400, 500)
    assert sizes(dealt([siblings(g, 100, n - 100) for g, n in enumerate(lengths)], 1024)) == [1000, 1000]


def test_a_group_is_cut_where_that_saves_more_than_its_prompt_costs() -> None:
    """Groups of 1,000, a budget of 1,600: six micro-batches where prompts are short, eight where they are not."""
    short = dealt([siblings(g, 40, *(120,) * 8) for g in range(8)], 1600)
    assert len(short) == 6
    assert max(sizes(short)) - min(sizes(short)) < 250
    long = dealt([siblings(g, 600, *(50,) * 8) for g in range(8)], 1600)
    assert sizes(long) == [1000] * 8


def test_a_group_beyond_the_budget_is_cut_evenly() -> None:
    """Seven answers would fit beside the prompt: four and four rather than seven and one."""
    assert sizes(dealt([siblings(0, 150, *(100,) * 8)], 900)) == [550, 550]


def test_a_long_sequence_is_alone() -> None:
    rows = dealt([siblings(0, 20, 10, 500, 10), siblings(1, 20, 10)], 100)
    assert sizes(rows) == [30, 60, 520]


def test_cost_counts_what_attention_sees() -> None:
    """One sequence of 1,000 costs more than ten of 100 where attention counts, and as much where it does not."""
    one, ten = [siblings(0, 500, 500)], [siblings(g, 50, 50) for g in range(10)]
    (a,), (b,) = dealt(one, 2000, reach=100), dealt(ten, 2000, reach=100)
    assert a.cost == pytest.approx(1000 + 1000 * 1001 / 2 / 100)
    assert b.cost == pytest.approx(1000 + 10 * 100 * 101 / 2 / 100)
    # So of two micro-batches one has the long sequence and few others, although tokens would be even otherwise.
    together = dealt([*one, *ten], 1700, reach=100)
    long = next(load for load in together if 0 in load.members)
    assert long.members.keys() == {0}


def test_what_is_shared_is_attended_to_once() -> None:
    (load,) = dealt([siblings(0, 100, 10, 10)], 1000, reach=10)
    assert load.cost == pytest.approx(120 + (110 * 111 + 110 * 111 - 100 * 101) / 2 / 10)


def test_samples_of_a_rollout_that_is_cut_stay_in_order() -> None:
    """Each is longer than half a micro-batch; they are dealt in order whatever else there is."""
    draw = random.Random(0)
    families = [
        family([[draw.randrange(10**6) for _ in range(60)] for _ in range(3)], ["a", "a", "a"]),
        family([[draw.randrange(10**6) for _ in range(70)] for _ in range(3)], ["b", "b", "b"]),
        family([[draw.randrange(10**6) for _ in range(25)]]),
    ]
    loads = dealt(families, 100)
    for g in (0, 1):
        assert [i for load in loads for i in load.members.get(g, ())] == [0, 1, 2]


def test_dealing_is_the_same_every_time() -> None:
    draw = random.Random(1)
    families = [siblings(g, draw.randrange(20, 90), *(draw.randrange(5, 60) for _ in range(5))) for g in range(12)]
    first, second = (dealt(families, 500) for _ in range(2))
    assert [load.members for load in first] == [load.members for load in second]
    assert len(first) <= -(-sum(load.tokens for load in first) // 500) + 1
    costs = [load.cost for load in first]
    assert min(costs) > 0.75 * max(costs)


def test_the_price_of_a_micro_batch_decides() -> None:
    families = [siblings(g, 40, *(120,) * 8) for g in range(8)]
    with mock.patch.object(balance, "ANOTHER", 0):
        assert len(dealt(families, 1600)) == 8
