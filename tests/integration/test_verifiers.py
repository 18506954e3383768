"""Environments that are written with verifiers' own classes are played and trained by Tandem as they are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import build_tiny_model
from integration.atropos_peers import until, verifiers_python
from support.fake_engine import END
from support.proxy_sessions import Scripted
from transformers import AutoTokenizer

import tandem
from tandem.envs import _package
from tandem.envs.base import Environment
from tandem.envs.verifiers import Verifiers
from tandem.errors import EnvError
from tandem.ports import free_port
from tandem.rewards.environment import EnvironmentReward
from tandem.rewards.grading.workers import Graders
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.template import Template
from tandem.types import Group, Sampling

pytestmark = pytest.mark.slow  # each imports verifiers, datasets and pyarrow in a process of its own
ROOT = Path(__file__).parents[2]
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter that has verifiers; its environments are found from the working directory."""
    monkeypatch.chdir(ROOT / "tests/support/verifiers_envs")
    return str(verifiers_python())


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return with_tools(tmp_path / "tools")


def with_tools(folder: Path) -> Path:
    """The tiny model with a chat template that shows tools."""
    build_tiny_model(folder, context=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TOOLS
    tokenizer.save_pretrained(folder)
    return folder


def call(folder: Path) -> list[int]:
    """A call of ``double`` as tokens."""
    text = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    return AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


def trained(model: Path, folder: Path, **options: Any) -> tandem.Run:
    """A run of two groups a step, to its end."""
    fixed = {"model": str(model), "runs": str(folder / "runs"), "dtype": "float32", "threads": 1}
    run = tandem.train(tandem.Recipe.load({**fixed, "groups_per_step": 2, **options}))
    assert run.status == "finished"
    return run


def game(id: str, role: str = "player", **taskset: Any) -> dict[str, Any]:
    """A taskset of verifiers 0.4 and its agent."""
    agent = {"harness": {"id": "tandem-task"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    return {"id": id, "python": str(verifiers_python("-04")), "args": {role: agent, "taskset": taskset}}


@pytest.fixture(name="tandem-task")
def words() -> dict[str, Any]:
    return game("tandem-task", "agent")


@pytest.fixture
def textarena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Hangman for one word: nltk's own ones are a download, and no package has them."""
    (words := tmp_path / "nltk/corpora/words").mkdir(parents=True)
    (words / "en-basic").write_text("cat\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    # Through a proxy nltk downloads nothing, and waits for nothing.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    return game("textarena", game="Hangman-v0")


@contextlib.contextmanager
def served(*command: str) -> Iterator[str]:
    """URL of a server, which is given its port last."""
    port = free_port()
    with subprocess.Popen([*command, str(port)]) as server, socket.socket() as client:
        try:
            until(lambda: client.connect_ex(("127.0.0.1", port)) == 0, "the server", 120)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture
def openenv() -> Iterator[dict[str, Any]]:
    """A server of OpenEnv, with eight tasks."""
    with served(str(verifiers_python("-04")), str(ROOT / "recipes/say_server.py")) as url:
        yield game("openenv", base_url=url, resets=[{"seed": seed} for seed in range(8)])


TURNS = {"tandem-reverse": 1.0, "tandem-guess": 3.0, "tandem-tool": 1.0, "tandem-groups": 1.0}
"""How many turns an environment has, by its own metric."""
NEWER = {
    "tandem-task": (["ab"], 1.0),
    "textarena": (["[c]", "[a]", "[t]"], 1.0),
    "openenv": (["cat dog sun sea ice oak fox jam"] * 2, pytest.approx(2 - 2 * 31 / 1000)),
}
"""Tasksets of verifiers 0.4: the replies of its turns, and their reward."""


@pytest.mark.parametrize("id", [*TURNS, *NEWER])
def test_an_environment_trains(
    id: str, python: str, tools: Path, tmp_path: Path, long: bool, request: pytest.FixtureRequest
) -> None:
    env = {"id": id} if id != "tandem-groups" else {"id": "tandem-reverse", "args": {"together": True}}
    if id in NEWER:
        env = request.getfixturevalue(id)
    more: dict[str, Any] = {"group_size": 4, "evaluate": {"tasks": 2, "samples": 2, "every": 20}}
    if id == "textarena":  # a random model makes no valid move of a game
        more["rewards"] = {"environment": 1.0, "support.vowels:share": 0.1}
    steps = 20 if long else 3
    env = {"kind": "verifiers", "python": python, **env}
    run = trained(tools, tmp_path, env=env, steps=steps, sampling={"max_tokens": 12}, **more)
    assert [run.metrics[step]["env/verifiers/trained"] for step in range(steps)] == [2.0] * steps
    assert run.metrics[steps - 1].get("env/verifiers/rubric/num_turns") == TURNS.get(id)


def group(env: Environment, folder: Path, *answers: list[int], size: int = 2, reward: Any = None) -> Group:
    """Play and grade one group of the first task with an engine that samples what it is told."""
    template = Template(AutoTokenizer.from_pretrained(folder), {})
    engine: Any = Scripted(*answers)
    engine.context = 2000

    async def play() -> Group:
        async with Graders({"environment": (reward or EnvironmentReward(), 1.0)}) as graders:
            runner = GroupRunner(name="e", env=env, engine=engine, graders=graders, template=template, seed=0)
            task = env.tasks("train")[0]
            return await runner.run(task, id="g", index=0, size=size, sampling=Sampling(max_tokens=400))

    return asyncio.run(play())


def test_a_tool_is_called_and_every_token_is_as_it_was_sampled(python: str, tools: Path) -> None:
    tokens = call(tools)
    (rollout,) = group(Verifiers(id="tandem-tool", python=python), tools, [*tokens, END], [64, END], size=1).rollouts
    first, second = rollout.turns
    assert second.prompt[: len(first.prompt) + len(tokens) + 1] == (*first.prompt, *tokens, END)
    assert [message.content for message in rollout.messages if message.role == "tool"] == ["42"]
    assert first.completion.versions == (4,) * (len(tokens) + 1)
    assert rollout.metrics["rubric/messages"] == 3.0
    assert rollout.reward == pytest.approx(3.0 + 0.1 * rollout.metrics["rubric/characters"])
    assert rollout.metrics["rubric/double_calls"] == 1.0


def test_a_rubric_with_its_weights_scores_siblings_together(python: str, tiny_model: Path) -> None:
    env = Verifiers(id="tandem-reverse", args={"together": True}, python=python)
    short, long = sorted(group(env, tiny_model, [64, END], [64, 65, 66, END]).rollouts, key=lambda r: r.num_tokens)
    assert (short.metrics["rubric/rank"], long.metrics["rubric/rank"]) == (0.0, 1.0)
    assert short.reward == 2.0 * short.metrics["rubric/share_of_vowels"] + 0.25 * 1
    assert long.reward == pytest.approx(2.0 * long.metrics["rubric/share_of_vowels"] + 0.25 * 3 + 10.0 * 1)


@pytest.mark.parametrize("id", NEWER)
def test_a_taskset_of_the_newer_line_is_played_by_its_own_harness(
    id: str, python: str, tools: Path, request: pytest.FixtureRequest
) -> None:
    texts, reward = NEWER[id]
    encode = AutoTokenizer.from_pretrained(tools).encode
    replies = [[*encode(text, add_special_tokens=False), END] for text in texts]
    (rollout,) = group(Verifiers(**request.getfixturevalue(id)), tools, *replies, size=1).rollouts
    assert [list(turn.completion.tokens) for turn in rollout.turns] == replies
    for turn, after in itertools.pairwise(rollout.turns):
        whole = (*turn.prompt, *turn.completion.tokens)
        assert after.prompt[: len(whole)] == whole
    assert rollout.reward == reward
    assert rollout.metrics.get("state/turns") == (1.0 if id == "tandem-task" else None)


def test_splits_are_disjoint_with_evaluation_data_and_without(python: str) -> None:
    for id, counts in (("tandem-reverse", (9, 1)), ("tandem-guess", (10, 3))):
        env = Verifiers(id=id, python=python)
        train, test = env.tasks("train"), env.tasks("test")
        assert (len(train), len(test)) == counts
        assert not {task.prompt for task in train} & {task.prompt for task in test}
        assert len({task.id for task in (*train, *test)}) == sum(counts)


@pytest.mark.parametrize("broken", ["dies", "hangs", "floods"])
def test_a_process_that_fails_costs_its_rollouts_and_is_started_again(
    broken: str, python: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_package, "_CANCEL_SECONDS", 0.2)
    env = Verifiers(id="tandem-reverse", args={"broken": broken}, python=python, timeout_seconds=1.0)
    env.tasks("train")
    before = env._package.process
    failed = group(env, tiny_model, [64, END]).rollouts
    assert [rollout.status for rollout in failed] == ["error", "error"]
    assert ("ended with status -9" if broken == "dies" else "took longer than 1 s") in failed[0].error
    again = env._package.process
    assert again is not before
    assert len(env.tasks("train")) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "no-such-env"}, "Could not import 'no-such-env' environment"),
        ({"id": "tandem-reverse", "python": "/nowhere/python"}, "there is no such interpreter"),
        ({"id": "tandem-reverse", "args": {"colour": "red"}}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anything_is_played(
    options: dict[str, Any], message: str, python: str
) -> None:
    with pytest.raises(EnvError, match=message):
        Verifiers(**{"python": python, **options}).tasks("train")
