"""Chat templates that Axolotl has names for: a model of that family brings it, for others it is written here."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib.resources import files


@cache
def templates() -> dict[str, str]:
    """Jinja templates by Axolotl's names, for conversations of text."""
    folder = files(__package__)
    turns = (folder / "turns.jinja").read_text(encoding="utf-8")
    formats = tomllib.loads((folder / "templates.toml").read_text(encoding="utf-8"))
    texts = {name: json.dumps({"name": name, **of}, ensure_ascii=False) for name, of in formats.items()}
    return {name: f"{{%- set f = {text} -%}}\n{turns}" for name, text in texts.items()}


def brought_by(model: str, template: str) -> bool:
    """True if the model is of the family that a template is named after, and so brings that template itself."""
    family = "commandr" if template == "cohere" else "mistral" if template.startswith("mistral_") else template
    return _letters(family) in _letters(model)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
