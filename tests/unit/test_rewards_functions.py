"""Reward functions as Axolotl and TRL call them: by import path, over completions and columns."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.loading import dump, load
from tandem.errors import ConfigError, RewardError
from tandem.rewards.cosine_length import CosineLength
from tandem.rewards.function import Function
from tandem.rewards.grading.workers import Graders
from tandem.types import Completion, Message, Rollout, Task, Turn

pytestmark = pytest.mark.slow

FUNCTIONS = '''
import functools, json, sys

def accuracy(completions, solution, **kwargs):
    return [1.0 if c[0]["content"] == s else 0.0 for c, s in zip(completions, solution)]
def seen(prompts, completions, completion_ids, answer, trainer_state, **columns):
    """Everything that it was given, as one line in the log."""
    shown = {"prompts": prompts, "completions": completions, "ids": completion_ids, "answer": answer,
             "step": trainer_state.global_step, "of": getattr(trainer_state, "max_steps", None),
             "columns": {k: v for k, v in columns.items() if not callable(v)}, "more": sorted(columns)}
    print("SEEN " + json.dumps(shown))
    return [0.0] * len(completions)
def texts(prompts, completions, **kwargs):
    assert all(isinstance(p, str) for p in prompts), prompts
    return [float(len(c)) for c in completions]
def only_some(completions, kind, **kwargs):
    return [1.0 if k == "maths" else None for k in kind]
def logs(completions, log_metric, log_extra):
    log_metric("mean_length", sum(len(c[0]["content"]) for c in completions) / len(completions))
    log_extra("length", [len(c[0]["content"]) for c in completions])
    log_extra("first", [c[0]["content"][0] for c in completions])
    return [0.0] * len(completions)
def logs_wrongly(completions, log_extra):
    log_extra("length", [1])
    return [0.0] * len(completions)
def curious(completions, trainer_state): return [trainer_state.log_history] * len(completions)
def inner(texts): return json.loads(texts[0])
def deep(completions, **kwargs):
    rewards = []
    for c in completions:
        rewards.append(inner([c[0]["content"]]))
    return rewards
def long(completions, **kwargs): return [0.0] * (len(completions) + 1)
def text(completions, **kwargs): return ["good"] * len(completions)
class Plugin:
    def __call__(self, completions, **kwargs): return [2.0] * len(completions)
class NeedsArguments:
    def __init__(self, args): ...
    def __call__(self, completions, **kwargs): return [2.0] * len(completions)
async def later(completions, **kwargs): return [3.0] * len(completions)
partly = functools.partial(accuracy, unused=1)
def maker(worth): return lambda completions, **kwargs: [worth] * len(completions)
made = maker(0.5)
number = 5
def by_ids(completion_ids, trainer_state): return [float(len(ids)) for ids in completion_ids]
def by_prompts(prompts, **kwargs): return [float(len(prompt)) for prompt in prompts]
def by_column(solution, **kwargs): return [float(gold) for gold in solution]
def undecorated(*args, **kwargs): return accuracy(*args, **kwargs)
def any_keyword(**kwargs): return [float(len(c)) for c in kwargs["completions"]]
def native(rollout, **options): return float(rollout.text)
def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
    assert not strict
    return {"score": float(solution_str == ground_truth), "acc": 0.5, "pred": solution_str}
def told(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float([data_source, solution_str, ground_truth, extra_info] == ["gsm8k", "7", {"target": 7}, {"index": 3}])
def spoils(prompts, completions, numbers, info, **kwargs):
    assert all(prompt == prompts[-1] for prompt in prompts)
    prompts[0][0]["content"] = completions[0][0]["content"] = "spoilt"
    for changed in (numbers[0], info[0]["deep"]):
        changed.clear()
    return [float(len(n) + len(i["deep"])) for n, i in zip(numbers, info)]
def spoils_own(rollout):
    rollout.task.meta["numbers"].append(9)
    rollout.task.meta["info"]["deep"].append(9)
    return float(len(rollout.task.meta["numbers"]) + len(rollout.task.meta["info"]["deep"]))
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trl_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def group(*replies: str, gold: str = "7", **meta: Any) -> list[Rollout]:
    """Siblings that step 4 sampled; the first token is the newest of the group."""
    prompt = (Message(role="system", content="Be brief."), Message(role="user", content="What is 3 + 4?"))
    task = Task(id="t", env="e", prompt=prompt, answer=gold, meta=meta)
    rollouts = []
    for i, reply in enumerate(replies):
        tokens = tuple(range(10 * i, 10 * i + 2))
        completion = Completion(tokens=tokens, logprobs=(-1.0, -1.0), versions=(3, 4 if i else 3), finish="stop")
        turn = Turn(prompt=(1,), completion=completion, temperature=1.0)
        messages = (*prompt, Message(role="assistant", content=reply))
        rollouts.append(Rollout(id=f"t@0/{i}", task=task, turns=(turn,), messages=messages, status="ok"))
    return rollouts


def graded(specs: Mapping[str, Any], rollouts: list[Rollout], **options: Any) -> list[Rollout]:
    async def go() -> list[Rollout]:
        weighed = {name: spec if isinstance(spec, tuple) else (spec, 1.0) for name, spec in specs.items()}
        async with Graders(weighed, **options) as graders:
            return await graders.grade(rollouts)

    return asyncio.run(go())


def of(name: str, **options: Any) -> Function:
    return Function(path=f"trl_functions.{name}", **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("by_ids", [2.0, 2.0]),
        ("by_prompts", [2.0, 2.0]),
        ("by_column", [7.0, 7.0]),
        ("undecorated", [1.0, 0.0]),
        ("any_keyword", [1.0, 1.0]),
        ("native", [7.0, 8.0]),
        ("compute_score", [1.0, 0.0]),
    ],
)
def test_calling_conventions_are_told_by_parameters(name: str, expected: list[float]) -> None:
    got = graded({"f": of(name)}, group("7", "8", solution="7"))
    assert [rollout.reward for rollout in got] == expected, got[0].error


def test_a_function_of_verl_is_given_a_row_of_verl_and_its_numbers_are_metrics() -> None:
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": {"target": 7}}, "extra_info": {"index": 3}}
    assert [rollout.reward for rollout in graded({"f": of("told")}, group("7", "8", **row))] == [1.0, 0.0]
    (got,) = graded({"f": of("compute_score")}, group("7"))
    assert (got.reward, got.metrics) == (1.0, {"acc": 0.5})


@pytest.mark.parametrize("order", [("spoils", "spoils_own"), ("spoils_own", "spoils")])
def test_what_a_reward_changes_no_other_and_no_sibling_sees(order: tuple[str, str]) -> None:
    got = graded({name: of(name) for name in order}, group("a", "b", "c", numbers=[1, 2], info={"deep": [3]}))
    assert [rollout.rewards for rollout in got] == [
        {"spoils": 0.0, "spoils_own": 5.0},
        {"spoils": 3.0, "spoils_own": 5.0},
        {"spoils": 3.0, "spoils_own": 5.0},
    ]


def test_what_a_function_is_given(tmp_path: Path) -> None:
    log = tmp_path / "graders.log"
    meta = {"prompt": "raw", "completion": "gold", "level": 3, "answer": 7}
    graded({"seen": of("seen")}, group("a", "b", **meta), log=log, steps=40)
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("SEEN ")]
    shown = json.loads(line.removeprefix("SEEN "))
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    assert shown == {
        "prompts": [prompt, prompt],
        "completions": [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]],
        "ids": [[0, 1], [10, 11]],
        "answer": [7, 7],  # a number: the column as the data has it, not the task's text of it
        "step": 4,
        "of": 40,
        "columns": {"level": [3, 3]},
        "more": ["level", "log_extra", "log_metric"],
    }


def test_logged_numbers_are_metrics_of_the_rollouts(tmp_path: Path) -> None:
    log = tmp_path / "graders.log"
    rollouts = group("a", "bcd")
    rollouts[0] = replace(rollouts[0], metrics={"tools": 2.0})
    got = graded({"logs": of("logs")}, rollouts, log=log)
    assert got[0].metrics == {"tools": 2.0, "mean_length": 2.0, "length": 1.0}
    assert got[1].metrics == {"mean_length": 2.0, "length": 3.0}
    assert "first: ['a', 'b']" in log.read_text()
    assert "log_extra('length') got 1 values for 3" in graded({"f": of("logs_wrongly")}, group("a", "b", "c"))[0].error


def test_a_function_may_say_which_answers_are_right() -> None:
    reward = CosineLength(accuracy=of("accuracy"), max_tokens=2)
    got = graded({"cosine": reward, "later": "trl_functions:later"}, group("7", "8", solution="7"))
    assert [rollout.rewards["cosine"] for rollout in got] == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such.mod.fn", "reward 'f' cannot be used: ModuleNotFoundError: No module named 'no_such'"),
        ("trl_functions.missing", "cannot be used: AttributeError: .*trl_functions.*missing"),
        ("trl_functions.number", "cannot be used: TypeError: it is a int; expected f"),
        ("trl_functions.NeedsArguments", "cannot be used: TypeError: .*args"),
    ],
)
def test_a_function_that_cannot_be_used_is_told_at_once(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        graded({"f": Function(path=path)}, [])


def test_an_error_names_the_places_in_the_users_code_and_the_log_has_its_traceback(tmp_path: Path) -> None:
    log = tmp_path / "graders.log"
    got = graded({"deep": of("deep")}, group("1", "x"), log=log)
    lines = FUNCTIONS.splitlines()
    inner, deep = (next(at for at, line in enumerate(lines, 1) if text in line) for text in ("def inner", "(inner(["))
    assert got[1].error == (
        "reward 'deep' raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) "
        f"(trl_functions.py:{inner} in inner, from trl_functions.py:{deep} in deep)"
    )
    text = log.read_text()
    assert "reward 'deep' raised for t@0/0, t@0/1:\nTraceback (most recent call last):\n" in text
    assert "in deep\n    rewards.append(inner(" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [("long", "reward 'f' returned 2 rewards for 1 completions"), ("text", "returned 'good' (str); expected a number")],
)
def test_wrong_returns_are_told(name: str, message: str) -> None:
    (got,) = graded({"f": of(name)}, group("a"))
    assert message in got.error


# in recipes

RECIPE = """\
model: m
steps: 1
env: arithmetic
rewards:
  beside_the_recipe.right: 1.0
  brief: {kind: beside_the_recipe.brief, weight: 0.5}
  texts: {kind: function, path: beside_the_recipe.right, completions: text}
