"""README and docs name only what exists: verbs, options, recipes and their keys, files."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from support.sources import parsed

import tandem
from tandem.cli.app import with_verb
from tandem.config import loading as config
from tandem.errors import DOCS, ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?(?:python3? -m )?tandem (?P<rest>.+)$")
OF_THE_PROJECT = re.compile(r"^(?:\.ci|benchmarks|docs|examples|recipes|scripts|src|tests)/[\w./-]+$")
OWN_PART = re.compile(r"[\w.]+:[A-Za-z]")
GLOSSARY = ROOT / "docs/reference/glossary.md"
TOKEN = ("life-of-a-token", "life-of-a-token-vllm")
METRIC = re.compile(r"(Mean|Sum|Max|Share|Histogram|Pending)(\.of)?\(")
AREAS = tuple(f"{area}/" for area in ("groups", "rollouts", "tokens", "samples", "seconds", "grading", "engine"))
GENERATED = {"reference/options", "reference/commands"}
"""Pages that the site alone has."""
FENCE = re.compile(r"^```(?P<language>[\w-]*)(?: title=\"[^\"]+\")?\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(text: str) -> Iterator[tuple[str, str]]:
    """Language and body of every fenced block."""
    return ((m["language"], m["body"]) for m in FENCE.finditer(text))


def code(text: str) -> list[str]:
    """Every line of code: of fenced blocks, with continued lines joined, and inline."""
    lines = [line.strip() for _, body in fences(text) for line in body.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def commands(text: str) -> list[list[str]]:
    """The words after ``tandem`` of every command shown, comments left out."""
    rests = [m["rest"] for line in code(text) if (m := COMMAND.match(line))]
    return [shlex.split(rest, comments=True) for rest in rests]


def placeholder(word: str) -> bool:
    """Upper-case or bracketed words and ellipses stand for something else."""
    return word.isupper() or word[0] in "<[{" or "..." in word or "…" in word


@cache
def verbs() -> dict[str, Any]:
    """Every verb by its name."""
    return dict(typer.main.get_command(with_verb("")).commands)  # type: ignore[attr-defined]


def problem(words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    verb, *rest = words
    if verb.startswith("-") or placeholder(verb):
        return None
    if verb not in verbs():
        return f"there is no verb {verb!r}"
    command = verbs()[verb]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help", "--debug"}
    if unknown := [w for w in rest if w.startswith("-") and w.partition("=")[0] not in known]:
        return f"{verb} has no option {unknown[0]}"
    recipes = [w for w in rest if w.startswith("recipes/")]
    overrides = [w for w in rest if re.match(r"^[a-z_]+[\w.]*=", w) and not placeholder(w.partition("=")[2] or "X")]
    if recipes and verb in ("train", "check", "eval"):
        try:
            config.load(ROOT / recipes[0], overrides)
        except ConfigError as error:
            return str(error)
    return None


def recipe_problem(body: str) -> str | None:
    """What is wrong with a recipe, or with a piece of one once the rest is added."""
    options = yaml.safe_load(body)
    if not isinstance(options, dict) or OWN_PART.search(body):
        return None
    try:
        rest = {"model": "m", "steps": 1, **({} if "envs" in options else {"env": "arithmetic"})}
        config.from_options({**rest, **options}, (), Path("docs.yaml"))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_exist(page: Path) -> None:
    problems = [f"tandem {' '.join(words)}: {what}" for words in commands(page.read_text()) if (what := problem(words))]
    assert not problems


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_recipes_load(page: Path) -> None:
    problems = [
        what for language, body in fences(page.read_text()) if language == "yaml" and (what := recipe_problem(body))
    ]
    assert not problems


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    named = {word.rstrip(".,:;)") for line in code(text) for word in line.split()}
    missing = [w for w in named if OF_THE_PROJECT.match(w) and not (ROOT / w).exists()]
    modules = [w for w in re.findall(r"`(\w+(?:/\w+)+\.py)`", text) if not (ROOT / w).exists()]
    missing += [w for w in modules if not any((ROOT / folder / w).exists() for folder in ("src", "src/tandem"))]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))]
    missing += [link for link in links if link and "://" not in link and not (page.parent / link).exists()]
    assert not missing, f"{shown(page)} names what does not exist: {sorted(missing)}"


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s:]*\.md|)#([^)\s]+)\)", FENCE.sub("", page.read_text()))
    targets = [((page.parent / path if path else page).resolve(), anchor) for path, anchor in links]
    assert not [f"{shown(path)}#{anchor}" for path, anchor in targets if anchor not in anchors(path)]


def test_addresses_of_the_site_lead_to_pages() -> None:
    """Messages, recipes, notebooks, llms.txt and the skill name them; mkdocs and pyproject have the same address."""
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_url"] == f"{DOCS}/"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"] == DOCS
    suffixes = (".py", ".yaml", ".md", ".txt", ".ipynb")
    rooms = [ROOT / name for name in ("llms.txt", "skills", "src", "recipes", "examples")]
    files = [path for room in rooms for path in (room, *room.rglob("*")) if path.suffix in suffixes]
    address = re.compile(rf"(?:\{{DOCS\}}|{re.escape(DOCS)})/(\w[\w/-]*)/")
    named = {page for path in files for page in address.findall(path.read_text())}
    assert {"guide/trl", "guide/multi-turn", "guide/distributed"} <= named
    pages = {*GENERATED, "guide", "guide/NAME"}  # of the last two a message fills in the name
    assert [page for page in sorted(named - pages) if not (ROOT / f"docs/{page}.md").exists()] == []


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if ROOT / "docs" in page.parents}
    assert listed == pages | {f"{page}.md" for page in GENERATED}


def test_pages_that_sources_name_exist() -> None:
    sources = [path for room in ("src", "scripts", "benchmarks", "tests") for path in (ROOT / room).rglob("*.py")]
    named = {(name, path) for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 5
    assert [f"{shown(path)}: {name}" for name, path in sorted(named) if not (ROOT / name).exists()] == []


def metric_names(tree: ast.AST) -> Iterator[str]:
    """Keys that hold a metric's value, or that name one of an area, and names of spans; ``*`` for what varies."""
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs += zip(node.keys, node.values, strict=True)
        elif isinstance(node, ast.DictComp):
            pairs.append((node.key, node.value))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs.append((node.targets[0].slice, node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "trace.span" and not _is_command(node):
            yield ast.literal_eval(node.args[0])
    for key, value in pairs:
        if key is None:  # of another dict unpacked
            continue
        parts = key.values if isinstance(key, ast.JoinedStr) else [key]
        name = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
        if name.strip("*") and (name.startswith(AREAS) or METRIC.match(ast.unparse(value))):
            yield name


def _is_command(span: ast.Call) -> bool:
    """True of the span around a command of a follower, which emits no metrics."""
    return "{COMMANDS}" in ast.unparse(span)


@pytest.mark.slow
def test_every_metric_is_in_the_glossary() -> None:
    """A row names it, or has a placeholder where it varies."""
    rows = [line.split("|")[1] for line in GLOSSARY.read_text().splitlines() if line.startswith("| `")]
    known = [re.sub(r"<\w+>", "*", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    trees = [parsed(path) for path in (ROOT / "src").rglob("*.py")]
    names = {name for tree in trees for name in metric_names(tree)}
    assert {"loss", "groups/dropped_*", "rollouts/*", "seconds/wait", "ess", "kl_reference"} <= names
    names -= {name for name in names if f"env/*/{name}" in known}
    missing = [name for name in names if not any(fnmatch(k, name) or fnmatch(name, k) for k in known)]
    assert not missing, f"{shown(GLOSSARY)} lacks the metrics {sorted(missing)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKEN)
def test_the_life_of_a_token_names_code_that_exists(name: str) -> None:
    page = (ROOT / f"docs/design/{name}.md").read_text()
    for place, names in re.findall(r"`([\w/]+(?:\.py|/))`:\s((?:`[\w.]+`(?:,\s+)?)+)", page):
        path = ROOT / "src/tandem" / place
        trees = [parsed(file) for file in ([path] if path.is_file() else sorted(path.glob("*.py")))]
        for one in re.findall(r"`([\w.]+)`", names):
            nodes: list[Any] = trees
            for part in one.split("."):
                nodes = [inner for node in nodes for inner in node.body if getattr(inner, "name", None) == part]
            assert nodes, f"{place} has no {one}"


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs/README.md"
    named = {
        (index.parent / link).resolve()
        for link in re.findall(r"^- \[[^]]+\]\(([^)]+)\): ", index.read_text(), re.MULTILINE)
    }
    assert named == {page for page in PAGES if page.parent.parent == index.parent}


def test_the_page_on_python_names_every_public_name_and_no_other() -> None:
    page = (ROOT / "docs/guide/python.md").read_text()
    named = set(re.findall(r"\btandem\.([A-Za-z]\w*)", "\n".join(code(page))))
    assert named == {name for name in tandem.__all__ if not name.startswith("__")}
    assert "(docs/guide/python.md)" in (ROOT / "README.md").read_text()


def test_the_rules_are_alive() -> None:
    """The checks above see what they look for."""
    page = (
        "Run `tandem lsit` or:\n```bash\n$ X=1 tandem show runs/a --repotr  # a comment\n"
        "tandem train recipes/arithmetic.yaml \\\n    loss.clip_hgih=0.3\ntandem train RECIPE\n"
        "tandem check recipes/arithmetic.yaml steps=3\n```\n"
    )
    problems = [problem(words) for words in commands(page)]
    assert "--repotr" in (problems[0] or "")
    assert "clip_high" in (problems[1] or "")
    assert problems[2:4] == [None, None]
    assert "lsit" in (problems[4] or "")
    assert "did you mean" in (recipe_problem("group_sise: 3\n") or "")
    assert recipe_problem("group_size: 3\nloss: {kind: grpo}\n") is None
