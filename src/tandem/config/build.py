"""Located tree -> dataclasses, with every mistake found, and back again.

A dataclass's fields are the only truth about its options. Beyond their types it may say more:

- ``__post_init__`` raises ``ValueError`` for values out of range (one message per line; a message that starts
  with an option's name is shown where that option was written);
- ``inert()`` maps options that change nothing, given the others, to the reason; giving one is a mistake, unless it is
  the file's and an override of the same part makes it so;
- a field with a ``category`` in its metadata holds another part, chosen by its ``kind``;
- one with a ``shorthand`` holds a mapping of which a single text is that option;
- one with an ``unless`` must be given unless one of the fields that it names is.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Union

import msgspec

from tandem.config import registry as resolve
from tandem.config.dialects import elsewhere
from tandem.config.tree import SHELL, Branch, Items, Leaf, Problems, Tree, plain, within
from tandem.errors import ConfigError, RewardError, TandemError, redacted
from tandem.types import Json


class _Bad:
    """Stands for a value whose problem is already noted."""


BAD = _Bad()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward of a run."""

    kind: str
    """A file of ``rewards/``, or ``pkg.module:name`` (a recipe may write a dot for the colon)."""
    reward: Any
    """The part, or the import path of a plain function."""
    weight: float
    """What its value is multiplied by before rewards are summed."""


def part(category: str, default: str) -> Any:
    """A field that holds one part of a category, of this kind unless the recipe names another.

    One without a default kind is ``field(metadata={"category": category})``.
    """
    metadata = {"category": category, "default": default}
    return dataclasses.field(metadata=metadata, default_factory=partial(_make, category, default))


def parts(category: str, default: tuple[str, ...]) -> Any:
    """A field that holds a tuple of parts of a category."""

    def make() -> tuple[Any, ...]:
        return tuple(_make(category, kind) for kind in default)

    return dataclasses.field(metadata={"category": category, "many": True}, default_factory=make)


def _make(category: str, kind: str) -> Any:
    return resolve.find(category, kind)()


@cache
def hints(cls: type) -> dict[str, Any]:
    """Types of a dataclass's options.

    Raises:
        ConfigError: an annotation names something that its module does not import at run time.
    """
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ConfigError(f"{cls.__module__}.{cls.__name__}: a field's type cannot be read: {error}") from error


