"""Entries of the rollout buffer are in one state of a table, and batches own their release."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from feeding import Trainer, mixed, run

from tandem.rollout.buffer import TRANSITIONS, Entry, EntryState
from tandem.rollout.data_state import DataState, Draw
from tandem.types import Group

DRAW = Draw("fake", 0)


@pytest.mark.parametrize(("before", "after"), [*product(EntryState, EntryState)], ids=lambda state: state.value)
def test_an_entry_takes_the_transitions_of_the_table_and_no_other(before: EntryState, after: EntryState) -> None:
    entry = Entry(3, DRAW, before)
    if after in TRANSITIONS[before]:
        entry.become(after)
        assert entry.state is after
    else:
        with pytest.raises(RuntimeError, match=f"entry 3 .* is {before.value} and cannot become {after.value}"):
            entry.become(after)
        assert entry.state is before


def test_an_entry_in_flight_has_no_group() -> None:
    entry = Entry(3, DRAW)
    assert entry.in_flight
    with pytest.raises(RuntimeError, match="entry 3 of the rollout buffer is queued: it has no group yet"):
        entry.group  # noqa: B018


def test_runs_walk_every_transition_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the table is unused: trained, dropped as they are scored, and dropped as stale after a resume."""
    walked: set[tuple[EntryState, EntryState]] = set()
    become = Entry.become

    def noted(entry: Entry, state: EntryState) -> None:
        before = entry.state
        become(entry, state)
        walked.add((before, state))

    monkeypatch.setattr(Entry, "become", noted)

    async def go() -> None:
        trainer = Trainer(mixed)
        async with trainer.buffer(max_lag=1).open(DataState()) as buffer:
            await trainer.train(buffer, 6)
            for _ in range(50):
                await asyncio.sleep(0)
            left = buffer.data_state()
        assert left.ready
        late = Trainer(mixed, step=trainer.step + 9)
        async with late.buffer(max_lag=1).open(left) as buffer:
            await buffer.take()
        assert "stale" in dict(late.dropped)

    run(go())
    assert walked == {(before, after) for before, all in TRANSITIONS.items() for after in all}


def test_a_batch_is_released_once_and_keeps_the_data_state_of_that_moment() -> None:
    async def go() -> None:
        trainer = Trainer()
        async with trainer.buffer().open(DataState()) as buffer:
            batch = await buffer.take()
            assert len(trainer.started) == 3
            assert batch.data_state == buffer.data_state()
            before = buffer.data_state()
            batch.release()
            await asyncio.sleep(0)
            assert len(trainer.started) == 6, "the next wave has begun"
            assert batch.data_state == before != buffer.data_state()
            second: list[Group] = list(await buffer.take())
            batch.release()
            await asyncio.sleep(0)
            assert len(trainer.started) == 6, "the slots of the second batch are its own"
            assert [group.index for group in second] == [3, 4, 5]

    run(go())
