"""Context parallel against one process: logprobs and gradients of packed rows whose tokens several ranks share."""

from __future__ import annotations

import pytest
from support import cut_context
from support.rank_processes import on_ranks
from support.tiers import long_but

from tandem.errors import ConfigError
from tandem.model.context import check_heads

EVERY = (0, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name", "row", "only", "checkpointing", "sharded"), [
    (2, "two key heads", "tree", EVERY, False, False),
    (4, "one key head", "tree", EVERY, False, False),  # one copy of the key head on each rank
    (4, "two key heads", "one sequence", EVERY, False, False),
    (2, "as many key heads", "tree", (13, 18), True, False),  # about the seam alone; layers computed again
    (4, "as many key heads", "shorter than the ranks", EVERY, False, False),
    (2, "window", "one sequence", (0, 12), False, False),  # the second rank trains no token
    (2, "two key heads", "tree", EVERY, False, True),  # sharded weights too
])  # fmt: skip
def test_logprobs_and_gradients_are_those_of_one_process(
    world: int, name: str, row: str, only: tuple[int, int], checkpointing: bool, sharded: bool
) -> None:
    for errors in on_ranks(world, cut_context.gradient, name, row, only, checkpointing, sharded):
        assert errors.pop("logprobs") < 5e-6
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.slow
@pytest.mark.parametrize("rows", long_but([["tree"], ["tree", "one sequence", "shorter than the ranks"]], ["tree"]))
def test_a_compiled_layer_has_the_exchange_and_the_kernel_in_its_graph(rows: list[str]) -> None:
    for errors, counts in on_ranks(2, cut_context.in_one_graph, "two key heads", rows):
        for each in errors:
            assert each.pop("logprobs") < 5e-6
            assert max(each.values()) < 1e-6, each
        assert counts["breaks"] == 0
        assert counts["graphs"] == len({row == "tree" for row in rows}), "one with shared parts, one without"
        assert counts["backward"] == len(rows) * counts["layers"]


@pytest.mark.parametrize(("query_heads", "key_heads", "ranks"), [(4, 2, 3), (12, 4, 6), (4, 4, 8)])
def test_heads_that_cannot_be_shared_are_refused_with_what_fits(query_heads: int, key_heads: int, ranks: int) -> None:
    message = rf"some\.option: {ranks} processes cannot share {query_heads} query heads.*use one of 1, 2"
    with pytest.raises(ConfigError, match=message):
        check_heads(query_heads, key_heads, ranks, option="some.option")


def test_key_heads_are_split_or_repeated() -> None:
    for ranks in (1, 2, 4, 8, 16):
        check_heads(16, 4, ranks, option="some.option")
