"""Adds Atropos' and ms-swift's verbs to Tandem's command line, which finds them as entry points."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tandem.cli.app import Overrides, Show
from tandem_compat.atropos.options import SERVER, TRAINER
from tandem_compat.commands.flags import options_of, repeated, with_options, words_of
from tandem_compat.swift.options import DEPLOY, RLHF


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeated(args, (*TRAINER.values(), *RLHF, *DEPLOY)))


@with_options(options_of(TRAINER.values()))
def _atropos_grpo(context: typer.Context, overrides: Overrides = None, show: Show = False, **flags: Any) -> None:
    """Train by the flags of Atropos' trainer.

    They are translated to a recipe, which --show prints; options may be laid over it.
    """
    from tandem_compat.commands.run import atropos

    unified = context.info_name == "atropos-grpo-run"
    typer.echo(atropos(words_of(TRAINER.values(), flags), overrides or [], show=show, unified=unified))


@with_options(options_of(SERVER.values()))
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
    from tandem_compat.commands.run import atropos_server

    atropos_server(words_of(SERVER.values(), flags), overrides or [], show=show)


@with_options(options_of(RLHF))
def _swift_rlhf(overrides: Overrides = None, show: Show = False, **arguments: Any) -> None:
    """Train by ms-swift's arguments of GRPO.

    They are translated to a recipe, which --show prints; options may be laid over it.
    """
    from tandem_compat.commands.run import swift_rlhf

    typer.echo(swift_rlhf(words_of(RLHF, arguments), overrides or [], show=show))


@with_options(options_of(DEPLOY))
def _swift_deploy(overrides: Overrides = None, show: Show = False, **arguments: Any) -> None:
    """Run the engine alone by ms-swift's arguments, until Ctrl-C.

    A trainer elsewhere uses it by --vllm_server_host and --vllm_server_port.
    """
    from tandem_compat.commands.run import swift_deploy

    swift_deploy(words_of(DEPLOY, arguments), overrides or [], show=show)


def add_atropos_grpo(app: typer.Typer) -> None:
    """Add ``atropos-grpo``."""
    app.command("atropos-grpo", cls=_Command)(_atropos_grpo)


def add_atropos_grpo_run(app: typer.Typer) -> None:
    """Add ``atropos-grpo-run``."""
    unified = "Start an engine and train on its one copy of the weights: atropos-grpo with shared_vllm and --benchmark."
    app.command("atropos-grpo-run", cls=_Command, help=unified)(_atropos_grpo)


def add_atropos_server(app: typer.Typer) -> None:
    """Add ``atropos-server``."""
    app.command("atropos-server", context_settings={"ignore_unknown_options": True})(_atropos_server)


def add_swift(app: typer.Typer) -> None:
    """Add ``swift rlhf``, ``swift deploy`` and ``swift rollout``."""
    commands = typer.Typer(help="Speak ms-swift's command line.", no_args_is_help=True, rich_markup_mode=None)
    commands.command("rlhf", cls=_Command)(_swift_rlhf)
    for name in ("deploy", "rollout"):
        commands.command(name, cls=_Command)(_swift_deploy)
    app.add_typer(commands, name="swift")
