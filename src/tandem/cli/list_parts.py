"""``tandem list``: the parts that recipes can name, read from the files themselves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem.config import registry as resolve
from tandem.config.build import describe, hints, plain_value
from tandem.config.loading import RunConfig

_OPTION = {f.metadata["category"]: f.name for f in resolve.options(RunConfig) if "category" in f.metadata}
"""What a recipe calls a category."""


def list_parts(category: str | None) -> None:
    """Print every category's parts, or one category's with their options.

    Raises:
        ConfigError: there is no such category.
    """
    console = Console()
    if category is not None:
        category = {option: name for name, option in _OPTION.items()}.get(category, category)
        for kind in resolve.names(category):
            _print_part(console, category, kind)
        return
    for name in resolve.CATEGORIES:
        also = ", or envs for several" if name == "envs" else ""
        written = "" if _OPTION[name] == name else f"  (in a recipe: {_OPTION[name]}{also})"
        console.print(Text.assemble((name, "bold"), written))
        table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, min_width=16)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for kind in resolve.names(name):
            table.add_row(Text(f"  {kind}"), Text(resolve.summary(resolve.find(name, kind))))
        console.print(table)
    console.print("\nOptions of the parts of a category: tandem list CATEGORY", markup=False)


def _print_part(console: Console, category: str, kind: str) -> None:
    """One part: what it is and each option's default, type and doc."""
    cls = resolve.find(category, kind)
    console.print(Text.assemble((kind, "bold"), f"  {resolve.summary(cls)}"))
    docs = resolve.field_docs(cls)
    for field in resolve.options(cls):
        inner = field.metadata.get("category")
        kind_of_value = f"one of {inner}" if inner else describe(hints(cls)[field.name])
        console.print(Text.assemble(f"    {field.name}: {default_text(field)}", (f"  {kind_of_value}", "dim")))
        console.print(Padding(Text(docs.get(field.name, "")), (0, 0, 0, 8)))
    console.print()


def default_text(field: dataclasses.Field[Any]) -> str:
    """An option's default as a recipe writes it."""
    if field.default is not dataclasses.MISSING:
        value = plain_value(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        value = plain_value(field.default_factory())
    else:
        return "(required)"
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value)