class Builder:
    """Builds dataclasses from a tree and notes what is wrong on the way."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.places: dict[str, str] = {}
        """Where each option that the user set was written, by dotted path."""

    def dataclass(self, cls: type, tree: Branch, path: str, label: str = "", category: str = "") -> Any:
        """An instance, or BAD; of a part, ``category`` has others that may have what this one has not."""
        fields = {field.name: field for field in resolve.options(cls)}
        values: dict[str, Any] = {}
        bad = False
        for key, value in tree.entries.items():
            where = tree.key_where[key]
            if key not in fields:
                self._unknown(cls, key, value, where, label, category)
                bad = True
                continue
            inner = f"{path}.{key}" if path else key
            self.places[inner] = where
            values[key] = self.field(cls, fields[key], value, inner)
            bad = bad or values[key] is BAD
        for name, field in fields.items():
            others = field.metadata.get("unless")
            required = _required(field) or (others is not None and not set(others) & set(tree.entries))
            if required and name not in tree.entries:
                doc = resolve.field_docs(cls).get(name, "")
                what = f"{label} needs" if label else "missing"
                self.problems.add(tree.where, f"{what} {name!r}: {doc}".rstrip(": "))
                bad = True
        return self._alone(cls, values, tree.where, path) if bad else self._construct(cls, values, tree.where, path)

    def field(self, cls: type, field: dataclasses.Field[Any], tree: Tree, path: str) -> Any:
        """The value of one option, or BAD."""
        category = field.metadata.get("category")
        if category is None:
            return self.value(hints(cls)[field.name], opened(field, tree), path)
        if field.default is None and isinstance(tree, Leaf) and tree.value is None:
            return None
        if field.metadata.get("weighted"):
            return self.rewards(category, tree, path)
        if field.metadata.get("many"):
            if not isinstance(tree, Items):
                some = ", ".join(resolve.names(category)[:2])
                return self._wrong(tree, path, f"a list of {category}, such as [{some}]")
            built = tuple(self.part(category, item, path, None) for item in tree.items)
            return BAD if _any_bad(built) else built
        return self.part(category, tree, path, field.metadata.get("default"))

    def part(self, category: str, tree: Tree, path: str, default: str | None) -> Any:
        """A part by kind, with its options."""
        kind, branch = self._kind(category, tree, path, default)
        if kind is None:
            return BAD
        try:
            cls = resolve.find(category, kind)
        except ConfigError as error:
            where = branch.key_where.get("kind", branch.where)
            is_reward = category == "rewards" and ":" in kind  # one of the user's own has an exit code of its own
            self.problems.add(where, f"{path}: {error}", RewardError if is_reward else ConfigError)
            return BAD
        return self.dataclass(cls, _drop_key(branch, "kind"), path, f"{path} ({kind})", category)

    def rewards(self, category: str, tree: Tree, path: str) -> Any:
        """Reward specs by name."""
        if not isinstance(tree, Branch):
            return self._wrong(tree, path, "a mapping of reward names to weights, such as {exact: 1.0}")
        specs = {name: self._reward(category, name, value, f"{path}.{name}") for name, value in tree.entries.items()}
        return BAD if _any_bad(specs.values()) else specs

    def value(self, hint: Any, tree: Tree, path: str) -> Any:
        """A value of a plain type or of a dataclass, or BAD."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        made = next((each for each in (hint, *args) if isinstance(each, type) and dataclasses.is_dataclass(each)), None)
        if isinstance(tree, Branch) and origin in (dict, Mapping):
            entries = {key: self.value(args[1], inner, f"{path}.{key}") for key, inner in tree.entries.items()}
            return BAD if _any_bad(entries.values()) else entries
        if made is not None and isinstance(tree, Branch):
            return self.dataclass(made, tree, path, path)
        leaf, more = tree if isinstance(tree, Leaf) else None, ""
        if made is not None and set(args or (hint,)) <= {made, type(None)} and not (leaf and leaf.value is None):
            return self._wrong(tree, path, f"a mapping of {', '.join(f.name for f in resolve.options(made))}")
        # What is typed in a shell has no quotes, and to YAML off is a truth.
        as_text = leaf is not None and leaf.value is not None and (leaf.from_shell or isinstance(leaf.value, bool))
        for written in (plain(tree), *([leaf.text] if leaf and as_text else [])):
            try:
                value = msgspec.convert(written, hint, dec_hook=lambda kind, text: kind(text))
            except (msgspec.ValidationError, OverflowError) as error:  # the latter of 309 digits
                more = f": {error}" if leaf is None else _remedy(hint, origin, args, leaf)
            else:
                if value == value:  # nan is no number
                    return value
        return self._wrong(tree, path, describe(hint), more)

    def _kind(self, category: str, tree: Tree, path: str, default: str | None) -> tuple[str | None, Branch]:
        """Kind and options as written; kind None if a problem was noted."""
        if isinstance(tree, Leaf) and isinstance(tree.value, str):
            return tree.value, Branch(where=tree.where)
        if not isinstance(tree, Branch):
            self._wrong(tree, path, f"a name ({', '.join(resolve.names(category))}) or a mapping with kind and options")
            return None, Branch(where=tree.where)
        kind = tree.entries.get("kind")
        if kind is None and default is None:
            self.problems.add(tree.where, f"{path} needs a kind; known: {', '.join(resolve.names(category))}")
            return None, tree
        if kind is None:
            return default, tree
        if not (isinstance(kind, Leaf) and isinstance(kind.value, str)):
            self._wrong(kind, f"{path}.kind", f"one of {', '.join(resolve.names(category))}")
            return None, tree
        return kind.value, tree

    def _reward(self, category: str, name: str, tree: Tree, path: str) -> Any:
        """One entry of ``rewards``: a weight, or a mapping of weight, kind and options."""
        weight: Any = 1.0
        branch = tree
        if isinstance(tree, Leaf):
            weight, branch = self.value(float, tree, path), Branch(where=tree.where)
        elif isinstance(tree, Branch) and "weight" in tree.entries:
            weight = self.value(float, tree.entries["weight"], f"{path}.weight")
        if not isinstance(branch, Branch):
            return self._wrong(tree, path, "a weight, or a mapping of weight, kind and options")
        if weight is not BAD and not math.isfinite(weight):
            weight = self._wrong(tree, path, "a finite weight")
        kind, options = self._kind(category, _drop_key(branch, "weight"), path, name)
        if kind is None or weight is BAD:
            return BAD
        if "." in kind and ":" not in kind:  # as Axolotl and TRL write an import path
            kind = ":".join(kind.rpartition(".")[::2])
            options, where = _drop_key(options, "kind"), options.key_where.get("kind", options.where)
            options.put("kind", Leaf(value=kind, text=kind, where=where), where)
        function = self._function(kind, options, path) if ":" in kind else None
        reward = self.part(category, options, path, name) if function is None else function
        return BAD if reward is BAD else RewardSpec(kind=kind, reward=reward, weight=weight)

    def _function(self, kind: str, options: Branch, path: str) -> Any:
        """An import path that leads to a plain function; None if it leads to a part."""
        where = options.key_where.get("kind", options.where)
        try:
            thing = resolve.import_object(kind)
        except ConfigError as error:
            self.problems.add(where, f"{path}: {error}", RewardError)
            return BAD
        if isinstance(thing, type):
            return None
        if not callable(thing):
            self.problems.add(where, f"{path}: {kind} is a {type(thing).__name__}, not a function", RewardError)
            return BAD
        for key in _drop_key(options, "kind").entries:
            where = options.key_where[key]
            self.problems.add(where, f"{path}: a plain function takes no option {key!r}; use a dataclass")
            return BAD
        return kind  # not what it leads to: what another function made cannot be sent to a grading process

    def _construct(self, cls: type, values: dict[str, Any], where: str, path: str) -> Any:
        """Make the instance; refuse values out of range and options that change nothing."""
        try:
            built = cls(**values)
        except (ValueError, TandemError) as error:
            for line in str(error).splitlines() or ["its options are refused"]:
                self._refused(cls, line, where, path, _kind_of(error))
            return self._alone(cls, values, where, path)
        shell = {other for other, written in self.places.items() if written.startswith(SHELL)}
        overridden = bool(path) and any(other.startswith(f"{path}.") for other in shell)
        for name, reason in inert(built).items():
            full = f"{path}.{name}" if path else name
            if full in self.places and (full in shell or not overridden):
                self.problems.add(self.places[full], f"{full} changes nothing: {reason}; remove it")
        return built

    def _alone(self, cls: type, values: dict[str, Any], where: str, path: str) -> _Bad:
        """Where something is wrong already, judge each other option by itself: what others should be is not known."""
        right = {name: value for name, value in values.items() if value is not BAD}
        required = [field.name for field in resolve.options(cls) if _required(field)]
        if not set(required) <= set(right):
            return BAD
        for name, value in right.items():
            try:
                cls(**{other: right[other] for other in required} | {name: value})
            except (ValueError, TandemError) as error:
                for line in str(error).splitlines():
                    if _named(line).partition(".")[0] == name:
                        self._refused(cls, line, where, path, _kind_of(error))
        return BAD

    def _refused(self, cls: type, message: str, where: str, path: str, kind: type[Exception]) -> None:
        """Note what a dataclass said of its options, where the option was written that the message starts with."""
        first = _named(message)
        name = f"{path}.{first}" if path else first
        is_option = first.partition(".")[0] in {field.name for field in resolve.options(cls)}
        text = f"{path}{'.' if is_option else ': '}{message}" if path else message
        self.problems.add(self.places.get(name, where), text, kind)

    def _unknown(self, cls: type, key: str, value: Tree, where: str, label: str, category: str) -> None:
        of = f" of {label}" if label else ""
        known = [field.name for field in resolve.options(cls)]
        nested = [path for path in _nested(cls) if path.endswith(f".{key}")]
        hint = f"; did you mean {nested[0]!r}?" if nested else resolve.did_you_mean(key, known)
        listing = f"; known: {', '.join(known)}" if known else "; it has none"
        message = f"unknown option {key!r}{of}{hint or listing}"
        other_systems = {} if nested else elsewhere(key, value, where)
        for place, text in other_systems.items():
            # Of a part one may mean its own option as well as another system's.
            self.problems.add(place, f"{message}; {text.partition('; ')[2]}" if label and place == where else text)
        if not other_systems:
            self.problems.add(where, message)

    def _wrong(self, tree: Tree, path: str, expected: str, hint: str = "") -> _Bad:
        self.problems.add(tree.where, f"{path}: expected {expected}, got {got(tree)}{hint}")
        return BAD


