"""Train, go on, evaluate and look at a run: what the command line does, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import html
import inspect
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.api import comparison, described, targets
from tandem.api.blocking import run_to_end
from tandem.api.comparison import ComparedRuns
from tandem.api.recipe import Overrides, Recipe, override_texts
from tandem.config.loading import RunConfig
from tandem.config.registry import did_you_mean
from tandem.errors import ConfigError, TandemError
from tandem.observability.emit import OnStep
from tandem.observability.report import folder as folders
from tandem.observability.report.folder import Row, RunFolder
from tandem.observability.report.page import build
from tandem.observability.report.summary import Summary, summarise
from tandem.types import Json

if TYPE_CHECKING:
    from tandem.api.chat import Replies

_training = threading.Lock()
"""Held while this process trains a run."""


class Run:
    """A run by its folder, live or ended. Every property reads the folder anew.

    Example:
        >>> import tandem
        >>> run = tandem.train(
        ...     {
        ...         "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        ...         "env": {"kind": "arithmetic", "max_number": 9},
        ...         "steps": 2,
        ...         "groups_per_step": 2,
        ...         "group_size": 2,
        ...         "sampling": {"max_tokens": 8},
        ...         "zero_variance_groups": "keep",
        ...         "evaluate": {"tasks": 0},
        ...         "loggers": [],
        ...     }
        ... )
        >>> run.status, run.metrics.column("step")
        ('finished', [1, 2])
        >>> len(run.rollouts(step=2))  # 2 groups of 2
        4
        >>> again = tandem.Run.open(run.folder).resume({"steps": 3})
        >>> again.metrics[-1]["step"]
        3
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).absolute()
        """Its folder, whatever the working directory is by now."""

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run that was started before, here or by ``tandem train``.

        Raises:
            ConfigError: the folder is not a run's; names those nearby.
        """
        targets.recipe_of(Path(folder))
        return cls(Path(folder))

    @property
    def recipe(self) -> Recipe:
        """The recipe, complete."""
        return Recipe.load(targets.recipe_of(self.folder))

    @property
    def metrics(self) -> MetricsTable:
        """Metrics of every step so far."""
        return MetricsTable(self._read().metrics)

    @property
    def evaluations(self) -> list[Row]:
        """Evaluations on held-out tasks by step, in the shape that ``tandem.evaluate`` returns."""
        return self._read().evaluations

    @property
    def events(self) -> list[Row]:
        """What happened, oldest first: ``event``, ``time`` (Unix seconds) and more."""
        return self._read().events

    @property
    def summary(self) -> Summary:
        """The few numbers that a person asks for first, such as rewards of the first and the last steps."""
        return summarise(self._read())

    @property
    def status(self) -> str:
        """running, finished, interrupted, failed, killed, unfinished or not started."""
        return self.summary["status"]

    def rollouts(self, step: int | None = None) -> list[Row]:
        """The rollouts that a step was trained on: conversation, rewards, advantage, and every token's numbers.

        Args:
            step: which; None: the last.

        Raises:
            ConfigError: the step has none; says which have.
        """
        read = self._read()
        step = max(read.rollout_steps, default=0) if step is None else step
        if step not in read.rollout_steps:
            saved = read.rollout_steps
            steps = f"there are those of steps {saved[0]} to {saved[-1]}" if saved else "no step has any yet"
            raise ConfigError(f"{self.folder} has no rollouts of step {step}; {steps}")
        return read.rollouts(step)

    def weights(self, step: int | None = None) -> Path:
        """Folder of the trained model, or of the PEFT adapter, at a checkpoint; None: the newest.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        return targets.weights_of(self.folder, step)

    def resume(self, overrides: Overrides = (), *, on_step: OnStep | None = None) -> Run:
        """Go on from the newest checkpoint to the last step; blocks until then.

        Args:
            overrides: options that may change, such as ``{"steps": 200}``.
            on_step: as for ``train``.

        Raises:
            ConfigError: an override would make it another run, or another trainer is at work in the folder.
            TandemError: as for ``train``.
        """
        return trained(targets.resumed(self.folder, override_texts(overrides)), self.folder, on_step)

    def report(self) -> ReportPage:
        """Write the report anew; as the last value of a notebook's cell the page is shown there."""
        return ReportPage(build(self.folder))

    def plot(self, *metrics: str) -> Any:
        """Curves of metrics, by default of the reward and the answers' length, as a figure of matplotlib.

        Raises:
            TandemError: no step has such a metric.
        """
        return comparison.compare(self.folder).plot(*metrics)

    def chat(self, message: str | None = None, *, step: int | None = None) -> Replies | None:
        """What the trained model says to a message, and what the model said before training.

        Args:
            message: what is said; None: a conversation at the prompt, until an empty line.
            step: the checkpoint; None: the newest.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        from tandem.api.chat import BeforeAndAfter  # which needs torch

        models = BeforeAndAfter(self.folder, step)
        if message is not None:
            return models.reply(message)
        models.converse(print)
        return None

    def eval(
        self, env: str | Mapping[str, Any] | None = None, overrides: Overrides = (), *, step: int | None = None
    ) -> dict[str, Json]:
        """Measure a checkpoint on held-out tasks, of the run's environment or of another, as ``tandem.evaluate`` does.

        Args:
            env: an environment by name, such as "gsm8k", or a mapping of its kind and options; scored by its own
                rewards. None: the run's.
            overrides: options by dotted path, such as ``{"evaluate.tasks": 100}``.
            step: the checkpoint; None: the newest.
        """
        if env is None:
            return evaluate(self, overrides, step=step)
        written = self.recipe.written
        options = {name: value for name, value in written.items() if name not in ("env", "envs", "rewards", "broker")}
        config = Recipe.load({**options, "env": env}, override_texts(overrides)).config
        return _evaluated(config, targets.weights_of(self.folder, step))

    def _read(self) -> RunFolder:
        return folders.load(self.folder)

    def __repr__(self) -> str:
        summary = self.summary
        return f"<Run {self.folder}: {summary['status']}, {summary['steps']} of {summary['steps_planned']} steps>"


def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    data: Any = None,
    rewards: Any = None,
    epochs: float | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Run:
    """Train to the last step; blocks until then, in a notebook's cell too.

    The stop button (Ctrl-C) ends it after the step under way, with everything saved; ``run.resume()`` goes on.

    Args:
        recipe: a recipe, or what ``Recipe.load`` takes; None: ``data``, ``rewards`` and ``options`` are one.
        overrides: options by dotted path that replace those of the recipe.
        data: what is trained on, in place of ``env``: rows (mappings, prompts or pairs of prompt and answer), a
            ``datasets.Dataset``, a file, or the name of an environment or a data set on the hub.
        rewards: a function, a list of them, or a mapping of functions or names to weights. A function of a script or
            a cell takes a rollout, or ``completions`` and columns as TRL's do; its source is kept in the run's folder.
        epochs: how often every task is drawn, in place of ``steps``.
        on_step: called after every optimizer step with its number, from 1, and its metrics by name. Training waits
            for it, in a notebook in another thread. What it raises ends the run, which can be resumed from its newest
            checkpoint.
        **options: options of the recipe by name, such as ``model`` and ``steps``.

    Raises:
        ConfigError: a mistake in the recipe; found before weights load.
        Interrupted: the user stopped it; the message says what was saved.
        TandemError: anything else that ended it; the message says what to do.

    Example:
        >>> import tandem
        >>> seen = []
        >>> run = tandem.train(
        ...     model="HuggingFaceTB/SmolLM2-135M-Instruct",
        ...     data=[(f"What is {n} + 1?", str(n + 1)) for n in range(40)],
        ...     rewards=["number"], steps=2, groups_per_step=2, group_size=2, sampling={"max_tokens": 8},
        ...     zero_variance_groups="keep", evaluate={"tasks": 0}, loggers=[],
        ...     on_step=lambda step, metrics: seen.append(metrics["reward"]),
        ... )
        >>> seen == run.metrics.column("reward")
        True
    """
    if data is not None:
        options["env"] = described.environment(data, Path(options.get("runs") or "runs"))
    if rewards is not None:
        options["rewards"] = described.rewards(rewards)
    if epochs is not None:
        if "steps" in options:
            raise TandemError("epochs and steps both say how long it trains; leave one of them out")
        options["steps"] = 1  # until its tasks are counted
    texts = override_texts(overrides)
    if recipe is None:
        options.setdefault("dtype", "auto")  # a first run is on the machine at hand
    loaded = Recipe.load(options, texts) if recipe is None else Recipe.load(recipe, [*override_texts(options), *texts])
    if epochs is not None:
        loaded = Recipe.load(loaded, {"steps": described.steps_of(epochs, loaded.config)})
    return trained(loaded.config, None, on_step)


def compare(*runs: Run | str | Path) -> ComparedRuns:
    """Runs beside one another: what their recipes differ in, held-out results task by task, curves on the same axes.

    Args:
        runs: two or more runs, or their folders; differences are to the first.

    Raises:
        TandemError: one is not a run's folder.

    Example:
        >>> import tandem
        >>> recipe = {
        ...     "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "env": "arithmetic", "steps": 1, "groups_per_step": 2,
        ...     "group_size": 2, "sampling": {"max_tokens": 8}, "zero_variance_groups": "keep",
        ...     "evaluate": {"tasks": 2}, "loggers": [],
        ... }
        >>> a, b = tandem.train(recipe), tandem.train(recipe, {"optimizer.lr": 1e-5})
        >>> tandem.compare(a, b).differences
        {'optimizer.lr': ('1e-06', '1e-05')}
    """
    return comparison.compare(*(run.folder if isinstance(run, Run) else Path(run) for run in runs))


def evaluate(
    target: Run | Recipe | str | Path | Mapping[str, Any], overrides: Overrides = (), *, step: int | None = None
) -> dict[str, Json]:
    """Measure mean@k and pass@k on held-out tasks; blocks until done.

    Args:
        target: a run (its checkpoint is measured) or its folder, a recipe, its options or its file (its model is), or
            the folder of a model, which needs ``{"env": ...}``.
        overrides: options by dotted path, such as ``{"evaluate.tasks": 100, "evaluate.samples": 8}``.
        step: the checkpoint of a run; None: the newest.

    Returns:
        ``mean``: share of answers that are right, 0 to 1, and ``mean_ci``, its 95 % interval; ``pass_at``: share of
        tasks with a right answer among k, by k; ``tokens``: mean length; ``rollouts``: some tasks with an answer each;
        ``envs``: the same numbers for each environment; ``step``: that of the checkpoint, 0 of a model.

    Raises:
        ConfigError: the target is none of these, or there is nothing to evaluate on.
        CheckpointError: the run has no such checkpoint.

    Example:
        >>> import tandem
        >>> recipe = tandem.Recipe.load(
        ...     {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "env": "arithmetic", "steps": 40},
        ...     {"sampling.max_tokens": 8},
        ... )
        >>> record = tandem.evaluate(recipe, {"evaluate.tasks": 2, "evaluate.samples": 2})
        >>> record["tasks"], record["samples"], 0 <= record["mean"] <= 1
        (2, 2, True)
    """
    texts = override_texts(overrides)
    if isinstance(target, Recipe | Mapping):
        if step is not None:
            raise TandemError("step names a checkpoint of a run, and this is a recipe; leave it out")
        config, weights = Recipe.load(target, texts).config, None
        targets.check_evaluated(config, "the recipe")
    else:
        config, weights = targets.to_evaluate(target.folder if isinstance(target, Run) else Path(target), texts, step)
    return _evaluated(config, weights)


def _evaluated(config: RunConfig, weights: Path | None) -> dict[str, Json]:
    from tandem.trainer import assemble as run  # only now: a mistake in the recipe is told before the rest has loaded

    return run_to_end(run.evaluate(config, weights=weights))


def trained(
    config: RunConfig, resume: Path | None = None, on_step: OnStep | None = None, stop: asyncio.Event | None = None
) -> Run:
    """Train a checked recipe, or go on with the run in ``resume``; once ``stop`` is set it ends in order."""
    if inspect.iscoroutinefunction(on_step):
        raise TandemError("on_step is an async function, which nothing awaits; write it as a plain def")
    if not _training.acquire(blocking=False):
        raise TandemError(
            "this process is training a run already, and a process trains one at a time; wait until that one is done, "
            "or train this one in a process of its own"
        )
    try:
        from tandem.trainer import assemble as run  # only now: a mistake in the recipe is told before the rest loads

        stop = stop or asyncio.Event()
        return Run(run_to_end(run.train(config, resume=resume, on_step=on_step, stop=stop), stop))
    finally:
        _training.release()


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A run's report: ``path`` is the page, which a notebook shows."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:800px;border:0"></iframe>'


class MetricsTable(list[dict[str, float]]):
    """Metrics of a run: one row for each optimizer step, ascending.

    A row has ``step``, ``time`` (Unix seconds) and every metric of the step by name; one that was not finite is nan.

    Example:
        >>> import tandem
        >>> table = tandem.MetricsTable([{"step": 1, "time": 0.0, "metrics": {"reward": 0.25, "length": 12.0}}])
        >>> table.column("reward")
        [0.25]
        >>> table[-1]["step"], table.names
        (1, ['length', 'reward', 'step', 'time'])
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """Rows as metrics.jsonl holds them."""
        for row in rows:
            metrics = {name: math.nan if value is None else float(value) for name, value in row["metrics"].items()}
            self.append({"step": row["step"], "time": float(row.get("time", math.nan)), **metrics})

    @property
    def names(self) -> list[str]:
        """Every column, sorted."""
        return sorted({name for row in self for name in row})

    def column(self, name: str) -> list[float]:
        """A metric of every step; nan for steps without it.

        Raises:
            TandemError: no step has it; names one that is alike.
        """
        if name not in self.names:
            raise TandemError(f"no step has a metric {name!r}{did_you_mean(name, self.names)}; see names for all")
        return [row.get(name, math.nan) for row in self]

    def to_pandas(self) -> Any:
        """A pandas ``DataFrame`` with the step as its index."""
        import pandas

        return pandas.DataFrame(self, columns=self.names or ["step"]).set_index("step")

    def __repr__(self) -> str:
        return f"<MetricsTable: {len(self)} steps, {len(self.names)} columns>"
