"""What was expected and what is there, in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from tandem.config.tree import Branch, Items, Tree


def describe(hint: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    if hint in words:
        return words[hint]
    if hint is type(None):
        return "null"
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in args)}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin in (list, Sequence) or (origin is tuple and args[-1] is Ellipsis):
        return f"a list (of {describe(args[0])})"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(describe(arg) for arg in args)}"
    if origin in (dict, Mapping):
        return f"a mapping (of names to {describe(args[1])})"
    return "anything" if hint in (Any, object) else f"a mapping ({getattr(hint, '__name__', hint)})"


def got(tree: Tree) -> str:
    """A tree in words."""
    if isinstance(tree, Branch):
        return "a mapping"
    if isinstance(tree, Items):
        return "a list"
    if tree.value is None:
        return "nothing"
    if isinstance(tree.value, str):
        return f"the text {tree.value!r}"
    return f"{tree.text}" if isinstance(tree.value, bool) else f"the number {tree.text}"
