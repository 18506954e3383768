"""Rows, functions and numbers of a script or a notebook, as options of a recipe."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tandem.config import registry
from tandem.config.loading import RunConfig
from tandem.envs.data.rows import read_file
from tandem.errors import ConfigError

_PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input")
_ANSWERS = ("answer", "solution", "ground_truth", "gold", "target", "label")


def environment(data: Any, runs: Path) -> dict[str, Any]:
    """The environment whose tasks are rows of data.

    Args:
        data: the name of an environment, a file or a data set on the hub; a mapping of the environment's options;
            rows, each a mapping, a prompt or a pair of prompt and answer; a ``datasets.Dataset`` or a pandas
            ``DataFrame``; or a mapping of train and test to any of the last three.
        runs: rows are written to a folder in it, where a run that goes on finds them.

    Raises:
        ConfigError: it is none of these, or has no column with a prompt.
    """
    if isinstance(data, str) and data in registry.names("envs"):
        return {"kind": data}
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.is_file():
            return {"kind": "dataset", "path": str(data)}
        first = next(read_file(str(path)))
        return {"kind": "dataset", "path": str(path.absolute()), **_columns(first.columns, str(path))}
    if isinstance(data, Mapping) and "train" in data:
        test = next((data[name] for name in ("test", "validation") if data.get(name) is not None), None)
        train = environment(data["train"], runs)
        return train if test is None else {**train, "test_path": environment(test, runs)["path"]}
    if isinstance(data, Mapping):
        return {"kind": "dataset", **data}
    rows = _rows(data)
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    file = (runs / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return {"kind": "dataset", "path": str(file), **_columns(rows[0], "data")}


def rewards(rewards: Any) -> Any:
    """Options of ``rewards`` for functions, kinds and weights in any form that a script has them in.

    Raises:
        ConfigError: two of them have one name.
    """
    if callable(rewards) or isinstance(rewards, str):
        rewards = [rewards]
    if isinstance(rewards, Mapping):
        return {_name(name): _reward(name, value) for name, value in rewards.items()}
    names = [_name(reward) for reward in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(
            f'rewards: two of {names} have one name; give each its own, as in rewards={{"short": f, "right": g}}'
        )
    return dict(zip(names, (_reward(reward, 1.0) for reward in rewards), strict=True))


def steps_of(epochs: float, config: RunConfig) -> int:
    """Steps in which every training task is drawn so many times.

    Raises:
        ConfigError: epochs is not above 0.
        EnvError: the data cannot be read.
    """
    if not 0 < epochs < math.inf:
        raise ConfigError(f"epochs must be above 0, got {epochs!r}")
    from tandem.trainer import environments  # which needs more than a recipe's mistakes should wait for

    count = sum(len(tasks) for tasks in environments.tasks(config, "train").values())
    return max(1, math.ceil(epochs * count / config.groups_per_step))


def _name(reward: Any) -> str:
    return reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)


def _reward(name: str | Callable[..., Any], value: Any) -> Any:
    if callable(name):
        return {"kind": name, "weight": value}
    return {"kind": value, "weight": 1.0} if callable(value) else value


def _rows(data: Any) -> list[dict[str, Any]]:
    """Rows as mappings of columns."""
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a DataFrame
        data = data.to_dict("records")
    rows = [_row(row) for row in data] if isinstance(data, Iterable) else []
    if not rows:
        raise ConfigError(
            f"data is a {type(data).__name__} without rows; expected rows, a datasets.Dataset, a file's path or the "
            "name of a data set or an environment"
        )
    return rows


def _row(row: Any) -> dict[str, Any]:
    if isinstance(row, Mapping):
        return dict(row)
    if isinstance(row, str):
        return {"prompt": row}
    if isinstance(row, tuple) and len(row) == 2:
        return {"prompt": row[0], "answer": row[1]}
    raise ConfigError(
        f"a row of data is a {type(row).__name__}; expected a mapping of columns, a prompt, or (prompt, answer)"
    )


def _columns(row: Mapping[str, Any], where: str) -> dict[str, str]:
    """Which columns are the prompt and the gold answer."""
    prompt = next((name for name in _PROMPTS if name in row), None)
    if prompt is None:
        raise ConfigError(
            f"{where} has no column called {', '.join(_PROMPTS)}, but {', '.join(map(str, row))}; name the one with "
            "the prompt, as in data={'path': ..., 'prompt': 'text'}, or rename it"
        )
    return {"prompt": prompt, "answer": next((name for name in _ANSWERS if name in row), "")}