def _remedy(hint: Any, origin: Any, args: tuple[Any, ...], leaf: Leaf) -> str:
    """What to write instead of a single value."""
    if leaf.value is None:
        return ""
    if origin is Literal:
        return resolve.did_you_mean(leaf.text, [str(choice) for choice in args])
    if origin in (list, tuple, Sequence):
        return f"; write [{leaf.text}]"
    return f"; put it in quotes: {leaf.text!r}" if {str, Path} & {hint, *args} else ""


def opened(field: dataclasses.Field[Any], tree: Tree) -> Tree:
    """The mapping that a single value stands for, where the field has a shorthand."""
    key = field.metadata.get("shorthand")
    if key is None or isinstance(tree, Branch) or (isinstance(tree, Leaf) and tree.value is None):
        return tree
    return within(key, tree)


def inert(built: object) -> Mapping[str, str]:
    """Options of a dataclass that change nothing, and why."""
    rule = getattr(built, "inert", None)
    return rule() if callable(rule) else {}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _named(message: str) -> str:
    """The option, by dotted path, that a dataclass's message starts with, if it does."""
    return message.split(maxsplit=1)[0].rstrip(":,") if message.strip() else ""


def _kind_of(error: Exception) -> type[Exception]:
    return type(error) if isinstance(error, TandemError) else ConfigError