"""


def test_functions_by_dotted_path_are_found_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside_the_recipe.py").write_text(
        textwrap.dedent(
            """
            def right(completions, answer, **columns): return [1.0 for _ in completions]
            def brief(rollout): return float(len(rollout.text) < 3)
            """
        )
    )
    (folder / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("sys.path", sys_path())
    config = load(folder / "recipe.yaml").config
    assert [(n, s.kind, s.weight) for n, s in config.rewards.items()] == [
        ("beside_the_recipe.right", "beside_the_recipe:right", 1.0),
        ("brief", "beside_the_recipe:brief", 0.5),
        ("texts", "function", 1.0),
    ]
    specs = {name: (spec.reward, spec.weight) for name, spec in config.rewards.items()}
    assert [rollout.reward for rollout in graded(specs, group("a", "abc"))] == [2.5, 2.0]
    (folder / "again.yaml").write_text(dump(config))
    assert load(folder / "again.yaml").config == config


def sys_path() -> list[str]:
    """A copy that a test may let its recipe add to."""
    return list(sys.path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no_such_module.fn: 1.0", "cannot import no_such_module:fn: there is no module 'no_such_module'"),
        ("f: {kind: function, path: a.b, colour: red}", "unknown option 'colour' of rewards.f (function)"),
        ("f: {kind: function}", "rewards.f (function) needs 'path'"),
        ("trl_functions.accuracy: {weight: 1, colour: red}", "a plain function takes no option 'colour'"),
        ("trl_functions.Plugin: 1.0", "trl_functions:Plugin is a type, not a dataclass"),
        ("cosine_length: {max_tokens: 9}", "rewards.cosine_length (cosine_length) needs 'accuracy'"),
        ("cosine_length: {accuracy: numbr, max_tokens: 9}", "there is no 'numbr' in rewards; did you mean 'number'?"),
    ],
)
def test_mistakes_in_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    monkeypatch.setattr("sys.path", sys_path())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: m\nsteps: 1\nenv: arithmetic\nrewards:\n  {line}\n")
    with pytest.raises((ConfigError, RewardError)) as caught:
        load(recipe)
    assert message in str(caught.value)
