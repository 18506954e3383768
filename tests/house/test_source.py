"""Rules of the house that no linter checks: everything public is documented, files and functions stay small."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.sources import parsed

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.py"))

MAX_FUNCTION = 60
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def public(name: str) -> bool:
    return not name.startswith("_")


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef) and public(node.name))


def methods(cls: ast.ClassDef) -> Iterator[Function]:
    return (node for node in cls.body if isinstance(node, Function) and public(node.name))


@cache
def promised(package: str) -> frozenset[str]:
    """Methods that a package's ``base.py`` documents: whoever keeps the protocol need not say it again."""
    path = SRC.joinpath(*package.split("."), "base.py")
    if not path.exists():
        return frozenset()
    return frozenset(m.name for cls in classes(parsed(path)) for m in methods(cls) if ast.get_docstring(m))


def undocumented_methods(path: Path, cls: ast.ClassDef) -> Iterator[str]:
    """Public methods without a docstring of their own, of a base class's or of the protocol's."""
    module = module_name(path)
    for method in methods(cls):
        setter = any(ast.unparse(d).endswith(".setter") for d in method.decorator_list)
        if ast.get_docstring(method) or setter or method.name in promised(module.rpartition(".")[0]):
            continue
        live = getattr(importlib.import_module(module), cls.name)
        if not inspect.getdoc(getattr(live, method.name)):  # an overriding method inherits its docstring
            yield f"{cls.name}.{method.name}"


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=shown)
def test_everything_public_is_documented(path: Path) -> None:
    if path.name == "__init__.py" and not path.read_text().strip():
        return
    tree = parsed(path)
    missing = [] if ast.get_docstring(tree) else ["the module"]
    missing += [
        node.name
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and public(node.name) and not ast.get_docstring(node)
    ]
    for cls in classes(tree):
        missing += undocumented_methods(path, cls)
    assert not missing, f"{shown(path)}: no docstring: {', '.join(missing)}"


@pytest.mark.slow
def test_functions_fit_a_screen() -> None:
    long = [
        f"{shown(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION
    ]
    assert not long, f"longer than {MAX_FUNCTION} lines: {long}"


def test_names_say_what_is_inside() -> None:
    everything = [p for top in ("src", "tests", "scripts", "benchmarks") for p in (ROOT / top).rglob("*")]
    bad = [shown(p) for p in everything if p.stem.strip("_").lower() in BANNED_NAMES]
    assert not bad, f"a name that says nothing: {bad}"
