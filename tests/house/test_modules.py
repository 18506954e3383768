"""Modules know one another in one direction, by public names; a class name means one thing in the whole tree."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support import sources

pytestmark = pytest.mark.slow

SRC = Path(__file__).parents[2] / "src"
FACE = "tandem"
"""It names what all others define, lazily: no module's import of it is a step of a cycle."""


def named(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


FILES = {named(path): path for path in sorted(SRC.rglob("*.py"))}


def parsed(module: str) -> ast.Module:
    return sources.parsed(FILES[module])


def imported(tree: ast.AST, modules: Iterable[str]) -> set[str]:
    """Modules of the tree that a module imports, in functions and under TYPE_CHECKING too."""
    known, names = frozenset(modules), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            within = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {full if full in known else node.module for full in within.values()}
    return (names & known) - {FACE}


def private(module: str, is_package: bool, imports: Iterable[str]) -> list[str]:
    """Imports of a ``_private`` module by a module of another package."""
    package = module if is_package else module.rpartition(".")[0]
    hidden = [other for other in imports if other.rpartition(".")[2].startswith("_")]
    return [f"{module} -> {other}" for other in hidden if not f"{package}.".startswith(f"{other.rpartition('.')[0]}.")]


@cache
def imports() -> dict[str, set[str]]:
    return {module: imported(parsed(module), FILES) for module in FILES}


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name for module in FILES for node in ast.walk(parsed(module)) if isinstance(node, ast.ClassDef)
    )
    again = {name for name, count in names.items() if count > 1}
    assert not again, f"classes of one name; give each the field's own word: {sorted(again)}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(imports()).prepare()  # raises CycleError, which names the cycle


def test_no_module_imports_a_private_one_of_another_package() -> None:
    private_imports = [
        each
        for module, others in imports().items()
        for each in private(module, FILES[module].name == "__init__.py", sorted(others))
    ]
    assert not private_imports, f"rename the module or ask its package's public modules: {private_imports}"


def test_the_rules_are_alive() -> None:
    """The checks above see what they look for."""
    source = (
        "import tandem\nfrom tandem import a\nif TYPE_CHECKING:\n    from tandem.b import B\n"
        "def f():\n    import tandem.c\n"
    )
    assert imported(ast.parse(source), ["tandem", "tandem.a", "tandem.b", "tandem.c", "tandem.d"]) == {
        "tandem.a", "tandem.b", "tandem.c",
    }  # fmt: skip
    assert private("tandem.x.y", False, ["tandem.x._z", "tandem.w._z", "tandem.w.z"]) == ["tandem.x.y -> tandem.w._z"]
    assert private("tandem.x.y.z", False, ["tandem.x._z"]) == []
    assert len(FILES) > 200
