"""A recipe as a script or a notebook holds it."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from tandem.config import cells
from tandem.config import loading as recipes
from tandem.config.loading import Loaded
from tandem.config.tree import render
from tandem.errors import ConfigError
from tandem.types import Json

Overrides = Mapping[str, Any] | Sequence[str]
"""Options laid over a recipe: ``{"optimizer.lr": 1e-5}`` or, as on the command line, ``["optimizer.lr=1e-5"]``."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Loaded):
    """Everything about a run, resolved and checked: parts, their options, defaults.

    Example:
        >>> import tandem
        >>> recipe = tandem.Recipe.load(
        ...     {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "env": "arithmetic", "steps": 40},
        ...     overrides={"optimizer.lr": 2e-5, "sampling.max_tokens": 32},
        ... )
        >>> recipe.options["optimizer"]["lr"], recipe.options["group_size"]
        (2e-05, 8)
        >>> print(recipe)
        model: HuggingFaceTB/SmolLM2-135M-Instruct
        env: arithmetic
        steps: 40
        optimizer: {lr: 2.0e-05}
        sampling: {max_tokens: 32}
    """

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Self, overrides: Overrides = ()) -> Self:
        """Read and check a recipe; loads neither weights nor torch.

        Args:
            source: the path of a YAML file, a mapping of options, or another recipe. In a mapping a reward, an
                environment or another part of your own may be the function or the class itself, as its ``kind``.
            overrides: options by dotted path that replace those of ``source``.

        Raises:
            ConfigError: lists every mistake, each with its place and a hint.
            RewardError: all that is wrong is a reward that cannot be imported.
        """
        texts = override_texts(overrides)
        options = source.written if isinstance(source, Recipe) else source
        if isinstance(options, Mapping):
            loaded = recipes.from_options(json.loads(_json(options)), texts, Path("recipe"))
        elif isinstance(options, str | Path):
            loaded = recipes.load(Path(options), texts)
        else:
            raise ConfigError(
                f"a recipe is a mapping of options, the path of a file or a tandem.Recipe, not a "
                f"{type(source).__name__}; that of a run is run.recipe, and run.resume() goes on with it"
            )
        return cls(config=loaded.config, written=loaded.written, notes=loaded.notes)

    @property
    def options(self) -> dict[str, Json]:
        """Every option with its value, defaults included, as plain data."""
        return recipes.as_json(self.config)

    def __str__(self) -> str:
        """YAML that ``tandem train`` and ``Recipe.load`` take; what was not set is left out."""
        return render(self.written).rstrip()

    def __repr__(self) -> str:
        config = self.config
        tasks, step = "+".join(config.sources) or "a broker", f"{config.groups_per_step} x {config.group_size}"
        return f"<Recipe: {Path(config.model).name} on {tasks}, {config.steps} steps of {step} answers>"


def override_texts(overrides: Overrides) -> list[str]:
    """Overrides as the command line writes them.

    Raises:
        ConfigError: a value that no recipe can hold, or a part that none can name.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is a mapping or a list of texts, not one text; write overrides=[{overrides!r}]")
    if isinstance(overrides, Mapping):
        return [f"{name}={_json(value)}" for name, value in overrides.items()]
    return list(overrides)


def _json(options: Any) -> str:
    """Options as a file would hold them.

    Raises:
        ConfigError: a value that no file can hold.
    """
    return json.dumps(options, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no word for: functions and classes become import paths, paths become texts."""
    if isinstance(value, Mapping):
        return dict(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return _import_path(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Real):  # numpy's too
        return int(value) if isinstance(value, Integral) else float(value)
    raise ConfigError(
        f"a recipe cannot hold a {type(value).__name__}: {str(value)[:60]!r}; write plain values, and a part of your "
        "own as a mapping of its class and options, such as {'kind': MyEnv, 'size': 10}"
    )


def _import_path(part: Any) -> str:
    """``package.module:name`` of a function or a class; one of a script or a notebook becomes a module of its own.

    Raises:
        ConfigError: another process cannot import it.
    """
    module, name = part.__module__, part.__qualname__
    importable = module != "__main__" and getattr(sys.modules.get(module), name, None) is part
    return f"{module}:{name}" if importable else cells.import_path(part)
