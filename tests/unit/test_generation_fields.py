"""Fields of vLLM's SamplingParams: every one has a place, and each option of ``sampling`` exists."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from tandem.types import Sampling
from tandem_compat.generation import FIELDS, translated

VLLM_SOURCES = sorted(
    (Path(__file__).parents[2] / ".venv-engine").glob("lib/python3*/site-packages/vllm/sampling_params.py")
)


def test_each_says_one_thing_and_options_exist() -> None:
    options = {field.name for field in fields(Sampling)}
    for name, field in FIELDS.items():
        assert bool(field.becomes) + bool(field.idle) + bool(field.refused) == 1, name
        assert not field.becomes or field.becomes in options, name
    assert {field.becomes for field in FIELDS.values() if field.becomes} == options - {"regex"}, (
        "vLLM's structured_outputs has that"
    )


@pytest.mark.skipif(not VLLM_SOURCES, reason="there is no vLLM beside this environment")
def test_none_of_vllms_is_forgotten() -> None:
    tree = ast.parse(VLLM_SOURCES[0].read_text())
    (params,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    names = {n.target.id for n in params.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    made_by_vllm = {"output_text_buffer_length"}
    assert {name for name in names if not name.startswith("_")} - made_by_vllm <= set(FIELDS)


def test_values_are_brought_into_sampling() -> None:
    translation = translated(
        {"stop": "a", "top_k": -1, "min_p": None, "frequency_penalty": 0.5, "skip_special_tokens": True}
    )
    assert translation.recipe == {"stop": ["a"], "top_k": 0, "frequency_penalty": 0.5}
    assert [note.partition(":")[0] for note in translation.notes] == ["skip_special_tokens"]
    assert not translation.problems


def test_the_rest_is_refused_by_name() -> None:
    translation = translated({"logit_bias": {3: 1.0}, "guided_decoding": {"regex": "a"}, "topk": 3, "bad_words": None})
    assert translation.recipe == {}
    unknown, *refused = translation.problems
    assert [why.partition(":")[0] for why in refused] == ["logit_bias", "guided_decoding"]
    assert "reward the form" in refused[1]
    assert unknown.startswith("topk: ")
    assert "did you mean 'top_k'?" in unknown
