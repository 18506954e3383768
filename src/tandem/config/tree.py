"""YAML and dotted overrides as one tree in which every value knows where it was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

from tandem.errors import ConfigError, redacted
from tandem.types import Json

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""1e-6: a number by every rule but YAML 1.1's."""


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Text with line breaks and the like in double quotes, where they are written as escapes and survive."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


SHELL = "command line: "
"""What the location of an override starts with; the option's path follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A value without parts."""

    value: bool | int | float | str | None
    """As YAML reads it."""
    text: str
    """As it was written."""
    where: str
    """``recipe.yaml:12`` or ``command line: loss.clip_high``."""
    from_shell: bool = False
    """True if typed as an override, where quotes do not survive: any text may then be text."""


@dataclass(slots=True, kw_only=True)
class Branch:
    """A mapping; keys keep the order in which they were written."""

    entries: dict[str, Tree] = field(default_factory=dict)
    """Values by key."""
    key_where: dict[str, str] = field(default_factory=dict)
    """Where each key was written."""
    where: str
    """Where the mapping begins."""

    def put(self, key: str, value: Tree, where: str) -> None:
        """Add or replace an entry."""
        self.entries[key] = value
        self.key_where[key] = where


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list."""

    items: tuple[Tree, ...]
    """Values in order."""
    where: str
    """Where the list begins."""


Tree = Leaf | Branch | Items


def within(key: str, value: Leaf | Items) -> Branch:
    """The mapping that a single value stands for, where it is this option of it."""
    return Branch(entries={key: value}, key_where={key: value.where}, where=value.where)


class Problems:
    """All problems of a recipe, collected for one error."""

    def __init__(self) -> None:
        self._noted: dict[str, type[Exception]] = {}

    def add(self, where: str, message: str, kind: type[Exception] = ConfigError) -> None:
        """Note a problem; ``kind`` is the error it would be if it were the only one."""
        option = where.removeprefix(SHELL)
        named = where.startswith(SHELL) and re.match(rf"{re.escape(option)}[:. ]", message)
        self._noted.setdefault(f"{SHELL}{message}" if named else f"{where}: {message}", kind)

    def __len__(self) -> int:
        return len(self._noted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._noted)

    def raise_if_any(self, source: str) -> None:
        """One error for all of them, of the kind they share or else ConfigError."""
        if not self._noted:
            return
        kinds = set(self._noted.values())
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        lines = list(self._noted)
        if len(lines) == 1:
            raise kind(lines[0])
        raise kind(f"{source} has {len(lines):,} problems:" + "".join(f"\n  {line}" for line in lines))


class _Loader(yaml.SafeLoader):
    """Makes trees of YAML, and notes what is wrong in it."""

    def __init__(self, text: str, locate: Callable[[yaml.Mark | None], str], problems: Problems):
        super().__init__(text)
        self._locate, self._problems = locate, problems

    def tree(self, node: yaml.Node) -> Tree | None:
        """One composed node as a tree."""
        where = self._locate(node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            items = (self.tree(item) for item in node.value)
            return Items(items=tuple(item for item in items if item is not None), where=where)
        if isinstance(node, yaml.MappingNode):
            return self._branch(node, where)
        try:
            return Leaf(value=self.scalar(node.value, node.tag), text=node.value, where=where)
        except ValueError as error:
            self._problems.add(where, str(error))
            return None

    def _branch(self, node: yaml.MappingNode, where: str) -> Branch:
        """A mapping whose keys are words, each once; what ``<<`` names lies beneath them."""
        branch, seen = Branch(where=where), dict[str, str]()
        for key, _ in node.value:
            place = self._locate(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                self._problems.add(place, "a key must be a word, not a list or a mapping")
            elif key.value in seen:
                first = seen[key.value]
                self._problems.add(place, f"duplicate key {key.value!r}, already given at {first}; remove one")
            else:
                seen[key.value] = place
        self.flatten_mapping(node)  # puts what is merged first, and own keys replace it
        for key, inner in node.value:
            if isinstance(key, yaml.ScalarNode) and (value := self.tree(inner)) is not None:
                branch.put(key.value, value, self._locate(key.start_mark))
        return branch

    def scalar(self, text: str, tag: str) -> bool | int | float | str | None:
        """The value YAML gives a scalar; dates stay text."""
        kind = tag.rpartition(":")[2]
        if kind in ("null", "bool", "int", "float"):
            value: bool | float | None = self.construct_object(yaml.ScalarNode(tag, text))
            return value
        if kind in ("str", "timestamp", "value", "merge"):
            return text
        raise ValueError(f"the tag {tag!r} is not understood; write plain values")


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def parse(text: str, source: str, problems: Problems) -> Tree | None:
    """The tree of a YAML document; None if it is empty or cannot be read."""
    return _compose(text, lambda mark: f"{source}:{mark.line + 1}" if mark else source, problems)


def parse_override(text: str, where: str, problems: Problems) -> Tree | None:
    """The value of an override: YAML flow syntax for lists, mappings and quoted text, else one plain value."""
    if text[:1] in ("[", "{", '"', "'"):
        quoted = "; a text that begins so is written in quotes of its own, as in '\"[0-9]+\"'"
        return _compose(text, lambda mark: where, problems, remedy=quoted if text[0] in "[{" else "")
    loader = _Loader("", lambda mark: where, problems)
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return Leaf(value=loader.scalar(text, tag), text=text, where=where, from_shell=True)


def _compose(
    text: str, locate: Callable[[yaml.Mark | None], str], problems: Problems, *, remedy: str = ""
) -> Tree | None:
    """The tree of a text, located by the caller; ``remedy`` is what to do where it is not YAML."""
    try:
        loader = _Loader(text, locate, problems)
        node = loader.get_single_node()
        return None if node is None else loader.tree(node)
    except yaml.MarkedYAMLError as error:
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        problems.add(locate(error.problem_mark or error.context_mark), f"this is not YAML: {detail}{remedy}")
    except (yaml.YAMLError, RecursionError) as error:
        problems.add(locate(None), f"this is not YAML: {' '.join(str(error).split())}")
    return None


def plain(tree: Tree) -> Json:
    """The values alone."""
    if isinstance(tree, Branch):
        return {key: plain(value) for key, value in tree.entries.items()}
    return [plain(item) for item in tree.items] if isinstance(tree, Items) else tree.value


def from_plain(value: Json, where: str) -> Tree:
    """A tree of plain data, all of it written in one place."""
    if isinstance(value, dict):
        branch = Branch(where=where)
        for key, inner in value.items():
            branch.put(str(key), from_plain(inner, where), where)
        return branch
    if isinstance(value, list | tuple):
        return Items(items=tuple(from_plain(item, where) for item in value), where=where)
    return Leaf(value=value, text=str(value), where=where)


def render(data: Json) -> str:
    """YAML text with innermost collections on one line, keys in the order given."""
    return redacted(
        yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    )
