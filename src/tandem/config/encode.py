"""Dataclasses -> plain data, as a recipe would write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config import registry as resolve
from tandem.config.build import RewardSpec, inert
from tandem.types import Json


def encode(built: Any, *, complete: bool = True) -> dict[str, Json]:
    """Every option of a dataclass; ``complete=False`` leaves out those that ``inert`` names."""
    return _dataclass(built, complete, frozenset())


def _dataclass(built: Any, complete: bool, skipped: frozenset[str]) -> dict[str, Json]:
    if not complete:
        skipped = skipped | frozenset(inert(built))
    encoded: dict[str, Json] = {}
    for field in resolve.options(type(built)):
        if field.name in skipped:
            continue
        below = frozenset(name.partition(".")[2] for name in skipped if name.startswith(f"{field.name}."))
        value = getattr(built, field.name)
        slot: str | None = field.metadata.get("slot")
        if field.metadata.get("weighted"):
            encoded[field.name] = {name: _reward(name, spec, complete) for name, spec in value.items()}
        elif slot is not None and field.metadata.get("many"):
            encoded[field.name] = [_part(slot, item, complete, below) for item in value]
        elif slot is not None and value is not None:
            encoded[field.name] = _part(slot, value, complete, below)
        else:
            encoded[field.name] = plain_value(value, complete, below)
    return encoded


def _part(slot: str, built: Any, complete: bool, skipped: frozenset[str]) -> Json:
    """``{kind, ...options}``, or the kind alone where there are none."""
    kind, options = resolve.kind_of(slot, built), _dataclass(built, complete, skipped)
    return {"kind": kind, **options} if options else kind


def _reward(name: str, spec: RewardSpec, complete: bool) -> Json:
    """``weight``, or ``{kind, weight, ...options}``; the kind is left out where it is the name."""
    options = _dataclass(spec.reward, complete, frozenset()) if dataclasses.is_dataclass(spec.reward) else {}
    if spec.kind == name and not options:
        return spec.weight
    kind = {} if spec.kind == name else {"kind": spec.kind}
    return {**kind, "weight": spec.weight, **options}


def plain_value(value: Any, complete: bool = True, skipped: frozenset[str] = frozenset()) -> Json:
    """One option's value; dataclasses, mappings and lists in depth."""
    if dataclasses.is_dataclass(value):
        return _dataclass(value, complete, skipped)
    if isinstance(value, Mapping):
        return {key: plain_value(inner, complete) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, complete) for item in value]
    return str(value) if isinstance(value, Path) else value
