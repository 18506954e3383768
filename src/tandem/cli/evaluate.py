"""``tandem eval``: held-out tasks, answered by a run's checkpoint, a recipe's model or a model folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import typer

from tandem.api.blocking import run_to_end
from tandem.api.targets import to_evaluate
from tandem.errors import ConfigError
from tandem.types import Json


def evaluate(target: Path, overrides: Sequence[str], step: int | None) -> None:
    """Evaluate and print the result.

    Raises:
        ConfigError: the target is none of the three, or there is nothing to evaluate on.
    """
    config, weights = to_evaluate(target, overrides, step)
    from tandem.observability.board import answer_lines, best_and_worst
    from tandem.observability.progress import shown
    from tandem.trainer import assemble as run  # only now: a mistake in the recipe is told before the rest has loaded

    with shown():
        record = run_to_end(run.evaluate(config, weights=weights))
    for line in _lines(str(weights or config.model), record):
        typer.echo(line)
    if config.print_completions.every:
        for sample in best_and_worst(record["rollouts"]):
            for line in answer_lines(sample, "an answer"):
                typer.echo(line)


def print_benchmarks(target: Path, names: Sequence[str], overrides: Sequence[str], step: int | None) -> None:
    """Print a line for each metric of benchmarks, with the interval of what training changed.

    Raises:
        ConfigError: an override is not evaluate.tasks, or lm-eval cannot measure it.
    """
    from tandem.api.benchmarks import benchmark

    limits = dict(override.partition("=")[::2] for override in overrides)
    if limits.keys() - {"evaluate.tasks"} or not all(value.isdecimal() for value in limits.values()):
        raise ConfigError("a benchmark has no options but evaluate.tasks=N, which takes its first N samples")
    limit = int(limits["evaluate.tasks"]) if limits else None
    scores = benchmark(target, names, step=step, limit=limit)
    typer.echo(" → ".join(scores[0].models) if scores else "none of them has a number for each sample")
    for score in scores:
        typer.echo(f"  {score}")


def _lines(what: str, record: Mapping[str, Json]) -> Iterator[str]:
    """The result in words: of all environments together, then of each of several."""
    samples = record["samples"]
    yield f"{what} on {record['tasks']} held-out tasks of {record['env']}, {samples} answers each"
    yield from _numbers(record, samples)
    for name, of in record["envs"].items() if len(record["envs"]) > 1 else ():
        yield f"{name}, {of['tasks']} tasks"
        yield from _numbers(of, samples)


def _numbers(of: Mapping[str, Json], samples: int) -> Iterator[str]:
    low, high = of["mean_ci"]
    yield f"  mean@{samples}  {of['mean']:.3f}  [{low:.3f}, {high:.3f}]"
    largest = max(of["pass_at"], key=int)
    for k, share in of["pass_at"].items():
        interval = f"  [{of['pass_ci'][0]:.3f}, {of['pass_ci'][1]:.3f}]" if k == largest else ""
        yield f"  pass@{k}  {share:.3f}{interval}"
    yield f"  {of['tokens']:.0f} tokens on average, {of['truncated']:.0%} truncated"
    if of["failed"]:
        total = of["tasks"] * samples
        yield f"  {of['failed']} of {total} answers failed, as the environment or a reward did; they count as wrong"
