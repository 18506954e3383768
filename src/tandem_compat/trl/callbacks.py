"""``transformers.TrainerCallback`` over a run's steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

import tandem
from tandem.api.run import trained
from tandem.config.loading import RunConfig
from tandem.config.tree import Problems
from tandem.errors import ConfigError, Interrupted
from tandem.observability.emit import with_trl_names

_CALLED = ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_train_end")


def newest(runs: Path) -> tandem.Run:
    """The run that was begun last.

    Raises:
        ConfigError: there is none.
    """
    begun = sorted(runs.glob("*/config.yaml"), key=lambda config: config.stat().st_ctime)
    if not begun:
        raise ConfigError(f"there is no run in {runs} yet")
    return tandem.Run.open(begun[-1].parent)


class Callbacks:
    """Callbacks, with the state and the control that they are given."""

    def __init__(self, args: Any, callbacks: Sequence[Any]) -> None:
        """Check what they listen for.

        Raises:
            ConfigError: with every method that nothing would call.
        """
        self.state = TrainerState()
        self._args, self._control, self._each = args, TrainerControl(), list[Any]()
        self._stop: asyncio.Event
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Take another one, or its class."""
        callback = callback() if isinstance(callback, type) else callback
        problems = Problems()
        for name in (name for name in vars(TrainerCallback) if name.startswith("on_") and name not in _CALLED):
            if getattr(type(callback), name, None) is not getattr(TrainerCallback, name):
                problems.add(f"callbacks: {type(callback).__name__}.{name}", f"only {', '.join(_CALLED)} are called")
        problems.raise_if_any("GRPOTrainer")
        self._each.append(callback)
        self._call("on_init_end", only=callback)

    def around(self, config: RunConfig, resume: Path | None) -> tandem.Run:
        """Train a run, or go on with one, and call them on the way."""
        self._stop, self.state.max_steps = asyncio.Event(), config.steps
        self._control.should_training_stop = False
        self._call("on_train_begin")
        try:
            run = trained(config, resume, self._step, self._stop)
        except Interrupted:
            if not self._control.should_training_stop:
                raise
            run = newest(Path(config.runs))
        self._call("on_train_end")
        return run

    def _step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state.global_step = step
        self.state.epoch = step / self.state.max_steps * math.ceil(self._args.num_train_epochs)
        logs = {**with_trl_names(metrics), "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": step})
        self._call("on_step_end")
        self._call("on_log", logs=logs)
        if self._control.should_training_stop:
            self._stop.set()
        else:
            self._call("on_step_begin")

    def _call(self, name: str, only: Any = None, **more: Any) -> None:
        for callback in self._each if only is None else [only]:
            control = getattr(callback, name)(self._args, self.state, self._control, **more)
            self._control = control or self._control