def _any_bad(values: Iterable[Any]) -> bool:
    return any(value is BAD for value in values)


def _nested(cls: type) -> list[str]:
    """Dotted paths of the options one level down, to guess what a misplaced key meant."""
    paths = []
    for field in resolve.options(cls):
        inner = hints(cls)[field.name]
        if field.metadata.get("default"):
            inner = resolve.find(field.metadata["category"], field.metadata["default"])
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            paths += [f"{field.name}.{option.name}" for option in resolve.options(inner)]
    return paths


def _drop_key(branch: Branch, key: str) -> Branch:
    """A mapping less one entry."""
    entries = {name: value for name, value in branch.entries.items() if name != key}
    return Branch(entries=entries, key_where=branch.key_where, where=branch.where)


def encode(built: Any, complete: bool = True, skipped: frozenset[str] = frozenset()) -> dict[str, Json]:
    """Every option of a dataclass but ``skipped``; ``complete=False`` leaves out those that ``inert`` names."""
    if not complete:
        skipped = skipped | frozenset(inert(built))
    encoded: dict[str, Json] = {}
    for field in resolve.options(type(built)):
        if field.name in skipped:
            continue
        below = frozenset(name.partition(".")[2] for name in skipped if name.startswith(f"{field.name}."))
        value = getattr(built, field.name)
        category: str | None = field.metadata.get("category")
        if field.metadata.get("weighted"):
            encoded[field.name] = {name: _reward(name, spec, complete) for name, spec in value.items()}
        elif category is not None and field.metadata.get("many"):
            encoded[field.name] = [_part(category, item, complete, below) for item in value]
        elif category is not None and value is not None:
            encoded[field.name] = _part(category, value, complete, below)
        else:
            encoded[field.name] = plain_value(value, complete, below)
    return encoded


def _part(category: str, built: Any, complete: bool, skipped: frozenset[str]) -> Json:
    """``{kind, ...options}``, or the kind alone where there are none."""
    kind, options = resolve.kind_of(category, built), encode(built, complete, skipped)
    return {"kind": kind, **options} if options else kind


def _reward(name: str, spec: RewardSpec, complete: bool) -> Json:
    """``weight``, or ``{kind, weight, ...options}``; the kind is left out where it is the name."""
    options = encode(spec.reward, complete) if dataclasses.is_dataclass(spec.reward) else {}
    if spec.kind == name and not options:
        return spec.weight
    kind = {} if spec.kind == name else {"kind": spec.kind}
    return {**kind, "weight": spec.weight, **options}


def plain_value(value: Any, complete: bool = True, skipped: frozenset[str] = frozenset()) -> Json:
    """One option's value; dataclasses, mappings and lists in depth."""
    if dataclasses.is_dataclass(value):
        return encode(value, complete, skipped)
    if isinstance(value, Mapping):
        return {key: plain_value(inner, complete) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, complete) for item in value]
    return redacted(str(value)) if isinstance(value, Path | str) else value


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
