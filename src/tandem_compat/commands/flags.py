"""Options of verbs that speak another system's command line, made from the tables of ``compat``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from tandem_compat.table import ForeignOption

Verb = TypeVar("Verb", bound=Callable[..., None])


def repeated(words: Sequence[str], table: Iterable[ForeignOption]) -> list[str]:
    """A command line with ``--dataset a b`` as ``--dataset a --dataset b``; OPTION=VALUE ends the values.

    ``--use_vllm`` without a value is ``--use_vllm true``.
    """
    takes = {f"--{name}": row.takes for row in table for name in (row.name, *row.also)}
    out: list[str] = []
    several, first = "", False
    for word in words:
        if out and takes.get(out[-1]) == "truth" and (word.startswith("--") or "=" in word):
            out.append("true")
        if word.startswith("--"):
            several, first = (word, True) if takes.get(word) in ("texts", "numbers") else ("", False)
        elif several and (first or "=" not in word):
            out += [] if first else [several]
            first = False
        else:
            several = ""
        out.append(word)
    return [*out, "true"] if out and takes.get(out[-1]) == "truth" else out


def options_of(table: Iterable[ForeignOption]) -> Iterator[inspect.Parameter]:
    """Rows as options of a verb; what their words hold is read by ``compat``, all of it at once."""
    for row in table:
        flag, *also = (name if name.startswith("-") else f"--{name}" for name in (row.name, *row.also))
        flag += f"/--no-{row.name}" if row.takes == "flag" and row.default else ""
        hint = bool | None if row.takes == "flag" else list[str] | None
        yield inspect.Parameter(
            re.sub(r"\W", "_", row.name),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[hint, typer.Option(flag, *also, help=row.help, show_default=False)],
        )


def with_options(options: Iterator[inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Give a verb options for its ``**flags``."""

    def decorate(verb: Verb) -> Verb:
        named = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [parameter for parameter in named if parameter.kind is not parameter.VAR_KEYWORD]
        setattr(verb, "__signature__", inspect.Signature([*parameters, *options]))  # noqa: B010 - typer reads it
        return verb

    return decorate


def words_of(table: Iterable[ForeignOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """Words of options that were not left out, by their names."""
    named = {row.name: values[re.sub(r"\W", "_", row.name)] for row in table}
    return {name: value for name, value in named.items() if value is not None and value != []}
