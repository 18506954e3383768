"""Functions and classes of a script or a notebook's cell, as modules that other processes import.

Each becomes a module with its source and whatever else of the script it uses, named for what that holds. It lies in a
folder of this process; a run keeps a copy in its own, from which it goes on (``trainer/run_folder.py``).
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import hashlib
import inspect
import linecache
import re
import shutil
import symtable
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import ConfigError

_DIGITS = 12
_NAME = re.compile(rf"\w+_([0-9a-f]{{{_DIGITS}}})")


def import_path(part: Any) -> str:
    """``module:name`` by which any process of this run imports a function or a class of a script.

    Raises:
        ConfigError: its source is not to be had, or it uses a value that cannot be written down.
    """
    name = part.__name__
    pieces: dict[str, str] = {}
    _write(part, name, pieces)
    text = "\n\n".join(["from __future__ import annotations", *pieces.values()]) + "\n"
    module = f"{name}_{_digest(text)}"
    _keep(module, text)
    return f"{module}:{name}"


def restore(kept: Path) -> None:
    """Make modules importable that a run kept; a file that is not what its name says is not one of them."""
    for file in kept.glob("*.py"):
        match = _NAME.fullmatch(file.stem)
        if match and _digest(text := file.read_text(encoding="utf-8", errors="replace")) == match[1]:
            _keep(file.stem, text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@cache
def _folder() -> Path:
    """Where this process's modules lie; its grading processes search what it searches."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-cells-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _keep(module: str, text: str) -> None:
    if str(_folder()) not in sys.path:
        sys.path.append(str(_folder()))
    (_folder() / f"{module}.py").write_text(text, encoding="utf-8")


def _write(part: Any, name: str, pieces: dict[str, str]) -> None:
    """Add the source of a function or class to ``pieces``, after that of all it uses."""
    source = _source(part)
    pieces[name] = ""  # known, should it use itself
    inside = _closure(part)
    for used in _globals(symtable.symtable(source, name, "exec")):
        if used not in pieces and used in inside:
            pieces[used] = ""
            pieces[used] = _definition(used, inside[used], name, pieces)
    del pieces[name]  # what it uses comes first
    pieces[name] = source if part.__name__ == name else f"{source}\n{name} = {part.__name__}"


def _definition(used: str, value: Any, user: str, pieces: dict[str, str]) -> str:
    """Source that gives a name its value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {used}"
    if isinstance(value, re.Pattern):
        return f"import re\n{used} = re.compile({value.pattern!r}, {int(value.flags)})"
    home, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if home not in (None, "__main__") and path and getattr(sys.modules.get(home), path, None) is value:
        return f"from {home} import {path} as {used}"
    if callable(value) and (inspect.isfunction(inspect.unwrap(value)) or inspect.isclass(value)):
        _write(value, used, pieces)
        return pieces[used]
    with contextlib.suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return f"{used} = {value!r}"
    what = f"{user} uses {used}, a {type(value).__name__} of this script that other processes cannot be given"
    file = "a file (in a notebook, %%writefile my_parts.py as the cell's first line)"
    raise ConfigError(f"{what}; make it inside {user}, or write both to {file} and from my_parts import {user}")


def _source(part: Any) -> str:
    """The source of a function or class, flush left."""
    name = part.__name__
    try:
        text = textwrap.dedent(_class_source(part) if inspect.isclass(part) else inspect.getsource(part))
        (node,) = ast.parse(text).body
        if getattr(node, "name", None) != name:
            raise ValueError("it is an expression, such as a lambda")
    except (OSError, TypeError, ValueError, SyntaxError) as error:
        why = f"other processes cannot be given {name}, for its source cannot be read ({error})"
        raise ConfigError(f"{why}; define it by def or class in a script, a cell or a file of its own") from error
    return text


def _class_source(part: type) -> str:
    """Of a class of a notebook's cell too, which has no file: found by one of its functions."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        files = [each.__code__.co_filename for each in vars(part).values() if inspect.isfunction(each)]
        for text in ("".join(linecache.getlines(file)) for file in files):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == part.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        raise


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Names that a source takes from outside of itself, in it and in every scope within."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (not symbol.is_assigned() if top else symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _globals(inner)


def _closure(part: Any) -> Mapping[str, Any]:
    """What names outside of a function or a class's methods stand for, builtins left out."""
    functions = [inspect.unwrap(part)] if not inspect.isclass(part) else vars(part).values()
    known = dict(vars(sys.modules[part.__module__])) if part.__module__ in sys.modules else {}
    for function in functions:
        if inspect.isfunction(function):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            known |= function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    return {name: value for name, value in known.items() if getattr(builtins, name, None) is not value}
