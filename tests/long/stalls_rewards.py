"""Rewards that stall when they are told to. Nothing heavy is imported: a grading process starts anew after each.

Which stall strikes is in STALL; the first to strike leaves the time in the file STALL_MARK, and strikes alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from pathlib import Path

from tandem.types import Rollout

FOR_EVER = 3600
_seen: dict[str, int] = {}


def strikes(name: str, *, after: int = 0) -> bool:
    """True once, in one process, for the stall that is to be; the first ``after`` chances are let pass."""
    if os.environ.get("STALL") != name:
        return False
    _seen[name] = _seen.get(name, 0) + 1
    if _seen[name] <= after:
        return False
    mark = Path(os.environ["STALL_MARK"])
    try:
        with mark.open("x") as out:
            out.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def spell() -> None:
    """A call in C that keeps the interpreter for ever."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def graded(rollout: Rollout) -> float:
    """A reward that hangs in many ways."""
    if rollout.id.endswith("@gold/0"):
        return 1.0
    if strikes("hung grader"):
        time.sleep(FOR_EVER)
    if strikes("deadlocked reward"):
        lock = threading.Lock()
        with lock, lock:
            pass
    if strikes("reward loops in C"):
        spell()
    if strikes("stopped grader"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if strikes("full queue of graders"):
        time.sleep(FOR_EVER)
    if os.environ.get("STALL") == "slow but living":
        time.sleep(0.7)
    return float(len(rollout.id) % 2)


async def awaited(rollout: Rollout) -> float:
    """A reward that awaits what never comes."""
    if rollout.id.endswith("@gold/0"):
        return 1.0
    if strikes("async reward never returns"):
        await asyncio.Event().wait()
    return 0.5
