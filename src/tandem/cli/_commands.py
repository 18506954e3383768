"""Verbs that speak another system's command line: their options are the tables and dataclasses of ``compat``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from tandem.cli.arguments import Overrides, Show
from tandem.compat import swift
from tandem.compat.atropos.environment import EnvFlags
from tandem.compat.atropos.options import TrainerFlags, joined
from tandem.compat.atropos.server import ServerFlags
from tandem.compat.swift.options import DEPLOY, RLHF
from tandem.compat.table import ForeignOption
from tandem.config import registry as resolve

Verb = TypeVar("Verb", bound=Callable[..., None])


def _flags(cls: type) -> Iterator[inspect.Parameter]:
    """A dataclass's fields as options of a verb: their names, types, defaults and docstrings are said there alone."""
    hints, docs = get_type_hints(cls), resolve.field_docs(cls)
    for field in dataclasses.fields(cls):
        flag = field.metadata.get("flag", f"--{field.name.replace('_', '-')}")
        names = [flag, *field.metadata.get("also", ())]
        if off := field.metadata.get("off"):
            names = [f"{names[0]}/{off}"]
        hint, text, default = hints[field.name], docs[field.name], field.default
        if hint == tuple[str, ...]:
            hint = list[str]
        if default is not dataclasses.MISSING:
            hint |= None  # None is left out, which a verb may have to know; the default is the dataclass's
            text += "" if default is None or default is False or default == () else f" Default: {default}."
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else None,
            annotation=Annotated[hint, typer.Option(*names, help=text)],
        )


def _arguments(table: Sequence[ForeignOption]) -> Iterator[inspect.Parameter]:
    """Arguments of ms-swift as options of a verb; what they hold is read by ``compat``, all of it at once."""
    for argument in table:
        names = [f"--{name}" for name in (argument.name, *argument.also)]
        yield inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[list[str] | None, typer.Option(*names, help=argument.help, show_default=False)],
        )


def _with(options: Iterator[inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Give a verb options for its ``**flags``."""

    def decorate(verb: Verb) -> Verb:
        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        setattr(verb, "__signature__", inspect.Signature([*own, *options]))  # noqa: B010 - typer reads it
        return verb

    return decorate


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that were not left out."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in flags.items()
        if value is not None and value != []
    }


class _AtroposCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined(args))


@_with(_flags(TrainerFlags))
def _atropos_grpo(overrides: Overrides = None, show: Show = False, **flags: Any) -> None:
    """Train by the flags of Atropos' trainer.

    They are translated to a recipe, which --show prints; options may be laid over it.
    """
    from tandem.cli.atropos import atropos

    typer.echo(atropos(_given(flags), overrides or [], show=show))


@_with(_flags(TrainerFlags))
def _atropos_grpo_run(overrides: Overrides = None, show: Show = False, **flags: Any) -> None:
    """Start an engine and train on its one copy of the weights.

    Atropos' unified launcher: atropos-grpo with shared_vllm and --benchmark.
    """
    from tandem.cli.atropos import atropos

    typer.echo(atropos(_given(flags), overrides or [], show=show, unified=True))


@_with(_flags(ServerFlags))
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

    server(_given(flags), overrides or [], show=show)


@_with(_flags(EnvFlags))
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

    typer.echo(env(name, mode, _given(flags), overrides or []))


class _SwiftCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, swift.repeated(args))


@_with(_arguments(RLHF))
def _swift_rlhf(overrides: Overrides = None, show: Show = False, **arguments: Any) -> None:
    """Train by ms-swift's arguments of GRPO.

    They are translated to a recipe, which --show prints; options may be laid over it.
    """
    from tandem.cli.swift import rlhf

    typer.echo(rlhf(_given(arguments), overrides or [], show=show))


@_with(_arguments(DEPLOY))
def _swift_deploy(overrides: Overrides = None, show: Show = False, **arguments: Any) -> None:
    """Run the engine alone by ms-swift's arguments, until Ctrl-C.

    A trainer elsewhere uses it by --vllm_server_host and --vllm_server_port.
    """
    from tandem.cli.swift import deploy

    deploy(_given(arguments), overrides or [], show=show)


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
