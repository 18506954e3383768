"""A weight-sync session is in one state of a table, and its transactions walk all of the table."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import pytest
from support.scripted_engine import scripted
from support.sync_sessions import open_session
from support.tiny_policy import live_policy

from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.types import PolicyVersion
from tandem.weight_sync.base import TRANSITIONS, SyncState, SyncStateMachine
from tandem.weight_sync.hotswap import Hotswap
from tandem.weight_sync.restart import Restart

START = PolicyVersion(step=0, digest="")


def standing(state: SyncState) -> SyncStateMachine:
    machine = SyncStateMachine()
    machine.state = state
    return machine


@pytest.mark.parametrize(("before", "after"), [*product(SyncState, SyncState)], ids=lambda state: state.value)
def test_a_session_takes_the_transitions_of_the_table_and_no_other(before: SyncState, after: SyncState) -> None:
    machine = standing(before)
    if after in TRANSITIONS[before]:
        machine.become(after)
        assert machine.state is after
    else:
        with pytest.raises(RuntimeError, match=f"that is {before.value} cannot become {after.value}"):
            machine.become(after)
        assert machine.state is before


def test_a_pause_does_not_forget_what_was_written() -> None:
    for before, after in (
        (SyncState.SERVING, SyncState.PAUSED),
        (SyncState.STOPPED, SyncState.PAUSED),
        (SyncState.PAUSED, SyncState.PAUSED),
        (SyncState.WRITING, SyncState.WRITING),
    ):
        machine = standing(before)
        machine.pause()
        assert machine.state is after
    for before in (SyncState.SERVING, SyncState.STOPPED):
        with pytest.raises(RuntimeError, match="cannot become writing"):
            standing(before).write()


@pytest.mark.slow
def test_sessions_walk_every_transition_of_the_table(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way that pauses and one that never does, an engine that dies in a publish, and one that is never published."""
    walked: set[tuple[SyncState, SyncState]] = set()
    become = SyncStateMachine.become

    def noted(machine: SyncStateMachine, state: SyncState) -> None:
        before = machine.state
        become(machine, state)
        walked.add((before, state))

    monkeypatch.setattr(SyncStateMachine, "become", noted)

    async def pausing() -> None:
        with live_policy(tiny_model) as policy, scripted(tiny_model) as engine:
            async with open_session(Restart(every=1), policy, engine, START, Full(), tmp_path) as session:
                assert session.state.state is SyncState.SERVING
                engine.dies["probe"] = 1
                async with session.commit(1):
                    pass
                assert session.state.state is SyncState.SERVING
                assert engine.serves
                assert walked == {
                    (SyncState.SERVING, SyncState.PAUSED),
                    (SyncState.PAUSED, SyncState.WRITING),
                    (SyncState.WRITING, SyncState.STOPPED),
                    (SyncState.STOPPED, SyncState.PAUSED),
                    (SyncState.WRITING, SyncState.SERVING),
                }
                await session.pause()
            assert session.state.state is SyncState.SERVING, "nothing was written: it goes on as before"
            assert engine.serves

    async def never_pausing() -> None:
        trainable = Lora(rank=2)
        with live_policy(tiny_model, trainable=trainable) as policy, scripted(tiny_model, trainable) as engine:
            async with open_session(Hotswap(), policy, engine, START, trainable, tmp_path) as session:
                walked.clear()
                async with session.commit(1):
                    pass
                assert walked == {(SyncState.SERVING, SyncState.PAUSED), (SyncState.PAUSED, SyncState.SERVING)}

    asyncio.run(pausing())
    seen = set(walked)
    asyncio.run(never_pausing())
    assert seen | walked == {(before, after) for before, all in TRANSITIONS.items() for after in all}
