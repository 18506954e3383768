"""Adds the broker's verbs to Tandem's command line, which finds them as entry points, each by its verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.app import Overrides

Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")]
Data = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keep everything accepted here through a restart; default: in memory alone."),
]


def add_broker(app: typer.Typer) -> None:
    """Add ``serve broker``."""
    serve = next(group.typer_instance for group in app.registered_groups if group.name == "serve")
    assert serve is not None
    serve.command("broker")(_serve_broker)


def add_run_api(app: typer.Typer) -> None:
    """Add ``run-api``."""
    app.command("run-api", help="Run the broker, by the name it has in Atropos.")(_serve_broker)


def add_work(app: typer.Typer) -> None:
    """Add ``work``."""
    app.command("work")(_work)


def add_env(app: typer.Typer) -> None:
    """Add ``env``, whose options are Atropos'."""
    from tandem_compat.atropos.options import ENVIRONMENT
    from tandem_compat.commands.flags import options_of, with_options, words_of

    @app.command("env")
    @with_options(options_of(ENVIRONMENT.values()))
    def env(
        name: Annotated[str, typer.Argument(metavar="NAME", help="The environment, such as gsm8k.")],
        mode: Annotated[str, typer.Argument(metavar="serve", help="What to do.")],
        overrides: Overrides = None,
        **flags: Any,
    ) -> None:
        """Play an environment by the flags of Atropos' environments.

        They are translated to options of tandem work, of which more may be laid over them.
        """
        from tandem_broker.commands.work import play_by_flags

        typer.echo(play_by_flags(name, mode, words_of(ENVIRONMENT.values(), flags), overrides or []))


def _serve_broker(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data: Data = None,
    max_body: Annotated[int, typer.Option(metavar="MIB", min=1, help="Largest body, sent and inflated.")] = 64,
    max_held: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Most data queued before environments are held back.")
    ] = 2048,
) -> None:
    """Run the broker between environments and a trainer, until Ctrl-C.

    It speaks Atropos' protocol. TANDEM_BROKER_KEY and TANDEM_BROKER_ENV_KEY hold API keys, if any.
    """
    from tandem_broker.commands.serve import serve_broker

    serve_broker(host, port, data, max_body << 20, max_held << 20, typer.echo)


def _work(
    words: Annotated[
        list[str], typer.Argument(metavar="[RECIPE] [OPTION=VALUE]...", help="A recipe and options, or options alone.")
    ],
) -> None:
    """Play an environment for a broker, sampling elsewhere.

    As in: tandem work env=gsm8k model=MODEL broker=http://127.0.0.1:8000 engine=http://127.0.0.1:9001
    """
    from tandem_broker.commands.work import work

    typer.echo(work(words))
