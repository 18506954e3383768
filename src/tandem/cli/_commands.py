"""Verbs that speak another system's command line: their options are the tables of ``compat``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from tandem.cli.arguments import Overrides, Show
from tandem.compat import swift
from tandem.compat.atropos.options import ENVIRONMENT, SERVER, TRAINER, joined
from tandem.compat.swift.options import DEPLOY, RLHF
from tandem.compat.table import ForeignOption

Verb = TypeVar("Verb", bound=Callable[..., None])


def _options(table: Iterable[ForeignOption]) -> Iterator[inspect.Parameter]:
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


def _with(options: Iterator[inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Give a verb options for its ``**flags``."""

    def decorate(verb: Verb) -> Verb:
        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        setattr(verb, "__signature__", inspect.Signature([*own, *options]))  # noqa: B010 - typer reads it
        return verb

    return decorate


def _without_missing(table: Iterable[ForeignOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """Words of options that were not left out, by their names."""
    named = {row.name: values[re.sub(r"\W", "_", row.name)] for row in table}
    return {name: value for name, value in named.items() if value is not None and value != []}


class _AtroposCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined(args))


@_with(_options(TRAINER.values()))
def _atropos_grpo(overrides: Overrides = None, show: Show = False, **flags: Any) -> None:
    """Train by the flags of Atropos' trainer.

    They are translated to a recipe, which --show prints; options may be laid over it.
    """
    from tandem.cli.atropos import atropos

    typer.echo(atropos(_without_missing(TRAINER.values(), flags), overrides or [], show=show))


@_with(_options(TRAINER.values()))
def _atropos_grpo_run(overrides: Overrides = None, show: Show = False, **flags: Any) -> None:
    """Start an engine and train on its one copy of the weights.

    Atropos' unified launcher: atropos-grpo with shared_vllm and --benchmark.
    """
    from tandem.cli.atropos import atropos

    typer.echo(atropos(_without_missing(TRAINER.values(), flags), overrides or [], show=show, unified=True))


@_with(_options(SERVER.values()))
def _atropos_server(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OPTION=VALUE", help="Options laid over the recipe; other options of vLLM's server."),
    ] = None,
    show: Show = False,
    **flags: Any,
) -> None:
    """Run an engine alone by the flags of Atropos' vLLM server, until Ctrl-C.

    With VLLM_ENABLE_SHARED_WEIGHTS=1 its weights are lent to a trainer, by a file in $LOGDIR.
    """
    from tandem.cli.atropos import server

    server(_without_missing(SERVER.values(), flags), overrides or [], show=show)


@_with(_options(ENVIRONMENT.values()))
def _env(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The environment, such as gsm8k.")],
    mode: Annotated[str, typer.Argument(metavar="serve", help="What to do.")],
    overrides: Overrides = None,
    **flags: Any,
) -> None:
    """Play an environment by the flags of Atropos' environments.

    They are translated to options of tandem work, of which more may be laid over them.
    """
    from tandem.cli.env import env

    typer.echo(env(name, mode, _without_missing(ENVIRONMENT.values(), flags), overrides or []))


class _SwiftCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, swift.repeated(args))


@_with(_options(RLHF))
def _swift_rlhf(overrides: Overrides = None, show: Show = False, **arguments: Any) -> None:
    """Train by ms-swift's arguments of GRPO.

    They are translated to a recipe, which --show prints; options may be laid over it.
    """
    from tandem.cli.swift import rlhf

    typer.echo(rlhf(_without_missing(RLHF, arguments), overrides or [], show=show))


@_with(_options(DEPLOY))
def _swift_deploy(overrides: Overrides = None, show: Show = False, **arguments: Any) -> None:
    """Run the engine alone by ms-swift's arguments, until Ctrl-C.

    A trainer elsewhere uses it by --vllm_server_host and --vllm_server_port.
    """
    from tandem.cli.swift import deploy

    deploy(_without_missing(DEPLOY, arguments), overrides or [], show=show)


def register(app: typer.Typer) -> None:
    """Add every such verb to the command line."""
    app.command("atropos-grpo", cls=_AtroposCommand)(_atropos_grpo)
    app.command("atropos-grpo-run", cls=_AtroposCommand)(_atropos_grpo_run)
    app.command("atropos-server", context_settings={"ignore_unknown_options": True})(_atropos_server)
    app.command("env")(_env)
    commands = typer.Typer(help="Speak ms-swift's command line.", no_args_is_help=True, rich_markup_mode=None)
    commands.command("rlhf", cls=_SwiftCommand)(_swift_rlhf)
    for name in ("deploy", "rollout"):
        commands.command(name, cls=_SwiftCommand)(_swift_deploy)
    app.add_typer(commands, name="swift")
