"""``tandem recipes`` and ``tandem new``: recipes that ship, and a copy of one, or an environment, to start from."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import yaml
from rich.console import Console
from rich.text import Text

from tandem import clone
from tandem.config import registry as resolve
from tandem.errors import ConfigError, command


def print_recipes() -> None:
    """Print the recipes that ship."""
    console = Console(highlight=False)
    for name, path in clone.recipes().items():
        text = path.read_text(encoding="utf-8")
        comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
        card = next((line.removeprefix("Card: ") for line in comment if line.startswith("Card: ")), "")
        model = Path(yaml.safe_load(text)["model"]).name
        about = shorten(" ".join(comment).partition(". ")[0], 76, placeholder=" …")
        console.print(Text.assemble((f"{name:13}", "bold"), f"{model}  {card}\n", (f"  {about}", "dim")))
    console.print("tandem train NAME trains one; tandem new recipe MINE NAME copies one to be edited")


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
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    texts = {path: clone.written(clone.FOLDER / "new" / f"my_env{path.suffix}") for path in (module, recipe)}
    _write({path: text.replace("my_env", name).replace("MyEnv", title) for path, text in texts.items()})
    return f"wrote {module} and {recipe}; next: {command('check', recipe)}"


def _new_recipe(path: Path, source: str) -> str:
    """Copy a shipped recipe, and the modules that it names."""
    recipes = clone.recipes()
    if source not in recipes:
        hint = resolve.did_you_mean(source, recipes)
        raise ConfigError(f"Tandem ships no recipe {source!r}{hint}; tandem recipes lists them")
    text = clone.written(recipes[source])
    named = [module for module in recipes[source].parent.glob("*.py") if f"{module.stem}:" in text]
    beside = {path.with_name(module.name): module.read_text(encoding="utf-8") for module in named}
    _write({path: text} | {place: code for place, code in beside.items() if not place.exists()})
    return f"wrote {path}, a copy of {source}; edit it, then: {command('check', path)}"


def _write(files: Mapping[Path, str]) -> None:
    """Write new files."""
    for path in files:
        if path.exists():
            raise ConfigError(f"{path} is already there and is left as it is; choose another name, or move it away")
    try:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
