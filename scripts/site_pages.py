"""What the site has beyond the pages in docs/: links into the repository, and the reference, generated from the code.

mkdocs loads it as a hook in ``.venv-docs``, and has Tandem's own interpreter (``.venv``) write the generated pages:

    .venv/bin/python scripts/site_pages.py options|commands
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("options", "commands")
_LINK = re.compile(r"(?<!!)\]\((?P<path>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    for name in PAGES:
        command = [str(ROOT / ".venv/bin/python"), __file__, name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside docs/ at the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        if path.startswith("docs/"):
            return match[0]
        return f"]({config.repo_url.rstrip('/')}/blob/main/{path}{match['anchor'] or ''})"

    return _LINK.sub(absolute, markdown)


def options_page() -> Iterator[str]:
    """Every option of a recipe, then the parts of each category with theirs."""
    from tandem.config import registry
    from tandem.config.build import hints
    from tandem.config.loading import RunConfig

    yield "# Every option\n"
    yield "Written from the code. [Config](config.md) says how a recipe is read. Below each meaning: the default.\n"
    yield from _table(RunConfig)
    for field in registry.options(RunConfig):
        nested = hints(RunConfig)[field.name]
        if "category" not in field.metadata and dataclasses.is_dataclass(nested):
            yield f"\n## {field.name}\n"
            yield from _table(nested)
    category_of = {f.metadata["category"]: f.name for f in registry.options(RunConfig) if "category" in f.metadata}
    for category in registry.CATEGORIES:
        yield f"\n## {category_of[category]}: kinds\n"
        for kind in registry.names(category):
            part = registry.find(category, kind)
            yield f"\n### {category_of[category]}: {kind}\n\n{_cell(registry.summary(part))}\n"
            if registry.options(part):
                yield from _table(part)


def _table(cls: Any) -> Iterator[str]:
    from tandem.cli.list_parts import default_text
    from tandem.config import registry
    from tandem.config.build import describe, hints

    docs = registry.field_docs(cls)
    yield "| option | meaning |\n|---|---|"
    for field in registry.options(cls):
        category = field.metadata.get("category")
        value = f"a part: {category}" if category else describe(hints(cls)[field.name])
        meaning = _cell(docs.get(field.name, ""))
        yield f"| `{field.name}` | {meaning}<br>`{_cell(default_text(field))}` ({_cell(value)}) |"


def _cell(text: str) -> str:
    """Text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands_page() -> Iterator[str]:
    """``--help`` of every verb."""
    import click
    import typer.main

    from tandem.cli.app import with_verb

    yield "# Every command\n\nWritten from the code: what `tandem VERB --help` prints.\n"
    yield from _help("tandem", typer.main.get_command(with_verb("")), None, click.Context)


def _help(name: str, command: Any, parent: Any, context: Any) -> Iterator[str]:
    here = context(command, info_name=name.rpartition(" ")[2], parent=parent, terminal_width=100, max_content_width=100)
    yield f"\n## {name}\n\n```text\n{command.get_help(here)}\n```\n"
    for verb, inner in getattr(command, "commands", {}).items():
        yield from _help(f"{name} {verb}", inner, here, context)


if __name__ == "__main__":
    print("\n".join({"options": options_page, "commands": commands_page}[sys.argv[1]]()))
