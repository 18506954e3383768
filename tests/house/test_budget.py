"""The budget: lines of code per package, of the tests and benchmarks, and words of the docs, which only go down."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())
SLACK = 60
"""Lines or words that a place may be below its budget before the budget is to be lowered."""
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that hold code; a docstring is any expression statement that is a text alone."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def counted(place: str) -> int:
    """Lines of code below a folder, or of the modules that lie in it where the place ends in ``*.py``."""
    folder = ROOT / place.removesuffix("/*.py")
    files = folder.glob("*.py") if place.endswith("*.py") else folder.rglob("*.py")
    return sum(code_lines(file.read_text()) for file in files)


def words() -> int:
    """Words of README and docs."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in pages)


@pytest.mark.parametrize(
    ("source", "lines"),
    [("x = 1\n", 1), ('"""Doc."""\n\n# a comment\nx = (\n    1,\n)\n', 3), ('def f():\n    """Doc\n    more."""\n', 1)],
)
def test_only_code_is_counted(source: str, lines: int) -> None:
    assert code_lines(source) == lines


@pytest.mark.parametrize("place", BUDGET["lines"])
def test_a_place_keeps_to_its_lines(place: str) -> None:
    assert (now := counted(place)) <= BUDGET["lines"][place], f"{place} has {now} lines of code: take some out"
    assert now >= BUDGET["lines"][place] - SLACK, f"{place} has {now} lines of code: lower its budget to that"


def test_every_package_has_a_budget() -> None:
    packages = {
        f"src/tandem/{entry.name}" for entry in (ROOT / "src/tandem").iterdir() if (entry / "__init__.py").exists()
    }
    others = {
        f"src/{entry.name}" for entry in (ROOT / "src").iterdir() if entry.name != "tandem" and entry.suffix == ""
    }
    assert packages | others | {"src/tandem/*.py", "tests", "benchmarks"} == set(BUDGET["lines"])


def test_the_docs_keep_to_their_words() -> None:
    assert BUDGET["words"]["docs"] - 10 * SLACK <= words() <= BUDGET["words"]["docs"]
