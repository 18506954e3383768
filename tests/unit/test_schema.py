"""The JSON schema says what the loader says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig, as_json, load
from tandem.config.schema import schema

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCHEMA = schema()
TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "object": dict, "array": list,
}  # fmt: skip
KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "enum", "const",
    "additionalProperties", "patternProperties", "anyOf", "oneOf", "items", "prefixItems", "minItems", "pattern",
}  # fmt: skip


def conforms(value: Any, rule: Any) -> bool:
    """Whether a value is valid: as much of JSON schema as the schema uses, and an error for anything else."""
    if isinstance(rule, bool):
        return rule
    assert rule.keys() <= KNOWN, rule.keys() - KNOWN
    if "$ref" in rule:
        return conforms(value, SCHEMA["$defs"][rule["$ref"].removeprefix("#/$defs/")])
    if "const" in rule and value != rule["const"]:
        return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    if "type" in rule:
        wanted = TYPES[rule["type"]]
        if not isinstance(value, wanted) or (isinstance(value, bool) and rule["type"] in ("integer", "number")):
            return False
    if "pattern" in rule and not re.search(rule["pattern"], value):
        return False
    if "anyOf" in rule and not any(conforms(value, choice) for choice in rule["anyOf"]):
        return False
    if "oneOf" in rule and sum(conforms(value, choice) for choice in rule["oneOf"]) != 1:
        return False
    if isinstance(value, dict):
        return conforms_object(value, rule)
    if isinstance(value, list):
        first = rule.get("prefixItems", [])
        rest = rule.get("items", True)
        fits = all(conforms(item, first[at] if at < len(first) else rest) for at, item in enumerate(value))
        return fits and len(value) >= rule.get("minItems", 0)
    return True


def conforms_object(value: dict[str, Any], rule: Any) -> bool:
    if not set(rule.get("required", [])) <= value.keys():
        return False
    for key, inner in value.items():
        named = [rule["properties"][key]] if key in rule.get("properties", {}) else []
        matched = [sub for pattern, sub in rule.get("patternProperties", {}).items() if re.search(pattern, key)]
        others = [] if named or matched else [rule.get("additionalProperties", True)]
        if not all(conforms(inner, sub) for sub in named + matched + others):
            return False
    return True


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_conforms_as_written_and_as_resolved(path: Path) -> None:
    assert conforms(yaml.safe_load(path.read_text()), SCHEMA)
    assert conforms(as_json(load(path).config), SCHEMA)


MINIMAL = {"model": "m", "steps": 1, "env": "arithmetic"}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"env": {"kind": "arithmetic", "terms": 3}},
        {"env": "my_mod:Env"},
        {"env": {"kind": "my_mod:Env", "whatever": [1]}},
        {"loss": "grpo", "optimizer": {"lr": 1}},
        {"loss": "my_mod:Loss"},
        {"loggers": ["console", {"kind": "tensorboard"}]},
        {
            "rewards": {
                "exact": 1,
                "number": {"weight": 2, "after": "="},
                "strict": {"kind": "exact", "ignore_case": True},
            }
        },
        {"rewards": {"my.mod:fn": 1, "mine": {"kind": "my.mod:fn", "weight": 1}}},
        {"rewards": {"my.mod.fn": 1, "mine": {"kind": "my.mod.fn", "weight": 1}}},
        {"rewards": {"cosine_length": {"accuracy": "number", "max_tokens": 9}}},
        {"rewards": {"cosine_length": {"accuracy": {"kind": "number", "after": "="}, "max_tokens": 9}}},
        {"context": None, "sampling": {"stop": ["a"]}, "trainable": {"kind": "lora", "target_modules": ["q_proj"]}},
        {"trainable": {"kind": "lora", "target_modules": "all-linear"}},
    ],
)
def test_what_loads_conforms(extra: dict[str, Any]) -> None:
    assert conforms(MINIMAL | extra, SCHEMA)


@pytest.mark.parametrize(
    "extra",
    [
        {"steps": "one"},
        {"steps": True},
        {"group_sise": 3},
        {"env": "arithmetik"},
        {"env": {"kind": "arithmetic", "term": 3}},
        {"env": {"terms": 3}},
        {"loss": {"clip_hihg": 1}},
        {"loss": 3},
        {"loggers": "console"},
        {"truncated": "maks"},
        {"rewards": {"exact": "x"}},
        {"rewards": {"unheard_of": 1}},
        {"rewards": {"exact": {"weight": 1, "ignore_kase": True}}},
        {"rewards": {"cosine_length": {"accuracy": "numbr", "max_tokens": 9}}},
        {"rewards": {"cosine_length": {"max_tokens": 9}}},
        {"sampling": {"stop": "a"}},
        {"trainable": {"kind": "lora", "target_modules": 3}},
    ],
)
def test_what_does_not_load_does_not_conform(extra: dict[str, Any]) -> None:
    assert not conforms(MINIMAL | extra, SCHEMA)


def test_missing_options_do_not_conform() -> None:
    for name in MINIMAL:
        assert not conforms({key: value for key, value in MINIMAL.items() if key != name}, SCHEMA)


def test_every_option_is_described_from_its_field() -> None:
    docs = resolve.field_docs(RunConfig)
    for option in resolve.options(RunConfig):
        assert SCHEMA["properties"][option.name]["description"] == docs[option.name] != ""
    for category in resolve.CATEGORIES:
        text = json.dumps(SCHEMA["$defs"][category])
        for kind in resolve.names(category):
            for option, doc in resolve.field_docs(resolve.find(category, kind)).items():
                assert f"{json.dumps(option)}: {{" in text
                assert json.dumps(doc) in text


def test_defaults_are_told() -> None:
    assert SCHEMA["properties"]["group_size"]["default"] == 8
    assert SCHEMA["properties"]["loss"]["default"] == "grpo"
    assert SCHEMA["properties"]["evaluate"]["properties"]["tasks"]["default"] == 40


def test_a_mapping_may_be_one_word_where_the_recipe_says_so() -> None:
    either = schema()["properties"]["alarms"]["anyOf"]
    assert either[0] == {"enum": ["stop", "warn"]}
    assert set(either[1]["properties"]) == {"action", "ignore"}
    broker = schema()["properties"]["broker"]["anyOf"]
    assert broker[0] == {"type": "string"}
