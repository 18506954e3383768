"""The command line: each verb is a function here that imports its work when it runs, so that help is instant."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command_name

from tandem import __version__
from tandem.errors import TandemError, is_theirs, message_of, place_of, redacted

app = typer.Typer(
    name="tandem",
    help="GRPO post-training in which trainer and inference engine ride one copy of the weights.",
    epilog="A recipe is a YAML file; its options can be overridden as in: tandem train recipe.yaml loss.clip_high=0.3",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich would double the time that help takes
    pretty_exceptions_enable=False,
)

Overrides = Annotated[list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="Options laid over the recipe.")]
Show = Annotated[bool, typer.Option("--show", help="Print the recipe as YAML and exit.")]
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe.")]
Target = Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe (file or name), or a run to resume.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Folder = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder of runs.")]
Step = Annotated[int | None, typer.Option(metavar="N", help="The checkpoint of this step; default: the newest.")]

Merge = Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the model it was trained on.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show an error's traceback; or TANDEM_DEBUG=1.")] = False,
) -> None:
    """Options of every verb; ``main`` reads --debug, wherever it stands."""


@app.command()
def train(
    target: Target,
    overrides: Overrides = None,
    show: Show = False,
    launcher: Annotated[
        Literal["ray"] | None, typer.Option(help="Start the ranks on a Ray cluster (pip install ray).")
    ] = None,
) -> None:
    """Train by a recipe or an Axolotl file, or resume a run by its folder.

    Under torchrun or srun each process is one rank of the run.
    """
    from tandem.cli.train import train

    typer.echo(train(target, overrides or [], show=show, launcher=launcher))


@app.command()
def sft(target: Target, overrides: Overrides = None, show: Show = False) -> None:
    """Train on given replies alone: rows of messages (warm_start.data=FILE), or the environment's gold replies.

    For as many steps as the recipe has, or warm_start.epochs=N.
    """
    from tandem.cli.train import supervised, train

    typer.echo(train(target, overrides or [] if target.is_dir() else supervised(target, overrides or []), show=show))


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks whose gold answer is graded, and prompt measured.")] = 64,
    sample: Annotated[int, typer.Option(metavar="N", min=0, help="Also load the model and play N groups.")] = 0,
    attack: Annotated[bool, typer.Option("--attack", help="Also grade wrong answers that may pay.")] = False,
) -> None:
    """Find what would go wrong, before loading weights.

    Resolves every option, reads the data, scores gold answers, measures prompts, and plans memory.
    """
    from tandem.config.loading import load

    config = load(recipe, overrides or []).config
    from tandem.cli.check import check, check_attack, check_sample  # only now: a mistake is told before all this loads

    code = check(config, tasks)
    if attack and not code:
        code = check_attack(config)
    if code and sample:
        typer.echo("no groups are played before that is mended")
    elif sample:
        check_sample(config, sample)
    raise typer.Exit(code)


@app.command()
def certify(recipe: Recipe, overrides: Overrides = None) -> None:
    """Prove that a recipe's gradient is the one it says, and that its optimizer does with it what it should.

    On made-up answers and a tiny model of its architecture, on the CPU: it must not depend on how a batch is cut, and
    must be that of the plain formulas.
    """
    from tandem.tools.certify.case import print_certificate

    raise typer.Exit(print_certificate(recipe, overrides or []))


@app.command("list")
def list_parts(
    category: Annotated[str | None, typer.Argument(metavar="[CATEGORY]", help="Such as losses; default: all.")] = None,
) -> None:
    """Show the parts recipes can name, and options."""
    from tandem.cli.list_parts import list_parts

    list_parts(category)


@app.command()
def new(
    what: Annotated[str, typer.Argument(metavar="env|recipe", help="What to make.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name; of an env a Python module name.")],
    source: Annotated[str, typer.Argument(metavar="[RECIPE]", help="The shipped recipe to copy.")] = "arithmetic",
) -> None:
    """Write a working environment, or a recipe, to start from.

    Makes NAME.py and NAME.yaml in this folder, or of a recipe NAME.yaml.
    """
    from tandem.cli.new import new

    typer.echo(new(what, name, Path(), source))


@app.command()
def recipes() -> None:
    """List the recipes that Tandem ships, which train and check take by name."""
    from tandem.cli.new import print_recipes

    print_recipes()


@app.command()
def runs(folder: Folder = Path("runs")) -> None:
    """List the runs in a folder, the newest last."""
    from tandem.cli.show import print_runs

    print_runs(folder)


@app.command()
def watch(
    folder: Folder = Path("runs"),
    host: Annotated[str, typer.Option(help="Address; where others reach it, a key is printed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one.")] = 8760,
) -> None:
    """Show all runs of a folder, and comparisons of them, on a live page until Ctrl-C."""
    from tandem.cli.watch import watch

    watch(folder, host, port, typer.echo)


@app.command()
def compare(run: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs.")]) -> None:
    """Show runs side by side.

    Options that differ, held-out results with the interval of their difference task by task, curves on one scale.
    """
    from tandem.api.comparison import compare

    typer.echo(str(compare(*run)))


@app.command()
def chat(run: Run, step: Step = None) -> None:
    """Talk to a trained model, with the model as it was before training beside it, until an empty line."""
    from tandem.api.chat import BeforeAndAfter

    BeforeAndAfter(run, step).converse(typer.echo)


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|RECIPE|MODEL", help="A run, a recipe or a model's folder.")],
    overrides: Overrides = None,
    step: Step = None,
    on: Annotated[
        str, typer.Option(metavar="TASK,...", help="Benchmarks of lm-eval, such as gsm8k,math500,ifeval.")
    ] = "",
) -> None:
    """Measure mean@k and pass@k on held-out tasks, or on public benchmarks before and after training.

    Of a run's checkpoint, of a recipe's model, or of a model folder (which needs env=... or --on).
    """
    from tandem.cli.evaluate import evaluate, print_benchmarks

    if on:
        print_benchmarks(target, on.split(","), overrides or [], step)
    else:
        evaluate(target, overrides or [], step)


@app.command()
def why(
    run: Run,
    stacks: Annotated[bool, typer.Option("--stacks", help="Also show where its threads and tasks stand.")] = False,
) -> None:
    """Show what a run is waiting for, since when, and which part has to deliver it."""
    from tandem.cli.why import why

    raise typer.Exit(why(run, stacks=stacks))


@app.command()
def show(
    run: Run,
    report: Annotated[bool, typer.Option("--report", help="Write report.html anew and print where it is.")] = False,
) -> None:
    """Summarise a run."""
    from tandem.cli.show import show

    show(run, report)


@app.command()
def mismatch(
    run: Run,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Step to look at; default: the last recorded.")
    ] = None,
) -> None:
    """Show how far the trainer's logprobs are from the engine's.

    By policy version and place in the turn, from a step's recorded tokens.
    """
    from tandem.cli.mismatch import mismatch

    mismatch(run, step=step)


@app.command()
def export(
    run: Run,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A folder to make.")],
    step: Step = None,
    merge: Merge = False,
) -> None:
    """Copy the trained model out of a run.

    The result is an ordinary Hugging Face folder, or a PEFT adapter's, with a model card.
    """
    from tandem.api.publishing import export

    typer.echo(export(run, destination, step, merge))


@app.command()
def push(
    run: Run,
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="A repository of the Hugging Face hub.")],
    step: Step = None,
    merge: Merge = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload the trained model with its model card, as you are logged in (hf auth login)."""
    from tandem.api.publishing import push

    typer.echo(push(run, repository, step, merge=merge, private=private or None))


