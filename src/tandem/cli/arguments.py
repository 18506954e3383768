"""Arguments that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="Options laid over the recipe.")]
Show = Annotated[bool, typer.Option("--show", help="Print the recipe as YAML and exit.")]
