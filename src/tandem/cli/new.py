"""``tandem new``: a working environment and its recipe, or a copy of a shipped recipe, to start from."""

from __future__ import annotations

import keyword
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from tandem import clone
from tandem.config import registry as resolve
from tandem.errors import ConfigError, command

_MODULE = '''"""{title}: what the model is asked, and what counts as right. Try it with: tandem check {name}.yaml"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.envs.base import Environment, Split
from tandem.types import Message, Rollout, Task


@dataclass(frozen=True, kw_only=True)
class {title}(Environment):
    """Sums of two numbers; replace this by your own problems. Each field below is an option of the recipe."""

    largest: int = 9
    """Largest number in a question."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split, always in the same order. No task may be in both splits."""
        pairs = [(a, b) for a in range(1, self.largest + 1) for b in range(1, self.largest + 1)]
        held_out = [pair for pair in pairs if (pair[0] * 7 + pair[1]) % 5 == 0]
        chosen = held_out if split == "test" else [pair for pair in pairs if pair not in held_out]
        return [self._task(a, b) for a, b in chosen]

    def check(self, task: Task) -> str:
        """A reply that must earn full marks, so that a broken reward is found before training."""
        return f"The answer is {{task.answer}}"

    def _task(self, a: int, b: int) -> Task:
        question = f"What is {{a}} + {{b}}? End with: The answer is <number>"
        return Task(
            id=f"{{a}}+{{b}}",  # unique, and the same in every run
            env=self.name,
            prompt=(Message(role="user", content=question),),
            answer=str(a + b),
            meta={{"terms": [a, b]}},  # whatever else your reward needs
        )

    # For more than one turn, override play (docs/guide/environments.md).


def correct(rollout: Rollout) -> float:
    """1 if the reply ends with the right answer, else 0. It runs in a process of its own, which may be killed."""
    _, found, given = rollout.text.rpartition("The answer is")
    return float(bool(found) and given.strip().rstrip(".") == rollout.task.answer)
'''

_RECIPE = """# Trains on the environment in {name}.py. Look before you start: tandem check {name}.yaml
model: {model}
steps: 40
env: {{kind: "{name}:{title}", largest: 9}}
rewards: {{"{name}:correct": 1.0}}
groups_per_step: 4
group_size: 8
sampling: {{max_tokens: 48}}
optimizer: {{lr: 3.0e-5}}
evaluate: {{tasks: 16}}
"""

_LOCAL_MODEL = ".cache/smollm2"
_HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def new(what: str, name: str, folder: Path, source: str = "arithmetic") -> str:
    """Write NAME.py and NAME.yaml, or of a recipe NAME.yaml; returns the message to print.

    Raises:
        ConfigError: the name cannot be a module's, is taken, or a file is already there.
    """
    if what == "recipe":
        return _new_recipe(folder / f"{name.removesuffix('.yaml')}.yaml", source)
    if what != "env":
        raise ConfigError(f"new makes an env or a recipe, not {what!r}; write: tandem new env NAME")
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ConfigError(f"{name!r} cannot be a module's name; use letters, digits and _, such as my_task")
    if name in resolve.names("envs"):
        raise ConfigError(f"there is an environment {name!r} already (tandem list envs); choose another name")
    module, recipe = folder / f"{name}.py", folder / f"{name}.yaml"
    for path in (module, recipe):
        if path.exists():
            raise ConfigError(f"{path} is already there and is left as it is; choose another name, or move it away")
    other = PathFinder.find_spec(name)
    if name in sys.builtin_module_names or (other is not None and other.origin is not None):
        raise ConfigError(f"Python has a module {name!r} already, which would hide it; choose another name")
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    model = _LOCAL_MODEL if (folder / _LOCAL_MODEL).is_dir() else _HUB_MODEL
    try:
        module.write_text(_MODULE.format(name=name, title=title), encoding="utf-8")
        recipe.write_text(_RECIPE.format(name=name, title=title, model=model), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return f"wrote {module} and {recipe}; next: {command('check', recipe)}"


def _new_recipe(path: Path, source: str) -> str:
    """Copy a shipped recipe, and the modules that it names."""
    recipes = clone.recipes()
    if source not in recipes:
        hint = resolve.did_you_mean(source, recipes)
        raise ConfigError(f"Tandem ships no recipe {source!r}{hint}; tandem recipes lists them")
    text = clone.written(recipes[source])
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        for module in recipes[source].parent.glob("*.py"):
            if f"{module.stem}:" in text and not (beside := path.with_name(module.name)).exists():
                beside.write_bytes(module.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{path} is already there and is left as it is; choose another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return f"wrote {path}, a copy of {source}; edit it, then: {command('check', path)}"
