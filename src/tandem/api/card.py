"""The model card of a trained model: what it is, what it reached, how it was made, how to load it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from tandem.api.comparison import paired
from tandem.observability import json_lines
from tandem.observability.board import CURVES, percent_with_interval, sparkline
from tandem.observability.loggers.base import kind
from tandem.observability.report.folder import RunFolder, load
from tandem.observability.report.summary import column, facts
from tandem.types import Json

BENCHMARKS = "benchmarks.jsonl"
"""File of a run's folder with what ``tandem eval RUN --on`` measured."""
_PLACES = 6
"""Most evaluations that are listed; of more, the first and the last."""


def model_card(run: Path, weights: Path, name: str, *, whole: bool) -> str:
    """README.md of a checkpoint.

    Args:
        run: the run's folder.
        weights: the checkpoint's model or adapter.
        name: what the model is called: ``user/name``, or a folder.
        whole: it is a model, not an adapter.
    """
    folder = load(run)
    base, data, step = str(folder.config.get("model", "")), _data(folder), int(weights.parent.name)
    on_hub = base if base.count("/") == 1 and not Path(base).exists() else None
    about = ModelCardData(
        library_name="transformers" if whole else "peft",
        pipeline_tag="text-generation",
        base_model=on_hub,
        datasets=data if data and data.count("/") == 1 and not Path(data).exists() else None,
        tags=["grpo", "reinforcement-learning", "tandem"],
    )
    settings = dict(facts(folder.config))
    title, env = name.rpartition("/")[2], settings.get("environment", "a broker's groups")
    parts = [
        f"# {title}",
        f"{'A model' if whole else 'A LoRA adapter'} trained from `{on_hub or Path(base).name}` by GRPO on **{env}**, "
        f"as it was after step {step} of {folder.config.get('steps', step)}. Trained with Tandem, where the trainer "
        "and the inference engine ride one copy of the weights.",
        *_held_out(folder),
        *_benchmarks(folder),
        *_curves(folder),
        "## Data and rewards",
        f"Prompts: {f'`{Path(data).name if Path(data).is_absolute() else data}`' if data else env}. Rewards: "
        f"{_rewards(folder)}.",
        *_proof(folder),
        "## How to use it",
        _usage(name, on_hub or base, whole=whole),
        "## Recipe",
        f"<details><summary>config.yaml</summary>\n\n```yaml\n{folder.config_text.rstrip()}\n```\n\n</details>",
    ]
    return str(ModelCard(f"---\n{about.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _held_out(run: RunFolder) -> list[str]:
    """Results on held-out tasks, before and after."""
    rows = [row for row in run.evaluations if row.get("env") == run.evaluations[0].get("env")]
    if not rows:
        return []
    shown = rows if len(rows) <= _PLACES else [rows[0], rows[-1]]
    lines = [f"| {row['step']} | {percent_with_interval(row)} | {row['tasks']} × {row['samples']} |" for row in shown]
    gain = f"\n\nLast to first, task by task: {paired(rows[0], rows[-1])}." if len(rows) > 1 else ""
    table = "\n".join(["| step | right | tasks × answers |", "|---|---|---|", *lines])
    return ["## Held out", f"Tasks that were not trained on; 95 % intervals in brackets.\n\n{table}{gain}"]


def _benchmarks(run: RunFolder) -> list[str]:
    """What was measured of it, the last of each metric."""
    rows = {(row["task"], row["metric"]): row["line"] for row in json_lines.read(run.path / BENCHMARKS)}
    lines = "\n".join(f"- {line}" for line in rows.values())
    return ["## Benchmarks", f"By lm-eval, before training → after, ± half a 95 % interval.\n\n{lines}"] if rows else []


def _curves(run: RunFolder) -> list[str]:
    """The course of training: a metric's first value, its curve and its last value."""
    series = {name: values for name in CURVES if (values := column(run, name))}
    lines = [f"- {name}: {each[0]:.3g} `{sparkline(each, 16)}` {each[-1]:.3g}" for name, each in series.items()]
    return ["## Training", "\n".join(lines)] if lines else []


def _proof(run: RunFolder) -> list[str]:
    """What was proved of the weights that answers were sampled from."""
    published = [event for event in run.events if event.get("event") == "published"]
    proved = [event for event in published if event.get("digest")]
    gaps = [event["probe_gap"] for event in proved if isinstance(event.get("probe_gap"), float)]
    if not proved:
        return []
    probe = f" Largest difference of a probe's logprobs between the two: {max(gaps):.3g} nats." if gaps else ""
    text = (
        f"Of {len(published)} publishes of weights to the engine {len(proved)} were proved: checksums of the "
        f"engine's bytes were those of the trainer's.{probe} Digest of the last: `{proved[-1]['digest']}`."
    )
    return ["## Proof of sync", text]


def _usage(name: str, base: str, *, whole: bool) -> str:
    """How the model is loaded, served and measured."""
    peft = "" if whole else "  # with peft installed"
    serve = f"vllm serve {name}" if whole else f"vllm serve {base} --enable-lora --lora-modules trained={name}"
    measured = f"pretrained={name}" if whole else f"pretrained={base},peft={name}"
    python = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto"){peft}
tokenizer = AutoTokenizer.from_pretrained("{name}")
messages = [{{"role": "user", "content": "Hello"}}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=256)[0]))
```"""
    return f"""{python}

```bash
{serve}
lm_eval --model hf --model_args {measured} --tasks gsm8k --apply_chat_template
```"""


def _data(run: RunFolder) -> str:
    """The file or the name of the data set, if the environment has one."""
    env: Json = run.config.get("env") or {}
    return str(env.get("path") or env.get("dataset") or "") if isinstance(env, dict) else ""


def _rewards(run: RunFolder) -> str:
    """Rewards with their weights."""
    rewards = run.config.get("rewards") or {}
    if not isinstance(rewards, dict) or not rewards:
        return f"those of {kind(run.config.get('env')) or 'its environments'}"
    weights = {name: value.get("weight", 1.0) if isinstance(value, dict) else value for name, value in rewards.items()}
    return ", ".join(f"`{name}` × {weight:g}" for name, weight in weights.items())
