"""Functions of a script or a cell become modules that other processes import, and a run goes on with them."""

from __future__ import annotations

import functools
import importlib
import json
import linecache
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.config import cells
from tandem.errors import ConfigError

DIGITS = re.compile(r"\d+")
LIMIT = {"most": 3}
OPEN = sys.stdout


def first_number(text: str) -> str:
    match = DIGITS.search(text)
    return match.group() if match else ""


def cell(text: str, name: str = "f") -> Any:
    """A function or class of a notebook's cell, whose source Python has in memory alone."""
    file = f"<cell-{abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "__main__", "DIGITS": DIGITS, "LIMIT": LIMIT, "first_number": first_number,
                             "json": json, "OPEN": OPEN, "functools": functools}  # fmt: skip
    exec(compile(text, file, "exec"), names)
    return names[name]


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    importlib.invalidate_caches()
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("text", "call", "result"),
    [
        ("def f(x):\n    return json.dumps(x)", lambda f: f([1]), "[1]"),
        ("def f(x):\n    return [y for y in DIGITS.findall(x)]", lambda f: f("1 a 22"), ["1", "22"]),
        ("def f(x):\n    LIMIT = 2\n    return LIMIT", lambda f: f(0), 2),
        ("def f(x, most=LIMIT['most']):\n    return x < most", lambda f: f(2), True),
        ("def f(x):\n    OPEN = 1\n    return OPEN", lambda f: f(0), 1),
        ("def g(n):\n    return n and f(n - 1)\n\ndef f(n):\n    return n and g(n - 1)", lambda f: f(3), 0),
        ("@functools.cache\ndef g(n):\n    return n\n\nh = g\n\ndef f(n):\n    return h(n) + 1", lambda f: f(3), 4),
        ("def make(k):\n    def f(n):\n        return n * k\n    return f\nf = make(3)", lambda f: f(2), 6),
        ("class f:\n    size: int = 2\n    def area(self):\n        return self.size ** 2", lambda f: f().area(), 4),
    ],
    ids=["module", "pattern", "own name", "default", "hides a global", "each other", "decorated", "closure", "class"],
)
def test_a_function_takes_along_what_it_uses(text: str, call: Callable[[Any], Any], result: Any) -> None:
    assert call(imported(cells.import_path(cell(text)))) == result


def test_a_function_takes_along_those_of_modules() -> None:
    path = cells.import_path(cell("def f(x):\n    return first_number(x)"))
    assert (
        f"from {first_number.__module__} import first_number" in Path(imported(path).__code__.co_filename).read_text()
    )
    assert imported(path)("a 7 b") == "7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f = lambda x: 1", r"source cannot be read .*define it by def or class"),
        ("def f(x):\n    return OPEN", r"f uses OPEN, a \w+ of this script .*make it inside f"),
    ],
)
def test_what_cannot_be_written_down_is_told_at_once(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cells.import_path(cell(text))


def test_a_kept_file_that_is_not_what_its_name_says_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "f_0123456789ab.py").write_text("raise SystemExit('it was run')\n")
    (tmp_path / "own_rewards.py").write_text("raise SystemExit('it was run')\n")
    cells.restore(tmp_path)
    for name in ("f_0123456789ab", "own_rewards"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


SCRIPT = """
import tandem

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
BONUS = 0.5

def right(completions, answer, **columns):
    return [BONUS * len(reply[-1]["content"]) for reply in completions]

run = tandem.train(
    model=MODEL, data=ROWS, rewards=[right], epochs=0.2, name="a", groups_per_step=2, group_size=2, dtype="float32",
    sampling={"max_tokens": 2}, zero_variance_groups="keep", evaluate={"tasks": 2}, loggers=[], threads=1,
)
"""


@pytest.mark.slow
def test_functions_of_a_script_grade_and_a_run_goes_on_without_the_script(tiny_model: Path, tmp_path: Path) -> None:
    script, elsewhere = tmp_path / "script.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    script.write_text(SCRIPT.replace("MODEL", repr(str(tiny_model))))
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, timeout=240)
    script.unlink()
    run = tandem.Run.open(tmp_path / "runs/a")
    assert len(run.metrics) == 2  # a fifth of the rows that are not held out
    (kept,) = (run.folder / "sources").glob("right_*.py")
    assert "BONUS = 0.5" in kept.read_text()
    words = [sys.executable, "-m", "tandem", "train", str(run.folder), "steps=3"]
    subprocess.run(words, cwd=elsewhere, check=True, timeout=240)
    assert run.metrics[-1]["step"] == 3
    assert all(row["reward"] == 0.5 * len(row["text"]) for row in run.rollouts())
