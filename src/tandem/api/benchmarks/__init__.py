"""Public benchmarks by lm-eval: a model before and after training, compared sample by sample."""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tandem.api import targets
from tandem.api.card import BENCHMARKS
from tandem.api.comparison import half_interval, paired
from tandem.errors import ConfigError
from tandem.importing import library
from tandem.model.policy import load_config
from tandem.observability.report.folder import load
from tandem.types import Json

_NAMES = {"humaneval": "humaneval_instruct"}
"""lm-eval's names of what people ask a chat model for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A metric of a benchmark, sample by sample."""

    task: str
    metric: str
    """Its name, and that of lm-eval's filter of answers if there are several."""
    models: tuple[str, ...]
    """The model before training, if there is one, and the trained one."""
    samples: tuple[list[float], ...]
    """Of each model, in the same order."""

    def __str__(self) -> str:
        """One line of what ``tandem eval --on`` prints."""
        means = " → ".join(f"{statistics.fmean(each):.3f} ±{half_interval(each):.3f}" for each in self.samples)
        first, *more = ({"solved": each, "samples": 1} for each in self.samples)
        gain = "".join(f"  {paired(first, other)}" for other in more)
        return f"{self.task} {self.metric}, {len(self.samples[0])} samples: {means}{gain}"


def benchmark(target: Path, names: Sequence[str], *, step: int | None = None, limit: int | None = None) -> list[Score]:
    """Measure a run's model before and after training, an adapter's without and with it, or a model.

    Args:
        target: the folder of a run, a model or an adapter, or a model's name on the hub.
        names: tasks of lm-eval, ``math500``, or files of lm-eval's tasks.
        step: a checkpoint of a run; None: the newest.
        limit: samples of each; None: all.

    Raises:
        ConfigError: lm-eval is not installed, has no such task, or cannot load its data; there is no such model.
        CheckpointError: the run has no such checkpoint.
    """
    lm_eval = library("lm_eval.tasks", "a benchmark", "eval", ConfigError)
    is_run = (target / "config.yaml").is_file()
    models = _models(targets.weights_of(target, step) if is_run else target, target if is_run else None)
    for model in models:
        load_config(str(model["pretrained"]))  # lm-eval asks the hub for minutes before it gives up
    files = [file for file in map(Path, names) if file.is_file()]
    places = [Path(__file__).parent, *(file.parent for file in files)]
    # lm-eval's own are thousands of files, read one by one.
    manager = lm_eval.TaskManager(include_path=list(map(str, places)), include_defaults=len(files) < len(names))
    tasks = [_NAMES.get(name, _task(name)) for name in names]
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise ConfigError(f"lm-eval has no task {', '.join(unknown)}; lm-eval ls tasks lists what it has")
    each = [_samples(model, tasks, manager, limit) for model in models]
    keys = [key for key in each[-1] if all(key in samples for samples in each)]
    labels = tuple(str(model.get("peft", model["pretrained"])) for model in models)
    scores = [
        Score(task=task, metric=metric, models=labels, samples=tuple(samples[task, metric] for samples in each))
        for task, metric in keys
    ]
    if is_run:
        rows = ({"task": each.task, "metric": each.metric, "line": str(each), "step": step} for each in scores)
        with (target / BENCHMARKS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return scores


def _task(name: str) -> str:
    """The task's name that a file has; another name as it is."""
    return str(yaml.load(Path(name).read_text(), yaml.BaseLoader)["task"]) if Path(name).is_file() else name


def _models(weights: Path, run: Path | None) -> list[dict[str, Json]]:
    """Arguments of lm-eval for the model before training, if it is known, and for the trained one."""
    base = str(load(run).config["model"]) if run is not None else ""
    adapter = weights / "adapter_config.json"
    if adapter.is_file():
        base = base or str(json.loads(adapter.read_text())["base_model_name_or_path"])
        return [{"pretrained": base}, {"pretrained": base, "peft": str(weights)}]
    return [*([{"pretrained": base}] if base else []), {"pretrained": str(weights)}]


def _samples(
    model: Mapping[str, Json], tasks: list[str], manager: Any, limit: int | None
) -> dict[tuple[str, str], list[float]]:
    """Numbers of each sample, by task and metric."""
    from lm_eval import simple_evaluate
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.get("peft", model["pretrained"]))
    on_gpu = torch.cuda.is_available()
    try:
        results = simple_evaluate(
            "hf", {**model, "dtype": "auto"}, tasks, task_manager=manager, limit=limit, log_samples=True,
            batch_size="auto" if on_gpu else 8, device="cuda" if on_gpu else "cpu", bootstrap_iters=0,
            apply_chat_template=tokenizer.chat_template is not None,
            confirm_run_unsafe_code=os.environ.get("HF_ALLOW_CODE_EVAL") == "1",
        )  # fmt: skip
    except (ValueError, OSError) as error:
        allowed = "; HF_ALLOW_CODE_EVAL=1 lets it run programs that the model wrote" * ("unsafe" in str(error))
        raise ConfigError(f"lm-eval cannot measure {', '.join(tasks)}: {error}{allowed}") from error
    finally:
        gc.collect()  # the model, before the next one loads
    return dict(_metrics(results["samples"]))


def _metrics(samples: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[tuple[str, str], list[float]]]:
    for task, rows in samples.items():
        filters = dict.fromkeys(row["filter"] for row in rows)
        for name in filters:
            chosen = sorted((row for row in rows if row["filter"] == name), key=lambda row: row["doc_id"])
            for metric in chosen[0]["metrics"]:
                if all(isinstance(row[metric], (int, float)) for row in chosen):
                    label = f"{metric} ({name})" if len(filters) > 1 else metric
                    yield (task, label), [float(row[metric]) for row in chosen]