@app.command()
def doctor() -> None:
    """Say what this machine has and lacks."""
    from tandem.tools.doctor import doctor

    raise typer.Exit(doctor())


class ServeGroup(TyperGroup):
    """Parts by name; anything else is the folder of a run, whose model is served."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is meant, and its arguments."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


serve = typer.Typer(
    cls=ServeGroup, help="Serve a run's model (tandem serve RUN), or run a part alone.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
app.add_typer(serve, name="serve")


@serve.command("engine")
def serve_engine(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe with engine: vllm.")],
    overrides: Overrides = None,
) -> None:
    """Run a recipe's vLLM engine alone, until Ctrl-C.

    It is started for what the recipe trains and how its weights travel; a trainer names it in engine.urls.
    """
    from tandem.cli.serve import serve

    serve(recipe, overrides or [], typer.echo)


@serve.command("run")
def serve_run(
    run: Run,
    overrides: Overrides = None,
    step: Step = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one.")] = 8000,
) -> None:
    """Serve a trained model by OpenAI's API on the run's engine, until Ctrl-C."""
    from tandem.cli.serve import serve_model

    serve_model(run, overrides or [], step, host, port, typer.echo)


OWN_VERBS = frozenset(
    command.name or get_command_name(command.callback.__name__)
    for command in app.registered_commands
    if command.callback
)
"""Verbs of this file, which need nothing else loaded."""
VERBS = "tandem.verbs"
"""Entry points of verbs that another package brings: functions that add them to the app, each named for its verb."""


@cache
def with_verb(verb: str) -> typer.Typer:
    """The app with what a verb needs; with all verbs if there is none of that name, as for help."""
    if verb not in OWN_VERBS:
        for point in entry_points(group=VERBS, name=verb) or entry_points(group=VERBS):
            point.load()(app)
    return app


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line: the one place where errors become messages and exit codes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Threads of a product that wait for one another sleep soon instead of spinning: on a machine with anything else
    # to do, spinning costs several times the work itself. Read when torch loads its OpenMP, which is later.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    debug = "--debug" in words or os.environ.get("TANDEM_DEBUG", "") not in ("", "0")
    with_verb(next((word for word in words if not word.startswith("-")), ""))
    try:
        app([argument for argument in words if argument != "--debug"], prog_name="tandem")
    except SystemExit as error:
        if is_theirs(error):  # else it is how a verb ends
            _end(f"your code ended the process: {message_of(error)}{place_of(error)}")
        raise
    except TandemError as error:
        _end(str(error), error.exit_code, trace=debug)
    except Exception as error:
        if is_theirs(error) and not debug:
            _end(f"{message_of(error)}{place_of(error)}; it is your code, and --debug shows how")
        bug = "this is a bug, in Tandem or in a part of your own; the traceback above says where"
        _end(f"{redacted(f'{type(error).__name__}: {error}')}\ntandem: {bug}", trace=True)
    sys.exit(0)


def _end(text: str, code: int = 1, *, trace: bool = False) -> NoReturn:
    """End the process with a message, after the traceback of the error that is handled where that is wanted."""
    if trace:
        typer.echo(redacted(traceback.format_exc()), err=True, nl=False)
    typer.echo(f"tandem: {text}", err=True)
    sys.exit(code)
