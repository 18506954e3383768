"""JSON schema of a recipe, from the same dataclass fields that load it: for editors to complete and check."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import msgspec

from tandem.config import registry as resolve
from tandem.config.build import RewardSpec, hints, plain_value
from tandem.config.loading import RunConfig
from tandem.types import Json

_OUTSIDE = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$", "description": "A part of your own: pkg.module:Name."}
_PATH = r"^[\w.]+[:.][\w.]+$"
"""An import path as the name of a reward: with a colon, or with dots alone."""
_WEIGHT = {"type": "number", "description": resolve.field_docs(RewardSpec)["weight"]}


def schema() -> dict[str, Json]:
    """The schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tandem recipe",
        **_dataclass(RunConfig),
        "$defs": {
            category: _by_kind(category) if category == "rewards" else _category(category)
            for category in resolve.CATEGORIES
        },
    }


def _dataclass(cls: type) -> dict[str, Json]:
    """An object whose properties are the options of a dataclass."""
    fields, docs = resolve.options(cls), resolve.field_docs(cls)
    properties: dict[str, Json] = {}
    for field in fields:
        properties[field.name] = {**_field(cls, field), "description": docs.get(field.name, "")}
        if field.default is not dataclasses.MISSING:
            properties[field.name]["default"] = plain_value(field.default)
    missing = dataclasses.MISSING
    required = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    either = [name for f in fields if "unless" in f.metadata for name in (f.name, *f.metadata["unless"])]
    return {
        **({"anyOf": [{"required": [name]} for name in either]} if either else {}),
        "type": "object",
        "description": resolve.summary(cls),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _field(cls: type, field: dataclasses.Field[Any]) -> dict[str, Json]:
    category = field.metadata.get("category")
    if "entries" in field.metadata:
        # A number is a weight, and without an env the name is one.
        entry = {**_dataclass(field.metadata["entries"]), "required": []}
        return {"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, entry]}}
    if category is None:
        described = _type(hints(cls)[field.name])
        key = field.metadata.get("shorthand")
        return described if key is None else _or_one_option(described, key)
    if field.metadata.get("weighted"):
        return _weighted(category)
    if field.metadata.get("many"):
        return {"type": "array", "items": {"$ref": f"#/$defs/{category}"}}
    default = field.metadata.get("default")
    if default is None:
        schema: dict[str, Json] = {"$ref": f"#/$defs/{category}"}
        if (
            category == "rewards"
        ):  # entries of that category have a name, so that a part's own reward is its only bare kind
            schema = {"anyOf": [{"enum": resolve.names(category)}, schema]}
        return {"anyOf": [schema, {"type": "null"}]} if field.default is None else schema
    without_kind = _dataclass(resolve.find(category, default))
    return {"anyOf": [{"$ref": f"#/$defs/{category}"}, without_kind], "default": default}


def _or_one_option(described: dict[str, Json], key: str) -> dict[str, Json]:
    """A mapping, or the value of one of its options alone."""
    either = described.get("anyOf", [described])
    (option,) = [each["properties"][key] for each in either if "properties" in each]
    return {"anyOf": [{k: v for k, v in option.items() if k not in ("description", "default")}, *either]}


def _category(category: str) -> dict[str, Json]:
    """A part of a category: its kind alone, or a mapping of kind and options."""
    kinds = resolve.names(category)
    short = [{"const": kind, "description": resolve.summary(resolve.find(category, kind))} for kind in kinds]
    long = [_with_kind(kind, _dataclass(resolve.find(category, kind))) for kind in kinds]
    schema = {"type": "object", "properties": {"kind": _OUTSIDE}, "required": ["kind"]}
    return {"oneOf": [*short, _OUTSIDE, *long, schema]}


def _with_kind(kind: str, options: dict[str, Json]) -> dict[str, Json]:
    """The options of a kind, with the kind among them."""
    return {
        **options,
        "properties": {"kind": {"const": kind, "description": options["description"]}, **options["properties"]},
        "required": ["kind", *options["required"]],
    }


def _weighted(category: str) -> dict[str, Json]:
    """A mapping of names to a weight, or to weight, kind and options; where a name is a kind, it need not be said."""
    by_kind = {"$ref": f"#/$defs/{category}"}
    entries = {kind: _with_weight(_dataclass(resolve.find(category, kind))) for kind in resolve.names(category)}
    function = {"type": "object", "properties": {"weight": _WEIGHT}}
    return {
        "type": "object",
        "properties": {kind: {"anyOf": [_WEIGHT, options, by_kind]} for kind, options in entries.items()},
        "patternProperties": {_PATH: {"anyOf": [_WEIGHT, function]}},
        "additionalProperties": by_kind,
    }


def _by_kind(category: str) -> dict[str, Json]:
    """Weight, kind and options of a part whose name says nothing."""
    path = {**_OUTSIDE, "pattern": _PATH}
    schema = {"type": "object", "properties": {"kind": path, "weight": _WEIGHT}, "required": ["kind"]}
    kinds = resolve.names(category)
    return {
        "oneOf": [*(_with_weight(_with_kind(kind, _dataclass(resolve.find(category, kind)))) for kind in kinds), schema]
    }


def _with_weight(options: dict[str, Json]) -> dict[str, Json]:
    return {**options, "properties": {"weight": _WEIGHT, **options["properties"]}}


def _type(hint: Any) -> dict[str, Json]:
    """A plain type, by msgspec; dataclasses in it by their own options."""
    inner = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _dataclass(hint)
    if any(map(dataclasses.is_dataclass, inner)):
        return {"anyOf": [_type(member) for member in inner]}
    return msgspec.json.schema(hint, schema_hook=lambda kind: {"type": "string"} if kind is Path else {})
