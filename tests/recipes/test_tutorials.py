"""Tutorials and notebooks run from top to bottom, as they are but for a tiny model and few, short answers."""

from __future__ import annotations

import asyncio
import io
import json
import linecache
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.api.recipe import override_texts
from tandem.cli import app as cli

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

ROOT = Path(__file__).parents[2]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = [
    *("groups_per_step=2", "group_size=2", "sampling.max_tokens=4", "evaluate.tasks=2"),
    *("dtype=float32", "threads=1", "zero_variance_groups=keep", "print_completions=0"),
]
SERVERS = ("watch",)
"""Verbs that end by Ctrl-C alone; ``unit/test_watch`` opens the page."""
RUNS = {"first-run": 2, "own-data": 2, "multi-turn": 1, "agent": 1}
"""Pages, and how many runs each makes."""


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    yield from BLOCK.findall((ROOT / f"docs/guide/{page}.md").read_text())


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, from which modules are imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load, quick = tandem.Recipe.load, [*SMALL, f"model={tiny_model}", "steps=2"]
    fixed = {text.partition("=")[0] for text in quick}

    def small(source: Any, overrides: Any = ()) -> tandem.Recipe:
        others = [text for text in override_texts(overrides) if text.partition("=")[0] not in fixed]
        return load(source, [*others, *quick])

    monkeypatch.setattr(tandem.Recipe, "load", small)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def type_in(line: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of Tandem's; a recipe is made small."""
    _, verb, *words = shlex.split(line, comments=True)
    if verb in SERVERS:
        return
    if verb in ("train", "check") and not words[0].startswith("runs/"):
        words += [f"model={model}", *SMALL, *(["steps=2"] if verb == "train" else [])]
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3 + 4?\n\n"))
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, *words])
    assert stopped.value.code in (None, 0), line


@pytest.mark.parametrize("page", RUNS)
def test_a_tutorial_runs(page: str, place: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, title, body in blocks("own-data"):  # its rows are used by others too
        if title:
            (place / title).write_text(body)
    for language, title, body in blocks(page):
        if title:
            (place / title).write_text(body)
        elif language == "bash":
            for line in body.splitlines():
                type_in(line, tiny_model, monkeypatch)
        elif language == "python":
            exec(compile(body.replace("steps=30", "steps=2"), f"{page}.md", "exec"), {"__name__": "__main__"})
    steps = [path.read_text().count("\n") for path in (place / "runs").glob("*/metrics.jsonl")]
    assert steps == [2] * RUNS[page]


@pytest.mark.parametrize("name", ["first_run", "own_data", "compare"])
def test_a_notebook_runs(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((ROOT / f"examples/{name}.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}

    async def notebook() -> None:  # a cell runs beside the kernel's loop
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                text, file = "".join(cell["source"]), f"<{name}, cell {number}>"
                text = text.replace('"steps": 30', '"steps": 3')
                linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
                exec(compile(text, file, "exec"), names)

    asyncio.run(notebook())
    assert len(list((place / "runs").glob("*/report.html"))) == (2 if name == "compare" else 1)
