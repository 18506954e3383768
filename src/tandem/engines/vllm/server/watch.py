"""Ends an engine whose trainer is gone for good, and one that lost its server: a crash does not keep an accelerator."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time

from tandem.processes import alive_after
from tandem.transport.sharing import remove_orphans

log = logging.getLogger("vllm.tandem")

TRAINER = "TANDEM_TRAINER"
"""Environment variable: ``pid:start time`` of the process that started the engine; unset where none is watched."""
LINGER = "TANDEM_LINGER"
"""Environment variable: seconds that the engine outlives that process."""

LOOK_SECONDS = 1.0
"""Between two looks whether a process is still there."""
GRACE = 60.0
"""Seconds that the server gets to end in order; then it is killed with its workers."""
PR_SET_PDEATHSIG = 1
"""Linux' name of the signal that a process gets when its parent has ended."""


class TrainerWatch(threading.Thread):
    """Checks once a second that the trainer is alive. A trainer that comes back reattaches and is watched instead."""

    def __init__(self, trainer: str, linger: float):
        super().__init__(name="tandem watch", daemon=True)
        self._trainer = trainer
        self._linger = linger

    @classmethod
    def begin(cls) -> TrainerWatch | None:
        """Start watching the process that the environment names."""
        trainer = os.environ.get(TRAINER)
        if not trainer:
            return None
        watch = cls(trainer, float(os.environ.get(LINGER, "0")))
        watch.start()
        atexit.register(remove_orphans)  # workers are killed at the end, so what they lent on a host has its name yet
        return watch

    def reattach(self, trainer: str) -> bool:
        """Watch another process from now on; False, and all is as it was, if there is no such process."""
        pid, _, started = trainer.partition(":")
        if not alive_after(int(pid), started):
            return False
        self._trainer = trainer
        return True

    def run(self) -> None:
        """Ask the server to end, in order, ``linger`` seconds after the trainer was last seen."""
        seen = time.monotonic()
        while True:
            pid, _, started = self._trainer.partition(":")
            if alive_after(int(pid), started):
                seen = time.monotonic()
            elif time.monotonic() - seen >= self._linger:
                break
            time.sleep(LOOK_SECONDS)
        log.warning("the trainer (pid %s) is gone for %.0f s and nobody came back: ending", pid, self._linger)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        if os.getpgid(0) == os.getpid():  # else the group is a stranger's too
            os.killpg(0, signal.SIGKILL)


def end_with_parent() -> None:
    """In a process that vLLM has spawned: have the kernel end it with its parent, as vLLM does for workers alone.

    A server that is killed would else leave its scheduler behind for ever, with the workers and the memory they hold.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not parent.is_alive():  # it was gone before
            os.kill(os.getpid(), signal.SIGKILL)
