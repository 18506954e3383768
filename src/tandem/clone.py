"""Recipes that Tandem ships, and the clone of its repository that this package may stand in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root of the clone, if it is one."""
_INSIDE = Path(__file__).parent / "recipes"
FOLDER = _INSIDE if _INSIDE.is_dir() else ROOT / "recipes"
"""Recipes that ship with Tandem: in the wheel, or at the clone's root."""
_TESTED = FOLDER.parent / "constraints.txt"
_FETCHED = Path(".cache/smollm2")
"""The model of many recipes, which the quickstart fetches."""
_ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same, where it was not fetched."""


def recipes() -> dict[str, Path]:
    """Recipes that ship with Tandem, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def tested() -> dict[str, str]:
    """Versions of libraries that Tandem is tested with, by their names in lower case."""
    pins = (line.lower().split("==") for line in _TESTED.read_text(encoding="utf-8").splitlines())
    return {name.replace("_", "-"): version for name, version in pins}


def written(recipe: Path) -> str:
    """Text of a shipped recipe, for any working directory: what lies beside it, and a model that is to be had."""
    text = recipe.read_text(encoding="utf-8").replace(": recipes/data/", f": {recipe.parent}/data/")
    return text if _FETCHED.is_dir() else text.replace(f"model: {_FETCHED}", f"model: {_ON_THE_HUB}")


def where(path: str) -> str:
    """Hint for a relative path that is not in the working directory: where it is, or which command makes it.

    Begins with a semicolon; empty where there is nothing to say.
    """
    relative = Path(path).expanduser()
    if relative.is_absolute() or not (ROOT / "recipes").is_dir():
        return ""
    if (ROOT / relative).exists() and Path.cwd() != ROOT:
        return f"; there is {ROOT / relative}: run from {ROOT}, or name that"
    if relative == _FETCHED:
        return f"; bash {ROOT / 'scripts' / 'quickstart'} fetches it to {ROOT}"
    return ""
