"""Part name -> component. The file name is the registry: ``losses/grpo.py`` is ``loss: grpo``."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tandem import clone
from tandem.config import cells
from tandem.errors import ConfigError, place_of
from tandem.importing import importing

CATEGORIES = {
    "envs": "tandem.envs",
    "curricula": "tandem.algorithms.curricula",
    "rewards": "tandem.rewards",
    "advantages": "tandem.algorithms.advantages",
    "losses": "tandem.algorithms.losses",
    "corrections": "tandem.algorithms.corrections",
    "references": "tandem.algorithms.references",
    "optimizers": "tandem.optimizers",
    "trainable": "tandem.trainable",
    "engines": "tandem.engines",
    "sync": "tandem.weight_sync",
    "loggers": "tandem.observability.loggers",
}
"""Categories of a recipe, and the packages in which one file, or one package with a ``spec`` module, is one part."""
SPEC = "spec"
"""Module that holds the part of a kind whose code is a package."""


@cache
def _modules(category: str) -> dict[str, str]:
    """The module that declares each kind's part; read from the folder without importing any of them."""
    package = CATEGORIES[category]
    folder = Path(importlib.import_module(package).__path__[0])
    files = {file.stem: f"{package}.{file.stem}" for file in folder.glob("[!_]*.py") if file.stem != "base"}
    return files | {spec.parent.name: f"{package}.{spec.parent.name}.{SPEC}" for spec in folder.glob(f"*/{SPEC}.py")}


def names(category: str) -> list[str]:
    """Kinds that a category offers, sorted."""
    if category not in CATEGORIES:
        known = f"{did_you_mean(category, CATEGORIES)}; known: {', '.join(CATEGORIES)}"
        raise ConfigError(f"there is no category {category!r}{known}")
    return sorted(_modules(category))


def find(category: str, kind: str) -> type:
    """The dataclass behind a kind: a file's name, or ``pkg.mod:Name`` for one outside the tree.

    The latter is looked up anew each time: a notebook edits its modules and reloads them.

    Raises:
        ConfigError: there is no such part, or it cannot be imported.
    """
    if ":" in kind:
        part = import_object(kind)
        if not (inspect.isclass(part) and dataclasses.is_dataclass(part)):
            noun = type(part).__name__
            raise ConfigError(f"{kind} is a {noun}, not a dataclass; a part's options are its fields")
        return part
    return _find_builtin(category, kind)


@cache
def _find_builtin(category: str, kind: str) -> type:
    """The dataclass in the file of this name; raises as ``find``."""
    known = names(category)
    if kind not in known:
        hint = f"{did_you_mean(kind, known)}; known: {', '.join(known)} (or pkg.module:Name for your own)"
        raise ConfigError(f"there is no {kind!r} in {category}{hint}")
    module = importlib.import_module(_modules(category)[kind])
    classes = [thing for name, thing in vars(module).items() if inspect.isclass(thing) and not name.startswith("_")]
    (part,) = (each for each in classes if each.__module__ == module.__name__ and dataclasses.is_dataclass(each))
    return part


def kind_of(category: str, part: object) -> str:
    """Inverse of ``find`` for an instance, and of ``import_object`` for a plain function."""
    thing: Any = part if inspect.isroutine(part) else type(part)
    package, _, kind = thing.__module__.removesuffix(f".{SPEC}").rpartition(".")
    return kind if package == CATEGORIES[category] else f"{thing.__module__}:{thing.__qualname__}"


def import_object(path: str) -> Any:
    """Import ``pkg.mod:name`` or ``pkg.mod.name``; the working directory is searched too.

    Raises:
        ConfigError: the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is not an import path; write pkg.module:name")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        with importing():
            module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything while it is imported; the message carries it
        raise ConfigError(_import_failure(path, module_name, error)) from error
    thing: Any = module
    for attribute in name.split("."):
        if not hasattr(thing, attribute):
            public = [other for other in vars(thing) if not other.startswith("_")]
            where = getattr(module, "__file__", None) or module_name
            raise ConfigError(f"{where} has no {attribute!r}{did_you_mean(attribute, public)} (asked for by {path})")
        thing = getattr(thing, attribute)
    return thing


SOURCES = "sources"
"""Folder in a run's for the source of the modules that its recipe names."""
_PLACES = "modules.json"
"""In a run's folder: where its recipe's modules were looked for."""
_searched: dict[str, None] = {}
"""Folders that this process imports modules from besides the working directory and Python's own, in order."""


def search(folder: Path) -> None:
    """Import modules from this folder too, after all others: nothing in it hides a library.

    A run's folder stands for those that its recipe's modules were looked for in. It may come from somebody else:
    nothing within it is imported but functions of the script or notebook that started the run.
    """
    recorded = folder / _PLACES
    remembered = json.loads(recorded.read_text(encoding="utf-8")) if recorded.is_file() else []
    inside = folder.resolve()
    outside = [
        path for path in remembered if Path(path).is_absolute() and not Path(path).resolve().is_relative_to(inside)
    ]
    is_run = recorded.is_file() or ((folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir())
    if is_run:
        cells.restore(folder / SOURCES)
    for path in outside if is_run else [str(inside)]:
        _searched[path] = None
        if path not in sys.path:
            sys.path.append(path)


def remember(folder: Path) -> None:
    """Write into a run's folder where modules are looked for, so that it goes on from any working directory."""
    places = list(dict.fromkeys([os.getcwd(), *_searched]))
    (folder / _PLACES).write_text(json.dumps(places) + "\n", encoding="utf-8")


def _import_failure(path: str, module_name: str, error: Exception) -> str:
    """Hint after an import path failed."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name + ".").startswith(f"{missing}."):
        nowhere = f"there is no module {missing!r} in {os.getcwd()} nor among installed packages"
        near = clone.where(module_name.replace(".", "/") + ".py")
        return f"cannot import {path}: {nowhere}; name its folder in PYTHONPATH{near}"
    return f"cannot import {path}: importing {module_name} failed with {type(error).__name__}: {error}{place_of(error)}"


def options(cls: type) -> list[dataclasses.Field[Any]]:
    """Fields of a dataclass that a recipe may set."""
    return [f for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")]


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring beneath each field, inherited ones included, on one line each."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_own_docs(base))
    return {field.name: docs[field.name] for field in dataclasses.fields(cls) if field.name in docs}


def _own_docs(cls: type) -> dict[str, str]:
    """Docstrings beneath the fields that one class body declares."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def summary(cls: type) -> str:
    """First sentence of a part's docstring; empty if it has only the one that ``dataclass`` makes."""
    doc = " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` if something known is close, else nothing."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""
