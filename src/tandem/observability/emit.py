"""The one place where a run's numbers leave it: merged once per step, written to the folder and to every logger."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from tandem.errors import ConfigError, TandemError
from tandem.metrics import Metrics, flatten, merge
from tandem.observability import json_lines, waits
from tandem.observability.alarms import AlarmWatch
from tandem.observability.json_lines import JsonLinesFile
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json

logger = logging.getLogger(__name__)

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with the number of a step, from 1, and its metrics by name."""


REWOUND = ("metrics.jsonl", "eval.jsonl")
"""Files whose rows of later steps are dropped when a run goes on: that future did not happen."""


@dataclass(eq=False)
class Telemetry:
    """Metrics, events, rollouts and evaluations of one run.

    ::

        with Telemetry(info, config.loggers) as telemetry:
            telemetry.event("run_started")
            telemetry.emit(1, [stats, trace.take()])

    A logger that raises is warned of once and dropped. The run folder's own files are never dropped: while they
    cannot be written (a full disk) that is logged as an error, and they are tried again each time. Neither stops
    training. Safe from any thread.
    """

    info: RunInfo
    """The run."""
    loggers: Sequence[MetricsLogger] = ()
    """Where numbers go besides the run folder."""
    alarms: AlarmWatch | None = None
    """Look at every step's numbers; None: nothing does."""
    on_step: OnStep | None = None
    """Called once a step is written; what it raises is raised by ``emit``."""
    _files: dict[str, JsonLinesFile] = field(default_factory=dict)
    _writers: dict[str, Writer] = field(default_factory=dict)
    _lost: set[str] = field(default_factory=set)
    _evaluated: set[int] = field(default_factory=set)
    _step: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __enter__(self) -> Self:
        """Drop what lies after the step the run starts from, and open every logger.

        Raises:
            ConfigError: a logger cannot be opened; found now rather than at the end of the first step.
            OSError: the run folder cannot be written.
        """
        self._drop_later_rollouts()
        folder, self._step = self.info.folder, self.info.resumed_step
        with ExitStack() as undo:
            with waits.blocking("trainer", "its files to open", on=f"the disk of {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                for name in REWOUND:
                    json_lines.rewind(folder / name, self.info.resumed_step)
                for name in (*REWOUND, "events.jsonl"):
                    self._files[name] = JsonLinesFile(folder / name)
                    undo.callback(self._files[name].close)
            self._evaluated = {row["step"] for row in json_lines.read(folder / "eval.jsonl")}
            if self.alarms is not None:
                self.alarms.replay(json_lines.read(folder / "metrics.jsonl"))
            for logger in self.loggers:
                name = _name(logger, taken=self._writers)
                with waits.blocking("trainer", "it to open", on=f"logger {name}"):
                    self._writers[name] = writer = _open(logger, name, self.info)
                undo.callback(writer.close)
            undo.pop_all()
        self._stop_listening = waits.listen(self._on_wait)
        return self

    def __exit__(self, *error: object) -> None:
        """Flush and close everything, whatever ended the run."""
        self._stop_listening()
        with self._lock:
            self._to_loggers(lambda writer: writer.close())
            self._writers.clear()
            for file in self._files.values():
                file.close()
            self._files.clear()

    def emit(self, step: int, parts: Iterable[Metrics]) -> dict[str, float]:
        """Merge what the parts of a step report and write it everywhere. Once per step.

        Args:
            step: optimizer steps taken.
            parts: metrics of each part.

        Returns:
            The plain numbers that were written.

        Raises:
            ValueError: the step was emitted before.
            TypeError: two parts give one name different kinds of values.
        """
        scalars = flatten(merge(parts))
        with self._lock:
            if step <= self._step:
                raise ValueError(f"metrics of step {step} come after those of step {self._step}; emit once per step")
            self._step = step
            notices = self.alarms.step(step, scalars) if self.alarms else []
            scalars |= self.alarms.scalars() if self.alarms else {}
            self._append("metrics.jsonl", {"step": step, "time": time.time(), "metrics": scalars})
            named = with_trl_names(scalars) if self.info.config.get("metric_names") == "trl" else scalars
            self._to_loggers(lambda writer: writer.write(step, named))
            for notice in notices:
                fields = notice.fields()
                logger.info("alarm: %s", fields)
                self.event("alarm" if notice.seen else "alarm_over", **fields)
        if self.on_step is not None:
            self.on_step(step, scalars)
        return scalars

    def event(self, name: str, /, **fields: Json) -> None:
        """Write down that something happened: ``checkpoint_saved``, ``published``, ``group_dropped``.

        Args:
            name: what happened.
            fields: what else is known; not ``time`` or ``event``.
        """
        with self._lock:
            self._append("events.jsonl", {"time": time.time(), "event": name, **fields})
            self._to_loggers(lambda writer: writer.event(name, fields))

    def rollouts(self, step: int, records: Iterable[Mapping[str, Json]]) -> None:
        """Write the rollouts that a step trained on to rollouts/NNNNNN.jsonl; whole or not at all. From one thread.

        Numbers and events are not held up by it: it takes its time, and writes a file of its own.
        """
        path = self.info.folder / "rollouts" / f"{step:06d}.jsonl"

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            json_lines.replace(path, records)

        self._to_folder("rollouts", write)

    def evaluation(self, record: Mapping[str, Json]) -> None:
        """Append an evaluation to eval.jsonl and give its numbers to the loggers under ``eval/``.

        Args:
            record: at least ``step``; ``mean``, ``mean_ci``, ``pass_at``, ``pass_ci``, ``truncated`` and ``tokens``
                become ``eval/mean``, ``eval/mean/low``, ``eval/mean/high``, ``eval/pass@4``, ...; those of an
                environment in ``envs`` become ``eval/<name>/mean``, ...
        """
        step: int = record["step"]
        scalars = evaluation_scalars(record)
        with self._lock:
            self._evaluated.add(step)
            self._append("eval.jsonl", {"step": step, "time": time.time(), **record})
            self._to_loggers(lambda writer: writer.evaluation(step, record, scalars))

    def evaluated(self, step: int) -> bool:
        """True if the folder already holds an evaluation at this step, perhaps from before a resume."""
        return step in self._evaluated

    def _append(self, name: str, row: Mapping[str, Json]) -> None:
        self._to_folder(name, lambda: self._files[name].append(row))

    def _to_folder(self, what: str, write: Callable[[], None]) -> None:
        """Write to the run folder; a failure is an error in the log, and the next write is tried again."""
        if not self._files:
            raise RuntimeError("Telemetry is used outside its with block")
        try:
            with waits.blocking("trainer", f"{what} to be written", on=f"the disk of {self.info.folder}"):
                write()
        except OSError as error:
            if what not in self._lost:
                text = "%s in %s cannot be written (%s); training goes on; free disk space or repair the folder"
                logger.error(text, what, self.info.folder, error)
            self._lost.add(what)
        else:
            self._lost.discard(what)

    def _to_loggers(self, call: Callable[[Writer], None]) -> None:
        """Call every writer; one that raises is warned of and dropped."""
        for name, writer in list(self._writers.items()):
            try:
                with waits.blocking("trainer", "numbers to be taken", on=f"logger {name}"):
                    call(writer)
            except Exception as error:
                del self._writers[name]
                text = "logger %s failed and is off for the rest of this run: %s: %s"
                logger.warning(text, name, type(error).__name__, error, exc_info=True)

    def _drop_later_rollouts(self) -> None:
        for path in (self.info.folder / "rollouts").glob("*.jsonl*"):
            if path.suffix == ".tmp" or (path.stem.isdecimal() and int(path.stem) > self.info.resumed_step):
                path.unlink()

    def _on_wait(self, wait: waits.Wait, state: waits.State) -> None:
        with self._lock:
            # Another thread's wait may end while this closes.
            if self._files:
                fields = {"owner": wait.owner, "reason": wait.reason, "on": wait.on, "deadline": wait.deadline}
                self.event("wait", **fields, seconds=round(wait.seconds, 3), state=state)


def evaluation_scalars(record: Mapping[str, Json], under: str = "eval") -> dict[str, float]:
    """An evaluation's numbers as loggers get them, by name under ``eval/``; an environment's under ``eval/<name>/``."""
    shares = ("mean", "loss", "truncated", "tokens")
    out = {f"{under}/{key}": float(record[key]) for key in shares if record.get(key) is not None}
    for key, name in (("mean_ci", "mean"), ("pass_ci", "pass")):
        if record.get(key):
            out[f"{under}/{name}/low"], out[f"{under}/{name}/high"] = map(float, record[key])
    out |= {f"{under}/pass@{k}": float(value) for k, value in (record.get("pass_at") or {}).items()}
    for name, of in (record.get("envs") or {}).items():
        out |= evaluation_scalars(of, f"{under}/{name}")
    return out


def _open(logger: MetricsLogger, name: str, info: RunInfo) -> Writer:
    try:
        return logger.open(info)
    except TandemError:
        raise
    except Exception as error:
        raise ConfigError(f"logger {name} cannot be opened: {error}; repair that or take it out of loggers") from error


def _name(logger: MetricsLogger, taken: Mapping[str, object]) -> str:
    """The part's file name, numbered where it is listed twice."""
    name = type(logger).__module__.rpartition(".")[2]
    return name if name not in taken else f"{name}-{len(taken) + 1}"


TRL: Mapping[str, str] = {
    "reward_std": "reward/group_std",
    "frac_reward_zero_std": "groups/zero_variance",
    "completions/mean_length": "length",
    "completions/min_length": "length/min",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "rollouts/truncated",
    "completions/mean_terminated_length": "length/ended",
    "completions/min_terminated_length": "length/ended/min",
    "completions/max_terminated_length": "length/ended/max",
    "kl": "kl_reference",
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction/low",
    "clip_ratio/high_mean": "clip_fraction/high",
    "cispo_clip_ratio": "clip_fraction/high",
    "sampling/sampling_logp_difference/max": "logprob_gap/max",
    "sampling/importance_sampling_ratio/mean": "correction/weight",
    "learning_rate": "lr",
    "step_time": "seconds/step",
}
"""TRL's name and Tandem's. ``reward``, ``entropy``, ``loss`` and ``grad_norm`` are called alike."""


def with_trl_names(scalars: Mapping[str, float]) -> dict[str, float]:
    """A step's numbers, and by TRL's names those that it has; a reward is called by the last part of its path."""
    named = {alias: scalars[name] for alias, name in TRL.items() if name in scalars}
    for name, mean in scalars.items():
        if name.startswith("reward/") and (std := scalars.get(f"{name}/std")) is not None:
            function = re.split("[.:/]", name)[-1]
            named |= {f"rewards/{function}/mean": mean, f"rewards/{function}/std": std}
    return {**scalars, **named}
