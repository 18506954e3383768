"""The field's words: names that the glossary replaced are bound nowhere in the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import parsed

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

NOUNS = ("told", "found", "asked", "given", "said")
"""Of no name in tests and benchmarks either."""

AS_A_NAME = {
    **dict.fromkeys(NOUNS, "what it holds: metrics, response, request, options"),
    **dict.fromkeys(("flat",), "zero_variance"),
    **dict.fromkeys(("feed", "supply"), "RolloutBuffer, RolloutSource"),
    **dict.fromkeys(("foreign",), "broker source, or whose it is"),
    **dict.fromkeys(("streams",), "EnvMixture"),
    **dict.fromkeys(("draws",), "TaskSampler"),
    **dict.fromkeys(("cursor",), "DataState"),
    **dict.fromkeys(("judge",), "GroupRunner"),
    **dict.fromkeys(("needs",), "EngineRequirements"),
    **dict.fromkeys(("epoch",), "restart_count"),
    **dict.fromkeys(("era",), "weights_generation"),
}
"""A whole name, underscores and case aside, and what replaces it; in a longer name the word may be plain English."""

AS_A_PART = {
    **dict.fromkeys(("players",), "environment runners"),
    **dict.fromkeys(("agenda",), "TaskSampler"),
    **dict.fromkeys(("trains",), "trainable"),
    **dict.fromkeys(("travels", "carries"), "payload, supported payloads"),
    **dict.fromkeys(("sinks",), "loggers"),
    **dict.fromkeys(("patience",), "timeouts, or a limit with its unit"),
    **dict.fromkeys(("prove", "proves", "proven"), "verify"),
    **dict.fromkeys(("stamp", "stamps", "stamped"), "set_version, timestamp, versions"),
    **dict.fromkeys(("lend", "lends", "lent", "borrow", "borrows", "borrowed"), "export, attach"),
    **dict.fromkeys(("adopt", "adopts", "adopted"), "reattach"),
    **dict.fromkeys(("boot",), "instance_id"),
    **dict.fromkeys(("insist", "persist", "halt", "revived"), "pause, publish, resume, abort, recover"),
}
"""A word of a name, in whichever case and place, and what takes its place."""

ALLOWED = {
    "tandem_broker.producer: epoch",  # one pass over the tasks
    "tandem_compat.trl.callbacks: epoch",  # transformers' name for it
    "tandem.rollout.task_sampler: epoch",  # one pass over the tasks
    "tandem.engines.vllm.protocol: flat",  # vLLM's form of logprobs
    "tandem.engines.vllm.server.frontend: flat",  # vLLM's form of logprobs
    "tandem.engines.vllm.server.routes: flat",  # vLLM's form of logprobs
    "tandem.optimizers._byte_moments: flat",  # a tensor of one dimension
    "tandem.optimizers._precise: flat",  # a tensor of one dimension
    "tandem.testing.oracle: flat",  # a tensor of one dimension
    "tandem.rewards.judge: Judge",  # a language model that grades, which the field calls so
}
"""``module: name`` that stays, and why."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Variables, attributes that are assigned, arguments, functions, classes and names of imports."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Load) or isinstance(node, ast.keyword):
            continue
        fields = ("asname",) if isinstance(node, ast.alias) else ("id", "attr", "arg", "name")
        yield from (name for field in fields if (name := getattr(node, field, None)))


def replacement(name: str) -> str | None:
    """What to write for a name that the glossary replaced."""
    words = (word.lower() for word in _WORD.findall(name))
    return AS_A_NAME.get(name.replace("_", "").lower()) or next((AS_A_PART[w] for w in words if w in AS_A_PART), None)


def replaced(tree: ast.AST) -> list[str]:
    return [name for name in bound_names(tree) if replacement(name)]


@pytest.mark.slow
def test_names_are_the_fields_words() -> None:
    wrong = {
        f"{module}: {name}; write {replacement(name)}"
        for path in sorted(SRC.rglob("*.py"))
        for module in [".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")]
        for name in replaced(parsed(path))
        if f"{module}: {name}" not in ALLOWED
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.slow
def test_tests_and_benchmarks_name_what_a_variable_holds() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("tests", "benchmarks", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in bound_names(parsed(path))
        if name.replace("_", "").lower() in NOUNS
    ]
    assert not wrong, f"write {AS_A_NAME[NOUNS[0]]}:\n" + "\n".join(wrong)


def test_the_rule_is_alive() -> None:
    source = """
import json as _told
class Agenda:
    flat: int
    def adopt(self, given, *, Said=1):
        self._found = [draws for draws in given]
        match given:
            case {"a": patience}: pass
    def kept(self, flat_tensor, needs_more): return self.asked
    def _lend_slot(self): LENT_AT = isAdopted = timestamp = 1
"""
    names = "LENT_AT Said Agenda _found _lend_slot _told adopt draws flat given isAdopted patience"
    assert sorted(replaced(ast.parse(source))) == sorted(names.split())
