"""The file name is the registry."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from tandem.config import registry as resolve
from tandem.errors import ConfigError


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def test_names_are_the_files_of_a_category_that_are_parts() -> None:
    names = resolve.names("loggers")
    assert names == sorted(names)
    assert {"console", "tensorboard"} <= set(names)
    assert "base" not in names
    assert not any(name.startswith("_") for name in names)


def test_every_category_has_parts_and_each_resolves_to_one_dataclass_and_back() -> None:
    for category in resolve.CATEGORIES:
        kinds = resolve.names(category)
        assert kinds, category
        for kind in kinds:
            cls = resolve.find(category, kind)
            assert dataclasses.is_dataclass(cls)
            assert cls.__module__.removesuffix(".spec") == f"{resolve.CATEGORIES[category]}.{kind}"
            assert resolve.kind_of(category, cls.__new__(cls)) == kind
            reserved = {option.name for option in resolve.options(cls)} & {"kind", "weight"}
            assert not reserved, f"{category}/{kind}: recipes use {reserved} themselves"


def test_kind_of_a_part_outside_the_tree_is_its_import_path(here: Path) -> None:
    write(
        here,
        "outside_a.py",
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: int = 1\ndef fn(r): ...\n",
    )
    cls = resolve.find("losses", "outside_a:Mine")
    assert resolve.kind_of("losses", cls()) == "outside_a:Mine"
    assert resolve.kind_of("rewards", resolve.import_object("outside_a:fn")) == "outside_a:fn"


def test_an_unknown_kind_names_the_closest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"no 'consle' in loggers; did you mean 'console'\?; known: console, "):
        resolve.find("loggers", "consle")


def test_an_unknown_category_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="no category 'reward'; did you mean 'rewards'"):
        resolve.names("reward")


def test_something_that_is_not_a_dataclass_is_refused_as_a_part(here: Path) -> None:
    write(here, "outside_b.py", "def fn(): ...\nclass Plain: ...\nVALUE = 3\n")
    for name, noun in {"fn": "a function", "Plain": "a type", "VALUE": "a int"}.items():
        with pytest.raises(ConfigError, match=f"outside_b:{name} is {noun}, not a dataclass"):
            resolve.find("losses", f"outside_b:{name}")


def test_import_object_takes_a_colon_or_a_dot_and_looks_in_the_working_directory(here: Path) -> None:
    write(here, "outside_c.py", "def fn(): return 7\nclass Box:\n    inner = 5\n")
    assert resolve.import_object("outside_c:fn")() == 7
    assert resolve.import_object("outside_c.fn")() == 7
    assert resolve.import_object("outside_c:Box.inner") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "'nothing' is not an import path; write pkg.module:name"),
        ("no_such_mod:fn", "cannot import no_such_mod:fn: there is no module 'no_such_mod' in "),
        ("json:dumpss", "has no 'dumpss'; did you mean 'dumps'?"),
        ("broken_a:fn", "importing broken_a failed with ZeroDivisionError: division by zero (broken_a.py:2 in "),
        ("broken_b:fn", "failed"),
        ("needs:fn", "ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_an_import_that_fails_says_why(here: Path, path: str, message: str) -> None:
    write(here, "broken_a.py", "x = 1\n1 / 0\n")
    write(here, "broken_b.py", "def f(:\n")
    write(here, "needs.py", "import not_installed\n")
    with pytest.raises(ConfigError) as caught:
        resolve.import_object(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys\nsys.exit()", r"with ImportError: it raised SystemExit \(ending.py:2"),
        ("raise BaseException('no')", r"with ImportError: it raised BaseException: no \(ending.py:1"),
    ],
    ids=["sys.exit", "BaseException"],
)
def test_an_import_that_ends_the_process_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.delitem(sys.modules, "ending", raising=False)
    write(here, "ending.py", code)
    with pytest.raises(ConfigError, match=f"importing ending failed {message}"):
        resolve.import_object("ending:fn")


def test_an_import_that_raises_names_file_and_line(here: Path) -> None:
    write(here, "broken_c.py", "x = 1\n1 / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(broken_c\.py:2"):
        resolve.import_object("broken_c:fn")


@dataclass(kw_only=True)
class _Base:
    one: int = 1
    """First."""
    two: int = 2
    """Second,
    on two lines."""


@dataclass(kw_only=True)
class _Derived(_Base):
    """What it is.

    More about it.
    """

    two: int = 3
    """Second, again."""
    three: int = 4
    _hidden: int = 5
    """Not an option."""
    made: int = dataclasses.field(init=False, default=6)
    """Not an option either."""
    shared: ClassVar[int] = 7
    """No field at all."""


def test_field_docs_are_the_strings_beneath_inherited_ones_included() -> None:
    docs = resolve.field_docs(_Derived)
    assert docs["one"] == "First."
    assert docs["two"] == "Second, again."
    assert "three" not in docs
    assert "shared" not in docs
    assert resolve.field_docs(_Base)["two"] == "Second, on two lines."
